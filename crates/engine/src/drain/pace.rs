//! How fast a drain or a way back goes, and when it will be over.

use std::collections::VecDeque;

/// The rate that is shown is taken over this window, as that of one migration.
const RATE_WINDOW_MS: f64 = 2_000.0;

/// The rate that the end is reckoned with: long enough to hold the gaps between VMs too.
const ETA_WINDOW_MS: f64 = 10_000.0;

/// Before this much was watched, the plan's own rate counts in proportion.
const TRUSTED_AFTER_MS: f64 = 5_000.0;

/// What is taken to be left of a VM that has sent all that was predicted, as a share of that.
const OVERDUE_SHARE: f64 = 0.02;

/// What of one VM is to go over the links.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// How far it is.
    pub stage: LoadStage,
    /// Bytes that are to arrive, as predicted.
    pub predicted_bytes: u64,
    /// Bytes that have arrived.
    pub sent_bytes: u64,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadStage {
    /// Its turn on the links has not come.
    ToCome,
    /// It is on them.
    OnLinks,
    /// All has arrived, and the VM runs on its target.
    Moved,
    /// Nothing of it is to be expected any more.
    Over,
}

/// Bytes of all VMs over time.
#[derive(Debug)]
pub struct Pace {
    arrived_bytes: u64,
    // Time and bytes so far; one older than the window stays, as the start of the interval.
    samples: VecDeque<(f64, u64)>,
    planned_bytes_per_ms: f64,
    completion_ms: Option<f64>,
}

impl Pace {
    /// Of what is to carry so many bytes in a millisecond, gaps between VMs included.
    pub fn planned(bytes_per_ms: f64) -> Self {
        Self {
            arrived_bytes: 0,
            samples: VecDeque::new(),
            planned_bytes_per_ms: bytes_per_ms,
            completion_ms: None,
        }
    }

    /// A new plan expects so many bytes in a millisecond; what was measured of late goes before that.
    pub(super) fn replanned(&mut self, bytes_per_ms: f64) {
        self.planned_bytes_per_ms = bytes_per_ms;
    }

    /// So many bytes more have arrived.
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
        while self.samples.len() > 2 && self.samples[1].0 < now_ms - ETA_WINDOW_MS {
            self.samples.pop_front();
        }
    }

    /// From a VM's pause to the end of its migration.
    pub(super) fn completed_in(&mut self, ms: f64) {
        self.completion_ms = Some(self.completion_ms.map_or(ms, |before| f64::midpoint(before, ms)));
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

    /// Milliseconds until all of this has arrived, with the completion of one VM if one is still to come; none while
    /// nothing arrives.
    pub fn eta_ms(&self, loads: impl Iterator<Item = Load> + Clone, one_completes: bool) -> Option<f64> {
        let bytes_per_ms = self.expected_bytes_per_ms();
        let left_bytes = left_bytes(loads);
        let completion_ms = self.completion_ms.filter(|_| one_completes).unwrap_or(0.0);
        match left_bytes {
            0.0 => Some(completion_ms),
            _ => (bytes_per_ms > 0.0).then(|| left_bytes / bytes_per_ms + completion_ms),
        }
    }

    fn expected_bytes_per_ms(&self) -> f64 {
        let (Some(first), Some(last)) = (self.samples.front(), self.samples.back()) else {
            return self.planned_bytes_per_ms;
        };
        let trust = ((last.0 - first.0) / TRUSTED_AFTER_MS).min(1.0);
        trust * self.rate_since(*first) + (1.0 - trust) * self.planned_bytes_per_ms
    }
}

/// Bytes that are still to arrive: as predicted, corrected by how far that was right for those that have
/// moved.
fn left_bytes(loads: impl Iterator<Item = Load> + Clone) -> f64 {
    let moved = loads.clone().filter(|load| load.stage == LoadStage::Moved);
    let (sent, predicted) = moved.fold((0.0, 0.0), |(sent, predicted), load| {
        (sent + load.sent_bytes as f64, predicted + load.predicted_bytes as f64)
    });
    let correction: f64 = if sent > 0.0 && predicted > 0.0 { sent / predicted } else { 1.0 };
    let left = loads.map(|load| {
        let whole = load.predicted_bytes as f64 * correction;
        match load.stage {
            LoadStage::ToCome => whole,
            LoadStage::OnLinks => (whole - load.sent_bytes as f64).max(whole * OVERDUE_SHARE),
            LoadStage::Moved | LoadStage::Over => 0.0,
        }
    });
    left.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(stage: LoadStage, predicted_bytes: u64, sent_bytes: u64) -> Load {
        Load { stage, predicted_bytes, sent_bytes }
    }

    #[test]
    fn what_is_left_is_reckoned_by_the_measured_rate_and_by_what_predictions_were_worth() {
        let mut pace = Pace::planned(100.0);
        let first = [
            load(LoadStage::OnLinks, 400_000, 0),
            load(LoadStage::ToCome, 600_000, 0),
            load(LoadStage::Over, 9, 0),
        ];
        assert_eq!(pace.eta_ms(first.into_iter(), false), Some(10_000.0));
        pace.begins(0.0);
        for second in 1..=8 {
            pace.arrived(50_000);
            pace.sample(f64::from(second) * 1_000.0);
        }
        // Half as fast as planned, and a tenth more than predicted was sent.
        let then = [load(LoadStage::Moved, 400_000, 440_000), load(LoadStage::ToCome, 600_000, 0)];
        let eta_ms = pace.eta_ms(then.into_iter(), false).unwrap();
        assert!((eta_ms - 660_000.0 / 50.0).abs() < 1e-6, "{eta_ms}");
        assert!((pace.rate_mbps(8_000.0) - 0.4).abs() < 1e-9);
    }
}
