//! Carries out the drain's actions in the world.

use drainpipe_engine::drain::lint::lint;
use drainpipe_engine::drain::plan::{DrainPlan, plan};
use drainpipe_engine::drain::run::{DrainAction, DrainEvent, MoveEnd, Standing};
use drainpipe_engine::problem::Problem;

use super::{Answer, Course, PendingAction, Simulation};
use crate::faults::Sight;
use crate::planted::Planted;
use crate::world::{At, By, Flight, Step, departure, name_of};

/// How often a VM may be refused without that counting as an attempt.
const REFUSALS_MAX: u64 = 8;

impl Simulation {
    pub(super) fn perform(&mut self, pending: PendingAction) -> Result<(), String> {
        match pending.action {
            DrainAction::Begin { vm, target, post_copy } => self.begin(&vm, &target, post_copy),
            DrainAction::Release { vm } => self.release(&vm, pending.transfers),
            DrainAction::Cancel { vm } => self.cancel(&vm),
            DrainAction::Plan => self.make_plan(),
            DrainAction::GiveWay { .. } | DrainAction::TakeAll { .. } => Ok(()),
            DrainAction::Finish => {
                self.course = Course::Finished;
                Ok(())
            }
        }
    }

    fn begin(&mut self, vm: &str, target: &str, post_copy: bool) -> Result<(), String> {
        let index = self.index(vm)?;
        let target = self.world.hosts.iter().position(|host| host.name == target).ok_or("no such target")?;
        self.begun += 1;
        self.migrations += 1;
        let vm = &mut self.world.vms[index];
        if vm.flight.is_some() || !matches!(vm.at, At::Here | At::EndedHere | At::Elsewhere) {
            return Err(format!("{} is begun while it is under way, or elsewhere", vm.name));
        }
        if vm.is_to_stay || vm.refused_by.contains(&target) {
            return Err(format!("{} is begun, and somebody does not want it", vm.name));
        }
        if post_copy != (self.limits.post_copy && vm.gave_way) {
            return Err(format!("{} goes by post-copy though it may converge, or does not", vm.name));
        }
        vm.by_post_copy = post_copy;
        vm.begun += 1;
        vm.migration = self.migrations;
        // The VM may have given way once, and others may have taken its room.
        let no_attempts = u64::from(vm.times > 2) + vm.refused.min(REFUSALS_MAX);
        if vm.begun > u64::from(self.limits.attempts) + no_attempts {
            return Err(format!("{} is tried too often", vm.name));
        }
        self.giving_way.remove(&vm.name);
        let (name, is_gone) = (vm.name.clone(), vm.at == At::EndedHere);
        if vm.at == At::Elsewhere {
            self.world.saw(Sight::BegunWhenMovedByHand);
            self.own_news.push_back(DrainEvent::Ended { vm: name, end: MoveEnd::Left(departure()) });
            return Ok(());
        }
        if is_gone || self.disk_fills() {
            self.world.saw(if is_gone { Sight::BegunWhenGone } else { Sight::BegunWithoutDisk });
            let problem = Problem::failed("it cannot be begun");
            self.own_news.push_back(DrainEvent::Ended { vm: name, end: MoveEnd::Failed(problem) });
            return Ok(());
        }
        self.world.vms[index].flight = Some(Flight::to(target));
        self.own_news.push_back(DrainEvent::Begun { vm: name, migration: name_of(self.migrations) });
        Ok(())
    }

    /// Whether the disk is full now that a migration is to be recorded.
    fn disk_fills(&mut self) -> bool {
        self.world.disk_full |= self.world.faults.disk_full > 0 && self.random.chance(3);
        self.world.disk_full
    }

    pub(super) fn give_way(&mut self, vm: &str) -> Result<(), String> {
        let index = self.index(vm)?;
        let others = self.world.vms.iter().enumerate().filter(|(other, _)| *other != index);
        // A VM that has ended counts, since the drain may not have heard of it yet.
        if !others.into_iter().any(|(_, other)| other.begun > 0) {
            return Err(format!("{vm} gives way to nobody"));
        }
        if !self.giving_way.insert(vm.to_owned()) {
            return Err(format!("{vm} gives way twice"));
        }
        if self.world.vms[index].flight.is_some_and(|flight| flight.is_on_links()) {
            return Err(format!("{vm} gives way in flight"));
        }
        Ok(())
    }

