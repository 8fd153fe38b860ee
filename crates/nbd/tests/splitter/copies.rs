//! Copies where nothing goes wrong.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;

use drainpipe_nbd::There;

use crate::noise::noise;
use crate::support::{Bench, Settings, allocated_bytes, has_qemu, image, said};

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_copied_over_all_streams_and_stays_thin() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings::default()).await;
    let source = bench.path("source");
    image(&source, 24);
    bench.connect_many(4).await;
    bench.copy_whole(&source).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn what_the_target_has_already_is_not_sent() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { there: There::Part, ..Settings::default() }).await;
    let (source, target) = (bench.path("source"), bench.path("target"));
    image(&source, 24);
    // The target is as an attempt leaves it that came half way; something has changed since.
    std::fs::copy(&source, &target).unwrap();
    let left = OpenOptions::new().write(true).open(&target).unwrap();
    for mebibyte in 12..24 {
        left.write_all_at(&vec![0; 1 << 20], mebibyte << 20).unwrap();
    }
    left.write_all_at(&noise(4096, 99), 3 << 20).unwrap();
    bench.connect_many(4).await;
    bench.copy_whole(&source).await;
    let counters = bench.watch.counters();
    assert!(bench.watch.is_all_written());
    assert_eq!(counters.found_same_bytes, 3 << 20, "{counters:?}");
    assert!((5 << 20..6 << 20).contains(&counters.sent_bytes()), "{counters:?}");
    bench.target.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_again_is_compared_with_what_is_there_by_then() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { there: There::Part, ..Settings::default() }).await;
    bench.connect_many(3).await;
    let writes = ["write -P 1 0 64k", "write -P 2 0 64k", "write -P 1 0 64k", "write -P 1 0 64k", "flush"];
    let (is_well, said) = said(bench.qemu_io(&writes)).await;
    assert!(is_well, "{said}");
    bench.ended().await.unwrap();
    assert!(!bench.watch.is_all_written());
    assert_eq!(bench.watch.counters().found_same_bytes, 64 << 10);
    assert!(std::fs::read(bench.path("target")).unwrap()[..64 << 10].iter().all(|byte| *byte == 1));
    bench.target.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_counted_whether_all_that_was_there_is_written_over() {
    if !has_qemu() {
        return;
    }
    for (last, is_all_written) in [("write -z 12M 4M", true), ("discard 12M 4M", false)] {
        let bench = Bench::new(Settings { there: There::Other, ..Settings::default() }).await;
        bench.connect_many(2).await;
        let (is_well, said) =
            said(bench.qemu_io(&["write -P 1 0 12M", "write -z 16M 8M", last, "flush"])).await;
        assert!(is_well, "{said}");
        assert_eq!(bench.watch.is_all_written(), is_all_written, "what is discarded may hold anything");
        assert_eq!(bench.watch.counters().found_same_bytes, 0, "nothing is compared");
    }
}
