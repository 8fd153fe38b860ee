//! How long transfers that share the links take: the drain is simulated before it begins, with the same rules for how
//! many send at a time and how many are prepared.

use std::collections::{BTreeSet, VecDeque};

use super::concurrency::Concurrency;
use super::copy_concurrency::{Busy, CopyConcurrency};
use super::disks::DevicePair;
use super::host_links::HostLinks;
use super::limits::{AHEAD, FIRST_ALONE_MS};
use crate::estimate::load::{Load, ROUNDS_MAX, whole_bytes};
use crate::migration::ENDING_MS;
use crate::transfer::downtime::downtime_limit_ms;

/// How often the drain under way looks what has arrived.
const LOOK_EVERY_MS: f64 = 200.0;

/// For so long; by then the number at a time has been found.
const LOOKS_UNTIL_MS: f64 = 3_600_000.0;

/// What a VM takes of what it could carry, while it leaves the links to another one.
const WAY_GIVEN_SHARE: f64 = 0.125;

/// What takes no longer than this share of the time so far, or than a nanosecond, is done: less cannot be told
/// apart once it is added to that.
const NOTHING: f64 = 1e-9;
const NOTHING_MS: f64 = 1e-6;

/// One transfer among others.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ScheduledTransfer {
    /// Which target it goes to.
    pub(super) target: usize,
    /// What it has to send.
    pub(super) load: Load,
    /// Between which devices its disks are copied.
    pub(super) device_pairs: BTreeSet<DevicePair>,
    /// Steps 1 to 5 that come before its turn.
    pub(super) setup_ms: f64,
    /// Steps 9 and 10 that follow it.
    pub(super) completion_ms: f64,
}

/// How the links are shared.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Links {
    /// How much one VM's transfer carries, by target, in bytes per ms.
    pub(super) vm_bytes_per_ms: Vec<f64>,
    /// How much the copies of one VM's disks carry, by target, in bytes per ms.
    pub(super) disk_bytes_per_ms: Vec<f64>,
    /// What all transfers to one target carry together, in bytes per ms.
    pub(super) target_bytes_per_ms: Vec<f64>,
    /// What goes to different targets at once.
    pub(super) host: HostLinks,
}

/// How many go at a time.
#[derive(Debug, Clone)]
pub(super) struct Places {
    /// On the links.
    pub(super) concurrency: Concurrency,
    /// In all, those being prepared included.
    pub(super) under_way: u8,
}

/// What became of one transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Course {
    /// From its turn on the links until all is sent.
    pub(super) transfer_ms: f64,
    /// How much of its memory it has sent.
    pub(super) bytes: f64,
}

/// What became of transfers that went in their order.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Schedule {
    /// The course of each, in their order.
    pub(super) courses: Vec<Course>,
    /// From the begin of the first one to the end of step 10 of the last one.
    pub(super) total_ms: f64,
}

/// Plays transfers through that share the links fairly. The next one's turn comes when little is left of a VM; that of a
/// VM with disks when its devices have room, and no VM without waits before it.
pub(super) fn schedule(
    transfers: &[ScheduledTransfer],
    links: &Links,
    places: Places,
    copy_concurrency: CopyConcurrency,
) -> Schedule {
    let Places { concurrency, under_way } = places;
    let mut play = Play {
        transfers,
        links,
        concurrency,
        under_way: usize::from(under_way.max(1)),
        copy_concurrency,
        released_ms: vec![],
        ended_ms: vec![],
        waiting: (0..transfers.len()).collect(),
        active: vec![],
        now_ms: 0.0,
        next_look_ms: LOOK_EVERY_MS,
        arrived_bytes: 0.0,
        copied_bytes: 0.0,
        schedule: Schedule { courses: vec![Course::default(); transfers.len()], total_ms: 0.0 },
    };
    play.let_more_go();
    while !play.active.is_empty() || !play.waiting.is_empty() {
        play.step();
        play.let_more_go();
    }
    play.schedule
}

struct Play<'a> {
    transfers: &'a [ScheduledTransfer],
    links: &'a Links,
    concurrency: Concurrency,
    under_way: usize,
    copy_concurrency: CopyConcurrency,
    // When the turns of those without disks came, and when they were over.
    released_ms: Vec<f64>,
    ended_ms: Vec<f64>,
    waiting: VecDeque<usize>,
    active: Vec<Active>,
    now_ms: f64,
    next_look_ms: f64,
    arrived_bytes: f64,
    copied_bytes: f64,
    schedule: Schedule,
}

