//! How long the rest will take. Pure.

use std::collections::VecDeque;

/// Nothing is foreseen from less.
const LOOK_MS: f64 = 2_000.0;

/// What was longer ago says little of what comes.
const WINDOW_MS: f64 = 10_000.0;

/// Progress as it was seen.
#[derive(Debug, Default)]
pub struct Pace {
    seen: VecDeque<(f64, u64)>,
}

impl Pace {
    /// Notes how many bytes were done at this moment.
    pub fn see(&mut self, at_ms: f64, done_bytes: u64) {
        // Another method has begun again.
        if self.seen.back().is_some_and(|(_, before)| done_bytes < *before) {
            self.seen.clear();
        }
        self.seen.push_back((at_ms, done_bytes));
        while self.seen.len() > 2 && self.seen.front().is_some_and(|(at, _)| at_ms - at > WINDOW_MS) {
            self.seen.pop_front();
        }
    }

    /// Bytes in a second, recently.
    pub fn bytes_per_s(&self) -> Option<f64> {
        let ((from_ms, from), (to_ms, to)) = (self.seen.front()?, self.seen.back()?);
        let ms = to_ms - from_ms;
        (ms >= LOOK_MS).then(|| to.saturating_sub(*from) as f64 * 1e3 / ms)
    }

    /// What the rest takes if it goes on like this; nothing while that cannot be known.
    pub fn left_ms(&self, total_bytes: u64) -> Option<f64> {
        let (_, done) = self.seen.back()?;
        let rate = self.bytes_per_s().filter(|rate| *rate > 0.0)?;
        Some(total_bytes.saturating_sub(*done) as f64 * 1e3 / rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seen: &[(f64, u64)]) -> Pace {
        let mut pace = Pace::default();
        for (at_ms, bytes) in seen {
            pace.see(*at_ms, *bytes);
        }
        pace
    }

    #[test]
    fn nothing_is_foreseen_from_little() {
        assert_eq!(after(&[]).left_ms(100), None);
        assert_eq!(after(&[(0.0, 0), (1_900.0, 50)]).left_ms(100), None);
        assert_eq!(after(&[(0.0, 50), (5_000.0, 50)]).left_ms(100), None, "it stands still");
    }

    #[test]
    fn what_was_seen_of_late_is_what_comes() {
        assert_eq!(after(&[(0.0, 0), (2_000.0, 50)]).left_ms(100), Some(2_000.0));
        let slower: Vec<_> =
            (0..=30_u32).map(|second| (f64::from(second) * 1e3, 1_000 + u64::from(second))).collect();
        assert_eq!(after(&[&[(-1e3, 0)], &slower[..]].concat()).left_ms(1_040), Some(10_000.0));
    }

    #[test]
    fn a_method_that_begins_anew_has_a_pace_of_its_own() {
        assert_eq!(after(&[(0.0, 0), (3_000.0, 60), (3_200.0, 0)]).left_ms(100), None);
    }
}
