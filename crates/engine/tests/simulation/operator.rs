//! The operator: moves the VM, declares a host lost, and boots what was lost with it again.

use drainpipe_engine::migration::result::Outcome;

use crate::planted::Planted;
use crate::qemu::SourceQemu;
use crate::world::{Host, Life, Sight, World};
use drainpipe_engine::migration::target::IncomingState as State;

/// How often the VM is moved, if nothing prevents it.
pub(crate) const ATTEMPTS: u32 = 3;

/// What the operator has done.
#[derive(Debug, Default)]
pub(crate) struct Operator {
    pub attempts: u32,
    /// Whether the operator is to start the VM, which an older journal calls stopped.
    pub is_to_start: bool,
    /// Whether the operator has declared the target lost, with all that ran there.
    pub says_lost: bool,
    /// Whether the VM was booted anew because its target was lost.
    pub has_reclaimed: bool,
}

impl World {
    pub(crate) fn has_to_operate(&self) -> bool {
        // Nobody sees that another journal lies in place of the right one.
        if self.source.older.is_some() {
            return self.has_to_start();
        }
        let record = self.source.journal.last();
        let is_idle = self.source.life == Life::Up && self.source.executor.is_none();
        if !is_idle {
            let executor = self.source.executor.as_ref();
            let is_in_doubt = executor.is_some() && self.source.has_handed_over();
            let is_believed = self.target.is_lost || self.planted == Planted::LostTooSoon;
            return is_in_doubt && is_believed && !self.operator.says_lost;
        }
        let is_open = self.source.open_migration().is_some();
        let runs = self.copy_at(Host::Source).is_some_and(|copy| copy.runs);
        let answers = self.answers(Host::Source);
        if is_open {
            return self.source.qemu.is_none() || answers;
        }
        let is_reclaimed =
            record.is_some_and(|record| record.is_reclaimed && record.outcome == Some(Outcome::Failed));
        is_reclaimed && self.source.qemu.is_none()
            || self.has_namesake()
            || runs && answers && self.may_move()
    }

    /// Does not move the VM while that would surely be refused: it would show nothing.
    fn may_move(&self) -> bool {
        let is_parted = self.now_ms < self.network.parted_until_ms;
        let is_welcome = self.target.life == Life::Up && self.target.entries.is_empty() && !is_parted;
        // On the last attempt nothing goes wrong, and everything before it is settled.
        let is_last = self.operator.attempts == ATTEMPTS - 1;
        let may_begin = if is_last { self.faults.are_over() && self.is_quiet() } else { is_welcome };
        let may_begin = may_begin && self.serves(Host::Source) && self.serves(Host::Target);
        may_begin && !self.is_source_disk_full() && !self.target.is_lost && self.operator.attempts < ATTEMPTS
    }

    /// Whether a target that came back still lists a VM that was reclaimed, because it believed that its source knew.
    fn has_namesake(&self) -> bool {
        let names_it = self.target.journal.values().any(|state| *state == State::Finished);
        let is_reclaimed = self.operator.has_reclaimed && self.source.qemu.is_some();
        is_reclaimed && names_it && self.target.life == Life::Up && self.target.qemu.is_none()
    }

    pub(crate) fn operate(&mut self) {
        if self.source.older.is_some() {
            self.start_stopped();
        } else if self.source.executor.is_some() {
            self.operator.says_lost = true;
        } else if self.source.open_migration().is_some() {
            // The source's agent could not reach its VM.
            self.start_source();
        } else if self.source.qemu.is_none() {
            self.boot_anew();
        } else if self.has_namesake() {
            self.remove_namesake();
        } else {
            self.operator.attempts += 1;
            self.begin_migration();
        }
    }

    fn boot_anew(&mut self) {
        self.saw(Sight::Reclaimed);
        self.newest += 1;
        (self.is_lost, self.operator.has_reclaimed) = (false, true);
        self.source.qemu = Some(SourceQemu::booted(self.newest));
        for record in &mut self.source.journal {
            record.is_reclaimed = false;
        }
    }

    fn remove_namesake(&mut self) {
        self.target.has_vm = false;
        for state in self.target.journal.values_mut().filter(|state| **state == State::Finished) {
            *state = State::Discarded;
        }
    }
}
