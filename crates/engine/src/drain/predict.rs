//! How long moving a VM will take, alone on the links and among others.

use std::collections::VecDeque;

use super::view::{Remembered, TargetView, VmView};
use crate::migration::downtime_limit_ms;

/// What arrives of a link's speed as memory: the rest is Ethernet's, IP's and TCP's headers.
const GOODPUT_SHARE: f64 = 0.95;

/// Taken for the speed of paths that is not known, in Mb/s; the least that a server has.
const UNKNOWN_SPEED_MBPS: f64 = 1_000.0;

/// What was remembered below this, in Mb/s, was no transfer.
const SLOWEST_MBPS: f64 = 1.0;

/// What was remembered above this, in ms, was no step that went well: more than Drainpipe waits for any.
const LONGEST_MS: f64 = 3_600_000.0;

/// A VM whose memory gets dirty faster than this share of what its links carry is not counted on to
/// converge: each round is hardly shorter than the one before.
const CONVERGES_BELOW: f64 = 0.8;

/// Rounds after which a prediction stops to add more. A VM that converges needs fewer.
const ROUNDS_MAX: u64 = 20;

/// Steps 1 to 5 where nothing is remembered, in ms: the median of `bench/results`.
const SETUP_MS: f64 = 110.0;

/// Steps 9 and 10 where nothing is remembered, in ms: the median of `bench/results`.
const COMPLETION_MS: f64 = 45.0;

/// What moving one VM to one target will take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Prediction {
    /// Bytes that will go over the links.
    pub(super) bytes: u64,
    /// From the first byte to the last, alone on the links.
    pub(super) transfer_ms: f64,
    /// Whether its memory gets dirty slowly enough.
    pub(super) converges: bool,
}

/// Predicts the transfer of one VM that is alone on the links.
///
/// The first round sends what is not zero; each further one what got dirty in the round before, until
/// that fits in the pause.
pub(super) fn predict(vm: &VmView, target: &TargetView) -> Prediction {
    let sample = vm.memory.filter(|memory| memory.zero_share.is_finite());
    let zero_share = sample.map_or(0.0, |memory| memory.zero_share.clamp(0.0, 1.0));
    let dirty_per_ms = sample.map_or(0.0, |memory| memory.dirty_bytes_per_s as f64 / 1_000.0);
    let rate = bytes_per_ms(vm_mbps(target));
    let mut round_bytes = vm.memory_bytes as f64 * (1.0 - zero_share);
    let mut bytes = round_bytes;
    for round in 1..=ROUNDS_MAX {
        round_bytes *= dirty_per_ms / rate;
        round_bytes = round_bytes.min(vm.memory_bytes as f64);
        bytes += round_bytes;
        if round_bytes / rate <= downtime_limit_ms(round) as f64 {
            break;
        }
    }
    Prediction {
        bytes: whole_bytes(bytes),
        transfer_ms: bytes / rate,
        converges: dirty_per_ms <= CONVERGES_BELOW * rate,
    }
}

/// What one VM's transfer to this target carries, in Mb/s.
pub(super) fn vm_mbps(target: &TargetView) -> f64 {
    let paths = paths_mbps(target);
    match target.remembered.map(|remembered| remembered.transfer_mbps) {
        Some(remembered) if remembered.is_finite() && remembered >= SLOWEST_MBPS => match target.paths_mbps {
            0 => remembered,
            // Links may have been lost since.
            known => remembered.min(known as f64),
        },
        _ => paths,
    }
}

/// What all paths to this target carry, in Mb/s.
pub(super) fn paths_mbps(target: &TargetView) -> f64 {
    match target.paths_mbps {
        0 => UNKNOWN_SPEED_MBPS * GOODPUT_SHARE,
        known => known as f64 * GOODPUT_SHARE,
    }
}

/// Steps 1 to 5 of a migration to this target, in ms.
pub(super) fn setup_ms(target: &TargetView) -> f64 {
    remembered_ms(target, |remembered| remembered.setup_ms).unwrap_or(SETUP_MS)
}

/// Steps 9 and 10 of a migration to this target, in ms.
pub(super) fn completion_ms(target: &TargetView) -> f64 {
    remembered_ms(target, |remembered| remembered.completion_ms).unwrap_or(COMPLETION_MS)
}

