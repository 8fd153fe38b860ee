//! Progress of a transfer, from bytes that arrived: rate, time left, stalls.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::estimate::convergence::{Outpaced, converges};
use crate::migration::step::Step;
use crate::paths::path::write_name;
use crate::storage::DiskProgress;
use crate::transfer::transferred::Transferred;

/// The rate is taken over this window: long enough to smooth the sawtooth of shaped links, short
/// enough to follow a lost path.
const WINDOW_MS: f64 = 2_000.0;

/// Without a byte for this long, a transfer is called stalled.
const STALLED_AFTER_MS: f64 = 1_000.0;

/// So long before the end of a round the pause may follow.
const PAUSE_NEAR_MS: f64 = 2_000.0;

/// Whether the VM would be paused soon: after one round through its memory, or with so little time left of it.
pub fn pause_is_near(rounds: u64, left_ms: Option<f64>) -> bool {
    rounds > 1 || left_ms.is_some_and(|left_ms| left_ms <= PAUSE_NEAR_MS)
}

/// What one path has carried, by the kernel's counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathCounter {
    /// Its link on the source.
    pub link: String,
    /// Its link on the target.
    pub peer_link: String,
    /// Bytes sent over it that the target's host has confirmed.
    pub arrived_bytes: u64,
    /// Whether something was sent that is not confirmed yet.
    pub is_waiting: bool,
}

/// What a person waiting for a migration wants to know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// The step under way.
    pub step: Step,
    /// Since the request.
    pub elapsed_ms: f64,
    /// Bytes sent that the target's host has acknowledged.
    pub sent_bytes: u64,
    /// Bytes of memory still to go through in this round.
    pub remaining_bytes: u64,
    /// Bytes of memory in all.
    pub total_bytes: u64,
    /// Rounds begun.
    pub rounds: u64,
    /// Over the last two seconds.
    pub rate_gbps: f64,
    /// Until the target runs, at this rate and with memory getting dirty as it did in the last round; absent while
    /// nothing is known, and while there is no end to it ([`Self::outpaced`]).
    pub eta_ms: Option<f64>,
    /// Memory gets dirty about as fast as it is sent, or faster: as it is now, the rounds do not end.
    #[serde(default)]
    pub outpaced: Option<Outpaced>,
    /// How long nothing has moved; absent while bytes flow.
    pub stalled_ms: Option<f64>,
    /// The share of a bandwidth limit that it must keep to, in Mb/s of the links; absent without a limit.
    #[serde(default)]
    pub limit_mbps: Option<u64>,
    /// Share of their time for which the VM's CPUs are held back, since its memory gets dirty too fast, in
    /// percent; absent while they are not.
    #[serde(default)]
    pub throttle_percent: Option<u8>,
    /// What compression has recently done; absent without it.
    #[serde(default)]
    pub compression: Option<CompressionProgress>,
    /// Paths that carry nothing for now, because they are not fit to.
    #[serde(default)]
    pub paths_out: Vec<String>,
    /// Paths over which something was sent and nothing has arrived for a second.
    #[serde(default)]
    pub paths_stalled: Vec<String>,
    /// With post-copy: whether the VM runs on the target, and the rest of its memory follows.
    #[serde(default)]
    pub rest_follows: bool,
    /// The disks that are copied, before the memory; empty where none is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskProgress>,
    /// What each path carries; empty while no memory is sent.
    #[serde(default)]
    pub paths: Vec<PathRate>,
}

/// What one path carries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PathRate {
    /// Its link on the source.
    pub link: String,
    /// Its link on the target.
    pub peer_link: String,
    /// What arrived of the migration over the last two seconds, in Mb/s.
    pub rate_mbps: f64,
}

/// What compression has recently done.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CompressionProgress {
    /// Bytes of QEMU's stream for each one on the network.
    pub ratio: f64,
    /// Cores that packing takes.
    pub cores: f64,
}

/// Watches a transfer.
#[derive(Debug, Clone, Default)]
pub struct ProgressMeter {
    readings: VecDeque<(f64, Transferred)>,
    last_growth_ms: Option<f64>,
    paths: BTreeMap<PathEnds, PathMeter>,
}

/// The links of a path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct PathEnds {
    link: String,
    peer_link: String,
}

impl fmt::Display for PathEnds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, &self.link, &self.peer_link)
    }
}

