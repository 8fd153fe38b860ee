//! Copies where nothing goes wrong.

use crate::support::{Bench, Settings, allocated_bytes, assert_same, has_qemu, image, said};

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_copied_over_all_streams_and_stays_thin() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings::default()).await;
    let source = bench.path("source");
    image(&source, 24);
    bench.connect_many(4).await;
    let (is_well, said) = said(bench.copy(&source)).await;
    assert!(is_well, "{said}");
    bench.ended().await.unwrap();
    assert_same(&source, &bench.path("target"));
    assert!(allocated_bytes(&bench.path("target")) <= 10 << 20, "8 MiB are not zero");

    let counters = bench.watch.counters();
    assert_eq!(counters.streams.len(), 4);
    assert!(counters.streams.values().all(|stream| stream.sent_bytes > 0), "{counters:?}");
    let sent_bytes = counters.sent_bytes();
    assert!((8 << 20..9 << 20).contains(&sent_bytes), "{counters:?}");
    assert_eq!((counters.requests_in_flight, counters.resent), (0, 0));
    bench.target.close().await.unwrap();
    assert!(bench.served.lock().unwrap().iter().all(Result::is_ok));
}

#[tokio::test(flavor = "multi_thread")]
async fn zeroes_are_sent_as_they_are_where_nobody_looks_for_them() {
    if !has_qemu() {
        return;
    }
    let settings = Settings { finds_zeroes: false, is_thin: false, ..Settings::default() };
    let mut bench = Bench::new(settings).await;
    let source = bench.path("source");
    std::fs::write(&source, vec![0; 24 << 20]).unwrap();
    bench.connect_many(2).await;
    let (is_well, said) = said(bench.qemu_io(&["write -P 0 0 1M", "flush"])).await;
    assert!(is_well, "{said}");
    bench.ended().await.unwrap();
    let counters = bench.watch.counters();
    assert_eq!((counters.written_bytes, counters.found_zero_bytes), (1 << 20, 0));
    assert!(allocated_bytes(&bench.path("target")) >= 1 << 20);
}