fn remembered_ms(target: &TargetView, which: impl Fn(&Remembered) -> f64) -> Option<f64> {
    target.remembered.as_ref().map(which).filter(|ms| (0.0..=LONGEST_MS).contains(ms))
}

fn bytes_per_ms(mbps: f64) -> f64 {
    mbps * 125.0
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of sizes, never negative")]
fn whole_bytes(bytes: f64) -> u64 {
    bytes.round() as u64
}

/// One transfer among others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Transfer {
    /// Which target it goes to.
    pub(super) target: usize,
    /// Bytes to send.
    pub(super) bytes: f64,
    /// Steps 9 and 10 that follow it.
    pub(super) completion_ms: f64,
}

/// How the links are shared.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Links {
    /// What one VM's transfer carries, by target, in Mb/s.
    pub(super) vm_mbps: Vec<f64>,
    /// What all transfers to one target carry together, in Mb/s.
    pub(super) target_mbps: Vec<f64>,
}

/// When transfers end that go in their order, so many at a time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Schedule {
    /// From the first byte of each transfer to its last.
    pub(super) transfer_ms: Vec<f64>,
    /// From the first byte of the first one to the end of step 10 of the last one.
    pub(super) total_ms: f64,
}

/// Plays through transfers that share the links fairly. The next one begins when one has sent its last
/// byte.
pub(super) fn schedule(transfers: &[Transfer], links: &Links, at_a_time: u8) -> Schedule {
    let mut transfer_ms = vec![0.0; transfers.len()];
    let mut waiting: VecDeque<usize> = (0..transfers.len()).collect();
    // Index, bytes left, since when.
    let mut active: Vec<(usize, f64, f64)> = vec![];
    let (mut now_ms, mut total_ms) = (0.0_f64, 0.0_f64);
    loop {
        while active.len() < usize::from(at_a_time.max(1))
            && let Some(next) = waiting.pop_front()
        {
            active.push((next, transfers[next].bytes, now_ms));
        }
        let rates = shares(active.iter().map(|(index, ..)| transfers[*index].target), links);
        let left_ms = |(at, (_, left, _)): (usize, &(usize, f64, f64))| left / bytes_per_ms(rates[at]);
        let Some((first, step_ms)) = active
            .iter()
            .enumerate()
            .map(|entry| (entry.0, left_ms(entry)))
            .min_by(|a, b| a.1.total_cmp(&b.1))
        else {
            return Schedule { transfer_ms, total_ms };
        };
        now_ms += step_ms;
        for ((_, left, _), rate) in active.iter_mut().zip(&rates) {
            *left = (*left - bytes_per_ms(*rate) * step_ms).max(0.0);
        }
        let (ended, _, since_ms) = active.remove(first);
        transfer_ms[ended] = now_ms - since_ms;
        total_ms = total_ms.max(now_ms + transfers[ended].completion_ms);
    }
}

