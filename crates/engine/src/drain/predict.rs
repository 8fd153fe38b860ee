//! What moving a VM will take: what it has to send, and what its links carry.

use super::concurrency::{Concurrency, NEARLY_FULL};
use super::copy_concurrency::CopyConcurrency;
use super::disks;
use super::host_links::HostLinks;
use super::schedule::{Course, Links, Places, Transfer, schedule};
use super::view::{MemorySample, PathHistory, TargetView, VmView};
use crate::migration::downtime_limit_ms;
use crate::transfer::convergence::converges;
use crate::transfer::prediction::{UNKNOWN_SHARE, carried_bytes_per_ms, slowed_ms};
use crate::transfer::relayed::Verdict;

/// What arrives of a link's speed as memory: the rest is Ethernet's, IP's and TCP's headers.
pub(super) const GOODPUT_SHARE: f64 = 0.95;

/// Taken for the speed of paths that is not known, in Mb/s; the least that a server has.
pub const UNKNOWN_SPEED_MBPS: u64 = 1_000;

/// What was remembered below this, in Mb/s, was no transfer.
const SLOWEST_MBPS: f64 = 1.0;

/// What was remembered above this, in ms, was no step that went well: more than Drainpipe waits for any.
const LONGEST_MS: f64 = 3_600_000.0;

/// Rounds after which a prediction stops to add more. A VM that converges needs fewer.
pub(super) const ROUNDS_MAX: u64 = 20;

/// From its turn to the first byte, in ms: its guard takes its post, QEMU connects. As `bench/results` has it.
pub(super) const START_MS: f64 = 100.0;

/// From the last byte until the target has taken it, in ms. As `bench/results` has it.
const END_MS: f64 = 40.0;

/// Steps 1 to 5 where nothing is remembered, in ms: the median of `bench/results`.
const SETUP_MS: f64 = 110.0;

/// Steps 9 and 10 where nothing is remembered, in ms: the median of `bench/results`.
const COMPLETION_MS: f64 = 45.0;

/// What moving one VM to one target will take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Prediction {
    /// What it has to send.
    pub(super) load: Load,
    /// Bytes of memory that will go over the links, alone on them.
    pub(super) bytes: u64,
    /// From its turn to the last byte, alone on the links; its disks included.
    pub(super) transfer_ms: f64,
    /// Whether its memory gets dirty slowly enough.
    pub(super) converges: bool,
    /// Whether it is likely to be compressed.
    pub(super) is_compressed: bool,
}

/// What a VM has to send, and what it takes besides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Load {
    /// What the copies of its disks carry before that.
    pub(super) disk_bytes: f64,
    /// In the first round: what is not zero.
    pub(super) first_bytes: f64,
    /// How fast clean memory gets dirty.
    dirty_bytes_per_ms: f64,
    /// How much of it does.
    dirty_set_bytes: f64,
    /// From its turn to the first byte.
    pub(super) start_ms: f64,
    /// From the last byte until the target has taken it.
    pub(super) end_ms: f64,
}

impl Load {
    /// Of which the wire carries this share when it is compressed. Without disks.
    fn of(memory_bytes: u64, sample: Option<MemorySample>, wire_share: f64, free_cores: Option<f64>) -> Self {
        let sample = sample.filter(|memory| memory.zero_share.is_finite()).unwrap_or(MemorySample {
            zero_share: 0.0,
            dirty_bytes_per_s: 0,
            dirty_set_bytes: 0,
            compressible: None,
        });
        Self {
            disk_bytes: 0.0,
            first_bytes: memory_bytes as f64 * (1.0 - sample.zero_share.clamp(0.0, 1.0)) * wire_share,
            dirty_bytes_per_ms: sample.dirty_bytes_per_s as f64 / 1_000.0 * wire_share,
            dirty_set_bytes: sample.dirty_set_bytes.min(memory_bytes) as f64 * wire_share,
            start_ms: slowed_ms(START_MS, free_cores),
            end_ms: slowed_ms(END_MS, free_cores),
        }
    }

    /// Memory of which nothing gets dirty.
    #[cfg(test)]
    pub(super) fn resting(bytes: f64) -> Self {
        let (start_ms, end_ms) = (START_MS, END_MS);
        let (disk_bytes, dirty_bytes_per_ms, dirty_set_bytes) = (0.0, 0.0, 0.0);
        Self { disk_bytes, first_bytes: bytes, dirty_bytes_per_ms, dirty_set_bytes, start_ms, end_ms }
    }

    /// How much gets dirty in so long, of memory that was clean.
    pub(super) fn dirtied_bytes(&self, ms: f64) -> f64 {
        if self.dirty_set_bytes <= 0.0 {
            return 0.0;
        }
        let changes = self.dirty_bytes_per_ms * ms / self.dirty_set_bytes;
        -(-changes).exp_m1() * self.dirty_set_bytes
    }

