//! Post-copy: the VM runs on the target before its memory is there, and the rest follows.

use super::{Migration, Phase, SourceAction};
use crate::migration::result::Outcome;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::transfer::transferred::Transferred;

/// The longest pause that QEMU is allowed, in later rounds ([`crate::transfer::downtime`]): what fits it goes whole.
const LONGEST_PAUSE_MS: f64 = 300.0;

/// How a round compares with the one before.
///
/// A VM whose memory gets dirty more slowly than half as fast as it is sent leaves less than half for each next round,
/// and converges by itself. Of another one the rounds hardly become shorter ([`crate::transfer::throttle`] goes by the same half).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Trigger {
    round: u64,
    left_bytes: u64,
}

impl Trigger {
    /// Takes a reading. True when a round begins that is longer than half of the one before, and too long for a pause.
    pub(super) fn fires(&mut self, transferred: &Transferred, is_much: bool) -> bool {
        if transferred.rounds <= self.round {
            return false;
        }
        let is_first = self.round == 0;
        let before = std::mem::replace(&mut self.left_bytes, transferred.remaining_bytes);
        self.round = transferred.rounds;
        !is_first && is_much && transferred.remaining_bytes > before / 2
    }
}

/// The memory that follows the VM to the target.
#[derive(Debug, Default)]
pub(super) struct Rest {
    follows: Follows,
    /// Why it does not arrive.
    pub(super) problem: Option<Problem>,
    // It never will.
    is_lost: bool,
    /// The target's hypervisor has said that the VM runs. It may be mute since it was told to run it, as it waits for a
    /// page itself.
    pub(super) is_running_there: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Follows {
    #[default]
    No,
    /// The hypervisor has that order, since before the VM was paused.
    Yes,
    /// Another life of the migration began it: the target has to say.
    Unknown,
}

impl Rest {
    pub(super) fn unknown() -> Self {
        Self { follows: Follows::Unknown, ..Self::default() }
    }

    pub(super) fn is_unknown(&self) -> bool {
        self.follows == Follows::Unknown
    }

    pub(super) fn follows(&self) -> bool {
        self.follows == Follows::Yes
    }
}

impl Migration {
    /// Whether it is time for post-copy, where that is allowed.
    pub(super) fn consider_post_copy(
        &mut self,
        now_ms: f64,
        transferred: &Transferred,
    ) -> Option<SourceAction> {
        let is_allowed = self.plan.as_ref().is_some_and(Plan::post_copy);
        let is_much = self.meter.round_left_ms().is_none_or(|left_ms| left_ms > LONGEST_PAUSE_MS);
        if self.phase != Phase::Copying
            || self.rest.follows()
            || !is_allowed
            || !self.trigger.fires(transferred, is_much)
        {
            return None;
        }
        self.note(
            now_ms,
            "memory gets dirty as fast as it is sent: the rest of it will follow the VM (post-copy)",
        );
        // Before the action is given: it may take effect though its answer is lost.
        self.rest.follows = Follows::Yes;
        self.phase = Phase::BeginningPostCopy;
        Some(SourceAction::BeginPostCopy)
    }

    pub(super) fn post_copy_begun(&mut self) -> Option<SourceAction> {
        self.phase = Phase::Copying;
        if self.cancel_requested { Some(self.undo()) } else { None }
    }

    /// Before post-copy could begin. A hypervisor that has stopped the VM itself lets it run on if what is left does not
    /// arrive, so the hand-over must not be recorded before that has.
    pub(super) fn converged(&mut self, now_ms: f64) -> Option<SourceAction> {
        if self.phase != Phase::BeginningPostCopy {
            return None;
        }
        self.rest.follows = Follows::No;
        self.note(now_ms, "little was left after all: all of it goes before the VM runs there");
        self.post_copy_begun()
    }

    pub(super) fn send_rest(&mut self, now_ms: f64) -> Option<SourceAction> {
        self.phase = Phase::SendingRest;
        if self.timings.rest_sent_ms.is_none() {
            self.note(now_ms, "the rest of its memory follows");
        }
        None
    }

    pub(super) fn rest_sent(&mut self, now_ms: f64) -> Option<SourceAction> {
        if self.phase != Phase::SendingRest {
            return None;
        }
        if self.timings.rest_sent_ms.is_none() {
            self.timings.rest_sent_ms = Some(now_ms);
            self.note(now_ms, "all of its memory is on the target");
        }
        if !self.rest.is_running_there {
            // It was told to run, and nobody has said that it does.
            self.phase = Phase::AskingTarget { since_ms: now_ms };
            return Some(SourceAction::AskTarget);
        }
        Some(self.clean_up(Outcome::Completed))
    }

