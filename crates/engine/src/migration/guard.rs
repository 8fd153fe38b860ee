//! The guard of a migration as a state machine: it lets the VM run when the source's agent cannot. Events in, actions
//! out; no I/O, no clock.
//!
//! ```text
//!  listen ─ dismissed ─► leave
//!    │ the agent has ended, or is silent while the VM stands still
//!    ▼
//!  forbid the hand-over ─ forbidden ─► stop the transfer ─► let it run here ─► leave
//!    │ it is recorded                          ▲
//!    ▼                                         │
//!  has the agent ended? ─ no ─► listen         │
//!    │ yes                                     │
//!    ▼                                         │
//!  ask the source's QEMU ─ kept ─► revoke ─────┘
//!    │ let go
//!    ▼
//!  order the target to run it ─► leave
//! ```
//!
//! The rules that the tests and the simulation hold it to:
//! - The VM runs here only once the journal says that it is not handed over, and no longer can be.
//! - The target is ordered to run it only once the record stands and the source's QEMU has let go of it: the writer of
//!   the record may have been told that it failed, and have let the VM run on.
//! - An agent that only stands still may know something that the journal does not say: after the record, the guard
//!   waits for its end, or its next message.
//! - The agent's next run decides the same by the same records, so either may come first.

use super::SourceState;

/// How long an agent may say nothing before it is taken to stand still, in ms. Long enough for a host that swaps, short
/// enough that the VM's clients do not give up.
pub const SILENCE_MS: u64 = 3_000;

/// How often a guard lets an agent stand still while the VM runs, or is the target's: 5 minutes of silence. After that
/// the agent is not expected to wake up, and the transfer would have no end.
pub const SILENCES_MAX: u32 = 100;

/// How often a guard tries to let the VM run, and how long it waits in between, in ms: the journal's disk may be full,
/// QEMU may hang for a while, or the target be unreachable. After this time, only a person can help.
pub const ATTEMPTS_MAX: u32 = 600;
/// See [`ATTEMPTS_MAX`].
pub const AGAIN_AFTER_MS: u64 = 1_000;

/// What a guard hears, and what has come of its last action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardEvent {
    /// Its agent needs no guard any more.
    Dismissed,
    /// Its agent has said nothing for [`SILENCE_MS`].
    Silent {
        /// It had said before that the last bytes of the paused VM begin to go.
        is_switching_over: bool,
    },
    /// Its agent has ended.
    AgentEnded,
    /// Whether the VM runs here.
    VmRuns(bool),
    /// What the journal says now of the hand-over.
    HandOver(HandOverRecord),
    /// What the source's QEMU says.
    SourceSays(SourceState),
    /// The action was carried out.
    Done,
    /// The source's hypervisor has ended.
    HypervisorEnded,
    /// The action failed.
    Failed {
        /// What stood in the way was removed just now.
        may_succeed_now: bool,
    },
}

/// Which host the VM belongs to, by the source's journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOverRecord {
    /// It is forbidden, or was revoked: the VM is the source's.
    Forbidden,
    /// It is recorded: the VM is the target's.
    Recorded,
    /// The migration has a result.
    Over,
}

/// What a guard does next. Each is answered by one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuardAction {
    /// Wait for a word of the agent, its silence or its end.
    Listen,
    /// Look whether the VM runs here, and lift its throttle if it does.
    LookAtVm,
    /// Forbid the hand-over unless it is recorded, and lift the throttle.
    ForbidHandOver,
    /// Have QEMU stop sending.
    StopTransfer,
    /// Let the VM run here.
    ResumeOnSource,
    /// Ask the source's QEMU whether it has let go of the VM.
    AskSource,
    /// Revoke a hand-over whose VM the source's QEMU has kept.
    RevokeHandOver,
    /// Order the target to run the VM.
    ResumeOnTarget,
    /// Wait for [`AGAIN_AFTER_MS`].
    Pause,
    /// Leave the post: nothing is left to do, or it is the agent's.
    Leave,
    /// Leave the post without having let the VM run.
    GiveUp,
}