    /// Whether what gets dirty in the longest pause can be sent in it, with something to spare.
    fn converges(&self, bytes_per_ms: f64) -> bool {
        let longest_ms = downtime_limit_ms(ROUNDS_MAX) as f64;
        converges(self.dirtied_bytes(longest_ms), bytes_per_ms * longest_ms)
    }
}

impl Prediction {
    /// With post-copy: what gets dirty while its memory is sent once follows, and nothing gets dirty here any more.
    pub(super) fn with_rest_to_follow(self) -> Self {
        let first_bytes = self.load.first_bytes + self.load.dirty_set_bytes;
        let bytes_per_ms = self.bytes as f64 / self.transfer_ms.max(1.0);
        Self {
            load: Load { first_bytes, dirty_bytes_per_ms: 0.0, dirty_set_bytes: 0.0, ..self.load },
            bytes: whole_bytes(first_bytes),
            transfer_ms: self.load.start_ms
                + first_bytes / bytes_per_ms.max(f64::MIN_POSITIVE)
                + self.load.end_ms,
            ..self
        }
    }
}

/// Predicts the transfer of one VM that is alone on the links.
///
/// The first round sends what is not zero; each further one what got dirty in the round before, until
/// that fits in the pause.
pub(super) fn predict(vm: &VmView, target: &TargetView) -> Prediction {
    let compressible = vm.memory.and_then(|memory| memory.compressible);
    let wire_share = match target.relay.map(|relay| relay.verdict(compressible)) {
        Some(Verdict::Compressed { wire_share }) => Some(wire_share),
        _ => None,
    };
    let load = Load::of(vm.memory_bytes, vm.memory, wire_share.unwrap_or(1.0), target.free_cores);
    let load = Load { disk_bytes: disks::bytes(vm.copies_to(&target.name)) as f64, ..load };
    let bytes_per_ms = bytes_per_ms(vm_mbps(target));
    let alone = Links {
        vm_bytes_per_ms: vec![bytes_per_ms],
        disk_bytes_per_ms: vec![self::bytes_per_ms(disk_mbps(target))],
        target_bytes_per_ms: vec![bytes_per_ms],
        host: HostLinks::of_speeds(&[speed_mbps(target)]),
    };
    let device_pairs = disks::device_pairs(&target.name, vm.copies_to(&target.name));
    let transfer = Transfer { target: 0, load, device_pairs, setup_ms: 0.0, completion_ms: 0.0 };
    let places = Places { concurrency: Concurrency::fixed(1), under_way: 1 };
    let course = schedule(&[transfer], &alone, places, CopyConcurrency::default()).courses[0];
    let Course { transfer_ms, bytes } = course;
    let converges = load.converges(bytes_per_ms_to_converge(target));
    Prediction {
        load,
        bytes: whole_bytes(bytes),
        transfer_ms,
        converges,
        is_compressed: wire_share.is_some(),
    }
}

/// Many threads send a VM's memory, and what one of them gets of a busy core says little of what all do: so a VM is not
/// taken to send more slowly than it does on busy cores of which no more is known.
fn bytes_per_ms_to_converge(target: &TargetView) -> f64 {
    let free_cores = target.free_cores.map(|cores| cores.max(UNKNOWN_SHARE));
    bytes_per_ms(links_mbps(target).min(cores_mbps(free_cores)))
}

/// Whether links of this speed, with headers, carry memory away as fast as it gets dirty, with something to spare.
pub fn keeps_pace(memory_bytes: u64, memory: MemorySample, speed_mbps: f64) -> bool {
    Load::of(memory_bytes, Some(memory), 1.0, None).converges(bytes_per_ms(speed_mbps * GOODPUT_SHARE))
}

/// From the request to the end of a migration that sends so much memory once, of which the wire carries this share, and
/// for which nothing is remembered.
pub fn sent_ms(bytes: f64, wire_share: f64, paths_mbps: f64, free_cores: Option<f64>) -> f64 {
    let steps_ms = SETUP_MS + START_MS + END_MS + COMPLETION_MS;
    slowed_ms(steps_ms, free_cores) + copied_ms(bytes * wire_share, paths_mbps, free_cores)
}

/// For how long so many bytes go over paths that carry this, headers included.
pub fn copied_ms(bytes: f64, paths_mbps: f64, free_cores: Option<f64>) -> f64 {
    let rate = bytes_per_ms(paths_mbps * GOODPUT_SHARE).min(carried_bytes_per_ms(free_cores));
    bytes / rate.max(f64::MIN_POSITIVE)
}

/// For how long a transfer of so many ms has sent: without its start and its end.
pub fn sending_ms(transfer_ms: f64) -> f64 {
    (transfer_ms - START_MS - END_MS).max(transfer_ms / 2.0)
}

