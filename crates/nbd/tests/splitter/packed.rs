//! Copies that idle cores pack.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use drainpipe_nbd::{Counters, There};

use crate::noise::noise;
use crate::support::{Bench, Settings, eventually, has_qemu, image, said, text};

/// Slow enough that a core finds the time on all but the busiest machine.
const LIMIT_BYTES_PER_S: u64 = 4_000_000;

/// Whether this many bytes were made smaller, unless no core was idle.
fn is_packed(counters: &Counters, raw_bytes: u64) -> bool {
    if counters.packed_bytes == 0 {
        eprintln!("SKIPPED: no core was idle");
    }
    counters.packed_bytes == 0 || counters.sent_bytes() < raw_bytes
}

fn packing() -> Settings {
    Settings { packs: true, ..Settings::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn text_takes_less_of_a_slow_wire_than_it_has() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(packing()).await;
    let source = bench.path("source");
    text(&source, 24);
    bench.pace.set(Some(LIMIT_BYTES_PER_S));
    bench.connect_many(4).await;
    bench.copy_whole(&source).await;
    let counters = bench.watch.counters();
    assert_eq!(counters.written_bytes, 24 << 20);
    assert!(is_packed(&counters, 24 << 20), "{counters:?}");
    assert_eq!(bench.pace.sent_bytes(), counters.sent_bytes(), "a limit counts what is sent");
    bench.target.close().await.unwrap();
    assert!(bench.served.lock().unwrap().iter().all(Result::is_ok));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_shrink_goes_as_it_is() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(packing()).await;
    let source = bench.path("source");
    image(&source, 24);
    bench.connect_many(4).await;
    bench.copy_whole(&source).await;
    let counters = bench.watch.counters();
    assert_eq!(counters.packed_bytes, 0, "{counters:?}");
    assert!((8 << 20..9 << 20).contains(&counters.sent_bytes()), "{counters:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_carry_packed_data_are_cut_and_others_come() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { mebibytes: 48, ..packing() }).await;
    let source = bench.path("source");
    text(&source, 48);
    bench.pace.set(Some(4 * LIMIT_BYTES_PER_S));
    let mut wires = bench.connect_many(3).await;
    let cut = async {
        for round in 1..5 {
            let watch = bench.watch.clone();
            eventually("it goes on", || watch.counters().written_bytes >= round << 22).await;
            wires.remove(0).cut();
            wires.push(bench.connect().await);
        }
        bench.pace.set(None);
    };
    let (ended, ()) = tokio::join!(said(bench.copy(&source)), cut);
    bench.assert_whole(&source, ended).await;
    let counters = bench.watch.counters();
    assert!(counters.resent > 0, "{counters:?}");
    bench.target.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_compared_is_packed_only_where_it_differs() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { there: There::Part, ..packing() }).await;
    let (source, target) = (bench.path("source"), bench.path("target"));
    text(&source, 24);
    std::fs::copy(&source, &target).unwrap();
    let left = OpenOptions::new().write(true).open(&target).unwrap();
    for mebibyte in 12..24 {
        left.write_all_at(&noise(4096, mebibyte), mebibyte << 20).unwrap();
    }
    bench.pace.set(Some(LIMIT_BYTES_PER_S));
    bench.connect_many(4).await;
    bench.copy_whole(&source).await;
    let counters = bench.watch.counters();
    assert_eq!(counters.found_same_bytes, 12 << 20, "{counters:?}");
    assert!(is_packed(&counters, 12 << 20) && counters.packed_bytes <= 12 << 20, "{counters:?}");
}