/// What each of these transfers carries, in Mb/s: as much as it can, less in proportion where all that go
/// to its target, or all that leave this host, are too many.
fn shares(targets: impl Iterator<Item = usize> + Clone, links: &Links) -> Vec<f64> {
    let wanted_to = |target: usize| {
        let rivals = targets.clone().filter(|other| *other == target).count();
        links.vm_mbps[target] * (rivals as f64)
    };
    let to_target: Vec<f64> = targets
        .clone()
        .map(|target| links.vm_mbps[target] * (links.target_mbps[target] / wanted_to(target)).min(1.0))
        .collect();
    // The host's own links are at least as fast as the fastest way to a target.
    let host_mbps = targets.map(|target| links.target_mbps[target]).fold(0.0, f64::max);
    let scale = (host_mbps / to_target.iter().sum::<f64>()).min(1.0);
    to_target.into_iter().map(|mbps| mbps * scale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::view::MemorySample;

    const GIB: u64 = 1 << 30;

    fn vm(memory: MemorySample) -> VmView {
        VmView {
            name: "vm".into(),
            needs_bytes: GIB,
            memory_bytes: GIB,
            placement: crate::drain::view::Placement::default(),
            immovable: None,
            refusals: std::collections::BTreeMap::new(),
            memory: Some(memory),
        }
    }

    fn target(paths_mbps: u64, transfer_mbps: Option<f64>) -> TargetView {
        TargetView {
            name: "b".into(),
            unavailable: None,
            memory_available_bytes: u64::MAX,
            vms: vec![],
            paths_mbps,
            remembered: transfer_mbps.map(|transfer_mbps| Remembered {
                transfer_mbps,
                setup_ms: 200.0,
                completion_ms: 80.0,
                transfers: None,
            }),
        }
    }

    fn sample(zero_share: f64, dirty_mbps: u64) -> MemorySample {
        MemorySample { zero_share, dirty_bytes_per_s: dirty_mbps * 125_000 }
    }

    fn near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-6 * expected, "{value} is not {expected}");
    }

    #[test]
    fn memory_that_rests_goes_over_once_without_its_zeros() {
        let prediction = predict(&vm(sample(0.5, 0)), &target(2_000, None));
        assert_eq!(prediction.bytes, GIB / 2);
        near(prediction.transfer_ms, GIB as f64 / 2.0 / (1_900.0 * 125.0));
        assert!(prediction.converges);
    }

    #[test]
    fn what_gets_dirty_goes_over_again() {
        let prediction = predict(&vm(sample(0.0, 475)), &target(1_000, None));
        let whole = prediction.bytes as f64 / GIB as f64;
        assert!((1.95..=2.0).contains(&whole), "half gets dirty in each round: 1 + 1/2 + 1/4 …, not {whole}");
        assert!(prediction.converges);
    }

    #[test]
    fn a_vm_that_is_dirtied_as_fast_as_the_links_does_not_converge() {
        assert!(!predict(&vm(sample(0.0, 900)), &target(1_000, None)).converges);
        let hopeless = predict(&vm(sample(0.0, 90_000)), &target(1_000, None));
        assert!(!hopeless.converges && hopeless.transfer_ms.is_finite());
    }

    #[test]
    fn what_was_measured_counts_unless_links_were_lost_since() {
        near(vm_mbps(&target(2_000, Some(1_930.0))), 1_930.0);
        near(vm_mbps(&target(1_000, Some(1_930.0))), 1_000.0);
        near(vm_mbps(&target(2_000, Some(f64::NAN))), 1_900.0);
        near(vm_mbps(&target(0, None)), 950.0);
        near(vm_mbps(&target(0, Some(1_930.0))), 1_930.0);
    }

    fn links(vm_mbps: f64, target_mbps: f64) -> Links {
        Links { vm_mbps: vec![vm_mbps; 2], target_mbps: vec![target_mbps; 2] }
    }

    fn transfers(targets: &[usize]) -> Vec<Transfer> {
        let transfer = |target: &usize| Transfer { target: *target, bytes: 125e6, completion_ms: 50.0 };
        targets.iter().map(transfer).collect()
    }

    #[test]
    fn one_vm_that_fills_the_links_makes_the_whole_as_long_as_all_in_turn() {
        for at_a_time in [1, 2, 4] {
            let schedule = schedule(&transfers(&[0; 4]), &links(1_000.0, 1_000.0), at_a_time);
            near(schedule.total_ms, 4_050.0);
            near(schedule.transfer_ms[0], f64::from(at_a_time) * 1_000.0);
        }
    }

    #[test]
    fn vms_that_fill_a_quarter_each_go_four_at_a_time() {
        let total_ms = |at_a_time| schedule(&transfers(&[0; 8]), &links(250.0, 1_000.0), at_a_time).total_ms;
        near(total_ms(1), 32_050.0);
        near(total_ms(4), 8_050.0);
        near(total_ms(8), 8_050.0);
    }

    #[test]
    fn two_targets_share_what_leaves_this_host() {
        let two = schedule(&transfers(&[0, 1]), &links(1_000.0, 1_000.0), 2);
        near(two.total_ms, 2_050.0);
        assert_eq!(schedule(&[], &links(1.0, 1.0), 3).total_ms.to_bits(), 0.0_f64.to_bits());
    }
}