/// Watches one path of a transfer.
#[derive(Debug, Clone, Default)]
struct PathMeter {
    arrived_bytes: VecDeque<(f64, u64)>,
    // Absent where nothing was on its way when it was looked at last.
    waits_since_ms: Option<f64>,
}

impl PathMeter {
    fn record(&mut self, now_ms: f64, arrived_bytes: u64, is_waiting: bool) {
        let grew = self.arrived_bytes.back().is_none_or(|(_, last)| arrived_bytes > *last);
        let waits_since_ms = if grew { now_ms } else { self.waits_since_ms.unwrap_or(now_ms) };
        self.waits_since_ms = is_waiting.then_some(waits_since_ms);
        self.arrived_bytes.push_back((now_ms, arrived_bytes));
        keep_window(&mut self.arrived_bytes, now_ms);
    }

    fn rate_mbps(&self) -> f64 {
        match (self.arrived_bytes.front(), self.arrived_bytes.back()) {
            (Some((begin_ms, begin)), Some((end_ms, end))) if end_ms > begin_ms => {
                end.saturating_sub(*begin) as f64 * 8.0 / 1e3 / (end_ms - begin_ms)
            }
            _ => 0.0,
        }
    }
}

/// One reading older than the window stays, as the start of the interval.
fn keep_window<Reading>(readings: &mut VecDeque<(f64, Reading)>, now_ms: f64) {
    while readings.len() > 2 && readings[1].0 < now_ms - WINDOW_MS {
        readings.pop_front();
    }
}

impl ProgressMeter {
    /// Takes a reading. Readings come in the order of time.
    pub fn record(&mut self, now_ms: f64, transferred: Transferred) {
        let grew = self.readings.back().is_none_or(|(_, last)| transferred.sent_bytes > last.sent_bytes);
        if grew {
            self.last_growth_ms = Some(now_ms);
        }
        self.readings.push_back((now_ms, transferred));
        keep_window(&mut self.readings, now_ms);
    }

    /// Takes a reading of each path.
    pub fn record_paths(&mut self, now_ms: f64, paths: Vec<PathCounter>) {
        for PathCounter { link, peer_link, arrived_bytes, is_waiting } in paths {
            let meter = self.paths.entry(PathEnds { link, peer_link }).or_default();
            meter.record(now_ms, arrived_bytes, is_waiting);
        }
    }

    /// Paths over which something was sent and nothing has arrived for a second.
    pub(crate) fn stalled_paths(&self, now_ms: f64) -> Vec<String> {
        let is_long = |since_ms: f64| now_ms - since_ms >= STALLED_AFTER_MS;
        let stalled = self.paths.iter().filter(|(_, meter)| meter.waits_since_ms.is_some_and(is_long));
        stalled.map(|(path, _)| path.to_string()).collect()
    }

    fn path_rates(&self) -> Vec<PathRate> {
        let rate = |(path, meter): (&PathEnds, &PathMeter)| PathRate {
            link: path.link.clone(),
            peer_link: path.peer_link.clone(),
            rate_mbps: meter.rate_mbps(),
        };
        self.paths.iter().map(rate).collect()
    }

    /// Bytes go by another connection from now on, which counts them again.
    pub(crate) fn restart(&mut self, now_ms: f64) {
        *self = Self { last_growth_ms: Some(now_ms), ..Self::default() };
    }

    /// How long the number of bytes sent has stood still.
    pub fn silent_ms(&self, now_ms: f64) -> f64 {
        self.last_growth_ms.map_or(0.0, |last| now_ms - last)
    }

    /// Whether it has stood still for so long that it is called stalled.
    pub(crate) fn is_stalled(&self, now_ms: f64) -> bool {
        self.silent_ms(now_ms) >= STALLED_AFTER_MS
    }

    /// Rounds begun, by the last reading.
    pub fn rounds(&self) -> u64 {
        self.readings.back().map_or(0, |(_, transferred)| transferred.rounds)
    }

    /// Until all that is dirty now has been gone through, at this rate; absent while nothing is known.
    pub(crate) fn round_left_ms(&self) -> Option<f64> {
        let remaining_bytes = self.readings.back()?.1.remaining_bytes as f64;
        self.gone_through_bytes_per_ms().map(|rate| remaining_bytes / rate)
    }

