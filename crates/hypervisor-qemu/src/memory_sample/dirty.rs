//! How fast a guest's memory gets dirty, and how much of it, from pages that have changed after two spans.
//!
//! Of `set` bytes that are written to at random, `set · (1 − e^(−rate · time / set))` have changed after some
//! time. The two spans give both unknowns. One span gives one only: 32 MiB that change all the time look like
//! 320 MiB/s after 100 ms and like 32 MiB/s after a second, and neither says what a migration has to send.

use std::time::Duration;

/// By how many standard deviations of what was counted memory must change less than in proportion to the time
/// before that is taken for the end of it, and not for chance.
const DEVIATIONS: f64 = 2.0;

/// Halvings of the interval in which a solution is.
const HALVINGS: u32 = 60;

/// How memory gets dirty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Dirty {
    /// How fast, of memory that is clean.
    pub(super) bytes_per_s: u64,
    /// How much at most.
    pub(super) set_bytes: u64,
}

/// From how many pages had changed after each of two spans, each page standing for so many bytes.
pub(super) fn estimate(changed: [(Duration, usize); 2], bytes_per_page: f64) -> Dirty {
    let [(first_s, first), (second_s, second)] =
        changed.map(|(span, pages)| (span.as_secs_f64(), pages as f64));
    let likely_most = second + DEVIATIONS * second.sqrt();
    let in_proportion = first * second_s / first_s;
    let per_s = match () {
        () if second_s <= 0.0 || second <= 0.0 => {
            return Dirty { bytes_per_s: 0, set_bytes: whole(second * bytes_per_page) };
        }
        // Nothing is known of an end.
        () if first <= 0.0 || first_s <= 0.0 || likely_most >= in_proportion => {
            let bytes_per_s = whole(second / second_s * bytes_per_page);
            return Dirty { bytes_per_s, set_bytes: u64::MAX };
        }
        () => changes_per_s(first_s, second_s, (second / first).max(1.0)),
    };
    let set = second.max(first) / -(-per_s * second_s).exp_m1();
    Dirty { bytes_per_s: whole(set * per_s * bytes_per_page), set_bytes: whole(set * bytes_per_page) }
}

/// How often each page changes in a second, so that after the second span so many times as many have changed
/// as after the first.
fn changes_per_s(first_s: f64, second_s: f64, times: f64) -> f64 {
    let ratio = |per_s: f64| (-per_s * second_s).exp_m1() / (-per_s * first_s).exp_m1();
    // All have changed but one in e^10: no more can be distinguished.
    let (mut low, mut high) = (0.0, 10.0 / first_s);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if ratio(middle) > times { low = middle } else { high = middle }
    }
    high
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of sizes, never negative")]
fn whole(bytes: f64) -> u64 {
    bytes.round() as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: f64 = 1_048_576.0;

    /// Counts after 75 and 150 ms, of 4096 pages that stand for 1 GiB.
    fn of(first: usize, second: usize) -> (f64, f64) {
        let spans = [(Duration::from_millis(75), first), (Duration::from_millis(150), second)];
        let Dirty { bytes_per_s, set_bytes } = estimate(spans, MIB / 4.0);
        (bytes_per_s as f64 / MIB, set_bytes as f64 / MIB)
    }

    #[test]
    fn what_changes_in_proportion_to_the_time_has_no_end_in_sight() {
        let (mib_per_s, set_mib) = of(300, 600);
        assert!((mib_per_s - 1_000.0).abs() < 1.0 && set_mib > 1e6);
        let (mib_per_s, set_mib) = of(3, 4);
        assert!((mib_per_s - 6.67).abs() < 0.1 && set_mib > 1e6, "a few pages tell nothing of an end");
        assert_eq!(of(0, 0), (0.0, 0.0));
    }

    #[test]
    fn what_changes_again_and_again_is_all_there_is() {
        let (mib_per_s, set_mib) = of(128, 128);
        assert!((set_mib - 32.0).abs() < 0.1 && mib_per_s > 500.0, "{set_mib} MiB, {mib_per_s} MiB/s");
    }

    #[test]
    fn a_set_that_is_written_to_at_random_is_seen() {
        // 1000 pages, each changed 10 times a second: 1000 (1 − e^−0.75), 1000 (1 − e^−1.5).
        let (mib_per_s, set_mib) = of(528, 777);
        assert!((set_mib - 250.0).abs() < 3.0, "{set_mib}");
        assert!((mib_per_s - 2_500.0).abs() < 40.0, "{mib_per_s}");
    }

    proptest! {
        #[test]
        fn every_count_gives_an_answer(
            first in 0_usize..20_000,
            second in 0_usize..20_000,
            spans in (0_u64..1_000, 0_u64..1_000),
        ) {
            let spans = [(Duration::from_millis(spans.0), first), (Duration::from_millis(spans.1), second)];
            let dirty = estimate(spans, MIB / 4.0);
            prop_assert!(dirty.set_bytes >= whole(second as f64 * MIB / 4.0), "what has changed is in it");
        }
    }
}
