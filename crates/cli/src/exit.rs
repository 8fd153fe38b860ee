//! Exit codes, which are stable.

use std::process::ExitCode;

use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::problem::{Problem, ProblemKind};

/// How the program ends; [`Exit::meaning`] says what each is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Done,
    Failed,
    BadInput,
    Refused,
    InDoubt,
    Cancelled,
    Warned,
    Lost,
}

impl Exit {
    /// Each, in the order of their codes.
    pub(crate) const ALL: [Self; 8] = [
        Self::Done,
        Self::Failed,
        Self::BadInput,
        Self::Refused,
        Self::InDoubt,
        Self::Cancelled,
        Self::Warned,
        Self::Lost,
    ];

    /// The code of a request that could not be done.
    pub(crate) fn of(problem: &Problem) -> Self {
        Self::of_kind(problem.kind)
    }

    fn of_kind(kind: ProblemKind) -> Self {
        match kind {
            ProblemKind::BadInput | ProblemKind::NotFound => Self::BadInput,
            ProblemKind::Conflict | ProblemKind::Refused | ProblemKind::Forbidden => Self::Refused,
            ProblemKind::Unreachable | ProblemKind::Failed => Self::Failed,
        }
    }

    /// The code of a list that lacks what so many hosts have.
    pub(crate) fn of_list(hosts_not_asked: usize) -> Self {
        if hosts_not_asked == 0 { Self::Done } else { Self::Failed }
    }

    /// The code of a migration that was begun.
    pub(crate) fn of_result(result: &MigrationResult) -> Self {
        match result.outcome {
            Outcome::Completed => Self::Done,
            Outcome::Failed => result.failure.error_kind.map_or(Self::Failed, Self::of_kind),
            Outcome::Cancelled => Self::Cancelled,
            Outcome::InDoubt => Self::InDoubt,
            Outcome::Lost => Self::Lost,
        }
    }

    /// The code of a drain, or of the way back, that is over.
    pub(crate) fn of_drain(status: &DrainStatus) -> Self {
        let any = |state| status.moves.iter().any(|one| one.state == state);
        if any(MoveState::Lost) {
            return Self::Lost;
        }
        if any(MoveState::InDoubt) {
            return Self::InDoubt;
        }
        match status.state {
            DrainState::Drained => Self::Done,
            DrainState::Cancelled => Self::Cancelled,
            DrainState::Moving
            | DrainState::Cancelling
            | DrainState::Incomplete
            | DrainState::Interrupted => Self::Failed,
        }
    }

    /// As a number.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::BadInput => 2,
            Self::Refused => 3,
            Self::InDoubt => 4,
            Self::Cancelled => 5,
            Self::Warned => 6,
            Self::Lost => 7,
        }
    }

    /// Its meaning, for `--help` and docs/reference/exit-codes.md.
    pub(crate) fn meaning(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => {
                "failed, and nothing is lost: each VM is where it was; the error says if one does not run there"
            }
            Self::BadInput => {
                "bad usage or bad input, or no such VM, host or migration: nothing was changed, or everything was undone"
            }
            Self::Refused => {
                "refused by a check or by permissions: nothing was changed, or everything was undone"
            }
            Self::InDoubt => {
                "in doubt: nobody knows yet where the VM runs; or the program has stopped watching"
            }
            Self::Cancelled => "cancelled: what had not moved yet runs where it ran",
            Self::Warned => "`check` found warnings, and nothing worse",
            Self::Lost => "lost: the VM ended while it was moved, on the source or on the target",
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_lacks_what_a_host_has_is_no_success() {
        assert_eq!([0, 1, 2].map(|silent| Exit::of_list(silent).code()), [0, 1, 1]);
    }
}