    /// Until little enough is dirty for the switch-over, with memory getting dirty as in the last round; absent while
    /// nothing is known, and where there is no end to it.
    pub fn left_ms(&self) -> Option<f64> {
        let (rate, last) = (self.gone_through_bytes_per_ms()?, self.readings.back()?.1);
        // Each round leaves this share of what it had to send to the next one.
        let dirty = last.dirty_bytes_per_ms();
        converges(dirty, rate).then(|| last.remaining_bytes as f64 / (rate - dirty))
    }

    /// How fast memory gets dirty and is gone through, where there is no end to that.
    pub(crate) fn outpaced(&self, throttle_max_percent: u8) -> Option<Outpaced> {
        let rate = self.gone_through_bytes_per_ms()?;
        let dirty = self.readings.back()?.1.dirty_bytes_per_ms();
        let gbps = |bytes_per_ms: f64| bytes_per_ms * 8.0 / 1e6;
        (!converges(dirty, rate)).then(|| Outpaced {
            dirty_gbps: gbps(dirty),
            sent_gbps: gbps(rate),
            throttle_max_percent,
        })
    }

    /// The state for people.
    pub fn progress(&self, step: Step, now_ms: f64) -> Progress {
        self.progress_while(step, step_moves_bytes(step), now_ms)
    }

    /// The state while the VM runs on the target, and the rest of its memory follows.
    pub(crate) fn progress_of_rest(&self, step: Step, now_ms: f64) -> Progress {
        Progress { rest_follows: true, ..self.progress_while(step, true, now_ms) }
    }

    fn progress_while(&self, step: Step, moves_bytes: bool, now_ms: f64) -> Progress {
        let last = self.readings.back().map(|(_, transferred)| *transferred).unwrap_or_default();
        let bytes_per_ms = self.bytes_per_ms();
        let silent_ms = self.silent_ms(now_ms);
        let stalled = moves_bytes && self.is_stalled(now_ms);
        Progress {
            step,
            elapsed_ms: now_ms,
            sent_bytes: last.sent_bytes,
            remaining_bytes: last.remaining_bytes,
            total_bytes: last.total_bytes,
            rounds: last.rounds,
            rate_gbps: if stalled { 0.0 } else { bytes_per_ms * 8.0 / 1e6 },
            eta_ms: self.left_ms().filter(|_| !stalled),
            outpaced: None,
            stalled_ms: stalled.then_some(silent_ms),
            limit_mbps: None,
            throttle_percent: None,
            compression: None,
            paths_out: Vec::new(),
            paths_stalled: if moves_bytes { self.stalled_paths(now_ms) } else { Vec::new() },
            rest_follows: false,
            disks: Vec::new(),
            paths: if moves_bytes { self.path_rates() } else { Vec::new() },
        }
    }

    fn bytes_per_ms(&self) -> f64 {
        let (Some((begin_ms, begin)), Some((end_ms, end))) = (self.readings.front(), self.readings.back())
        else {
            return 0.0;
        };
        if end_ms <= begin_ms {
            return 0.0;
        }
        end.sent_bytes.saturating_sub(begin.sent_bytes) as f64 / (end_ms - begin_ms)
    }

    /// How fast memory is gone through, and not bytes: zero pages and compression need fewer bytes than memory. Over the
    /// end of a round that is not known, and taken to be what the hypervisor sends.
    fn gone_through_bytes_per_ms(&self) -> Option<f64> {
        let ((begin_ms, begin), (end_ms, end)) = (self.readings.front()?, self.readings.back()?);
        let bytes = if begin.rounds == end.rounds {
            begin.remaining_bytes.saturating_sub(end.remaining_bytes)
        } else {
            let passed = end.passed_bytes.saturating_sub(begin.passed_bytes);
            passed.max(end.sent_bytes.saturating_sub(begin.sent_bytes))
        };
        (bytes > 0).then(|| bytes as f64 / (end_ms - begin_ms).max(f64::MIN_POSITIVE))
    }
}

