//! How long bytes take over the paths, and a migration's steps beside them.

use super::cores::{Work, carried_bytes_per_ms};

/// What arrives of a link's speed as memory: the rest is Ethernet's, IP's and TCP's headers.
pub(crate) const GOODPUT_SHARE: f64 = 0.95;

/// Taken for the speed of paths that is not known, in Mb/s; the least that a server has.
pub const UNKNOWN_SPEED_MBPS: u64 = 1_000;

/// From its turn to the first byte: its guard takes its post, QEMU connects. Here and below, times are as `bench/results`
/// has them, and docs/decisions/0104 says where those for each other thread are from.
pub(crate) const START: Work = Work { ms: 100.0, per_other_ms: 16.0 };

/// From the last byte until the target has taken it.
pub(crate) const END: Work = Work { ms: 40.0, per_other_ms: 8.0 };

/// Steps 1 to 5 without a path history.
pub(crate) const SETUP: Work = Work { ms: 110.0, per_other_ms: 12.0 };

/// Steps 9 and 10 without a path history.
pub(crate) const COMPLETION: Work = Work { ms: 45.0, per_other_ms: 4.0 };

/// The time from the request to the end of a migration that sends so much memory once, over paths without a history.
/// The wire carries this share of it.
pub fn sent_ms(bytes: f64, wire_share: f64, paths_mbps: f64, free_cores: Option<f64>) -> f64 {
    let steps_ms: f64 = [SETUP, START, END, COMPLETION].map(|step| step.with_ms(free_cores)).iter().sum();
    steps_ms + copied_ms(bytes * wire_share, paths_mbps, free_cores)
}

/// For how long so many bytes go over paths that carry this, headers included.
pub fn copied_ms(bytes: f64, paths_mbps: f64, free_cores: Option<f64>) -> f64 {
    let rate = bytes_per_ms(paths_mbps * GOODPUT_SHARE).min(carried_bytes_per_ms(free_cores));
    bytes / rate.max(f64::MIN_POSITIVE)
}

/// For how long a transfer of so many ms has sent: without its start and its end.
pub fn sending_ms(transfer_ms: f64) -> f64 {
    (transfer_ms - START.ms - END.ms).max(transfer_ms / 2.0)
}

/// A speed in Mb/s, in bytes per ms.
pub fn bytes_per_ms(mbps: f64) -> f64 {
    mbps * 125.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn fewer_cores_never_make_it_faster(
            bytes in 0.0_f64..1e13,
            paths_mbps in 1.0_f64..1e6,
            cores in -1.0_f64..512.0,
            more in 0.0_f64..512.0,
        ) {
            let of = |cores| sent_ms(bytes, 1.0, paths_mbps, cores);
            prop_assert!(of(Some(cores)) >= of(Some(cores + more)) - 1e-6);
            prop_assert!(of(Some(cores)).is_finite() && of(Some(cores)) >= of(None) - 1e-6);
        }
    }

    #[test]
    fn few_cores_are_the_limit_of_fast_links_only() {
        const GIB: f64 = (1_u64 << 30) as f64;
        let of = |paths_mbps, cores| sent_ms(GIB, 1.0, paths_mbps, Some(cores));
        assert!((of(2_000.0, 8.0) - of(2_000.0, 1.0)).abs() < 1.0);
        let (idle, busy) = (of(100_000.0, 8.0), of(100_000.0, 0.5));
        assert!(busy > idle + 1_000.0, "half a core takes 1.2 s for a GiB: {busy} ms, not {idle}");
        let work = Work { ms: 100.0, per_other_ms: 20.0 };
        for (cores, slowed_ms) in [(0.25, 160.0), (0.0, 2_080.0), (f64::NAN, 100.0), (3.0, 100.0)] {
            assert!((work.with_ms(Some(cores)) - slowed_ms).abs() < 1e-9, "{cores} cores");
        }
    }
}
