//! How fast disks are copied, and when they will be there.

use std::collections::{BTreeMap, VecDeque};

use super::{DiskName, DiskProgress, DiskState};

/// A rate is that of so long a time.
const WINDOW_MS: f64 = 2_000.0;

/// Watches the copies of a VM's disks.
#[derive(Debug, Clone, Default)]
pub struct DiskMeter {
    disks: BTreeMap<DiskName, OfDisk>,
    last_growth_ms: Option<f64>,
}

#[derive(Debug, Clone, Default)]
struct OfDisk {
    readings: VecDeque<(f64, DiskState)>,
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
    }

    /// How long nothing was copied, though something is left to be.
    pub fn silent_ms(&self, now_ms: f64) -> f64 {
        self.last_growth_ms.map_or(0.0, |last| now_ms - last)
    }

    /// Whether all that is watched is ready; not before anything is.
    pub fn are_ready(&self) -> bool {
        !self.disks.is_empty() && self.disks.values().all(|meter| meter.ready_ms.is_some())
    }

    /// What was gone through of all.
    pub fn copied_bytes(&self) -> u64 {
        self.disks.values().filter_map(OfDisk::last).map(|state| state.copied_bytes).sum()
    }

    /// What was gone through of one, and when all of it was there.
    pub fn of(&self, disk: DiskName) -> (u64, Option<f64>) {
        let Some(meter) = self.disks.get(&disk) else { return (0, None) };
        (meter.last().map_or(0, |state| state.copied_bytes), meter.ready_ms)
    }

    /// What of one the target had already.
    pub fn same_bytes(&self, disk: DiskName) -> u64 {
        self.disks.get(&disk).and_then(OfDisk::last).map_or(0, |state| state.same_bytes)
    }

    /// Progress for people, disk by disk.
    pub fn progress(&self) -> Vec<DiskProgress> {
        self.disks.values().filter_map(OfDisk::progress).collect()
    }
}

impl OfDisk {
    /// Whether anything has moved since the last one.
    fn record(&mut self, now_ms: f64, state: DiskState) -> bool {
        let grew = self.last().is_none_or(|last| state.copied_bytes > last.copied_bytes);
        if state.is_ready {
            self.ready_ms.get_or_insert(now_ms);
        }
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

    fn bytes_per_ms(&self) -> Option<f64> {
        let ((begin_ms, begin), (end_ms, end)) = (self.readings.front()?, self.readings.back()?);
        let bytes = end.copied_bytes.saturating_sub(begin.copied_bytes) as f64;
        (end_ms > begin_ms && bytes > 0.0).then(|| bytes / (end_ms - begin_ms))
    }

    fn progress(&self) -> Option<DiskProgress> {
        let DiskState { disk, copied_bytes, total_bytes, is_ready, .. } = self.last()?;
        let rate = self.bytes_per_ms();
        let left = total_bytes.saturating_sub(copied_bytes) as f64;
        let eta_ms = if is_ready { Some(0.0) } else { rate.map(|rate| left / rate) };
        let rate_gbps = rate.unwrap_or(0.0) * 8.0 / 1e6;
        Some(DiskProgress { disk, copied_bytes, total_bytes, is_ready, rate_gbps, eta_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(index: usize, copied_bytes: u64, is_ready: bool) -> DiskState {
        let disk = DiskName::at(index).unwrap();
        DiskState { disk, copied_bytes, total_bytes: 4_000_000, same_bytes: 0, is_ready }
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
