//! How fast disks are copied, and when they will be there.

use std::collections::{BTreeMap, VecDeque};

use super::passes::Passes;
use super::{DiskName, DiskProgress, DiskState, Reading};

/// A rate is that of so long a time.
const WINDOW_MS: f64 = 2_000.0;

/// Watches the copies of a VM's disks.
#[derive(Debug, Clone, Default)]
pub struct DiskMeter {
    disks: BTreeMap<DiskName, OfDisk>,
    last_growth_ms: Option<f64>,
    // Since each write goes to both disks, or is held back where that is necessary.
    nearing: Option<Nearing>,
    most_bytes_per_s: f64,
}

/// The sign that the rest shrinks. What was gone through is no sign: it grows with what the guest writes, too.
#[derive(Debug, Clone, Copy)]
struct Nearing {
    least_left_bytes: u64,
    last_ms: f64,
}

#[derive(Debug, Clone, Default)]
struct OfDisk {
    readings: VecDeque<(f64, DiskState)>,
    passes: Passes,
    ready_ms: Option<f64>,
}

impl DiskMeter {
    /// Takes a reading. Readings come in the order of time.
    pub fn record(&mut self, now_ms: f64, states: &[DiskState]) {
        for state in states {
            let meter = self.disks.entry(state.disk).or_default();
            if meter.record(now_ms, *state) {
                self.last_growth_ms = Some(now_ms);
            }
        }
        self.last_growth_ms.get_or_insert(now_ms);
        self.most_bytes_per_s = self.most_bytes_per_s.max(self.bytes_per_s());
        let left_bytes = self.left_bytes();
        if let Some(nearing) = self.nearing.as_mut().filter(|nearing| left_bytes < nearing.least_left_bytes) {
            *nearing = Nearing { least_left_bytes: left_bytes, last_ms: now_ms };
        }
    }

    /// Each write of the guest goes to both disks from now on, or is held back where that is necessary, so that what is left
    /// becomes less.
    pub fn mirrored(&mut self, now_ms: f64) {
        self.nearing = Some(Nearing { least_left_bytes: u64::MAX, last_ms: now_ms });
    }

    /// How long nothing was copied, though something is left to be.
    pub fn silent_ms(&self, now_ms: f64) -> f64 {
        let last_ms = self.nearing.map(|nearing| nearing.last_ms).or(self.last_growth_ms);
        last_ms.map_or(0.0, |last_ms| now_ms - last_ms)
    }

    /// Whether each was gone through, and going through them again and again brings no end.
    pub fn are_outpaced(&self) -> bool {
        let is_through = |meter: &OfDisk| {
            meter.ready_ms.is_some()
                || meter.passes.is_gone_through() && meter.last().is_some_and(|state| state.is_written_over)
        };
        let is_outpaced = |meter: &OfDisk| meter.ready_ms.is_none() && meter.passes.gain_too_little();
        self.disks.values().all(is_through) && self.disks.values().any(is_outpaced)
    }

    /// Whether all of each is there, and stays so; not before anything is.
    pub fn are_synchronised(&self) -> bool {
        let is_synchronised = |meter: &OfDisk| meter.last().is_some_and(|state| state.is_synchronised);
        !self.disks.is_empty() && self.disks.values().all(is_synchronised)
    }

    /// Whether all that is watched is ready; not before anything is.
    pub fn are_ready(&self) -> bool {
        !self.disks.is_empty() && self.disks.values().all(|meter| meter.ready_ms.is_some())
    }

    /// How far all of them are together.
    pub(crate) fn reading(&self) -> Reading {
        let (copied_bytes, left_bytes) = (self.copied_bytes(), self.left_bytes());
        Reading { copied_bytes, left_bytes, are_ready: self.are_ready() }
    }

    /// What was gone through of all each second, at its best.
    pub(crate) fn most_bytes_per_s(&self) -> f64 {
        self.most_bytes_per_s
    }

