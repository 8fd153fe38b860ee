//! Copies within a limit.

use crate::support::{Bench, Settings, eventually, has_qemu, image, said};

const LIMIT_BYTES_PER_S: u64 = 4_000_000;

/// How much is sent at once under that limit: a stream that is cut may have taken it without sending it.
const PART_BYTES: u64 = LIMIT_BYTES_PER_S / 100;

#[tokio::test(flavor = "multi_thread")]
async fn all_that_is_sent_waits_for_its_turn_also_if_a_stream_is_lost() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings::default()).await;
    let source = bench.path("source");
    image(&source, 24);
    bench.pace.set(Some(LIMIT_BYTES_PER_S));
    let mut wires = bench.connect_many(4).await;
    let watch = bench.watch.clone();
    let cut = async {
        eventually("something is sent", || watch.counters().sent_bytes() > 1_000_000).await;
        wires.remove(1).cut();
    };
    let (ended, ()) = tokio::join!(said(bench.copy(&source)), cut);
    bench.assert_whole(&source, ended).await;
    // The pace's own tests check that it lets through no more than the limit.
    let (paced, sent) = (bench.pace.sent_bytes(), watch.counters().sent_bytes());
    assert!(sent >= 8 << 20, "{sent}");
    assert!(
        (sent..=sent + PART_BYTES).contains(&paced),
        "{sent} bytes were sent, {paced} waited for their turn"
    );
    bench.target.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_is_raised_in_flight_lets_the_copy_go_on() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings::default()).await;
    let source = bench.path("source");
    image(&source, 24);
    // This would take minutes.
    bench.pace.set(Some(50_000));
    bench.connect_many(4).await;
    let raise = async {
        let watch = bench.watch.clone();
        eventually("something is sent", || watch.counters().sent_bytes() > 0).await;
        bench.pace.set(None);
    };
    let (ended, ()) = tokio::join!(said(bench.copy(&source)), raise);
    bench.assert_whole(&source, ended).await;
}
