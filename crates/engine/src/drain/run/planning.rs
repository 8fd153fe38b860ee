//! A new plan in the middle of a drain: when one is needed, and what it changes.

use super::super::disks::DrainedDisk;
use super::super::plan::{DrainPlan, Move};
use super::super::stay::{Stay, StayReason};
use super::super::view::{DrainView, PlacedVm, TargetView};
use super::entry::{Entry, Stage};
use super::{Drain, DrainAction};
use crate::problem::Problem;

/// When no host can take a VM that an earlier plan had placed, hosts are looked at again after this.
pub(super) const LOOK_AGAIN_MS: f64 = 5_000.0;

/// How often they are looked at again without any VM having moved since.
pub(super) const LOOKS: u8 = 3;

/// The same where room is to be expected: five minutes in which no VM has moved, and none was seen that will leave
/// room.
pub(super) const LOOKS_FOR_ROOM: u8 = 60;

/// Whether the plan holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Planning {
    /// The plan holds.
    Not,
    /// A VM failed: another plan is needed before it is tried again.
    Wanted,
    /// [`DrainAction::Plan`] was given and is not answered.
    UnderWay,
}

/// What a drain under way knows of its VMs better than a view of the hosts does. Before it has begun: nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    // Where it is going if it is under way; without a target: it was given up, or has moved.
    vms: Vec<(String, Option<Bound>)>,
}

/// Where a VM goes, with which disks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Bound {
    target: String,
    disks: Vec<DrainedDisk>,
}

impl Standing {
    /// VMs under way are on their targets, also where the target has not promised them memory yet; those that
    /// were given up are not moved again.
    pub fn complete(&self, view: &mut DrainView) {
        for (name, target) in &self.vms {
            let Some(vm) = view.vms.iter_mut().find(|vm| vm.name == *name) else { continue };
            let Some(Bound { target, disks }) = target else {
                vm.immovable.get_or_insert_with(|| "this drain has given up on it".into());
                continue;
            };
            vm.immovable = Some("it is being moved".into());
            let (needs_bytes, placement) = (vm.needs_bytes, vm.placement.clone());
            vm.copies.clear();
            promise(
                &mut view.targets,
                target,
                &PlacedVm { name: name.clone(), needs_bytes, placement },
                disks,
            );
        }
    }
}

impl Drain {
    /// What is to be added to the view for a new plan; taken when [`DrainAction::Plan`] is given.
    pub fn standing(&self) -> Standing {
        let settled = self.entries.iter().filter(|entry| !entry.stage.is_open());
        let bound = |entry: &Entry| Bound {
            target: entry.planned.target.clone(),
            disks: entry.planned.disks.clone(),
        };
        let target = |entry: &Entry| entry.stage.is_under_way().then(|| bound(entry));
        Standing { vms: settled.map(|entry| (entry.planned.vm.clone(), target(entry))).collect() }
    }

    pub(super) fn want_plan(&mut self) {
        if self.planning == Planning::Not {
            self.planning = Planning::Wanted;
        }
    }

