//! Silences of the guest, from the times at which its answers arrive.

use std::time::{Duration, Instant};

/// A silence of at least this is listed. Shorter ones are the scheduling of a busy host.
pub const GAP_MIN: Duration = Duration::from_millis(10);

/// How many gaps are listed, the first ones; later ones are only counted.
pub const GAPS_LISTED_MAX: usize = 1024;

/// One silence.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Gap {
    /// When it began, in ms since the start of the measurement.
    pub start_ms: f64,
    /// How long it was, in ms.
    pub length_ms: f64,
}

/// What a heartbeat measured since its start, or since it was last reset.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Statistics {
    /// Packets sent, or tried to: one that the host itself could not send counts, too.
    pub sent: u64,
    /// Answers to them that arrived. It says little about a silence, in which packets wait in buffers or
    /// are lost by turns; the gaps say how long it was.
    pub answered: u64,
    /// The longest time between two consecutive answers, in ms. The time from the start of the
    /// measurement to the first answer counts as a gap, and so does a silence that still goes on.
    pub longest_gap_ms: f64,
    /// Gaps of at least [`GAP_MIN`], in order, the one still going on last; at most
    /// [`GAPS_LISTED_MAX`].
    pub gaps: Vec<Gap>,
    /// Gaps of at least [`GAP_MIN`] that are not in `gaps` because there were too many.
    pub gaps_not_listed: u64,
    /// The longest time that this host kept the heartbeat's own thread from running, in ms. A gap
    /// no longer than this may be the host's and not the guest's.
    pub longest_stall_ms: f64,
}

/// Collects arrivals.
pub(super) struct Tracker {
    start: Instant,
    last_arrival: Instant,
    // The first packet that this measurement sent, by its sequence number.
    first_sent: Option<u64>,
    statistics: Statistics,
}

impl Tracker {
    pub(super) fn new(start: Instant) -> Self {
        Self { start, last_arrival: start, first_sent: None, statistics: Statistics::default() }
    }

    pub(super) fn sent(&mut self, sequence: u64, late_by: Duration) {
        self.first_sent.get_or_insert(sequence);
        self.statistics.sent += 1;
        let longest = &mut self.statistics.longest_stall_ms;
        *longest = longest.max(milliseconds(late_by));
    }

    pub(super) fn arrived(&mut self, sequence: u64, now: Instant) {
        // An answer to a packet of before the last reset ends a silence too.
        self.statistics.answered += u64::from(self.first_sent.is_some_and(|first| first <= sequence));
        let gap = self.gap(now);
        record(&mut self.statistics, gap);
        self.last_arrival = self.last_arrival.max(now);
    }

    /// What was measured until `now`, the present silence included.
    pub(super) fn statistics(&self, now: Instant) -> Statistics {
        let mut statistics = self.statistics.clone();
        record(&mut statistics, self.gap(now));
        statistics
    }

    fn gap(&self, now: Instant) -> Gap {
        Gap {
            start_ms: milliseconds(self.last_arrival.saturating_duration_since(self.start)),
            length_ms: milliseconds(now.saturating_duration_since(self.last_arrival)),
        }
    }
}

fn record(statistics: &mut Statistics, gap: Gap) {
    statistics.longest_gap_ms = statistics.longest_gap_ms.max(gap.length_ms);
    if gap.length_ms < milliseconds(GAP_MIN) {
        return;
    }
    if statistics.gaps.len() < GAPS_LISTED_MAX {
        statistics.gaps.push(gap);
    } else {
        statistics.gaps_not_listed += 1;
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn track(arrivals_ms: &[u64], now_ms: u64) -> Statistics {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut tracker = Tracker::new(start);
        for (sequence, &arrival_ms) in (0..).zip(arrivals_ms) {
            tracker.sent(sequence, Duration::ZERO);
            tracker.arrived(sequence, at(arrival_ms));
        }
        tracker.statistics(at(now_ms))
    }

    fn assert_close(one: f64, other: f64) {
        assert!((one - other).abs() < 1e-6, "{one} is not {other}");
    }

    #[test]
    fn a_silence_that_goes_on_counts() {
        assert_close(track(&[1, 2, 3], 503).longest_gap_ms, 500.0);
        assert_close(track(&[], 40).longest_gap_ms, 40.0);
    }

    #[test]
    fn answers_to_what_was_sent_before_end_a_silence_and_are_not_counted() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut tracker = Tracker::new(start);
        tracker.arrived(6, at(5));
        tracker.sent(8, Duration::ZERO);
        tracker.arrived(7, at(15));
        tracker.arrived(8, at(25));
        let statistics = tracker.statistics(at(25));
        assert_eq!((statistics.sent, statistics.answered), (1, 1));
        assert_close(statistics.longest_gap_ms, 10.0);
    }

    #[test]
    fn gaps_are_listed_with_their_start() {
        let statistics = track(&[1, 2, 22, 23, 73], 74);
        assert_eq!(statistics.gaps.len(), 2);
        assert_close(statistics.gaps[0].start_ms, 2.0);
        assert_close(statistics.gaps[0].length_ms, 20.0);
        assert_close(statistics.gaps[1].start_ms, 23.0);
        assert_close(statistics.longest_gap_ms, 50.0);
    }

    #[test]
    fn the_list_is_bounded_and_the_rest_counted() {
        let arrivals_ms: Vec<u64> = (1..=2000).map(|number| number * 10).collect();
        let statistics = track(&arrivals_ms, 20_000);
        assert_eq!(statistics.gaps.len(), GAPS_LISTED_MAX);
        assert_eq!(statistics.gaps_not_listed, 2000 - GAPS_LISTED_MAX as u64);
    }

    proptest! {
        #[test]
        fn gaps_add_up_to_the_time_measured(
            mut arrivals_ms in proptest::collection::vec(0..100_000_u64, 0..200),
            after_ms in 0..1000_u64,
        ) {
            arrivals_ms.sort_unstable();
            let now_ms = arrivals_ms.last().unwrap_or(&0) + after_ms;
            let statistics = track(&arrivals_ms, now_ms);
            let listed: f64 = statistics.gaps.iter().map(|gap| gap.length_ms).sum();
            prop_assert!(listed <= now_ms as f64 + 1e-6);
            prop_assert!(statistics.gaps.iter().all(|gap| gap.length_ms <= statistics.longest_gap_ms));
            prop_assert!(statistics.longest_gap_ms * (arrivals_ms.len() as f64 + 1.0) >= now_ms as f64 - 1e-6);
        }
    }
}