/// What one VM's transfer to this target carries, in Mb/s.
pub(super) fn vm_mbps(target: &TargetView) -> f64 {
    links_mbps(target).min(cores_mbps(target.free_cores))
}

/// The same by the links alone.
fn links_mbps(target: &TargetView) -> f64 {
    let paths = paths_mbps(target);
    match target.path_history.map(|history| history.transfer_mbps) {
        Some(seen_mbps) if seen_mbps.is_finite() && seen_mbps >= SLOWEST_MBPS => match target.paths_mbps {
            0 => seen_mbps,
            // Links may have been lost since.
            known => seen_mbps.min(known as f64),
        },
        _ => paths,
    }
}

/// What the copies of one VM's disks to this target carry, in Mb/s: as earlier ones did, or as fast as the links.
pub(super) fn disk_mbps(target: &TargetView) -> f64 {
    let seen_mbps = target.path_history.and_then(|history| history.disk_mbps);
    let seen_mbps = seen_mbps.filter(|mbps| mbps.is_finite() && *mbps >= SLOWEST_MBPS);
    let links_mbps = all_mbps(target);
    seen_mbps.map_or(links_mbps, |mbps| mbps.min(links_mbps))
}

/// What the cores of both hosts carry, in Mb/s.
fn cores_mbps(free_cores: Option<f64>) -> f64 {
    carried_bytes_per_ms(free_cores) / 125.0
}

/// What all paths to this target carry, in Mb/s.
pub(super) fn paths_mbps(target: &TargetView) -> f64 {
    speed_mbps(target) as f64 * GOODPUT_SHARE
}

/// The same with headers.
pub(super) fn speed_mbps(target: &TargetView) -> u64 {
    match target.paths_mbps {
        0 => UNKNOWN_SPEED_MBPS,
        known => known,
    }
}

/// What all transfers to this target carry together, in Mb/s. Where one VM's nearly fills the paths, what is missing
/// is no room for another one.
pub(super) fn all_mbps(target: &TargetView) -> f64 {
    let (vm, paths) = (vm_mbps(target), paths_mbps(target));
    if vm >= NEARLY_FULL * paths { vm } else { paths.min(cores_mbps(target.free_cores)) }
}

/// Steps 1 to 5 of a migration to this target, in ms: not less than they take with the cores that there are now.
pub(super) fn setup_ms(target: &TargetView) -> f64 {
    let seen_ms = seen_ms(target, |history| history.setup_ms);
    with_cores(target, seen_ms, SETUP_MS)
}

/// Steps 9 and 10 of a migration to this target, in ms.
pub(super) fn completion_ms(target: &TargetView) -> f64 {
    let seen_ms = seen_ms(target, |history| history.completion_ms);
    with_cores(target, seen_ms, COMPLETION_MS)
}

fn with_cores(target: &TargetView, seen_ms: Option<f64>, usual_ms: f64) -> f64 {
    let now_ms = slowed_ms(usual_ms, target.free_cores);
    let is_slowed = now_ms > usual_ms;
    seen_ms.map_or(now_ms, |seen_ms| if is_slowed { seen_ms.max(now_ms) } else { seen_ms })
}

fn seen_ms(target: &TargetView, which: impl Fn(&PathHistory) -> f64) -> Option<f64> {
    target.path_history.as_ref().map(which).filter(|ms| (0.0..=LONGEST_MS).contains(ms))
}

