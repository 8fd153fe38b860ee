//! Each kind of request, made by qemu-io.

use std::fs;

use crate::support::{Bench, Settings, allocated_bytes, has_qemu, said};

/// Carries out these commands, and ends the splitter.
async fn done(bench: &mut Bench, commands: &[&str]) -> String {
    bench.connect_many(3).await;
    let (is_well, said) = said(bench.qemu_io(commands)).await;
    assert!(is_well, "{said}");
    bench.ended().await.unwrap();
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_is_read_again() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings::default()).await;
    let said = done(
        &mut bench,
        &[
            "write -P 7 1000 3000000",
            "write -f -P 9 500000 1000",
            "write -z 600000 5000",
            "discard 1M 1M",
            "flush",
            "read -P 7 1000 499000",
            "read -P 9 500000 1000",
            "read -P 7 501000 99000",
            "read -P 0 600000 5000",
            "read -P 0 1M 1M",
            "read -P 7 2M 900000",
        ],
    )
    .await;
    assert!(!said.contains("failed"), "{said}");
    let target = fs::read(bench.path("target")).unwrap();
    assert!(target[1000..500_000].iter().all(|byte| *byte == 7) && target[3_001_000] == 0);
    let counters = bench.watch.counters();
    assert!(counters.flushes >= 1 && counters.read_bytes > 0 && counters.zeroed_bytes > 0, "{counters:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn zeroes_take_no_room_where_the_target_is_to_be_thin() {
    if !has_qemu() {
        return;
    }
    for (is_thin, most_bytes, least_bytes) in [(true, 1 << 20, 0), (false, u64::MAX, 8 << 20)] {
        let mut bench = Bench::new(Settings { is_thin, ..Settings::default() }).await;
        // Without -u it is NO_HOLE.
        done(&mut bench, &["write -z 0 8M", "flush"]).await;
        let bytes = allocated_bytes(&bench.path("target"));
        assert!((least_bytes..=most_bytes).contains(&bytes), "{bytes} bytes, thin: {is_thin}");
    }
}
