//! The rules: what holds after every step, what reports of a migration may say, and what must hold in the end.

use drainpipe_engine::migration::result::{Outcome, SourceVm};
use drainpipe_engine::migration::target::IncomingState as State;

use crate::operator::ATTEMPTS;
use crate::qemu::Writes;
use crate::world::{Host, World};

/// How often the source tries to let the VM run. A QEMU that is mute for that long prevents it.
const RESUMES: u32 = 5;

impl World {
    /// Checks what holds at any time.
    pub(crate) fn check(&mut self) {
        self.check_still_guest();
        self.check_disks();
        self.check_memory();
        let (source, target) = (self.copy_at(Host::Source), self.copy_at(Host::Target));
        if let (Some(source), Some(target)) = (source, target) {
            if source.runs && target.runs {
                self.breach("I1: two copies run".into());
            }
            if source.has_disks && target.has_disks {
                self.breach("I2: two hold the disks".into());
            }
        }
        let runs = [source, target].into_iter().flatten().any(|copy| copy.runs);
        if self.target.has_moved_on && (runs || self.target.has_vm) {
            self.breach("I1: the VM runs on a third host, and can be started where it has left".into());
        }
        if !self.is_lost && !self.has_newest() {
            self.breach("I3: no host holds the VM".into());
        }
        if source.is_some_and(|copy| copy.runs) && self.source.has_handed_over_in_time() {
            self.breach("I1: the VM runs on the source though it is handed over".into());
        }
        if let Some(qemu) = self.target.qemu.as_ref().filter(|qemu| qemu.copy.runs) {
            if !self.source.journal[qemu.migration].handed_over {
                self.breach("I1: the target runs before the hand-over is recorded".into());
            } else if !self.target.may_have_run() && !qemu.last.may_be_taken() {
                self.breach("the target does not know that the VM runs there".into());
            }
        }
    }

    /// Time that was skipped although somebody had something to do does not count.
    fn check_still_guest(&mut self) {
        let since_ms = self.now_ms - self.checked_ms - self.passed_over_ms;
        self.checked_ms = self.now_ms;
        self.check_stands_still(since_ms);
    }

    /// What is reported of a migration is true.
    pub(crate) fn check_outcome(
        &mut self,
        number: usize,
        outcome: Outcome,
        was_cancelled: bool,
        has_error: bool,
    ) {
        let known = [&self.target.journal, &self.target.lost_journal, &self.target.forgotten];
        let state = known.into_iter().find_map(|journal| journal.get(&number).copied());
        let went = matches!(state, Some(State::Running | State::Finished));
        let is_true = match outcome {
            Outcome::Completed => {
                let is_ended = self.source.qemu.is_none() || self.is_left_to_end(Host::Source);
                went && self.source.journal[number].handed_over && is_ended
            }
            Outcome::Failed => has_error && !self.source.journal[number].handed_over,
            Outcome::Cancelled => was_cancelled && !went,
            // At its target it may have ended with the host, by the operator's word.
            Outcome::Lost => has_error && (!went || self.is_lost) && self.source.qemu.is_none(),
            Outcome::InDoubt => false,
        };
        if self.source.qemu.as_ref().is_some_and(|qemu| qemu.is_throttled) {
            self.breach("I3: the VM is throttled, and nobody sends it".into());
        }
        let runs_there = self.copy_at(Host::Target).is_some_and(|copy| copy.runs);
        if !is_true || runs_there && outcome != Outcome::Completed {
            self.breach(format!("it is told to be {outcome:?}, which is not so"));
        }
    }

    /// What is reported of a VM is what somebody saw.
    pub(crate) fn check_seen(
        &mut self,
        number: usize,
        reported: Option<SourceVm>,
        seen: Option<SourceVm>,
        outcome: Outcome,
        has_ended_there: bool,
    ) {
        let is_seen = match reported {
            None if outcome == Outcome::Lost => self.is_lost,
            None => outcome == Outcome::Completed && !has_ended_there,
            Some(SourceVm::Unknown) => seen.is_none() && outcome == Outcome::Failed,
            Some(SourceVm::Ended) => {
                let is_to_be_booted = self.source.journal[number].is_reclaimed;
                reported == seen && (outcome == Outcome::Lost || is_to_be_booted)
            }
            Some(SourceVm::Paused) => reported == seen && outcome == Outcome::Failed,
            Some(SourceVm::Runs) => reported == seen,
        };
        if !is_seen {
            self.breach(format!("the VM is told to be {reported:?} on its source, and was seen as {seen:?}"));
        }
    }

    /// Checks what must hold once the faults have stopped and everything is settled.
    pub(crate) fn check_end(&self) -> Result<(), String> {
        let runs = |host| self.copy_at(host).is_some_and(|copy| copy.runs);
        let is_stuck = self.source.qemu.is_some() && self.resumes_failed >= RESUMES;
        if !runs(Host::Source) && !runs(Host::Target) && !self.is_lost && !is_stuck {
            return Err(format!("I5: nobody lets the VM run: {:#?} {:#?}", self.source, self.target));
        }
        let is_last_undisturbed = self.operator.attempts == ATTEMPTS;
        if is_last_undisturbed && self.outcomes.last() != Some(&Outcome::Completed) {
            return Err(format!("I5: nothing is wrong any more, and it does not move: {:?}", self.outcomes));
        }
        if self.source.is_network_changed || !self.target.network_changed_for.is_empty() {
            return Err("the network is not put back".into());
        }
        if self.source.qemu.as_ref().is_some_and(|qemu| qemu.is_throttled) {
            return Err("I3: the VM is throttled, and nobody sends it".into());
        }
        if self.source.qemu.as_ref().is_some_and(|qemu| qemu.writes == Writes::Held) {
            return Err("I3: what the VM writes is held back, and nobody copies its disks".into());
        }
        let is_left = self.target.qemu.is_some() && !self.target.has_vm;
        if is_left {
            return Err("an incoming VM is left".into());
        }
        Ok(())
    }
}