/// A guard.
#[derive(Debug, Clone, Copy)]
pub struct Guard {
    doing: GuardAction,
    agent_has_ended: bool,
    silences_left: u32,
    attempts_left: u32,
}

impl Guard {
    /// At its post, with its first action.
    pub fn at_post() -> (Self, GuardAction) {
        let doing = GuardAction::Listen;
        let guard =
            Self { doing, agent_has_ended: false, silences_left: SILENCES_MAX, attempts_left: ATTEMPTS_MAX };
        (guard, doing)
    }

    /// Takes what has come of the last action; says what to do next.
    pub fn handle(&mut self, event: GuardEvent) -> GuardAction {
        self.doing = self.next(event);
        self.doing
    }

    fn next(&mut self, event: GuardEvent) -> GuardAction {
        match (self.doing, event) {
            (GuardAction::Listen, GuardEvent::AgentEnded) => {
                self.agent_has_ended = true;
                GuardAction::ForbidHandOver
            }
            // A VM that is paused for its last bytes does not run.
            (GuardAction::Listen, GuardEvent::Silent { is_switching_over: false })
                if self.silences_left > 0 =>
            {
                GuardAction::LookAtVm
            }
            (GuardAction::LookAtVm, GuardEvent::VmRuns(true)) => self.listen_on(),
            (GuardAction::ForbidHandOver, GuardEvent::HandOver(HandOverRecord::Recorded))
                if self.agent_has_ended =>
            {
                GuardAction::AskSource
            }
            (GuardAction::ForbidHandOver, GuardEvent::HandOver(HandOverRecord::Recorded))
                if self.silences_left > 0 =>
            {
                self.listen_on()
            }
            (GuardAction::ForbidHandOver, GuardEvent::HandOver(HandOverRecord::Forbidden))
            | (GuardAction::RevokeHandOver, GuardEvent::Done) => GuardAction::StopTransfer,
            (GuardAction::StopTransfer, GuardEvent::Done) => GuardAction::ResumeOnSource,
            (GuardAction::AskSource, GuardEvent::SourceSays(SourceState::LetGo)) => {
                GuardAction::ResumeOnTarget
            }
            (GuardAction::AskSource, GuardEvent::SourceSays(SourceState::Kept)) => {
                GuardAction::RevokeHandOver
            }
            // What the target has of one that is astray, or has ended, the agent's next run asks.
            (GuardAction::ResumeOnSource | GuardAction::ResumeOnTarget, GuardEvent::Done)
            | (
                _,
                GuardEvent::Dismissed
                | GuardEvent::HandOver(_)
                | GuardEvent::SourceSays(SourceState::Astray)
                | GuardEvent::HypervisorEnded,
            ) => GuardAction::Leave,
            (_, GuardEvent::Failed { may_succeed_now }) => self.try_again(may_succeed_now),
            // Also after a pause: who did what meanwhile, the journal says.
            _ => GuardAction::ForbidHandOver,
        }
    }

    fn listen_on(&mut self) -> GuardAction {
        self.silences_left -= 1;
        GuardAction::Listen
    }