/// A transfer on the links.
struct Active {
    index: usize,
    since_ms: f64,
    /// It began beside one that is about to be paused, and leaves it the links.
    gives_way: bool,
    phase: Phase,
}

#[derive(Clone, Copy)]
enum Phase {
    /// QEMU connects; nothing is sent.
    Starting { until_ms: f64 },
    /// Its disks are copied.
    CopyingDisks { left_bytes: f64 },
    /// A round over memory.
    Copying { round: u64, since_ms: f64, left_bytes: f64, is_ending: bool },
    /// The VM is paused.
    SwitchingOver { left_bytes: f64 },
    /// All is sent, and is taken over.
    Loading { until_ms: f64 },
}

impl Phase {
    fn is_nearly_over(self) -> bool {
        matches!(
            self,
            Self::Copying { is_ending: true, .. } | Self::SwitchingOver { .. } | Self::Loading { .. }
        )
    }

    fn left_bytes(self) -> Option<f64> {
        match self {
            Self::CopyingDisks { left_bytes }
            | Self::Copying { left_bytes, .. }
            | Self::SwitchingOver { left_bytes } => Some(left_bytes),
            Self::Starting { .. } | Self::Loading { .. } => None,
        }
    }
}

impl Play<'_> {
    fn let_more_go(&mut self) {
        // As the drain itself: one at a time begins beside those that are nearly over.
        while let Some(index) = self.next_waiting().and_then(|at| self.waiting.remove(at)) {
            let phase = Phase::Starting { until_ms: self.now_ms + self.transfers[index].load.start_ms };
            let gives_way = self.is_one_ending() && self.transfers[index].device_pairs.is_empty();
            if self.transfers[index].device_pairs.is_empty() {
                self.released_ms.push(self.now_ms);
            }
            self.active.push(Active { index, since_ms: self.now_ms, gives_way, phase });
        }
    }

    /// Where in the queue the one is that may go.
    fn next_waiting(&self) -> Option<usize> {
        self.waiting.front()?;
        let with_memory = self.active.iter().filter(|active| !self.copies_disks(active)).count();
        let has_turn = self.on_links() < self.concurrency.allowed()
            && with_memory <= usize::from(self.concurrency.allowed())
            && self.next_is_ready_ms().is_some_and(|at_ms| at_ms <= self.now_ms);
        if self.waiting.iter().all(|index| self.transfers[*index].device_pairs.is_empty()) {
            return has_turn.then_some(0);
        }
        let busy = self.busy();
        let mut others_wait = false;
        self.waiting.iter().position(|index| {
            let pairs = &self.transfers[*index].device_pairs;
            others_wait |= pairs.is_empty();
            if pairs.is_empty() {
                has_turn
            } else {
                !others_wait && self.copy_concurrency.have_room(pairs, &busy)
            }
        })
    }

    /// When the next one without disks is ready for its turn; none while it depends on others that have not ended.
    fn next_is_ready_ms(&self) -> Option<f64> {
        let next = self.waiting.iter().find(|index| self.transfers[**index].device_pairs.is_empty())?;
        let number = self.released_ms.len();
        let ahead = usize::from(self.concurrency.allowed().saturating_add(AHEAD));
        let has_place_ms = match number.checked_sub(self.under_way) {
            Some(before) => *self.ended_ms.get(before)?,
            None => 0.0,
        };
        let is_prepared_from_ms = match (number, number.checked_sub(ahead)) {
            (number, _) if number < usize::from(self.concurrency.allowed()) => 0.0,
            (_, Some(before)) => self.released_ms[before],
            (_, None) => self.released_ms[0].min(FIRST_ALONE_MS),
        };
        Some(has_place_ms.max(is_prepared_from_ms) + self.transfers[*next].setup_ms)
    }

    /// Where those would go whose disks are still to be copied.
    fn wanted(&self) -> BTreeSet<DevicePair> {
        self.waiting.iter().flat_map(|index| &self.transfers[*index].device_pairs).cloned().collect()
    }

    /// Or will, before its memory.
    fn copies_disks(&self, active: &Active) -> bool {
        let has_disks = !self.transfers[active.index].device_pairs.is_empty();
        has_disks && matches!(active.phase, Phase::Starting { .. } | Phase::CopyingDisks { .. })
    }

    /// How many copy disks between which devices.
    fn busy(&self) -> Busy {
        let mut busy = Busy::new();
        let copying = self.active.iter().filter(|active| self.copies_disks(active));
        for pair in copying.flat_map(|active| &self.transfers[active.index].device_pairs) {
            *busy.entry(pair.clone()).or_default() += 1;
        }
        busy
    }

    fn is_one_ending(&self) -> bool {
        let is_ending = |phase| matches!(phase, Phase::Copying { is_ending: true, .. });
        self.active.iter().any(|active| is_ending(active.phase) && !active.gives_way)
    }

    fn on_links(&self) -> u8 {
        let stays = |active: &&Active| !active.phase.is_nearly_over() && !self.copies_disks(active);
        let on_links = self.active.iter().filter(stays).count();
        u8::try_from(on_links).unwrap_or(u8::MAX)
    }

    /// Up to the next thing that happens.
    fn step(&mut self) {
        let rates = self.rates();
        let ends = self.active.iter().zip(&rates).map(|(active, rate)| match active.phase {
            Phase::Starting { until_ms } | Phase::Loading { until_ms } => until_ms,
            Phase::Copying { left_bytes, is_ending: false, .. } if left_bytes > rate * ENDING_MS => {
                self.now_ms + left_bytes / rate - ENDING_MS
            }
            Phase::CopyingDisks { left_bytes }
            | Phase::Copying { left_bytes, .. }
            | Phase::SwitchingOver { left_bytes } => self.now_ms + left_bytes / rate,
        });
        let ready_ms = self.next_is_ready_ms().filter(|at_ms| *at_ms > self.now_ms);
        // While nothing is on the links, there is nothing to look at.
        let look_ms = if self.active.is_empty() { f64::INFINITY } else { self.next_look_ms };
        let next_ms = ends.chain(ready_ms).fold(look_ms, f64::min).max(self.now_ms);
        let span_ms = next_ms - self.now_ms;
        self.now_ms = next_ms;
        for (active, rate) in self.active.iter_mut().zip(&rates) {
            if let Phase::CopyingDisks { left_bytes } = &mut active.phase {
                let copied = (rate * span_ms).min(*left_bytes);
                *left_bytes -= copied;
                self.copied_bytes += copied;
            }
            if let Phase::Copying { left_bytes, .. } | Phase::SwitchingOver { left_bytes } = &mut active.phase
            {
                let sent = (rate * span_ms).min(*left_bytes);
                *left_bytes -= sent;
                self.schedule.courses[active.index].bytes += sent;
                self.arrived_bytes += sent;
            }
        }
        self.turn_phases(&rates);
        if self.now_ms >= self.next_look_ms {
            self.next_look_ms =
                if self.now_ms < LOOKS_UNTIL_MS { self.now_ms + LOOK_EVERY_MS } else { f64::INFINITY };
            let (arrived_bytes, on_links) = (whole_bytes(self.arrived_bytes), self.on_links());
            let turns = (self.transfers.len() - self.waiting.len()) as u64;
            // As the drain itself: each says nothing while the other is on the links.
            let copies = self.active.iter().filter(|active| self.copies_disks(active)).count();
            let counted = if copies == 0 { on_links } else { 0 };
            self.concurrency.observe(self.now_ms, Some(arrived_bytes), counted, turns);
            if copies > 0 {
                let is_alone = copies == self.active.len();
                let copied_bytes = is_alone.then_some(whole_bytes(self.copied_bytes));
                let (busy, wanted) = (self.busy(), self.wanted());
                self.copy_concurrency.observe(self.now_ms, copied_bytes, &busy, &wanted);
            }
        }
    }

    fn turn_phases(&mut self, rates: &[f64]) {
        let (transfers, now_ms) = (self.transfers, self.now_ms);
        let nothing_ms = NOTHING_MS.max(NOTHING * now_ms);
        for (active, rate) in self.active.iter_mut().zip(rates) {
            let load = &transfers[active.index].load;
            active.phase = match active.phase {
                Phase::Starting { until_ms } if until_ms <= now_ms && load.disk_bytes > 0.0 => {
                    Phase::CopyingDisks { left_bytes: load.disk_bytes }
                }
                Phase::CopyingDisks { left_bytes } if left_bytes > rate * nothing_ms => active.phase,
                Phase::Starting { until_ms } if until_ms > now_ms => active.phase,
                Phase::Starting { .. } | Phase::CopyingDisks { .. } => Phase::Copying {
                    round: 1,
                    since_ms: now_ms,
                    left_bytes: load.first_bytes,
                    is_ending: false,
                },
                Phase::Copying { round, since_ms, left_bytes, .. } if left_bytes <= rate * nothing_ms => {
                    let left_bytes = load.dirtied_bytes(now_ms - since_ms);
                    // As QEMU does, and as often as it is worth to reckon.
                    let fits = left_bytes / rate <= downtime_limit_ms(round) as f64 || round >= ROUNDS_MAX;
                    if fits {
                        Phase::SwitchingOver { left_bytes }
                    } else {
                        Phase::Copying { round: round + 1, since_ms: now_ms, left_bytes, is_ending: true }
                    }
                }
                Phase::Copying { round, since_ms, left_bytes, is_ending } => {
                    let is_ending = is_ending || left_bytes <= rate * (ENDING_MS + nothing_ms);
                    Phase::Copying { round, since_ms, left_bytes, is_ending }
                }
                Phase::SwitchingOver { left_bytes } if left_bytes <= rate * nothing_ms => {
                    Phase::Loading { until_ms: now_ms + load.end_ms }
                }
                phase => phase,
            };
        }
        if !self.is_one_ending() {
            self.active.iter_mut().for_each(|active| active.gives_way = false);
        }
        let (Schedule { courses, total_ms }, ended_ms) = (&mut self.schedule, &mut self.ended_ms);
        self.active.retain(|active| {
            let is_over = matches!(active.phase, Phase::Loading { until_ms } if until_ms <= now_ms);
            if is_over {
                let transfer = &transfers[active.index];
                courses[active.index].transfer_ms = now_ms - active.since_ms;
                *total_ms = total_ms.max(now_ms + transfer.completion_ms);
                if transfer.device_pairs.is_empty() {
                    ended_ms.push(now_ms + transfer.completion_ms);
                }
            }
            !is_over
        });
    }

    /// What each transfer carries, in bytes per ms: as much as it can, less in proportion where all that go to
    /// its target, or all that leave this host, are too many.
    fn rates(&self) -> Vec<f64> {
        let links = self.links;
        let sending = self
            .active
            .iter()
            .map(|active| active.phase.left_bytes().map(|_| self.transfers[active.index].target));
        let sending: Vec<Option<usize>> = sending.collect();
        let alone = |active: &Active, target: usize| match active.phase {
            Phase::CopyingDisks { .. } => links.disk_bytes_per_ms[target],
            _ => links.vm_bytes_per_ms[target],
        };
        let to_target = |active: &Active, target: usize| {
            let is_rival =
                |(active, other): &(&Active, &Option<usize>)| **other == Some(target) && !active.gives_way;
            let rivals = self.active.iter().zip(&sending).filter(is_rival);
            let own = alone(active, target);
            let wanted = rivals.map(|(rival, _)| alone(rival, target)).sum::<f64>().max(own);
            own * (links.target_bytes_per_ms[target] / wanted).min(1.0)
        };
        // A VM that gives way gets next to nothing, and the others what it leaves.
        let is_alone =
            self.active.iter().all(|active| active.gives_way || active.phase.left_bytes().is_none());
        let to_active = |(active, target): (&Active, &Option<usize>)| match target {
            Some(target) if active.gives_way && !is_alone => links.vm_bytes_per_ms[*target] * WAY_GIVEN_SHARE,
            Some(target) => to_target(active, *target),
            None => 0.0,
        };
        let rates: Vec<f64> = self.active.iter().zip(&sending).map(to_active).collect();
        // By shares: what was seen to go to a target is not what the speed of its paths says, and the host's links are
        // known by their speed alone.
        let of_links = |(rate, target): (&f64, &Option<usize>)| {
            target.map(|target| {
                links.host.to_target_mbps(target) as f64 * rate / links.target_bytes_per_ms[target]
            })
        };
        let wanted_mbps: f64 = rates.iter().zip(&sending).filter_map(of_links).sum();
        let targets: BTreeSet<usize> = sending.iter().flatten().copied().collect();
        let scale = (links.host.together_mbps(&targets) as f64 / wanted_mbps).min(1.0);
        rates.into_iter().map(|rate| rate * scale).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(vm: f64, target: f64) -> Links {
        let host = HostLinks::of_speeds(&[1_000; 2]);
        let disk_bytes_per_ms = vec![target / 4.0; 2];
        Links { vm_bytes_per_ms: vec![vm; 2], disk_bytes_per_ms, target_bytes_per_ms: vec![target; 2], host }
    }

    /// Transfers of 125 MB each, none of which gets dirty.
    fn transfers(targets: &[usize]) -> Vec<ScheduledTransfer> {
        let load = Load::resting(125e6);
        let transfer = |target: &usize| ScheduledTransfer {
            target: *target,
            load,
            device_pairs: BTreeSet::new(),
            setup_ms: 0.0,
            completion_ms: 50.0,
        };
        targets.iter().map(transfer).collect()
    }

    fn total_ms(transfers: &[ScheduledTransfer], links: &Links, at_a_time: u8) -> f64 {
        played(transfers, links, Concurrency::fixed(at_a_time)).total_ms
    }

    fn played(transfers: &[ScheduledTransfer], links: &Links, concurrency: Concurrency) -> Schedule {
        schedule(transfers, links, Places { concurrency, under_way: u8::MAX }, CopyConcurrency::default())
    }

    fn near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-6 * expected, "{value} is not {expected}");
    }

    #[test]
    fn one_vm_that_fills_the_links_makes_the_whole_as_long_as_all_in_turn() {
        let vms = transfers(&[0; 4]);
        let links = links(125_000.0, 125_000.0);
        let (start_ms, end_ms) = (vms[0].load.start_ms, vms[0].load.end_ms);
        // The next one starts before the one before ends.
        near(total_ms(&vms, &links, 1), 4_000.0 + start_ms + end_ms + 50.0);
        near(total_ms(&vms, &links, 4), 4_000.0 + start_ms + end_ms + 50.0);
        let four = played(&vms, &links, Concurrency::fixed(4));
        near(four.courses[0].transfer_ms, 4_000.0 + start_ms + end_ms);
        near(four.courses[0].bytes, 125e6);
    }

    #[test]
    fn vms_that_fill_a_quarter_each_go_four_at_a_time() {
        let (vms, links) = (transfers(&[0; 8]), links(31_250.0, 125_000.0));
        assert!(total_ms(&vms, &links, 1) > 29_000.0);
        assert!(total_ms(&vms, &links, 4) < 8_500.0 && total_ms(&vms, &links, 8) < 8_500.0);
    }

    #[test]
    fn two_targets_share_what_leaves_this_host() {
        let two = total_ms(&transfers(&[0, 1]), &links(125_000.0, 125_000.0), 2);
        assert!((2_000.0..2_300.0).contains(&two), "{two}");
        assert_eq!(total_ms(&[], &links(1.0, 1.0), 3).to_bits(), 0.0_f64.to_bits());
    }

    #[test]
    fn the_number_at_a_time_is_found_as_in_the_drain_itself() {
        let vms = transfers(&[0; 24]);
        let quarter = links(31_250.0, 125_000.0);
        let best_ms = total_ms(&vms, &quarter, 4);
        let found_ms = played(&vms, &quarter, Concurrency::new(1, 8)).total_ms;
        assert!(found_ms > best_ms && found_ms < 1.4 * best_ms, "{found_ms} against {best_ms}");
    }

    #[test]
    fn steps_that_take_longer_than_transfers_are_what_it_takes() {
        let vms = transfers(&[0; 24]);
        let slow: Vec<ScheduledTransfer> =
            vms.iter().map(|vm| ScheduledTransfer { setup_ms: 8_000.0, ..vm.clone() }).collect();
        let links = links(125_000.0, 125_000.0);
        // With one on the links three are prepared for at a time: 8 s for three of them, while the links wait.
        let taken_ms = total_ms(&slow, &links, 1);
        assert!((64_000.0..75_000.0).contains(&taken_ms), "{taken_ms}");
        let quick: Vec<ScheduledTransfer> =
            vms.iter().map(|vm| ScheduledTransfer { setup_ms: 100.0, ..vm.clone() }).collect();
        near(total_ms(&quick, &links, 1), total_ms(&vms, &links, 1) + 100.0);
    }

    #[test]
    fn who_waits_for_a_place_is_not_prepared_for() {
        let of = |completion_ms| -> Vec<ScheduledTransfer> {
            transfers(&[0; 12]).into_iter().map(|vm| ScheduledTransfer { completion_ms, ..vm }).collect()
        };
        let links = links(125_000.0, 125_000.0);
        let places = |under_way| Places { concurrency: Concurrency::fixed(1), under_way };
        let taken_ms = |vms: &[ScheduledTransfer], under_way| {
            schedule(vms, &links, places(under_way), CopyConcurrency::default()).total_ms
        };
        near(taken_ms(&of(50.0), 4), total_ms(&of(50.0), &links, 1));
        // Each holds its place for some 11 s, four at a time.
        let slow_ms = taken_ms(&of(10_000.0), 4);
        assert!((30_000.0..40_000.0).contains(&slow_ms), "{slow_ms}");
    }
}