    /// How the VM is there, the target says.
    pub(super) fn rest_interrupted(&mut self, now_ms: f64, problem: Problem) -> Option<SourceAction> {
        if self.phase != Phase::SendingRest {
            return None;
        }
        self.note(now_ms, format!("the rest of its memory does not arrive, so the VM may stall: {problem}"));
        self.rest.problem = Some(problem);
        self.phase = Phase::AskingTarget { since_ms: now_ms };
        Some(SourceAction::AskTarget)
    }

    /// Unless all of it has arrived before.
    pub(super) fn rest_lost(&mut self, now_ms: f64, problem: Problem) -> Option<SourceAction> {
        let action = self.rest_interrupted(now_ms, problem);
        self.rest.is_lost |= action.is_some();
        action
    }

    pub(super) fn runs_in_part(&mut self, now_ms: f64, since_ms: f64) -> Option<SourceAction> {
        self.note_order_to_run(now_ms);
        self.rest.follows = Follows::Yes;
        let Some(problem) = &self.rest.problem else { return self.send_rest(now_ms) };
        if self.rest.is_lost {
            let lost = "the VM is lost: part of its memory was still on the source";
            self.error = Some(problem.clone().context(lost));
            self.phase = Phase::EndingOnTarget;
            return Some(SourceAction::EndOnTarget);
        }
        self.phase = Phase::Reconnecting { since_ms };
        Some(SourceAction::Reconnect)
    }

