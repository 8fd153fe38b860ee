//! The way back.

use super::{Migration, Phase, SourceAction, VmCondition};
use crate::migration::result::{Outcome, SourceVm};
use crate::problem::{Problem, ProblemKind};

/// How often letting the VM run on the source is tried. It is local and nearly never fails.
const RESUME_ATTEMPTS: u8 = 5;

/// How often letting the VM run on the source has been tried.
#[derive(Debug, Default)]
pub(super) struct ResumeAttempts {
    failed: u8,
    // Why the last one failed that there was to be.
    problem: Option<Problem>,
}

impl ResumeAttempts {
    /// One more has failed. Whether it is to be tried again.
    fn fail(&mut self, problem: Problem) -> bool {
        self.failed += 1;
        let is_last = self.failed == RESUME_ATTEMPTS;
        if is_last {
            self.problem = Some(problem);
        }
        !is_last
    }
}

/// The way back, in this order: the VM runs again before anything else is tidied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Undo {
    StopTransfer,
    ResumeOnSource,
    DiscardTarget,
    PutBack,
}

impl Migration {
    pub(super) fn give_up(&mut self, error: Problem) -> SourceAction {
        self.error.get_or_insert(error);
        self.undo()
    }

    pub(super) fn undo(&mut self) -> SourceAction {
        let first = if self.reached.transfer_started {
            Undo::StopTransfer
        } else if self.reached.target_asked {
            Undo::DiscardTarget
        } else {
            return self.look_at_vm();
        };
        self.phase = Phase::Undoing(first);
        undo_action(first)
    }

    pub(super) fn undone(&mut self, now_ms: f64, undo: Undo) -> SourceAction {
        if undo == Undo::ResumeOnSource && self.timings.paused_ms.is_some() {
            self.timings.resumed_here_ms = Some(now_ms);
        }
        self.go_on_undoing(undo)
    }

    fn go_on_undoing(&mut self, undo: Undo) -> SourceAction {
        let next = match undo {
            Undo::StopTransfer => Undo::ResumeOnSource,
            Undo::ResumeOnSource => Undo::DiscardTarget,
            Undo::DiscardTarget if self.reached.paths_prepared => Undo::PutBack,
            Undo::DiscardTarget | Undo::PutBack => return self.look_at_vm(),
        };
        self.phase = Phase::Undoing(next);
        undo_action(next)
    }

    pub(super) fn undo_failed(&mut self, undo: Undo, error: Problem) -> SourceAction {
        if undo == Undo::ResumeOnSource && self.resume_attempts.fail(error) {
            return SourceAction::ResumeOnSource;
        }
        // Stopping, discarding and putting back are tried once: the hypervisor stops by itself when
        // the target goes, an unstarted target discards when its lease runs out, and the journal
        // has what is to be put back.
        self.go_on_undoing(undo)
    }

    /// Last of all: its hypervisor may have ended while the rest was undone.
    fn look_at_vm(&mut self) -> SourceAction {
        self.phase = Phase::LookingAtVm;
        SourceAction::LookAtVm
    }

    pub(super) fn vm_is(&mut self, now_ms: f64, condition: VmCondition) -> SourceAction {
        match condition {
            VmCondition::Runs => {
                self.note(now_ms, "the VM runs on the source");
                self.source_vm = Some(SourceVm::Runs);
                self.end(now_ms, self.outcome_of_undo())
            }
            VmCondition::Paused => {
                self.source_vm = Some(SourceVm::Paused);
                self.vm_does_not_run(now_ms, "the VM stands still on the source")
            }
            VmCondition::Ended(_) if self.source_vm == Some(SourceVm::Ended) => {
                self.note(now_ms, "the VM is stopped on the source, and has to be booted again");
                self.end(now_ms, self.outcome_of_undo())
            }
            VmCondition::Ended(how) => {
                self.source_vm = Some(SourceVm::Ended);
                self.lost(now_ms, &how)
            }
        }
    }

    fn lost(&mut self, now_ms: f64, how: &Problem) -> SourceAction {
        // Which consequence of that end was noticed first is chance.
        let cause = self.error.take().filter(|cause| !cause.is_hypervisor_gone);
        let before = cause.map_or(String::new(), |cause| format!("; the first error was: {cause}"));
        self.error = Some(Problem::failed(format!("the VM is lost: {how}{before}")));
        self.end(now_ms, Outcome::Lost)
    }

    pub(super) fn vm_is_mute(&mut self, now_ms: f64, error: &Problem) -> SourceAction {
        self.source_vm = Some(SourceVm::Unknown);
        self.vm_does_not_run(now_ms, &format!("it is not known whether the VM runs on the source: {error}"))
    }

    /// For all that is known. So nobody has cancelled with success.
    fn vm_does_not_run(&mut self, now_ms: f64, what: &str) -> SourceAction {
        self.note(now_ms, what);
        let not_resumed = self.resume_attempts.problem.take();
        let kind = not_resumed.as_ref().map(|_| ProblemKind::Failed);
        let why =
            not_resumed.map_or(String::new(), |error| format!("; letting it run there failed: {error}"));
        self.error = Some(match self.error.take() {
            Some(cause) => Problem::new(kind.unwrap_or(cause.kind), format!("{cause}; {what}{why}")),
            None => Problem::failed(format!("cancelled, but {what}{why}")),
        });
        self.end(now_ms, Outcome::Failed)
    }

