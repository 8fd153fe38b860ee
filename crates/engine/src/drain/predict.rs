//! How long moving a VM will take.

use super::concurrency::Concurrency;
use super::copy_concurrency::CopyConcurrency;
use super::disks;
use super::host_links::HostLinks;
use super::schedule::{Course, Links, Places, ScheduledTransfer, schedule};
use super::speeds::{disk_mbps, speed_mbps, vm_mbps};
use super::view::{TargetView, VmView};
use crate::estimate::load::{Load, whole_bytes};
use crate::estimate::sending::bytes_per_ms;
use crate::transfer::relayed::Verdict;

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
    let transfer = ScheduledTransfer { target: 0, load, device_pairs, setup_ms: 0.0, completion_ms: 0.0 };
    let places = Places { concurrency: Concurrency::fixed(1), under_way: 1 };
    let course = schedule(&[transfer], &alone, places, CopyConcurrency::default()).courses[0];
    let Course { transfer_ms, bytes } = course;
    let converges = load.converges(bytes_per_ms);
    Prediction {
        load,
        bytes: whole_bytes(bytes),
        transfer_ms,
        converges,
        is_compressed: wire_share.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::speeds::{all_mbps, completion_ms, setup_ms};
    use crate::drain::view::{LimitView, PathHistory, Placement};
    use crate::estimate::sending::{COMPLETION, END, SETUP, START};
    use crate::transfer::memory_sample::MemorySample;
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
        near(prediction.transfer_ms, GIB as f64 / 2.0 / (1_900.0 * 125.0) + START.ms + END.ms);
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
        // A fiftieth is a core that 49 others want.
        let starved = TargetView { free_cores: Some(0.02), ..busy(2_000) };
        near(setup_ms(&starved), SETUP.ms + 49.0 * SETUP.per_other_ms);
        near(completion_ms(&starved), COMPLETION.ms + 49.0 * COMPLETION.per_other_ms);
        near(vm_mbps(&starved), 2_000.0);
        near(vm_mbps(&busy(2_000)), 2_000.0);
        let cores_mbps = 0.5 / 0.6 * GIB as f64 * 8.0 / 1e6;
        near(vm_mbps(&busy(100_000)), cores_mbps);
        near(all_mbps(&busy(100_000)), cores_mbps);
        let idle = TargetView { free_cores: Some(2.0), ..target(2_000, Some(1_930.0)) };
        near(setup_ms(&idle), 200.0);
        let of = |target| predict(&vm(sample(0.5, 0)), &target).transfer_ms;
        near(
            of(busy(2_000)) - of(TargetView { free_cores: None, ..busy(2_000) }),
            START.per_other_ms + END.per_other_ms,
        );
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
