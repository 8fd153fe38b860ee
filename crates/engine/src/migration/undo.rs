//! The way back.

use super::{Action, Migration, Phase};
use crate::problem::Problem;
use crate::result::Outcome;

/// How often letting the VM run on the source is tried. It is local and nearly never fails.
pub(super) const RESUME_ATTEMPTS: u8 = 5;

/// The way back, in this order: the VM runs again before anything else is tidied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Undo {
    StopTransfer,
    ResumeOnSource,
    DiscardTarget,
    PutBack,
}

impl Migration {
    pub(super) fn give_up(&mut self, now_ms: f64, error: Problem) -> Action {
        self.error.get_or_insert(error);
        self.undo(now_ms)
    }

    pub(super) fn undo(&mut self, now_ms: f64) -> Action {
        let first = if self.reached.transfer_started {
            Undo::StopTransfer
        } else if self.reached.target_asked {
            Undo::DiscardTarget
        } else {
            return self.end(now_ms, self.outcome_of_undo());
        };
        self.phase = Phase::Undoing(first);
        undo_action(first)
    }

    pub(super) fn undone(&mut self, now_ms: f64, undo: Undo) -> Action {
        let next = match undo {
            Undo::StopTransfer => Undo::ResumeOnSource,
            Undo::ResumeOnSource => {
                self.note(now_ms, "the VM runs on the source");
                Undo::DiscardTarget
            }
            Undo::DiscardTarget if self.reached.paths_prepared => Undo::PutBack,
            Undo::DiscardTarget | Undo::PutBack => return self.end(now_ms, self.outcome_of_undo()),
        };
        self.phase = Phase::Undoing(next);
        undo_action(next)
    }

    pub(super) fn undo_failed(&mut self, now_ms: f64, undo: Undo, error: &Problem) -> Action {
        if undo == Undo::ResumeOnSource {
            self.resume_attempts_left -= 1;
            if self.resume_attempts_left > 0 {
                return Action::ResumeOnSource;
            }
            let cause = self.error.take().unwrap_or_else(|| Problem::failed("cancelled"));
            // A hypervisor that has ended says the same to both.
            let what_else = if cause == *error {
                String::new()
            } else {
                format!("; and the VM does not run on the source: {error}")
            };
            self.error = Some(Problem::failed(format!("{cause}{what_else}")));
        }
        // Stopping, discarding and putting back are tried once: the hypervisor stops by itself when
        // the target goes, an unstarted target discards when its lease runs out, and the journal
        // has what is to be put back.
        self.undone(now_ms, undo)
    }

    fn outcome_of_undo(&self) -> Outcome {
        if self.error.is_none() && self.cancel_requested { Outcome::Cancelled } else { Outcome::Failed }
    }
}

fn undo_action(undo: Undo) -> Action {
    match undo {
        Undo::StopTransfer => Action::StopTransfer,
        Undo::ResumeOnSource => Action::ResumeOnSource,
        Undo::DiscardTarget => Action::DiscardTarget,
        Undo::PutBack => Action::PutBack,
    }
}