    fn bytes_per_s(&self) -> f64 {
        let each = self.disks.values().filter_map(|meter| meter.per_ms(|state| state.copied_bytes as f64));
        each.sum::<f64>() * 1e3
    }

    /// What was gone through of all.
    pub fn copied_bytes(&self) -> u64 {
        self.disks.values().filter_map(OfDisk::last).map(|state| state.copied_bytes).sum()
    }

    fn left_bytes(&self) -> u64 {
        self.disks.values().filter_map(OfDisk::last).map(|state| state.left_bytes()).sum()
    }

    /// What was gone through of one, and when all of it was there.
    pub fn of(&self, disk: DiskName) -> (u64, Option<f64>) {
        let Some(meter) = self.disks.get(&disk) else { return (0, None) };
        (meter.last().map_or(0, |state| state.copied_bytes), meter.ready_ms)
    }

    /// Bytes of a disk that the target had already.
    pub fn same_bytes(&self, disk: DiskName) -> u64 {
        self.disks.get(&disk).and_then(OfDisk::last).map_or(0, |state| state.same_bytes)
    }

    /// Bytes of a disk that went over the network; none until that was looked at.
    pub fn wire_bytes(&self, disk: DiskName) -> Option<u64> {
        self.disks.get(&disk).and_then(OfDisk::last).map(|state| state.wire_bytes)
    }

    /// Progress for people, disk by disk; of writes nothing is said.
    pub fn progress(&self) -> Vec<DiskProgress> {
        self.disks.values().filter_map(OfDisk::progress).collect()
    }

    /// Whether [`Self::mirrored`].
    pub(crate) fn are_mirrored(&self) -> bool {
        self.nearing.is_some()
    }
}

impl OfDisk {
    /// Whether anything has moved since the last one.
    fn record(&mut self, now_ms: f64, state: DiskState) -> bool {
        let grew = self.last().is_none_or(|last| state.copied_bytes > last.copied_bytes);
        if state.is_ready {
            self.ready_ms.get_or_insert(now_ms);
        }
        self.passes.record(&state);
        self.readings.push_back((now_ms, state));
        // One reading older than the window stays, as the start of the interval.
        while self.readings.len() > 2 && self.readings[1].0 < now_ms - WINDOW_MS {
            self.readings.pop_front();
        }
        grew
    }

    fn last(&self) -> Option<DiskState> {
        self.readings.back().map(|(_, state)| *state)
    }

    /// How fast it grows, what this is of a reading.
    fn per_ms(&self, bytes: impl Fn(&DiskState) -> f64) -> Option<f64> {
        let ((begin_ms, begin), (end_ms, end)) = (self.readings.front()?, self.readings.back()?);
        let growth = bytes(end) - bytes(begin);
        (end_ms > begin_ms && growth > 0.0).then(|| growth / (end_ms - begin_ms))
    }

