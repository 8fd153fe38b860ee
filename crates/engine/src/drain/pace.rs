//! How fast bytes arrive in a drain or on a way back.

use std::collections::VecDeque;

/// The rate that is shown is taken over this window, as that of one migration.
const RATE_WINDOW_MS: f64 = 2_000.0;

/// Bytes of all VMs over time.
#[derive(Debug, Default)]
pub struct Pace {
    arrived_bytes: u64,
    // Time and bytes so far; one older than the window stays, as the start of the interval.
    samples: VecDeque<(f64, u64)>,
}

impl Pace {
    /// Counts bytes that have arrived.
    pub fn arrived(&mut self, bytes: u64) {
        self.arrived_bytes = self.arrived_bytes.saturating_add(bytes);
    }

    pub(super) fn arrived_bytes(&self) -> u64 {
        self.arrived_bytes
    }

    /// Somebody's turn on the links has come.
    pub fn begins(&mut self, now_ms: f64) {
        if self.is_idle(now_ms) {
            self.samples.clear();
            self.samples.push_back((now_ms, self.arrived_bytes));
        }
    }

    /// Whether nobody has been on the links for the last two seconds; shorter gaps are part of the rate.
    fn is_idle(&self, now_ms: f64) -> bool {
        self.samples.back().is_none_or(|(at_ms, _)| now_ms - at_ms > RATE_WINDOW_MS)
    }

    /// Some VM is on the links, and so much has arrived.
    pub fn sample(&mut self, now_ms: f64) {
        self.samples.push_back((now_ms, self.arrived_bytes));
        while self.samples.len() > 2 && self.samples[1].0 <= now_ms - RATE_WINDOW_MS {
            self.samples.pop_front();
        }
    }

    /// Mb/s of all VMs in the last two seconds.
    pub fn rate_mbps(&self, now_ms: f64) -> f64 {
        self.bytes_per_ms(now_ms) * 8.0 / 1_000.0
    }

    /// The same in bytes in a millisecond.
    pub(super) fn bytes_per_ms(&self, now_ms: f64) -> f64 {
        if self.is_idle(now_ms) {
            return 0.0;
        }
        let first = self.samples.iter().rfind(|(at_ms, _)| *at_ms <= now_ms - RATE_WINDOW_MS);
        first.or(self.samples.front()).map_or(0.0, |first| self.rate_since(*first))
    }

    fn rate_since(&self, (since_ms, since_bytes): (f64, u64)) -> f64 {
        let Some((at_ms, bytes)) = self.samples.back() else { return 0.0 };
        if *at_ms <= since_ms { 0.0 } else { (bytes - since_bytes) as f64 / (at_ms - since_ms) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_the_last_two_seconds() {
        let mut pace = Pace::default();
        pace.begins(0.0);
        for (second, bytes) in [(1, 90_000), (2, 90_000), (3, 50_000), (4, 50_000)] {
            pace.arrived(bytes);
            pace.sample(f64::from(second) * 1_000.0);
        }
        assert!((pace.rate_mbps(4_000.0) - 0.4).abs() < 1e-9);
        assert!(pace.rate_mbps(6_001.0).abs() < 1e-9, "nobody has been on the links since");
    }
}
