//! Copies within a limit.

use std::time::Instant;

use crate::support::{Bench, Settings, eventually, has_qemu, image, said};

const LIMIT_BYTES_PER_S: u64 = 4_000_000;

/// So much less than a second has what a reader's delay hides, and what goes out at once.
const SLACK_S: f64 = 0.2;

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_keeps_to_its_limit_also_if_a_stream_is_lost() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings::default()).await;
    let source = bench.path("source");
    image(&source, 24);
    bench.pace.set(Some(LIMIT_BYTES_PER_S));
    let mut wires = bench.connect_many(4).await;
    let began = Instant::now();
    let cut = async {
        let watch = bench.watch.clone();
        eventually("something is sent", || watch.counters().sent_bytes() > 1_000_000).await;
        wires.remove(1).cut();
    };
    let (ended, ()) = tokio::join!(said(bench.copy(&source)), cut);
    let allowed = (began.elapsed().as_secs_f64() + SLACK_S) * LIMIT_BYTES_PER_S as f64;
    bench.assert_whole(&source, ended).await;
    let sent_bytes = bench.pace.sent_bytes();
    assert!(sent_bytes >= 8 << 20 && sent_bytes as f64 <= allowed, "{sent_bytes} of {allowed}");
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
    // It would take minutes.
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