    /// What has not begun is replaced by the new plan; what is under way or over is left as it is.
    pub(super) fn planned(&mut self, now_ms: f64, plan: DrainPlan) {
        if self.planning != Planning::UnderWay {
            return;
        }
        let (predicted_ms, moves_any) = (plan.predicted_ms, !plan.moves.is_empty());
        let links = plan.links_bytes_per_ms();
        let entries = std::mem::take(&mut self.entries);
        let (mut open, mut others): (Vec<Entry>, Vec<Entry>) =
            entries.into_iter().partition(|entry| entry.stage.is_open());
        let is_settled = |vm: &str| others.iter().any(|entry| entry.planned.vm == vm);
        let moves: Vec<Move> = plan.moves.into_iter().filter(|planned| !is_settled(&planned.vm)).collect();
        let mut stays: Vec<Stay> = plan.stays.into_iter().filter(|stay| !is_settled(&stay.vm)).collect();
        for planned in moves {
            match open.iter().position(|entry| entry.planned.vm == planned.vm) {
                Some(index) => others.push(open.remove(index).replanned(planned)),
                None => others.push(Entry::new(planned)),
            }
        }
        for mut entry in open {
            let stay = stays.iter().position(|stay| stay.vm == entry.planned.vm).map(|at| stays.remove(at));
            if !entry.missed_plan {
                entry.leave_out(stay.map(|stay| stay.why));
            }
            others.push(entry);
        }
        self.entries = others;
        self.stays = stays;
        self.await_room = !plan.await_room.is_empty();
        if self.await_room && plan.room_is_coming {
            self.looks = 0;
        }
        self.endless_last();
        if self.targets_left().next().is_some() {
            self.concurrency.bound(self.limits.most_on_links(self.targets_left()));
            self.concurrency.carry_at_most(links);
            self.copy_concurrency.carry_at_most(links);
        }
        if moves_any {
            let is_waiting = |entry: &&Entry| entry.stage == Stage::Waiting;
            self.eta.replanned(self.entries.iter().filter(is_waiting).map(Entry::load), predicted_ms);
        }
        self.planning_over(now_ms);
    }

    /// The plan that there was still stands, but not for those that have failed: their places may be
    /// others' since.
    pub(super) fn not_planned(&mut self, now_ms: f64, problem: &Problem) {
        if self.planning != Planning::UnderWay {
            return;
        }
        for entry in &mut self.entries {
            if entry.stage == Stage::Waiting && entry.needs_plan && !entry.missed_plan {
                entry.leave_out(Some(StayReason::NotPlannedAnew(problem.clone())));
            }
        }
        self.planning_over(now_ms);
    }

    fn planning_over(&mut self, now_ms: f64) {
        self.looked_ms = now_ms;
        let missed = self.entries.iter().any(|entry| entry.missed_plan);
        self.entries.iter_mut().for_each(|entry| entry.missed_plan = false);
        self.planning = if missed { Planning::Wanted } else { Planning::Not };
    }

    /// A VM that no host can take now may go somewhere when a host is back.
    pub(super) fn look_again(&mut self, now_ms: f64) {
        let is_idle =
            !self.entries.iter().any(|entry| entry.stage.is_under_way() || entry.stage == Stage::Waiting);
        let is_due = self.may_look() && now_ms - self.looked_ms >= LOOK_AGAIN_MS;
        if is_idle && is_due && self.planning == Planning::Not {
            self.looks += 1;
            self.planning = Planning::Wanted;
        }
    }

    /// Whether hosts are to be looked at once more before it is over.
    pub(super) fn may_look(&self) -> bool {
        let left_out = self.entries.iter().any(|entry| entry.stage == Stage::LeftOut);
        self.looks < if self.await_room { LOOKS_FOR_ROOM } else { LOOKS } && (self.await_room || left_out)
    }

    pub(super) fn make_plan(&mut self, actions: &mut Vec<DrainAction>) {
        if self.planning == Planning::Wanted {
            self.planning = Planning::UnderWay;
            actions.push(DrainAction::Plan);
        }
    }
}

/// Counts a VM on this target, unless it counts there already.
fn promise(targets: &mut [TargetView], target: &str, placed: &PlacedVm, disks: &[DrainedDisk]) {
    let ways = targets.iter_mut().filter(|view| view.name == target);
    for view in ways.filter(|view| view.vms.iter().all(|vm| vm.name != placed.name)) {
        view.memory_available_bytes = view.memory_available_bytes.saturating_sub(placed.needs_bytes);
        for of in &mut view.file_systems {
            let there = disks.iter().filter(|disk| disk.to_device == of.device);
            let needs_bytes = there.map(|disk| disk.copy.room_bytes()).fold(0, u64::saturating_add);
            of.free_bytes = of.free_bytes.saturating_sub(needs_bytes);
        }
        view.vms.push(placed.clone());
    }
}