/// A speed in Mb/s, in bytes per ms.
pub fn bytes_per_ms(mbps: f64) -> f64 {
    mbps * 125.0
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of sizes, never negative")]
pub(super) fn whole_bytes(bytes: f64) -> u64 {
    bytes.round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::view::{LimitView, MemorySample, Placement};
    use crate::transfer::relayed::{Compressible, RelayMeans};

    const GIB: u64 = 1 << 30;

    fn vm(memory: MemorySample) -> VmView {
        VmView {
            name: "vm".into(),
            needs_bytes: GIB,
            memory_bytes: GIB,
            placement: Placement::default(),
            immovable: None,
            refusals: std::collections::BTreeMap::new(),
            memory: Some(memory),
            copies: std::collections::BTreeMap::new(),
        }
    }

    fn target(paths_mbps: u64, transfer_mbps: Option<f64>) -> TargetView {
        TargetView {
            name: "b".into(),
            unavailable: None,
            warnings: vec![],
            memory_available_bytes: u64::MAX,
            file_systems: vec![],
            makes_room: false,
            makes_room_now: false,
            vms: vec![],
            paths_mbps,
            paths: vec![],
            limit: LimitView::default(),
            free_cores: None,
            relay: None,
            no_post_copy: None,
            path_history: transfer_mbps.map(|transfer_mbps| PathHistory {
                transfer_mbps,
                setup_ms: 200.0,
                completion_ms: 80.0,
                transfers: None,
                disk_mbps: None,
            }),
        }
    }

    fn sample(zero_share: f64, dirty_mbps: u64) -> MemorySample {
        let dirty_bytes_per_s = dirty_mbps * 125_000;
        MemorySample { zero_share, dirty_bytes_per_s, dirty_set_bytes: GIB, compressible: None }
    }

    fn near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-6 * expected, "{value} is not {expected}");
    }

    #[test]
    fn memory_that_rests_goes_over_once_without_its_zeros() {
        let prediction = predict(&vm(sample(0.5, 0)), &target(2_000, None));
        assert_eq!(prediction.bytes, GIB / 2);
        near(prediction.transfer_ms, GIB as f64 / 2.0 / (1_900.0 * 125.0) + START_MS + END_MS);
        assert!(prediction.converges);
    }

    #[test]
    fn what_gets_dirty_goes_over_again() {
        let prediction = predict(&vm(sample(0.0, 475)), &target(1_000, None));
        let whole = prediction.bytes as f64 / GIB as f64;
        assert!((1.5..=1.8).contains(&whole), "1 − e^−½ gets dirty in the first round, not {whole}");
        assert!(prediction.converges);
    }

    #[test]
    fn a_vm_that_is_dirtied_as_fast_as_the_links_does_not_converge() {
        assert!(!predict(&vm(sample(0.0, 900)), &target(1_000, None)).converges);
        let hopeless = predict(&vm(sample(0.0, 90_000)), &target(1_000, None));
        assert!(!hopeless.converges && hopeless.transfer_ms.is_finite());
    }

    #[test]
    fn what_is_compressed_takes_less_of_the_links() {
        let relay = RelayMeans {
            is_asked_for: false,
            is_encrypted: false,
            wire_mbps: 1_000.0,
            source_cores: 8.0,
            target_cores: 8.0,
            packing_cores: 8.0,
            saved_mbps: None,
            compressed_slower: None,
        };
        let target = TargetView { relay: Some(relay), ..target(1_000, None) };
        let of = |compressible| predict(&vm(MemorySample { compressible, ..sample(0.5, 900) }), &target);
        let half = of(Some(Compressible { share: 1.0, left: 0.5 }));
        assert!(
            half.is_compressed && half.converges && half.bytes > GIB / 4,
            "half of it gets dirty at 450 Mb/s: {half:?}"
        );
        let resting =
            MemorySample { compressible: Some(Compressible { share: 1.0, left: 0.5 }), ..sample(0.5, 0) };
        assert_eq!(predict(&vm(resting), &target).bytes, GIB / 4);
        assert!(!of(None).converges, "nobody asked for what is not known to shrink");
    }

    #[test]
    fn a_small_part_that_changes_all_the_time_goes_over_in_the_pause() {
        let small = MemorySample { dirty_set_bytes: 16 << 20, ..sample(0.0, 4_000) };
        let prediction = predict(&vm(small), &target(1_000, None));
        assert!(prediction.converges, "16 MiB take 141 ms");
        assert!(prediction.bytes < GIB + ((6 * 16) << 20), "{}", prediction.bytes);
    }

    #[test]
    fn a_busy_host_takes_longer_for_each_step_and_carries_less() {
        let busy =
            |paths_mbps| TargetView { free_cores: Some(0.5), ..target(paths_mbps, Some(paths_mbps as f64)) };
        near(setup_ms(&busy(2_000)), 2.0 * SETUP_MS);
        near(completion_ms(&busy(2_000)), 2.0 * COMPLETION_MS);
        near(vm_mbps(&busy(2_000)), 2_000.0);
        let cores_mbps = 0.5 / 0.6 * GIB as f64 * 8.0 / 1e6;
        near(vm_mbps(&busy(100_000)), cores_mbps);
        near(all_mbps(&busy(100_000)), cores_mbps);
        let idle = TargetView { free_cores: Some(2.0), ..target(2_000, Some(1_930.0)) };
        near(setup_ms(&idle), 200.0);
        let of = |target| predict(&vm(sample(0.5, 0)), &target).transfer_ms;
        near(of(busy(2_000)) - of(TargetView { free_cores: None, ..busy(2_000) }), START_MS + END_MS);
    }

    #[test]
    fn what_was_measured_counts_unless_links_were_lost_since() {
        near(vm_mbps(&target(2_000, Some(1_930.0))), 1_930.0);
        near(vm_mbps(&target(1_000, Some(1_930.0))), 1_000.0);
        near(vm_mbps(&target(2_000, Some(f64::NAN))), 1_900.0);
        near(vm_mbps(&target(0, None)), 950.0);
        near(vm_mbps(&target(0, Some(1_930.0))), 1_930.0);
    }
}