fn step_moves_bytes(step: Step) -> bool {
    matches!(step, Step::CopyMemory | Step::CopyDirtyMemory | Step::Downtime)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(sent_mb: u64, remaining_mb: u64) -> Transferred {
        Transferred {
            sent_bytes: sent_mb * 1_000_000,
            remaining_bytes: remaining_mb * 1_000_000,
            total_bytes: 1_000_000_000,
            rounds: 1,
            ..Transferred::default()
        }
    }

    #[test]
    fn a_steady_transfer_has_a_rate_and_a_true_eta() {
        let mut meter = ProgressMeter::default();
        for second in 0..=4 {
            meter.record(second as f64 * 1000.0, reading(second * 125, 1000 - second * 125));
        }
        let progress = meter.progress(Step::CopyMemory, 4000.0);
        assert!((progress.rate_gbps - 1.0).abs() < 1e-9);
        assert!((progress.eta_ms.unwrap() - 4000.0).abs() < 1e-6);
        assert_eq!(progress.stalled_ms, None);
    }

    #[test]
    fn eta_counts_memory_gone_through_when_pages_shrink() {
        let mut meter = ProgressMeter::default();
        meter.record(0.0, reading(0, 1000));
        meter.record(1000.0, reading(50, 800));
        assert!((meter.progress(Step::CopyMemory, 1000.0).eta_ms.unwrap() - 4000.0).abs() < 1e-6);
    }

    #[test]
    fn what_gets_dirty_while_it_is_sent_takes_its_time_too_and_may_never_end() {
        let predicted = |dirty_mb_per_s: u64, rounds| {
            let mut meter = ProgressMeter::default();
            for tenth in 0..=10 {
                let transferred = Transferred {
                    rounds,
                    dirty_bytes_per_s: dirty_mb_per_s * 1_000_000,
                    ..reading(tenth * 10, 200 - tenth * 10)
                };
                meter.record(tenth as f64 * 100.0, transferred);
            }
            let outpaced =
                meter.outpaced(80).map(|it| ((it.dirty_gbps * 10.0).round(), (it.sent_gbps * 10.0).round()));
            (meter.round_left_ms().unwrap().round(), meter.left_ms().map(f64::round), outpaced)
        };
        assert_eq!(predicted(0, 2), (1000.0, Some(1000.0), None));
        assert_eq!(predicted(50, 2), (1000.0, Some(2000.0), None));
        assert_eq!(predicted(75, 2), (1000.0, Some(4000.0), None));
        assert_eq!(
            predicted(95, 2),
            (1000.0, None, Some((8.0, 8.0))),
            "it is the same amount, as well as it can be measured"
        );
        assert_eq!(predicted(150, 2), (1000.0, None, Some((12.0, 8.0))));
        assert_eq!(predicted(150, 1), (1000.0, Some(1000.0), None), "nobody has looked in the first round");
    }

    #[test]
    fn a_path_on_which_nothing_arrives_is_told_by_name() {
        let counter = |link: &str, arrived_bytes, is_waiting| PathCounter {
            link: link.into(),
            peer_link: link.into(),
            arrived_bytes,
            is_waiting,
        };
        let mut meter = ProgressMeter::default();
        for (count, ms) in [(1, 0.0), (2, 500.0), (3, 1000.0), (4, 1500.0)] {
            meter.record(ms, reading(count, 900));
            let moves = counter("e0", count * 1_000_000, true);
            meter.record_paths(ms, vec![moves, counter("e1", 7, true), counter("e2", 7, false)]);
        }
        let progress = meter.progress(Step::CopyMemory, 1500.0);
        assert_eq!((progress.stalled_ms, progress.paths_stalled), (None, vec!["e1–e1".to_owned()]));
        let rates: Vec<(&str, f64)> =
            progress.paths.iter().map(|path| (path.link.as_str(), path.rate_mbps)).collect();
        assert_eq!(rates, [("e0", 16.0), ("e1", 0.0), ("e2", 0.0)]);
        let before = meter.progress(Step::ConnectHosts, 1500.0);
        assert!(before.paths_stalled.is_empty() && before.paths.is_empty());
    }

    #[test]
    fn silence_is_a_stall_with_no_eta() {
        let mut meter = ProgressMeter::default();
        meter.record(0.0, reading(0, 1000));
        meter.record(1000.0, reading(125, 875));
        meter.record(4000.0, reading(125, 875));
        let progress = meter.progress(Step::CopyMemory, 4000.0);
        assert_eq!(progress.stalled_ms, Some(3000.0));
        assert_eq!(progress.eta_ms, None);
        assert!(progress.rate_gbps.abs() < f64::EPSILON);
    }

    #[test]
    fn no_reading_is_no_claim() {
        let progress = ProgressMeter::default().progress(Step::BuildIncomingVm, 10.0);
        assert_eq!((progress.eta_ms, progress.stalled_ms), (None, None));
    }
}
