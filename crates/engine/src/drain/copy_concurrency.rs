//! How many VMs have their disks copied at a time between the same two devices, found by trying.
//!
//! Each pair of devices begins with one. When copies have been measured for a while, one pair may have one more. It
//! keeps that if all copies together then carry clearly more; otherwise there is one fewer when the next one ends:
//! disks seek, links do not. Only one pair is tried at a time, since pairs share links.

use std::collections::{BTreeMap, BTreeSet};

use super::concurrency::NEARLY_FULL;
use super::disks::DevicePair;

/// VMs at most between one pair of devices: beyond these no disk was seen to gain.
const COPIES_MAX: u8 = 4;

/// After a copy has begun or ended the others need so long until they carry what they will.
const RAMP_MS: f64 = 1_000.0;

/// What decides is measured for so long: caches of a file system take some seconds' worth at once.
const WINDOW_MS: f64 = 4_000.0;

/// One more must carry so much more.
const GAIN: f64 = 0.05;

/// After a try that did not pay none is made with that pair for so long; twice as long after each further one.
const HOLD_MS: f64 = 30_000.0;

/// The longest hold.
const HOLD_MS_MAX: f64 = 480_000.0;

/// How many VMs are copied between each pair.
pub(super) type Busy = BTreeMap<DevicePair, u8>;

/// Finds how many are best in each.
#[derive(Debug, Clone, Default)]
pub(super) struct CopyConcurrency {
    known: BTreeMap<DevicePair, OfPair>,
    trial: Option<CopyTrial>,
    window: Option<Window>,
    // What all links carry together, in bytes per ms, where that is known.
    links: Option<f64>,
}

#[derive(Debug, Clone, Copy)]
struct OfPair {
    allowed: u8,
    hold_ms: f64,
    hold_until_ms: f64,
}

impl Default for OfPair {
    fn default() -> Self {
        Self { allowed: 1, hold_ms: HOLD_MS, hold_until_ms: f64::NEG_INFINITY }
    }
}

/// One more between a pair than was found to be good.
#[derive(Debug, Clone)]
struct CopyTrial {
    pair: DevicePair,
    // What all carried without it, and who was where.
    carried: f64,
    before: Busy,
}

/// Bytes since it was so.
#[derive(Debug, Clone)]
struct Window {
    busy: Busy,
    since_ms: f64,
    first: Option<(f64, u64)>,
}

impl CopyConcurrency {
    /// What all links carry together from now on, in bytes per ms, where that is known.
    pub(super) fn carry_at_most(&mut self, links: Option<f64>) {
        self.links = links;
    }

    /// How many VMs may be in it.
    pub(super) fn allowed(&self, pair: &DevicePair) -> u8 {
        self.known.get(pair).map_or(1, |of| of.allowed)
    }

    /// Whether a VM may be let into these, where so many are by now.
    pub(super) fn have_room(&self, pairs: &BTreeSet<DevicePair>, busy: &Busy) -> bool {
        pairs.iter().all(|pair| between(busy, pair) < self.allowed(pair))
    }

    /// Takes a sample, some times a second: what all copies have carried since the drain began, unless something else is
    /// on the links; between which devices copies are under way; and which are wanted by VMs that wait.
    pub(super) fn observe(
        &mut self,
        now_ms: f64,
        copied_bytes: Option<u64>,
        busy: &Busy,
        wanted: &BTreeSet<DevicePair>,
    ) {
        self.end_unwanted_trial(busy, wanted);
        let Some(copied_bytes) = copied_bytes.filter(|_| !busy.is_empty()) else {
            self.window = None;
            return;
        };
        if let Some(carries) = self.measured(now_ms, copied_bytes, busy) {
            match self.trial.take() {
                Some(trial) => self.judge(now_ms, trial, carries, busy),
                None => self.begin_trial(now_ms, carries, busy, wanted),
            }
        }
    }

    /// What they carry, in bytes per ms, once it has been measured.
    fn measured(&mut self, now_ms: f64, copied_bytes: u64, busy: &Busy) -> Option<f64> {
        let window = match &mut self.window {
            Some(window) if window.busy == *busy => window,
            other => other.insert(Window { busy: busy.clone(), since_ms: now_ms, first: None }),
        };
        if now_ms < window.since_ms + RAMP_MS {
            return None;
        }
        let (first_ms, first_bytes) = *window.first.get_or_insert((now_ms, copied_bytes));
        if now_ms < first_ms + WINDOW_MS {
            return None;
        }
        window.first = Some((now_ms, copied_bytes));
        Some(copied_bytes.saturating_sub(first_bytes) as f64 / (now_ms - first_ms))
    }

    /// With the pair of the fewest that somebody waits for.
    fn begin_trial(&mut self, now_ms: f64, carries: f64, busy: &Busy, wanted: &BTreeSet<DevicePair>) {
        let are_full = self.links.is_some_and(|links| carries >= NEARLY_FULL * links);
        let is_settled = busy.iter().all(|(pair, count)| *count <= self.allowed(pair));
        if carries <= 0.0 || are_full || !is_settled {
            return;
        }
        let may_be_tried = |pair: &&DevicePair| {
            let of = self.known.get(*pair).copied().unwrap_or_default();
            between(busy, pair) == of.allowed && of.allowed < COPIES_MAX && now_ms >= of.hold_until_ms
        };
        let Some(pair) = wanted.iter().filter(may_be_tried).min_by_key(|pair| self.allowed(pair)) else {
            return;
        };
        self.known.entry(pair.clone()).or_default().allowed += 1;
        self.trial = Some(CopyTrial { pair: pair.clone(), carried: carries, before: busy.clone() });
    }

    fn judge(&mut self, now_ms: f64, trial: CopyTrial, carries: f64, busy: &Busy) {
        if between(busy, &trial.pair) < self.allowed(&trial.pair) {
            // It has not begun yet.
            self.trial = Some(trial);
            return;
        }
        let mut one_fewer = busy.clone();
        one_fewer.entry(trial.pair.clone()).and_modify(|count| *count -= 1);
        let does_pay = carries >= trial.carried * (1.0 + GAIN);
        // Beside others than before, it says nothing.
        let is_comparable = one_fewer == trial.before;
        if is_comparable && does_pay {
            return;
        }
        self.step_back(&trial.pair);
        let of = self.known.entry(trial.pair).or_default();
        of.hold_until_ms = now_ms + of.hold_ms;
        if is_comparable {
            of.hold_ms = (of.hold_ms * 2.0).min(HOLD_MS_MAX);
        }
    }

    /// Nobody is there any more who would be let in.
    fn end_unwanted_trial(&mut self, busy: &Busy, wanted: &BTreeSet<DevicePair>) {
        let Some(trial) = self.trial.take() else { return };
        let has_begun = between(busy, &trial.pair) >= self.allowed(&trial.pair);
        if has_begun || wanted.contains(&trial.pair) {
            self.trial = Some(trial);
        } else {
            self.step_back(&trial.pair);
        }
    }

    fn step_back(&mut self, pair: &DevicePair) {
        let of = self.known.entry(pair.clone()).or_default();
        of.allowed = of.allowed.saturating_sub(1).max(1);
    }
}

fn between(busy: &Busy, pair: &DevicePair) -> u8 {
    busy.get(pair).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests;
