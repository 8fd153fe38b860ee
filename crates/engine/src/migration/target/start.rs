//! When an agent starts: what becomes of the VMs that came here or were on their way, by its journal and their hypervisors.

use super::{Hypervisor, IncomingState, KnownMigration, PostCopy, Received};

/// One thing that is done for all VMs that need it, before the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartStep {
    /// What is left of those that were discarded is removed: see [`remains`]. What cannot be removed yet is looked after as what is
    /// on its way: see [`super::silence`].
    ClearDiscarded,
    /// Those that wait for their state or for an order are taken up: see [`waiting`].
    TakeUpWaiting,
    /// Those that were recorded to run, and may not have been let run, are: see [`super::resume`].
    LetRun,
    /// Those that are still to receive a part are looked after: see [`lacks_part`].
    TakeUpParts,
}

/// When the agent starts. Some of those that wait are given up, and what was discarded is cleared away after that.
pub const AT_START: [StartStep; 4] =
    [StartStep::TakeUpWaiting, StartStep::ClearDiscarded, StartStep::LetRun, StartStep::TakeUpParts];

/// Once the hypervisor of a VM answers that did not when the agent started: for that VM.
pub const ONCE_IT_ANSWERS: [StartStep; 2] = [StartStep::LetRun, StartStep::TakeUpParts];

/// What is done with what is left of a VM that was discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remains {
    /// Its hypervisor is ended, its files go.
    Remove,
    /// A VM of its name has come since, or comes, and they are its own.
    Leave,
}

/// What remains of a VM that was discarded.
pub fn remains(is_here: bool, comes_again: bool) -> Remains {
    if is_here || comes_again { Remains::Leave } else { Remains::Remove }
}

/// What is done with a VM that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// Its source is asked about it at once.
    TakeUp,
    /// It is recorded as discarded: what had come of it is gone.
    GiveUp,
    /// It is recorded to run: others have let it run here, so what its source has is older than its disks.
    RecordRun,
}

/// What to do with a VM that waits, by its hypervisor, and whether others are known to have let it run. A VM that lives and
/// does not answer may be the only copy.
pub fn waiting(hypervisor: Hypervisor, was_let_run: bool) -> Waiting {
    match hypervisor {
        Hypervisor::None | Hypervisor::Ended if was_let_run => Waiting::RecordRun,
        Hypervisor::None | Hypervisor::Ended => Waiting::GiveUp,
        Hypervisor::Unresponsive | Hypervisor::There => Waiting::TakeUp,
    }
}

/// Whether a part of a VM is still to come. Of a hypervisor that says nothing of what it has, that must be taken for so: it
/// may wait for that part.
pub fn lacks_part(known: KnownMigration, received: Option<Received>) -> bool {
    let was_ordered_to_run = matches!(known.state, Some(IncomingState::Running | IncomingState::Finished));
    let may_lack =
        was_ordered_to_run && known.post_copy == PostCopy::Allowed && known.hypervisor == Hypervisor::There;
    may_lack && received != Some(Received::Whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_given_up_only_if_its_hypervisor_is_gone_and_nobody_has_let_it_run() {
        assert_eq!(waiting(Hypervisor::None, false), Waiting::GiveUp);
        assert_eq!(waiting(Hypervisor::None, true), Waiting::RecordRun);
        for was_let_run in [false, true] {
            assert_eq!(waiting(Hypervisor::Unresponsive, was_let_run), Waiting::TakeUp);
            assert_eq!(waiting(Hypervisor::There, was_let_run), Waiting::TakeUp);
        }
    }

    /// What cannot be cleared away takes as long as its hypervisor may take.
    #[test]
    fn what_is_discarded_is_cleared_away_once_after_what_is_given_up() {
        assert_eq!(AT_START.iter().filter(|step| **step == StartStep::ClearDiscarded).count(), 1);
        let place = |of| AT_START.iter().position(|step| *step == of);
        assert!(place(StartStep::TakeUpWaiting) < place(StartStep::ClearDiscarded));
    }

    #[test]
    fn what_came_again_is_no_remains() {
        assert_eq!(remains(false, false), Remains::Remove);
        assert_eq!(remains(true, false), Remains::Leave);
        assert_eq!(remains(false, true), Remains::Leave);
    }

    #[test]
    fn what_may_lack_a_part_is_looked_after() {
        let known = KnownMigration {
            post_copy: PostCopy::Allowed,
            hypervisor: Hypervisor::There,
            ..KnownMigration::by_decision_alone(Some(IncomingState::Finished))
        };
        assert!(lacks_part(known, Some(Received::InPart)) && lacks_part(known, None));
        assert!(!lacks_part(known, Some(Received::Whole)));
        for other in [
            KnownMigration { post_copy: PostCopy::Past, ..known },
            KnownMigration { hypervisor: Hypervisor::None, ..known },
            KnownMigration { hypervisor: Hypervisor::Unresponsive, ..known },
            KnownMigration { state: Some(IncomingState::Waiting), ..known },
        ] {
            assert!(!lacks_part(other, None));
        }
    }
}
