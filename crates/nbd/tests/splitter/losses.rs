//! Streams that are lost in flight, and disks.

use std::time::Duration;

use drainpipe_nbd::SplitterError;
use tokio::time::sleep;

use crate::support::{Bench, Settings, assert_same, eventually, has_qemu, image, said};

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_cut_and_others_come_in_flight() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { mebibytes: 96, ..Settings::default() }).await;
    let source = bench.path("source");
    image(&source, 96);
    let mut wires = bench.connect_many(3).await;
    let copy = bench.copy(&source);
    let mut bytes = 0;
    for round in 0..6 {
        bytes += 4 << 20;
        eventually("it goes on", || bench.watch.counters().sent_bytes() >= bytes).await;
        wires.remove(round % 3).cut();
        wires.push(bench.connect().await);
    }
    let (is_well, said) = said(copy).await;
    assert!(is_well, "{said}");
    bench.ended().await.unwrap();
    assert_same(&source, &bench.path("target"));
    assert!(bench.watch.counters().resent > 0, "{:?}", bench.watch.counters());
    bench.target.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_falls_silent_is_given_up_and_fenced() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { mebibytes: 48, ..Settings::default() }).await;
    let source = bench.path("source");
    image(&source, 48);
    let mut wires = bench.connect_many(2).await;
    let copy = bench.copy(&source);
    eventually("it goes on", || bench.watch.counters().sent_bytes() >= 4 << 20).await;
    wires.remove(0).mute();
    let (is_well, said) = said(copy).await;
    assert!(is_well, "{said}");
    bench.ended().await.unwrap();
    assert_same(&source, &bench.path("target"));
    assert!(bench.watch.counters().resent > 0, "{:?}", bench.watch.counters());
    bench.target.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_outlives_all_its_streams() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { mebibytes: 48, ..Settings::default() }).await;
    let source = bench.path("source");
    image(&source, 48);
    let wires = bench.connect_many(2).await;
    let copy = bench.copy(&source);
    eventually("it goes on", || bench.watch.counters().sent_bytes() >= 4 << 20).await;
    for wire in wires {
        wire.cut();
    }
    let mut live = bench.watch.live_streams();
    crate::support::in_time(live.wait_for(|live| *live == 0)).await.unwrap();
    sleep(Duration::from_millis(100)).await;
    bench.connect().await;
    let (is_well, said) = said(copy).await;
    assert!(is_well, "{said}");
    bench.ended().await.unwrap();
    assert_same(&source, &bench.path("target"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_whose_server_dies_ends_the_copy_at_both_ends() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { mebibytes: 96, ..Settings::default() }).await;
    let source = bench.path("source");
    image(&source, 96);
    bench.connect_many(2).await;
    let copy = bench.copy(&source);
    eventually("it goes on", || bench.watch.counters().sent_bytes() >= 4 << 20).await;
    bench.kill_server().await;
    let ended = bench.ended().await;
    assert!(matches!(ended, Err(SplitterError::DiskElsewhere)), "{ended:?}");
    assert!(!said(copy).await.0, "the client hears of it");
    let closed = bench.target.close().await;
    assert!(matches!(closed, Err(SplitterError::Disk(_))), "{closed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_cancels_leaves_nothing_under_way() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { mebibytes: 96, ..Settings::default() }).await;
    let source = bench.path("source");
    image(&source, 96);
    bench.connect_many(2).await;
    let copy = bench.copy(&source);
    eventually("it goes on", || bench.watch.counters().sent_bytes() >= 4 << 20).await;
    bench.cancel();
    assert!(matches!(bench.ended().await, Err(SplitterError::Cancelled)));
    assert!(!said(copy).await.0);
    bench.target.close().await.unwrap();
}