    fn release(&mut self, vm: &str, transfers: u8) -> Result<(), String> {
        let index = self.index(vm)?;
        // The migration has failed, and the drain has not heard of it yet.
        let Some(flight) = &mut self.world.vms[index].flight else { return Ok(()) };
        if matches!(flight.step, Step::Over(_)) {
            return Ok(());
        }
        if flight.released || flight.step != Step::Prepared {
            return Err(format!("{vm} is released at {:?}", flight.step));
        }
        flight.released = true;
        // Copies of disks take no turn, so there may be more of them on the links than is allowed by now.
        if self.world.vms[index].is_copied() { Ok(()) } else { self.check_links(transfers) }
    }

    pub(super) fn take_back(&mut self, vm: &str) -> Result<(), String> {
        let (is_closing, index) = (self.is_closing(), self.index(vm)?);
        let vm = &mut self.world.vms[index];
        let (overstays, gave_way) = (vm.overstays(), vm.gave_way);
        let Some(flight) = &mut vm.flight else {
            // It has ended, and the drain has not heard of it yet. It had sent more than it should, or the drain gives
            // everything up.
            vm.gave_way |= !is_closing;
            vm.is_to_stay = false;
            return Ok(());
        };
        if !is_closing && !overstays {
            return Err(format!("{} is cancelled for no reason", vm.name));
        }
        if flight.cancelled == Some(By::Drain)
            || (!self.cancelled && flight.released && !overstays && !gave_way)
        {
            return Err(format!("{} is cancelled twice, or on the links by the deadline", vm.name));
        }
        flight.cancelled = Some(By::Drain);
        vm.gave_way |= overstays;
        Ok(())
    }

    /// Cancels a migration that was begun meanwhile.
    fn cancel(&mut self, vm: &str) -> Result<(), String> {
        let index = self.index(vm)?;
        if let Some(flight) = &mut self.world.vms[index].flight {
            flight.cancelled = Some(By::Drain);
        }
        Ok(())
    }

    fn make_plan(&mut self) -> Result<(), String> {
        let seen_now = self.random.chance(50);
        let standing = self.drain.standing();
        self.answer =
            Some(if seen_now { Answer::Seen(self.new_plan(&standing)?) } else { Answer::NotSeen(standing) });
        Ok(())
    }

    pub(super) fn new_plan(&mut self, standing: &Standing) -> Result<DrainEvent, String> {
        if self.random.chance(self.world.faults.no_plan) {
            return Ok(DrainEvent::NotPlanned(Problem::failed("no host answers")));
        }
        self.sound_plan(standing).map(DrainEvent::Planned)
    }

    /// The agent carries out a plan only if the linter finds nothing in it. Here each plan must be sound.
    pub(super) fn sound_plan(&self, standing: &Standing) -> Result<DrainPlan, String> {
        let mut view = self.world.view();
        if self.planted == Planted::InDoubtForgotten {
            let is_in_doubt = |name: &str| {
                self.world.vms.iter().any(|vm| vm.name == name && matches!(vm.at, At::InDoubt(_)))
            };
            view.vms.iter_mut().filter(|vm| is_in_doubt(&vm.name)).for_each(|vm| vm.immovable = None);
            view.targets.iter_mut().for_each(|target| target.vms.retain(|vm| !is_in_doubt(&vm.name)));
        }
        standing.complete(&mut view);
        if self.planted == Planted::DiskRoomTwice {
            view.targets.iter_mut().for_each(|target| target.file_systems.clear());
        }
        let mut plan = plan(&view, Some(&self.limits));
        self.planted.spoil_plan(&mut plan);
        let findings = lint(&view, &plan);
        if !findings.is_empty() {
            return Err(format!("the plan is bad: {findings:?}"));
        }
        self.planted.spoil_sound(&mut plan);
        Ok(plan)
    }
}
