//! Streams that are lost in flight, and disks.

use std::path::PathBuf;
use std::time::Duration;

use drainpipe_nbd::SplitterError;
use tokio::process::Child;
use tokio::time::sleep;

use crate::support::{Bench, Settings, Wire, assert_same, eventually, has_qemu, image, said};

/// A copy under way.
struct Copying {
    bench: Bench,
    source: PathBuf,
    wires: Vec<Wire>,
    copy: Child,
}

impl Copying {
    /// `None` without QEMU's programs.
    async fn begin(mebibytes: u64, streams: usize) -> Option<Self> {
        if !has_qemu() {
            return None;
        }
        let bench = Bench::new(Settings { mebibytes, ..Settings::default() }).await;
        let source = bench.path("source");
        image(&source, mebibytes);
        let wires = bench.connect_many(streams).await;
        let copy = bench.copy(&source);
        Some(Self { bench, source, wires, copy })
    }

    async fn has_sent(&self, bytes: u64) {
        eventually("it goes on", || self.bench.watch.counters().sent_bytes() >= bytes).await;
    }

    async fn ends_well(mut self) -> Bench {
        let (is_well, said) = said(self.copy).await;
        assert!(is_well, "{said}");
        self.bench.ended().await.unwrap();
        assert_same(&self.source, &self.bench.path("target"));
        self.bench
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_cut_and_others_come_in_flight() {
    let Some(mut copying) = Copying::begin(96, 3).await else { return };
    for round in 0..6 {
        copying.has_sent((round + 1) << 22).await;
        copying.wires.remove(usize::try_from(round).unwrap() % 3).cut();
        copying.wires.push(copying.bench.connect().await);
    }
    let bench = copying.ends_well().await;
    assert!(bench.watch.counters().resent > 0, "{:?}", bench.watch.counters());
    bench.target.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_falls_silent_is_given_up_and_fenced() {
    let Some(mut copying) = Copying::begin(48, 2).await else { return };
    copying.has_sent(4 << 20).await;
    copying.wires.remove(0).mute();
    let bench = copying.ends_well().await;
    assert!(bench.watch.counters().resent > 0, "{:?}", bench.watch.counters());
    bench.target.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_outlives_all_its_streams() {
    let Some(mut copying) = Copying::begin(48, 2).await else { return };
    copying.has_sent(4 << 20).await;
    for wire in copying.wires.drain(..) {
        wire.cut();
    }
    let mut live = copying.bench.watch.live_streams();
    crate::support::in_time(live.wait_for(|live| *live == 0)).await.unwrap();
    sleep(Duration::from_millis(100)).await;
    copying.wires.push(copying.bench.connect().await);
    copying.ends_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_whose_server_dies_ends_the_copy_at_both_ends() {
    let Some(mut copying) = Copying::begin(96, 2).await else { return };
    copying.has_sent(4 << 20).await;
    copying.bench.kill_server().await;
    let ended = copying.bench.ended().await;
    assert!(matches!(ended, Err(SplitterError::DiskElsewhere)), "{ended:?}");
    assert!(!said(copying.copy).await.0, "the client hears of it");
    let closed = copying.bench.target.close().await;
    assert!(matches!(closed, Err(SplitterError::Disk(_))), "{closed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_cancels_leaves_nothing_under_way() {
    let Some(mut copying) = Copying::begin(96, 2).await else { return };
    copying.has_sent(4 << 20).await;
    copying.bench.cancel();
    assert!(matches!(copying.bench.ended().await, Err(SplitterError::Cancelled)));
    assert!(!said(copying.copy).await.0);
    copying.bench.target.close().await.unwrap();
}