    fn outcome_of_undo(&self) -> Outcome {
        if self.error.is_none() && self.cancel_requested { Outcome::Cancelled } else { Outcome::Failed }
    }
}

fn undo_action(undo: Undo) -> SourceAction {
    match undo {
        Undo::StopTransfer => SourceAction::StopTransfer,
        Undo::ResumeOnSource => SourceAction::ResumeOnSource,
        Undo::DiscardTarget => SourceAction::DiscardTarget,
        Undo::PutBack => SourceAction::PutBack,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration::SourceEvent;
    use crate::migration::in_flight::{copying, well};

    #[test]
    fn a_failed_migration_tells_its_pause() {
        let mut migration = copying();
        assert_eq!(migration.handle(2_000.0, SourceEvent::Paused), Some(SourceAction::SwitchOver));
        let late = SourceEvent::Failed(Problem::failed("the last of the state did not arrive"));
        assert_eq!(migration.handle(17_000.0, late), Some(SourceAction::StopTransfer));
        assert_eq!(migration.handle(18_000.0, SourceEvent::Done), Some(SourceAction::ResumeOnSource));
        let mute = SourceEvent::Failed(Problem::failed("QEMU does not answer"));
        assert_eq!(migration.handle(18_500.0, mute), Some(SourceAction::ResumeOnSource));
        assert_eq!(migration.timings().downtime_ms(), None, "it is still paused");
        let mut next = migration.handle(19_000.0, SourceEvent::Done);
        while let Some(action) = next.filter(|action| *action != SourceAction::Finish) {
            next = migration.handle(25_000.0, well(action));
        }
        assert_eq!(migration.outcome(), Some(Outcome::Failed));
        assert_eq!(migration.timings().downtime_ms(), Some(17_000.0));
    }

    /// A transfer that broke, with this answer to the order to let the VM run, and then with this VM.
    fn undone(broke: Problem, resume: &SourceEvent, condition: &VmCondition) -> Migration {
        let mut migration = copying();
        let mut next = migration.handle(2_000.0, SourceEvent::TransferFailed(broke));
        while let Some(action) = next.filter(|action| *action != SourceAction::Finish) {
            let event = match action {
                SourceAction::ResumeOnSource => resume.clone(),
                SourceAction::LookAtVm => SourceEvent::VmIs(condition.clone()),
                _ => well(action),
            };
            next = migration.handle(3_000.0, event);
        }
        migration
    }

    #[test]
    fn of_a_lost_vm_the_end_of_its_hypervisor_is_told_once_whatever_was_noticed_first() {
        let ended = Problem::hypervisor_gone("its QEMU has ended by signal 9");
        let closed = Problem::hypervisor_gone("QEMU closed its control socket");
        for first in [closed.clone(), ended.clone(), closed.context("query-migrate")] {
            let migration =
                undone(first, &SourceEvent::Failed(ended.clone()), &VmCondition::Ended(ended.clone()));
            assert_eq!(migration.outcome(), Some(Outcome::Lost));
            let message = migration.error().unwrap().to_string();
            assert_eq!(message, "the VM is lost: its QEMU has ended by signal 9");
        }
    }

    #[test]
    fn what_else_went_wrong_with_a_lost_vm_is_told_after_its_loss() {
        let ended = Problem::hypervisor_gone("its QEMU has ended by signal 9");
        let broke = Problem::failed("b could not take the state");
        let migration = undone(broke, &SourceEvent::Failed(ended.clone()), &VmCondition::Ended(ended));
        let message = "the VM is lost: its QEMU has ended by signal 9; the first error was: b could not take \
                    the state";
        assert_eq!(migration.error().unwrap().to_string(), message);
    }

    #[test]
    fn why_a_vm_does_not_run_on_is_told_unless_it_does() {
        let mute = SourceEvent::Failed(Problem::failed("QEMU did not answer"));
        let broke = || Problem::new(ProblemKind::Unreachable, "reset");
        let paused = undone(broke(), &mute, &VmCondition::Paused);
        let message =
            "reset; the VM stands still on the source; letting it run there failed: QEMU did not answer";
        assert_eq!(paused.error(), Some(&Problem::failed(message)));
        // Its guard may have let it run, or QEMU may have done so by itself.
        assert_eq!(undone(broke(), &mute, &VmCondition::Runs).error(), Some(&broke()));
    }

    #[test]
    fn one_that_was_never_paused_has_no_pause() {
        let mut migration = copying();
        let mut next = migration.handle(2_000.0, SourceEvent::TransferFailed(Problem::failed("reset")));
        while let Some(action) = next.filter(|action| *action != SourceAction::Finish) {
            next = migration.handle(3_000.0, well(action));
        }
        assert_eq!(migration.timings().downtime_ms(), None);
    }
}
