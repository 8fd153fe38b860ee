//! How fast a drain goes, and when it will be over.

use std::collections::VecDeque;

use super::super::plan::DrainPlan;
use super::entry::{Entry, Stage};

/// The rate that is shown is taken over this window, as that of one migration.
const RATE_WINDOW_MS: f64 = 2_000.0;

/// The rate that the end is reckoned with: long enough to hold the gaps between VMs too.
const ETA_WINDOW_MS: f64 = 10_000.0;

/// Before this much was watched, the plan's own rate counts in proportion.
const TRUSTED_AFTER_MS: f64 = 5_000.0;

/// What is taken to be left of a VM that has sent all that was predicted, as a share of that.
const OVERDUE_SHARE: f64 = 0.02;

/// Bytes of all VMs over time.
#[derive(Debug)]
pub(super) struct Pace {
    arrived_bytes: u64,
    // Time and bytes so far; one older than the window stays, as the start of the interval.
    samples: VecDeque<(f64, u64)>,
    planned_bytes_per_ms: f64,
    completion_ms: Option<f64>,
}

impl Pace {
    pub(super) fn of(plan: &DrainPlan) -> Self {
        let bytes: f64 = plan.moves.iter().map(|planned| planned.predicted_bytes as f64).sum();
        Self {
            arrived_bytes: 0,
            samples: VecDeque::new(),
            planned_bytes_per_ms: bytes / plan.predicted_ms.max(1.0),
            completion_ms: None,
        }
    }

    pub(super) fn arrived(&mut self, bytes: u64) {
        self.arrived_bytes = self.arrived_bytes.saturating_add(bytes);
    }

    pub(super) fn arrived_bytes(&self) -> u64 {
        self.arrived_bytes
    }

    /// Somebody's turn on the links has come.
    pub(super) fn begins(&mut self, now_ms: f64) {
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
    pub(super) fn sample(&mut self, now_ms: f64) {
        self.samples.push_back((now_ms, self.arrived_bytes));
        while self.samples.len() > 2 && self.samples[1].0 < now_ms - ETA_WINDOW_MS {
            self.samples.pop_front();
        }
    }

    /// From a VM's pause to the end of its migration.
    pub(super) fn completed_in(&mut self, ms: f64) {
        self.completion_ms = Some(self.completion_ms.map_or(ms, |before| f64::midpoint(before, ms)));
    }

    pub(super) fn rate_mbps(&self, now_ms: f64) -> f64 {
        self.bytes_per_ms(now_ms) * 8.0 / 1_000.0
    }

    /// Of all VMs in the last two seconds.
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

    /// Until everything that may move has moved; none while nothing arrives.
    pub(super) fn eta_ms(&self, entries: &[Entry]) -> Option<f64> {
        let bytes_per_ms = self.expected_bytes_per_ms();
        let left_bytes = left_bytes(entries);
        let completes =
            entries.iter().any(|entry| entry.stage.is_under_way() || entry.stage == Stage::Waiting);
        let completion_ms = self.completion_ms.filter(|_| completes).unwrap_or(0.0);
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
fn left_bytes(entries: &[Entry]) -> f64 {
    let moved = entries.iter().filter(|entry| entry.stage == Stage::Moved);
    let (sent, predicted) = moved.fold((0.0, 0.0), |(sent, predicted), entry| {
        (sent + entry.sent_bytes as f64, predicted + entry.planned.predicted_bytes as f64)
    });
    let correction: f64 = if sent > 0.0 && predicted > 0.0 { sent / predicted } else { 1.0 };
    let left = entries.iter().filter(|entry| !entry.is_taken_back()).map(|entry| {
        let whole = entry.planned.predicted_bytes as f64 * correction;
        match entry.stage {
            Stage::Waiting | Stage::Preparing | Stage::AwaitingPlace | Stage::Ready => whole,
            Stage::Transferring => (whole - entry.sent_bytes as f64).max(whole * OVERDUE_SHARE),
            _ => 0.0,
        }
    });
    left.sum()
}