    fn progress(&self) -> Option<DiskProgress> {
        let state = self.last()?;
        let DiskState { disk, copied_bytes, total_bytes, is_ready, .. } = state;
        let rate = self.per_ms(|state| state.copied_bytes as f64);
        // What the guest writes meanwhile is to be gone through, too.
        let nearing = self.per_ms(|state| -(state.left_bytes() as f64));
        let left = state.left_bytes() as f64;
        let eta_ms = if is_ready { Some(0.0) } else { nearing.map(|rate| left / rate) };
        let rate_gbps = rate.unwrap_or(0.0) * 8.0 / 1e6;
        let (writes_wait, writes_held) = (false, false);
        Some(DiskProgress {
            disk,
            copied_bytes,
            total_bytes,
            is_ready,
            writes_wait,
            writes_held,
            rate_gbps,
            eta_ms,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(index: usize, copied_bytes: u64, is_ready: bool) -> DiskState {
        let begun = DiskState::begun(DiskName::at(index).unwrap());
        DiskState { copied_bytes, total_bytes: 4_000_000, is_ready, ..begun }
    }

    #[test]
    fn what_is_left_takes_as_long_as_the_rate_says() {
        let mut meter = DiskMeter::default();
        meter.record(0.0, &[state(0, 0, false)]);
        assert_eq!(meter.progress()[0].eta_ms, None, "nothing is known yet");
        meter.record(1_000.0, &[state(0, 1_000_000, false)]);
        let progress = meter.progress()[0];
        assert_eq!(progress.eta_ms, Some(3_000.0));
        assert!((progress.rate_gbps - 0.008).abs() < 1e-9);
    }

    #[test]
    fn what_becomes_no_less_has_no_end_in_sight() {
        let mut meter = DiskMeter::default();
        let left = |copied_bytes| DiskState {
            total_bytes: 4_000_000 + copied_bytes,
            ..state(0, copied_bytes, false)
        };
        meter.record(0.0, &[left(0)]);
        meter.record(1_000.0, &[left(1_000_000)]);
        assert_eq!(meter.progress()[0].eta_ms, None);
        assert!(meter.progress()[0].rate_gbps > 0.0);
    }

    #[test]
    fn disks_are_outpaced_once_each_was_gone_through_and_one_gains_too_little() {
        let mut meter = DiskMeter::default();
        let again = |index| DiskState { total_bytes: 8_000_000, ..state(index, 4_000_000, false) };
        meter.record(0.0, &[state(0, 0, false), state(1, 0, false)]);
        meter.record(1.0, &[again(0), state(1, 3_000_000, false)]);
        assert!(!meter.are_outpaced(), "the second is still to be gone through");
        let shows = DiskState { is_written_over: false, ..again(1) };
        meter.record(2.0, &[again(0), shows]);
        assert!(!meter.are_outpaced(), "something else may show on the second");
        meter.record(3.0, &[again(0), again(1)]);
        assert!(meter.are_outpaced());
        meter.record(4.0, &[state(0, 8_000_000, true), state(1, 8_000_000, true)]);
        assert!(!meter.are_outpaced() && meter.are_ready());
    }

    #[test]
    fn once_mirrored_only_what_is_left_breaks_the_silence() {
        let mut meter = DiskMeter::default();
        meter.record(0.0, &[state(0, 1_000_000, false)]);
        meter.mirrored(1_000.0);
        meter.record(2_000.0, &[state(0, 1_000_000, false)]);
        let written = DiskState { total_bytes: 5_000_000, ..state(0, 2_000_000, false) };
        meter.record(5_000.0, &[written]);
        assert!((meter.silent_ms(5_000.0) - 3_000.0).abs() < 1e-9, "as much is left as before");
        meter.record(6_000.0, &[DiskState { copied_bytes: 2_000_001, ..written }]);
        assert!(meter.silent_ms(6_000.0) < 1.0);
        assert!(!meter.are_synchronised());
        meter.record(7_000.0, &[DiskState { is_synchronised: true, ..state(0, 5_000_000, true) }]);
        assert!(meter.are_synchronised());
    }

    #[test]
    fn all_are_ready_once_the_last_is() {
        let mut meter = DiskMeter::default();
        assert!(!meter.are_ready());
        meter.record(0.0, &[state(0, 9, true), state(1, 0, false)]);
        assert!(!meter.are_ready());
        meter.record(5.0, &[state(0, 9, true), state(1, 7, true)]);
        assert!(meter.are_ready());
        let second = DiskName::at(1).unwrap();
        assert_eq!((meter.copied_bytes(), meter.of(second)), (16, (7, Some(5.0))));
    }

    #[test]
    fn a_disk_that_moves_breaks_the_silence() {
        let mut meter = DiskMeter::default();
        assert!(meter.silent_ms(9_000.0) < 1.0, "nothing has begun");
        meter.record(0.0, &[state(0, 0, false), state(1, 0, false)]);
        meter.record(500.0, &[state(0, 0, false), state(1, 5, false)]);
        meter.record(2_000.0, &[state(0, 0, false), state(1, 5, false)]);
        assert!((meter.silent_ms(2_000.0) - 1_500.0).abs() < 1e-9);
    }
}