    fn try_again(&mut self, at_once: bool) -> GuardAction {
        self.attempts_left -= 1;
        match (self.attempts_left, at_once) {
            (0, _) => GuardAction::GiveUp,
            (_, true) => GuardAction::ForbidHandOver,
            (_, false) => GuardAction::Pause,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: GuardEvent = GuardEvent::Failed { may_succeed_now: false };

    /// The actions of a guard that hears this, one after the other.
    fn does(events: &[GuardEvent]) -> Vec<GuardAction> {
        let (mut guard, first) = Guard::at_post();
        assert_eq!(first, GuardAction::Listen);
        events.iter().map(|event| guard.handle(*event)).collect()
    }

    #[test]
    fn before_the_record_the_vm_runs_on_here() {
        let forbidden = GuardEvent::HandOver(HandOverRecord::Forbidden);
        let runs_on = [
            GuardAction::ForbidHandOver,
            GuardAction::StopTransfer,
            GuardAction::ResumeOnSource,
            GuardAction::Leave,
        ];
        let silent = GuardEvent::Silent { is_switching_over: true };
        for cause in [GuardEvent::AgentEnded, silent] {
            assert_eq!(does(&[cause, forbidden, GuardEvent::Done, GuardEvent::Done]), runs_on);
        }
    }

    #[test]
    fn after_the_record_of_an_agent_that_has_ended_the_target_is_ordered_to_run_it() {
        let let_go = GuardEvent::SourceSays(SourceState::LetGo);
        let recorded = GuardEvent::HandOver(HandOverRecord::Recorded);
        assert_eq!(
            does(&[
                GuardEvent::AgentEnded,
                recorded,
                let_go,
                FAILED,
                GuardEvent::Done,
                recorded,
                let_go,
                GuardEvent::Done
            ]),
            [
                GuardAction::ForbidHandOver,
                GuardAction::AskSource,
                GuardAction::ResumeOnTarget,
                GuardAction::Pause,
                GuardAction::ForbidHandOver,
                GuardAction::AskSource,
                GuardAction::ResumeOnTarget,
                GuardAction::Leave
            ]
        );
    }

    #[test]
    fn a_vm_that_was_not_let_go_of_runs_on_here_though_its_hand_over_is_recorded() {
        let kept = GuardEvent::SourceSays(SourceState::Kept);
        assert_eq!(
            does(&[
                GuardEvent::AgentEnded,
                GuardEvent::HandOver(HandOverRecord::Recorded),
                kept,
                GuardEvent::Done,
                GuardEvent::Done,
                GuardEvent::Done
            ]),
            [
                GuardAction::ForbidHandOver,
                GuardAction::AskSource,
                GuardAction::RevokeHandOver,
                GuardAction::StopTransfer,
                GuardAction::ResumeOnSource,
                GuardAction::Leave
            ]
        );
    }

    #[test]
    fn an_agent_that_stands_still_after_the_record_is_waited_for() {
        let silent = GuardEvent::Silent { is_switching_over: true };
        let recorded = GuardEvent::HandOver(HandOverRecord::Recorded);
        assert_eq!(
            does(&[silent, recorded, silent, recorded, GuardEvent::Dismissed]),
            [
                GuardAction::ForbidHandOver,
                GuardAction::Listen,
                GuardAction::ForbidHandOver,
                GuardAction::Listen,
                GuardAction::Leave
            ]
        );
        let for_long: Vec<GuardEvent> = (0..=SILENCES_MAX).flat_map(|_| [silent, recorded]).collect();
        assert_eq!(does(&for_long).last(), Some(&GuardAction::Leave));
    }

    #[test]
    fn an_agent_may_stand_still_for_five_minutes_while_the_vm_runs() {
        let silent = GuardEvent::Silent { is_switching_over: false };
        let mut events: Vec<GuardEvent> =
            (0..SILENCES_MAX).flat_map(|_| [silent, GuardEvent::VmRuns(true)]).collect();
        assert_eq!(does(&events).last(), Some(&GuardAction::Listen));
        events.push(silent);
        assert_eq!(does(&events).last(), Some(&GuardAction::ForbidHandOver));
        assert_eq!(
            does(&[silent, GuardEvent::VmRuns(false)]),
            [GuardAction::LookAtVm, GuardAction::ForbidHandOver]
        );
    }

    #[test]
    fn it_tries_for_ten_minutes_and_no_longer() {
        let mut events = vec![GuardEvent::AgentEnded];
        events.extend((1..ATTEMPTS_MAX).flat_map(|_| [FAILED, GuardEvent::Done]));
        assert_eq!(does(&events).last(), Some(&GuardAction::ForbidHandOver));
        events.push(FAILED);
        assert_eq!(does(&events).last(), Some(&GuardAction::GiveUp));
    }

    #[test]
    fn where_qemu_has_ended_there_is_nothing_to_let_run() {
        for answer in [HandOverRecord::Forbidden, HandOverRecord::Recorded] {
            let actions =
                does(&[GuardEvent::AgentEnded, GuardEvent::HandOver(answer), GuardEvent::HypervisorEnded]);
            assert_eq!(actions.last(), Some(&GuardAction::Leave));
        }
    }
}