    pub(super) fn reconnected(&mut self, now_ms: f64) -> Option<SourceAction> {
        self.rest.problem = None;
        self.error = None;
        self.meter.restart(now_ms);
        self.send_rest(now_ms)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::migration::in_flight::copying_with_post_copy;
    use crate::migration::{Limits, SourceEvent, SourceState, TargetState};

    /// A migration that an agent took up when the VM ran on the target, and a part of it was still here.
    fn taken_up() -> Migration {
        let (mut migration, _) = Migration::recover(Limits::default(), true);
        let asked = migration.handle(0.0, SourceEvent::SourceSays(SourceState::LetGo));
        assert_eq!(asked, Some(SourceAction::AskTarget));
        assert_eq!(migration.handle(0.0, SourceEvent::TargetSays(TargetState::RunningInPart)), None);
        assert!(!migration.can_cancel());
        migration
    }

    fn interrupted() -> SourceEvent {
        SourceEvent::RestInterrupted(Problem::failed("connection reset"))
    }

    #[test]
    fn a_migration_that_is_taken_up_ends_nothing_before_all_of_the_vm_is_there() {
        let mut migration = taken_up();
        assert_eq!(migration.handle(1.0, interrupted()), Some(SourceAction::AskTarget));
        let in_part = || SourceEvent::TargetSays(TargetState::RunningInPart);
        assert_eq!(migration.handle(2.0, in_part()), Some(SourceAction::Reconnect));
        let unreachable = SourceEvent::Failed(Problem::failed("it does not answer"));
        assert_eq!(migration.handle(3.0, unreachable), Some(SourceAction::AskTarget));
        assert_eq!(migration.handle(4.0, in_part()), Some(SourceAction::Reconnect));
        assert_eq!(migration.handle(5.0, SourceEvent::Done), None);
        // Nobody has said yet that the VM runs: its QEMU may have been mute since the order to run it.
        assert_eq!(migration.handle(6.0, SourceEvent::RestSent), Some(SourceAction::AskTarget));
        assert_eq!(migration.handle(6.0, in_part()), None);
        assert_eq!(migration.handle(6.0, SourceEvent::RestSent), Some(SourceAction::AskTarget));
        let runs = SourceEvent::TargetSays(TargetState::Running);
        assert_eq!(migration.handle(6.0, runs), Some(SourceAction::CleanUp));
        assert_eq!(migration.handle(7.0, SourceEvent::Done), Some(SourceAction::Finish));
        assert_eq!((migration.outcome(), migration.error()), (Some(Outcome::Completed), None));
    }

    #[test]
    fn one_that_is_told_to_run_again_after_all_of_it_is_there_is_over_once_it_runs() {
        let mut migration = taken_up();
        assert_eq!(migration.handle(1.0, SourceEvent::RestSent), Some(SourceAction::AskTarget));
        let ready = SourceEvent::TargetSays(TargetState::Ready);
        assert_eq!(migration.handle(2.0, ready), Some(SourceAction::ResumeOnTarget));
        assert_eq!(migration.handle(3.0, SourceEvent::Done), Some(SourceAction::CleanUp));
    }

    #[test]
    fn a_vm_of_which_a_part_is_lost_is_ended_where_it_stands_still() {
        let mut migration = taken_up();
        let lost = SourceEvent::RestLost(Problem::failed("its QEMU has ended"));
        assert_eq!(migration.handle(1.0, lost), Some(SourceAction::AskTarget));
        let in_part = SourceEvent::TargetSays(TargetState::RunningInPart);
        assert_eq!(migration.handle(1.0, in_part), Some(SourceAction::EndOnTarget));
        assert_eq!(migration.handle(2.0, SourceEvent::Done), Some(SourceAction::CleanUp));
        assert_eq!(migration.handle(3.0, SourceEvent::Done), Some(SourceAction::Finish));
        assert!(migration.error().unwrap().to_string().contains("the VM is lost"));
        assert_eq!((migration.outcome(), migration.source_vm()), (Some(Outcome::Lost), None));
    }

    #[test]
    fn one_that_has_crashed_there_meanwhile_is_told() {
        let mut migration = taken_up();
        assert_eq!(migration.handle(1.0, interrupted()), Some(SourceAction::AskTarget));
        let ended = SourceEvent::TargetSays(TargetState::Ended);
        assert_eq!(migration.handle(2.0, ended), Some(SourceAction::CleanUp));
        assert_eq!(migration.handle(3.0, SourceEvent::Done), Some(SourceAction::Finish));
        assert!(migration.error().unwrap().to_string().contains("has ended on the target"));
        assert_eq!((migration.outcome(), migration.source_vm()), (Some(Outcome::Lost), None));
    }

    #[test]
    fn one_that_converges_before_post_copy_begins_is_recorded_after_all_of_it_is_there() {
        let mut migration = copying_with_post_copy();
        let round = |round: u64| Transferred {
            sent_bytes: round << 30,
            remaining_bytes: 1 << 30,
            total_bytes: 1 << 30,
            rounds: round,
            ..Transferred::default()
        };
        let mut looks = (1..5).map(|number| (1_000.0 + 500.0 * number as f64, round(number)));
        let begins = looks
            .find_map(|(now_ms, looked)| migration.handle(now_ms, SourceEvent::Progress(looked, vec![])));
        assert_eq!(begins, Some(SourceAction::BeginPostCopy));
        assert_eq!(migration.handle(3_000.0, SourceEvent::Converged), None);
        assert_eq!(migration.handle(3_000.0, SourceEvent::Paused), Some(SourceAction::SwitchOver));
        assert_eq!(migration.handle(3_100.0, SourceEvent::Done), Some(SourceAction::RecordHandOver));
        assert_eq!(migration.handle(3_110.0, SourceEvent::Done), Some(SourceAction::ResumeOnTarget));
        assert_eq!(migration.handle(3_120.0, SourceEvent::Done), Some(SourceAction::CleanUp));
    }

    fn begin(trigger: &mut Trigger, round: u64, left_bytes: u64) -> bool {
        let reading = Transferred {
            remaining_bytes: left_bytes,
            total_bytes: 1 << 30,
            rounds: round,
            ..Transferred::default()
        };
        trigger.fires(&reading, true)
    }

    #[test]
    fn it_fires_at_the_first_round_that_is_no_shorter_than_half_of_the_one_before() {
        let mut trigger = Trigger::default();
        assert!(!begin(&mut trigger, 1, 1_000));
        assert!(!begin(&mut trigger, 1, 900), "within a round");
        assert!(!begin(&mut trigger, 2, 400));
        assert!(!begin(&mut trigger, 2, 399));
        assert!(begin(&mut trigger, 3, 300));
        assert!(!begin(&mut trigger, 3, 300), "once");
    }

    proptest! {
        #[test]
        fn a_vm_that_converges_by_itself_goes_without(
            memory in 1_000_u64..1 << 40,
            percents in prop::collection::vec(0..50_u64, 1..20),
        ) {
            let mut trigger = Trigger::default();
            let mut left = memory;
            prop_assert!(!begin(&mut trigger, 1, left));
            for (round, percent) in percents.iter().enumerate() {
                left = left * percent / 100;
                prop_assert!(!begin(&mut trigger, round as u64 + 2, left));
            }
        }

        #[test]
        fn one_that_does_not_is_found_in_its_second_round(memory in 1_000_u64..1 << 40, percent in 51..300_u64) {
            let mut trigger = Trigger::default();
            begin(&mut trigger, 1, memory);
            prop_assert!(begin(&mut trigger, 2, memory * percent / 100));
        }
    }
}
