//! One migration as a state machine: events in, actions out. No I/O, no clock: the caller says what
//! time it is.
//!
//! ```text
//!  1 establish ─ 2 permissions ─ 3 memory ─ 4 build VM ─ 5 connect ─ turn ─ 6,7 copy ─ 8 downtime
//!       │              │            │            │            │         │        │          │
//!       └──────────────┴────────────┴─── undo ◄──┴────────────┴─────────┴────────┴──────────┤
//!                                         │                                                 ▼
//!                        failed, cancelled, lost: as the            record the hand-over (the commit)
//!                        source's hypervisor says ◄─ revoke ──┐                           │
//!                                                               │                           ▼
//!                                               ask the target ◄┴─ no answer ───── 9 resume on target
//!                                                    │                                      │
//!                                              in doubt                        10 clean up ─ completed
//! ```
//!
//! With disks that are copied, these go before the memory, and the copies end before the record:
//!
//! ```text
//!  turn ─ begin ─ copy disks ─ synchronise ─ 6,7 copy memory ─ 8 paused ─ end the copies ─ switch over ─ …
//!           └─────────┴────────────┴──────────────┴───────────────┴──── undo
//! ```
//!
//! If the hypervisor has a single operation for disks and memory, it goes through the same parts by itself, and the guest's
//! writes do not wait for the target; the rest of them is sent in the pause:
//!
//! ```text
//!  turn ─ begin ─ copy disks ─ 6,7 copy memory ─ 8 paused ─ end the copies ─ switch over ─ …
//! ```
//!
//! If the hypervisor cannot make the guest's writes wait for the target, they are held back instead, as far as necessary for
//! the copies to keep up: in place of *synchronise*, and before the pause. The rest is then sent in the pause.
//!
//! With post-copy, the VM runs on the target before its memory is there:
//!
//! ```text
//!  6,7 copy ─ begin post-copy ─ 8 paused ─ record the hand-over ─ switch over ─ 9 resume on target
//!                                  │           (the commit)                          │
//!                                 undo                          send the rest ◄──────┘
//!                                              ask, reconnect ◄── broken │ └─ all there ─ 10 clean up ─ completed
//! ```
//!
//! The rules that the tests and the simulation hold it to:
//! - Copies of disks are over before the hand-over is recorded, and closed on the target before the VM runs there, so that no
//!   disk is written by two.
//! - The target is told to run only after the hand-over is recorded on the source.
//! - After the hand-over is recorded, the source runs again only once the target has said, from its
//!   own journal, that it discarded the VM and never ran it.
//! - A source that has begun to switch over to post-copy never lets the VM run again, so the hand-over is recorded
//!   before that. From then until all memory is on the target the VM needs both hosts.
//! - A record that is found later proves no hand-over: its writer may have been told that it failed. The source's
//!   hypervisor is asked first, and a VM that it has not let go of stays.
//! - The result reports a VM that did not move as its hypervisor described it after everything was undone.
//! - Each action is answered by exactly one event. No action is given while another is under way, with two exceptions:
//!   the transfer, which continues until it is stopped, fails or is over, and the wait for a turn, which ends at once
//!   when the migration is cancelled.

mod deadline;
mod disks;
pub mod guard;
#[cfg(test)]
mod in_flight;
mod messages;
mod post_copy;
pub mod progress;
pub mod result;
pub mod standstill;
pub mod step;
pub mod target;
mod throttled;
pub mod timing;
mod undo;
mod view;

use self::disks::Disks;
pub use self::messages::{Limits, SourceAction, SourceEvent, SourceState, TargetState, VmCondition};
use self::post_copy::{Rest, Trigger};
use self::undo::{ResumeAttempts, Undo};
use self::view::Record;
pub use self::view::{Stage, Timings};
use crate::format::seconds;
use crate::migration::progress::ProgressMeter;
use crate::migration::result::{Outcome, SourceVm};
use crate::migration::step::Step;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::transfer::throttle::Throttle;
use crate::transfer::transferred::Transferred;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Preparing(Step),
    AwaitingPlace { since_ms: f64 },
    AwaitingTurn { has_waited: bool },
    StartingDiskCopies,
    CopyingDisks,
    SynchronisingDisks,
    MirroringDisks,
    StartingTransfer,
    Copying,
    BeginningPostCopy,
    EndingDiskCopies,
    SwitchingOver,
    RecordingHandOver,
    ResumingOnTarget { since_ms: f64 },
    AskingSource,
    AskingTarget { since_ms: f64 },
    EndingOnSource,
    Revoking,
    SendingRest,
    Reconnecting { since_ms: f64 },
    EndingOnTarget,
    CleaningUp(Outcome),
    Undoing(Undo),
    LookingAtVm,
    Ended(Outcome),
}

/// So long before all memory has been gone through, a transfer is near its end. The next VM of a drain takes 100 ms
/// and more to its first byte. The two then share the links for as long as QEMU takes to notice what is left for
/// this one, before it decides that the rest fits the pause; and it is looked at ten times a second.
pub const ENDING_MS: f64 = 300.0;

const NO_RECORD: &str = "the target has no record of this migration, so whether the VM runs there is not known; \
    look there, and if it does not run there, `drainpipe vm reclaim` gives it back to the source";

/// One migration, from the source's side.
#[derive(Debug)]
pub struct Migration {
    limits: Limits,
    phase: Phase,
    reached: Reached,
    // By the source's journal it is the target's VM: recorded, and not revoked.
    is_the_targets: bool,
    meter: ProgressMeter,
    disks: Disks,
    plan: Option<Plan>,
    error: Option<Problem>,
    cancel_requested: bool,
    resume_attempts: ResumeAttempts,
    // Before it was looked at only where it was ended by an order, since its target is lost: to be booted again here.
    source_vm: Option<SourceVm>,
    timings: Timings,
    record: Record,
    throttle: Throttle,
    trigger: Trigger,
    rest: Rest,
}

/// What has been done that must be undone. Set before the action is given: it may have taken effect
/// although its answer was lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Reached {
    target_asked: bool,
    paths_prepared: bool,
    transfer_started: bool,
}

impl Migration {
    /// A migration that has not begun, with its first action.
    pub fn begin(limits: Limits) -> (Self, SourceAction) {
        let migration = Self::in_phase(limits, Phase::Preparing(Step::EstablishHosts), Reached::default());
        (migration, SourceAction::EstablishHosts)
    }

    /// A migration that an earlier run of the agent began, or a task of it that has crashed. `handed_over` is what
    /// the journal says.
    ///
    /// Before the hand-over everything may have been done, so everything is undone; after it, the
    /// target is asked, unless the VM never left.
    pub fn recover(limits: Limits, handed_over: bool) -> (Self, SourceAction) {
        let all = Reached { target_asked: true, paths_prepared: true, transfer_started: true };
        if handed_over {
            let asking = Self::in_phase(limits, Phase::AskingSource, all);
            let migration = Self { is_the_targets: true, rest: Rest::unknown(), ..asking };
            return (migration, SourceAction::AskSource);
        }
        let mut migration = Self::in_phase(limits, Phase::Undoing(Undo::StopTransfer), all);
        migration.error = Some(Problem::failed(
            "the source's agent stopped or crashed in the middle of the migration; the migration was undone",
        ));
        (migration, SourceAction::StopTransfer)
    }

    fn in_phase(limits: Limits, phase: Phase, reached: Reached) -> Self {
        Self {
            limits,
            phase,
            reached,
            is_the_targets: false,
            meter: ProgressMeter::default(),
            disks: Disks::default(),
            plan: None,
            error: None,
            cancel_requested: false,
            resume_attempts: ResumeAttempts::default(),
            source_vm: None,
            timings: Timings::default(),
            record: Record::default(),
            throttle: Throttle::new(limits.throttle_percent),
            trigger: Trigger::default(),
            rest: Rest::default(),
        }
    }

    /// Takes an event; says what to do next, if anything.
    pub fn handle(&mut self, now_ms: f64, event: SourceEvent) -> Option<SourceAction> {
        let action = self.next(now_ms, event);
        action.inspect(|action| self.assert_allowed(*action))
    }

    /// Invariants I1 and I3 of docs/architecture.md, whatever led here: one side alone may run the VM, and no copy ends
    /// before the other one runs or is known to be lost.
    fn assert_allowed(&self, action: SourceAction) {
        match action {
            SourceAction::ResumeOnTarget => {
                debug_assert!(self.is_the_targets, "I1: run there without the record");
            }
            SourceAction::ResumeOnSource => {
                debug_assert!(!self.is_the_targets, "I1: run here against the record");
            }
            SourceAction::RecordHandOver => {
                debug_assert!(!self.disks.may_be_written(), "I2: the copies of disks are not over");
            }
            SourceAction::CleanUp => {
                debug_assert!(self.timings.resumed_ms.is_some(), "I3: the last copy ends");
            }
            SourceAction::SwitchOver => {
                debug_assert!(
                    !self.rest.follows() || self.is_the_targets,
                    "I3: there is no way back from there"
                );
            }
            SourceAction::StopTransfer => {
                debug_assert!(!self.is_the_targets, "I3: the target needs what is sent");
            }
            _ => {}
        }
    }

    fn next(&mut self, now_ms: f64, event: SourceEvent) -> Option<SourceAction> {
        match event {
            SourceEvent::Progress(transferred, paths) => {
                self.meter.record(now_ms, transferred);
                self.consider_throttle(now_ms, Some(&transferred));
                self.meter.record_paths(now_ms, paths);
                self.consider_holding_writes(now_ms);
                self.check_limits(now_ms).or_else(|| self.consider_post_copy(now_ms, &transferred))
            }
            SourceEvent::DiskProgress(states) => {
                self.disks.record(now_ms, &states);
                self.record_held_writes(now_ms);
                self.check_limits(now_ms).or_else(|| self.consider_disks(now_ms))
            }
            SourceEvent::Tick => {
                self.consider_throttle(now_ms, None);
                self.check_limits(now_ms).or_else(|| self.wait_on(now_ms))
            }
            SourceEvent::CancelRequested => self.request_cancel(now_ms),
            SourceEvent::Done
            | SourceEvent::DisksGoAlong
            | SourceEvent::WritesHeldBack
            | SourceEvent::Established(_)
            | SourceEvent::Connected(_)
            | SourceEvent::SourceSays(_)
            | SourceEvent::VmIs(_)
            | SourceEvent::TargetSays(_) => self.action_done(now_ms, event),
            SourceEvent::Failed(error) => self.action_failed(now_ms, error),
            SourceEvent::Busy(why) => self.busy(now_ms, &why),
            SourceEvent::Found(finding) => {
                self.found(now_ms, finding);
                None
            }
            SourceEvent::PathTurned(path, news) => {
                self.path_turned(now_ms, path, news);
                None
            }
            SourceEvent::BandwidthLimited(limit_mbps) => {
                self.bandwidth_limited(now_ms, limit_mbps);
                None
            }
            SourceEvent::Throttled(percent) => {
                self.throttled(now_ms, percent);
                None
            }
            SourceEvent::NotThrottled(problem) => {
                self.not_throttled(now_ms, &problem);
                None
            }
            SourceEvent::Paused => self.paused(now_ms),
            SourceEvent::Converged => self.converged(now_ms),
            SourceEvent::TransferFailed(error) => self.transfer_failed(now_ms, error),
            SourceEvent::RestSent => self.rest_sent(now_ms),
            SourceEvent::RestInterrupted(problem) => self.rest_interrupted(now_ms, problem),
            SourceEvent::RestLost(problem) => self.rest_lost(now_ms, problem),
        }
    }

    fn action_done(&mut self, now_ms: f64, event: SourceEvent) -> Option<SourceAction> {
        match (self.phase, event) {
            (Phase::Preparing(Step::EstablishHosts), SourceEvent::Established(plan)) => {
                self.note(now_ms, describe_plan(&plan));
                self.plan = Some(plan);
                Some(self.next_preparation(now_ms, Step::CheckPermissions))
            }
            (Phase::Preparing(Step::ConnectHosts), SourceEvent::Connected(plan)) => {
                Some(self.connected(now_ms, plan))
            }
            (Phase::AwaitingPlace { since_ms }, _) => {
                self.timings.awaited_place_ms = now_ms - since_ms;
                Some(self.next_preparation(now_ms, Step::AllocateMemory))
            }
            (Phase::Preparing(step), _) => Some(self.next_preparation(now_ms, following(step))),
            (Phase::AwaitingTurn { .. }, _) => Some(self.released(now_ms)),
            (Phase::StartingDiskCopies, SourceEvent::DisksGoAlong) => Some(self.disks_go_along()),
            (Phase::StartingDiskCopies, _) => self.disk_copies_started(now_ms),
            (Phase::SynchronisingDisks, SourceEvent::WritesHeldBack) => self.writes_held_back(now_ms),
            (Phase::SynchronisingDisks, _) => self.disks_mirrored(now_ms),
            (Phase::EndingDiskCopies, _) => Some(self.disk_copies_ended(now_ms)),
            (Phase::StartingTransfer, _) => self.transfer_started(now_ms),
            (Phase::BeginningPostCopy, _) => self.post_copy_begun(),
            (Phase::SwitchingOver, _) => Some(self.state_transferred(now_ms)),
            (Phase::RecordingHandOver, _) => Some(self.handed_over(now_ms)),
            (Phase::ResumingOnTarget { since_ms }, _) => self.resumed(now_ms, since_ms),
            (Phase::AskingTarget { .. }, SourceEvent::TargetSays(TargetState::Running)) => {
                self.runs_on_target(now_ms)
            }

            (Phase::AskingSource, SourceEvent::SourceSays(SourceState::LetGo | SourceState::Astray)) => {
                self.phase = Phase::AskingTarget { since_ms: now_ms };
                Some(SourceAction::AskTarget)
            }
            (Phase::AskingSource, SourceEvent::SourceSays(SourceState::Kept)) => {
                self.note(now_ms, "the source has not let go of the VM");
                // Known already, unless this life of it began with the question.
                self.error.get_or_insert_with(|| {
                    Problem::failed(
                        "the agent stopped, or could not write, while it recorded the hand-over, and the VM \
                        ran on at the source or could do so",
                    )
                });
                self.phase = Phase::Revoking;
                Some(SourceAction::RevokeHandOver)
            }
            (Phase::AskingTarget { .. }, SourceEvent::TargetSays(TargetState::Ended)) => {
                Some(self.has_ended_there(now_ms))
            }
            (Phase::AskingTarget { since_ms }, SourceEvent::TargetSays(TargetState::RunningInPart)) => {
                self.runs_in_part(now_ms, since_ms)
            }
            (Phase::Reconnecting { .. }, _) => self.reconnected(now_ms),
            (Phase::AskingTarget { since_ms }, SourceEvent::TargetSays(TargetState::Ready)) => {
                self.phase = Phase::ResumingOnTarget { since_ms };
                Some(SourceAction::ResumeOnTarget)
            }
            (Phase::AskingTarget { .. }, SourceEvent::TargetSays(TargetState::Discarded)) => {
                let error = "the target discarded the VM and never ran it";
                self.note(now_ms, error);
                // Known already, unless this life of it began with the question.
                self.error.get_or_insert_with(|| Problem::failed(error));
                self.phase = Phase::Revoking;
                Some(SourceAction::RevokeHandOver)
            }
            // A target that has lost its records may have run the VM, or run it still.
            (Phase::AskingTarget { since_ms }, SourceEvent::TargetSays(TargetState::Unknown)) => {
                self.note(now_ms, NO_RECORD);
                self.error = Some(Problem::failed(NO_RECORD));
                Some(self.ask_again(now_ms, since_ms))
            }
            (Phase::AskingTarget { .. }, SourceEvent::TargetSays(TargetState::Lost)) => {
                let error = "its target was lost after the hand-over, on the operator's word, and with it \
                    what the VM had in memory";
                self.error = Some(Problem::failed(error));
                self.phase = Phase::EndingOnSource;
                Some(SourceAction::EndOnSource)
            }
            // In this order: what is revoked, a start after a crash would let run on.
            (Phase::EndingOnSource, _) => {
                self.source_vm = Some(SourceVm::Ended);
                self.phase = Phase::Revoking;
                Some(SourceAction::RevokeHandOver)
            }
            (Phase::Revoking, _) => {
                self.is_the_targets = false;
                Some(self.undo())
            }
            (Phase::EndingOnTarget, _) => Some(self.clean_up(Outcome::Lost)),
            (Phase::CleaningUp(outcome), _) => Some(self.end(now_ms, outcome)),
            (Phase::Undoing(undo), _) => Some(self.undone(now_ms, undo)),
            (Phase::LookingAtVm, SourceEvent::VmIs(condition)) => Some(self.vm_is(now_ms, condition)),
            (
                Phase::CopyingDisks
                | Phase::MirroringDisks
                | Phase::Copying
                | Phase::SendingRest
                | Phase::AskingSource
                | Phase::AskingTarget { .. }
                | Phase::LookingAtVm
                | Phase::Ended(_),
                _,
            ) => None,
        }
    }

    fn action_failed(&mut self, now_ms: f64, error: Problem) -> Option<SourceAction> {
        self.note(now_ms, format!("failed: {error}"));
        match self.phase {
            // Whether the VM has run on at the source, or never does again, only its hypervisor knows.
            Phase::SwitchingOver if self.is_the_targets => {
                self.error = Some(error);
                self.phase = Phase::AskingSource;
                Some(SourceAction::AskSource)
            }
            Phase::Preparing(_)
            | Phase::AwaitingPlace { .. }
            | Phase::AwaitingTurn { .. }
            | Phase::StartingDiskCopies
            | Phase::SynchronisingDisks
            | Phase::StartingTransfer
            | Phase::BeginningPostCopy
            | Phase::EndingDiskCopies
            | Phase::SwitchingOver
            | Phase::RecordingHandOver => Some(self.give_up(error)),
            // A refusal and a lost answer look alike from here. Only the target's journal knows.
            Phase::ResumingOnTarget { since_ms }
            | Phase::AskingTarget { since_ms }
            | Phase::Reconnecting { since_ms } => {
                self.error.get_or_insert(error);
                Some(self.ask_again(now_ms, since_ms))
            }
            // While the source does not say that it let go, the target must not be told to run; and without
            // the record that it is revoked, a restart would take the VM for handed over.
            Phase::AskingSource | Phase::EndingOnSource | Phase::EndingOnTarget | Phase::Revoking => {
                Some(self.end_in_doubt(now_ms, error))
            }
            // The VM is the target's. What could not be tidied is in the journal for the next start.
            Phase::CleaningUp(outcome) => {
                self.error.get_or_insert(error.context(
                    "the VM has moved; the clean-up on the source failed, and the agent repeats it when it restarts",
                ));
                Some(self.end(now_ms, outcome))
            }
            Phase::Undoing(undo) => Some(self.undo_failed(undo, error)),
            Phase::LookingAtVm => Some(self.vm_is_mute(now_ms, &error)),
            Phase::CopyingDisks
            | Phase::MirroringDisks
            | Phase::Copying
            | Phase::SendingRest
            | Phase::Ended(_) => None,
        }
    }

    fn busy(&mut self, now_ms: f64, why: &str) -> Option<SourceAction> {
        let since_ms = match self.phase {
            Phase::Preparing(Step::CheckPermissions) => None,
            Phase::AwaitingPlace { since_ms } => Some(since_ms),
            _ => return None,
        };
        if self.cancel_requested {
            return Some(self.undo());
        }
        if since_ms.is_none() {
            self.note(now_ms, format!("waits for its place: {why}"));
        }
        let since_ms = since_ms.unwrap_or(now_ms);
        self.phase = Phase::AwaitingPlace { since_ms };
        if now_ms - since_ms >= self.limits.held_ms {
            return Some(self.give_up(Problem::failed(why)));
        }
        Some(SourceAction::CheckPermissions)
    }

    fn next_preparation(&mut self, now_ms: f64, step: Step) -> SourceAction {
        if self.cancel_requested {
            return self.undo();
        }
        self.phase = Phase::Preparing(step);
        self.note(now_ms, step.title());
        match step {
            Step::CheckPermissions => {
                self.reached.target_asked = true;
                SourceAction::CheckPermissions
            }
            Step::AllocateMemory => SourceAction::AllocateMemory,
            Step::BuildIncomingVm => SourceAction::BuildIncomingVm,
            Step::ConnectHosts => {
                self.reached.paths_prepared = true;
                SourceAction::ConnectHosts
            }
            _ => SourceAction::EstablishHosts,
        }
    }

    fn connected(&mut self, now_ms: f64, plan: Plan) -> SourceAction {
        if self.plan.as_ref() != Some(&plan) {
            self.note(now_ms, describe_plan(&plan));
        }
        self.plan = Some(plan);
        if self.cancel_requested {
            return self.undo();
        }
        self.timings.connected_ms = Some(now_ms);
        self.phase = Phase::AwaitingTurn { has_waited: false };
        SourceAction::AwaitTurn
    }

    fn wait_on(&mut self, now_ms: f64) -> Option<SourceAction> {
        let Phase::AwaitingTurn { has_waited } = self.phase else { return None };
        if !has_waited {
            self.note(now_ms, "waits for its turn to send");
        }
        self.phase = Phase::AwaitingTurn { has_waited: true };
        Some(SourceAction::AwaitTurn)
    }

    fn released(&mut self, now_ms: f64) -> SourceAction {
        self.timings.released_ms = Some(now_ms);
        self.reached.transfer_started = true;
        self.start_disk_copies(now_ms).unwrap_or_else(|| self.start_transfer())
    }

    fn start_transfer(&mut self) -> SourceAction {
        self.phase = Phase::StartingTransfer;
        SourceAction::StartTransfer
    }

    fn transfer_started(&mut self, now_ms: f64) -> Option<SourceAction> {
        if self.disks.go_along() {
            return self.disk_copies_started(now_ms);
        }
        self.memory_goes(now_ms);
        self.cancel_requested.then(|| self.undo())
    }

    fn memory_goes(&mut self, now_ms: f64) {
        self.phase = Phase::Copying;
        self.meter.record(now_ms, Transferred::default());
        self.note(now_ms, "sending");
    }

    fn paused(&mut self, now_ms: f64) -> Option<SourceAction> {
        if self.disks.go_along() && self.phase == Phase::CopyingDisks {
            // It was not looked at between all of the disks was there and the pause.
            self.memory_follows(now_ms);
        }
        if self.phase != Phase::Copying {
            return None;
        }
        self.timings.paused_ms = Some(now_ms);
        self.note(now_ms, "the VM is paused on the source");
        Some(self.end_disk_copies().unwrap_or_else(|| self.part()))
    }

    /// The VM is paused, and its disks are where they belong.
    fn part(&mut self) -> SourceAction {
        let is_recorded_first = self.rest.follows();
        self.phase = if is_recorded_first { Phase::RecordingHandOver } else { Phase::SwitchingOver };
        if is_recorded_first { SourceAction::RecordHandOver } else { SourceAction::SwitchOver }
    }

    fn state_transferred(&mut self, now_ms: f64) -> SourceAction {
        self.timings.state_transferred_ms = Some(now_ms);
        if self.is_the_targets {
            self.note(now_ms, "everything that the VM needs to run is on the target");
            self.phase = Phase::ResumingOnTarget { since_ms: now_ms };
            return SourceAction::ResumeOnTarget;
        }
        self.note(now_ms, "all state is on the target");
        if self.cancel_requested {
            return self.undo();
        }
        self.phase = Phase::RecordingHandOver;
        SourceAction::RecordHandOver
    }

    fn transfer_failed(&mut self, now_ms: f64, error: Problem) -> Option<SourceAction> {
        if !matches!(self.phase, Phase::CopyingDisks | Phase::MirroringDisks | Phase::Copying) {
            return None;
        }
        self.note(now_ms, format!("the transfer broke: {error}"));
        Some(self.give_up(error))
    }

    fn handed_over(&mut self, now_ms: f64) -> SourceAction {
        self.is_the_targets = true;
        self.note(now_ms, "hand-over recorded");
        if self.rest.follows() {
            self.phase = Phase::SwitchingOver;
            return SourceAction::SwitchOver;
        }
        self.phase = Phase::ResumingOnTarget { since_ms: now_ms };
        SourceAction::ResumeOnTarget
    }

    fn resumed(&mut self, now_ms: f64, since_ms: f64) -> Option<SourceAction> {
        self.note_resumed(now_ms);
        if self.rest.is_unknown() || self.rest.problem.is_some() {
            // Whether a part of the memory is still to come.
            return Some(self.ask_again(now_ms, since_ms));
        }
        let is_outstanding = self.rest.follows() && self.timings.rest_sent_ms.is_none();
        if is_outstanding { self.send_rest(now_ms) } else { Some(self.clean_up(Outcome::Completed)) }
    }

    fn runs_on_target(&mut self, now_ms: f64) -> Option<SourceAction> {
        self.note_resumed(now_ms);
        if self.rest.follows() && self.rest.problem.is_none() && self.timings.rest_sent_ms.is_none() {
            // Whether all of it has been sent, the source's hypervisor knows.
            return self.send_rest(now_ms);
        }
        if self.rest.follows() {
            self.timings.rest_sent_ms.get_or_insert(now_ms);
        }
        Some(self.clean_up(Outcome::Completed))
    }

    fn has_ended_there(&mut self, now_ms: f64) -> SourceAction {
        self.note_order_to_run(now_ms);
        self.error = Some(match self.rest.problem.take() {
            Some(problem) => {
                problem.context("the VM is lost: it has ended on the target before all its memory was there")
            }
            None => {
                Problem::failed("the VM is lost: it has ended on the target after the order to run there")
            }
        });
        self.clean_up(Outcome::Lost)
    }

    fn note_resumed(&mut self, now_ms: f64) {
        self.error = None;
        self.timings.resumed_ms.get_or_insert(now_ms);
        if !std::mem::replace(&mut self.rest.is_running_there, true) {
            self.note(now_ms, "the VM runs on the target");
        }
    }

    /// Whether it runs is reported later, once its hypervisor says so.
    fn note_order_to_run(&mut self, now_ms: f64) {
        self.error = None;
        if self.timings.resumed_ms.is_none() {
            self.timings.resumed_ms = Some(now_ms);
            self.note(now_ms, "the VM was told to run on the target");
        }
    }

    fn clean_up(&mut self, outcome: Outcome) -> SourceAction {
        self.phase = Phase::CleaningUp(outcome);
        SourceAction::CleanUp
    }

    fn ask_again(&mut self, now_ms: f64, since_ms: f64) -> SourceAction {
        if now_ms - since_ms >= self.limits.decision_ms {
            let error = self.error.take().unwrap_or_else(|| Problem::failed("the target does not answer"));
            return self.end_in_doubt(now_ms, error);
        }
        self.phase = Phase::AskingTarget { since_ms };
        SourceAction::AskTarget
    }

    fn request_cancel(&mut self, now_ms: f64) -> Option<SourceAction> {
        if self.is_handed_over() || self.cancel_requested {
            return None;
        }
        self.cancel_requested = true;
        self.note(now_ms, "cancel requested");
        match self.phase {
            Phase::AwaitingTurn { .. } | Phase::CopyingDisks | Phase::MirroringDisks | Phase::Copying => {
                Some(self.undo())
            }
            _ => None,
        }
    }

    fn check_limits(&mut self, now_ms: f64) -> Option<SourceAction> {
        let (held_ms, limits) = (self.held_ms(now_ms), self.limits);
        let too_late = match self.phase {
            Phase::AwaitingTurn { .. } => (held_ms >= limits.held_ms)
                .then(|| format!("its turn to send did not come within {}", seconds(limits.held_ms))),
            Phase::CopyingDisks | Phase::MirroringDisks => {
                (now_ms - held_ms >= self.total_ms()).then(|| self.disks_not_there_in_time())
            }
            Phase::Copying => (now_ms - held_ms >= self.total_ms()).then(|| self.not_over_in_time(now_ms)),
            // There is no way back: however long it takes, only that something comes can be asked for.
            Phase::SendingRest => None,
            // Each has an action under way, which ends by the executor's own deadline.
            _ => return None,
        };
        if let Some(error) = too_late {
            return Some(self.give_up(Problem::failed(error)));
        }
        // Nothing has been sent before there is a transfer, so there is no silence.
        if let Some(why) = self.disks_stand_still(now_ms) {
            return Some(self.give_up(Problem::failed(why)));
        }
        if self.meter.silent_ms(now_ms) >= self.limits.stall_ms {
            let error = self.nothing_arrived(now_ms);
            return if self.phase == Phase::SendingRest {
                self.rest_interrupted(now_ms, Problem::failed(error))
            } else {
                Some(self.give_up(Problem::failed(error)))
            };
        }
        None
    }

    /// How long it has waited for its place at the target and for its turn.
    fn held_ms(&self, now_ms: f64) -> f64 {
        let connected_ms = self.timings.connected_ms.unwrap_or(now_ms);
        self.timings.awaited_place_ms + self.timings.released_ms.unwrap_or(now_ms) - connected_ms
    }

    fn end_in_doubt(&mut self, now_ms: f64, error: Problem) -> SourceAction {
        self.error = Some(error);
        self.end(now_ms, Outcome::InDoubt)
    }

    fn end(&mut self, now_ms: f64, outcome: Outcome) -> SourceAction {
        self.timings.ended_ms = Some(now_ms);
        self.note(
            now_ms,
            match outcome {
                Outcome::Completed => "completed",
                Outcome::Failed => "failed",
                Outcome::Cancelled => "cancelled",
                Outcome::Lost if self.is_the_targets => "lost: the VM has ended on the target",
                Outcome::Lost => "lost: the VM has ended on the source",
                Outcome::InDoubt => "in doubt; asking again which host the VM belongs to",
            },
        );
        self.phase = Phase::Ended(outcome);
        SourceAction::Finish
    }

    fn is_handed_over(&self) -> bool {
        self.is_the_targets || matches!(self.phase, Phase::RecordingHandOver | Phase::Ended(_))
    }
}

fn following(step: Step) -> Step {
    match step {
        Step::CheckPermissions => Step::AllocateMemory,
        Step::AllocateMemory => Step::BuildIncomingVm,
        _ => Step::ConnectHosts,
    }
}

fn describe_plan(plan: &Plan) -> String {
    let paths: Vec<String> = plan.paths.iter().map(ToString::to_string).collect();
    let reason = plan.reason().map(|reason| format!(" ({reason})")).unwrap_or_default();
    format!("{} over {}{reason}", plan.option(), paths.join(", "))
}

#[cfg(test)]
mod tests {
    use super::in_flight::{copying, well};
    use super::*;

    /// An agent that has restarted hears from the target that it discarded the VM.
    fn discarded(after: Option<Problem>) -> Migration {
        let (mut migration, first) = Migration::recover(Limits::default(), true);
        assert_eq!(first, SourceAction::AskSource);
        let let_go = SourceEvent::SourceSays(SourceState::LetGo);
        assert_eq!(migration.handle(0.0, let_go), Some(SourceAction::AskTarget));
        if let Some(problem) = after {
            assert_eq!(migration.handle(0.0, SourceEvent::Failed(problem)), Some(SourceAction::AskTarget));
        }
        let mut next = migration.handle(0.0, SourceEvent::TargetSays(TargetState::Discarded));
        assert_eq!(next, Some(SourceAction::RevokeHandOver));
        while let Some(action) = next.filter(|action| *action != SourceAction::Finish) {
            next = migration.handle(0.0, well(action));
        }
        migration
    }

    #[test]
    fn a_migration_that_the_target_discarded_failed_for_a_reason() {
        let unreachable = Problem::failed("the target does not answer");
        for (known, problem) in [
            (None, Problem::failed("the target discarded the VM and never ran it")),
            (Some(unreachable.clone()), unreachable),
        ] {
            let migration = discarded(known);
            assert_eq!(migration.outcome(), Some(Outcome::Failed));
            assert_eq!(migration.error(), Some(&problem));
        }
    }

    #[test]
    fn a_vm_that_ran_on_stays_though_its_hand_over_is_recorded() {
        let (mut migration, _) = Migration::recover(Limits::default(), true);
        let mut next = migration.handle(0.0, SourceEvent::SourceSays(SourceState::Kept));
        let mut actions = vec![];
        while let Some(action) = next.filter(|action| *action != SourceAction::Finish) {
            actions.push(action);
            next = migration.handle(0.0, well(action));
        }
        let undone = [
            SourceAction::StopTransfer,
            SourceAction::ResumeOnSource,
            SourceAction::DiscardTarget,
            SourceAction::PutBack,
            SourceAction::LookAtVm,
        ];
        assert_eq!(actions, [&[SourceAction::RevokeHandOver], &undone[..]].concat());
        assert_eq!(migration.outcome(), Some(Outcome::Failed));
        assert!(migration.error().unwrap().to_string().contains("ran on at the source"));
    }

    /// A migration that is undone, and of whose VM its hypervisor says this.
    fn undone(said: SourceEvent) -> Migration {
        let (mut migration, mut next) = Migration::recover(Limits::default(), false);
        while next != SourceAction::LookAtVm {
            next = migration.handle(0.0, SourceEvent::Done).expect("it is undone in order");
        }
        assert_eq!(migration.handle(0.0, said), Some(SourceAction::Finish));
        migration
    }

    #[test]
    fn what_is_told_of_a_vm_that_did_not_move_its_hypervisor_has_said() {
        let reported = |said| {
            let migration = undone(said);
            (migration.outcome(), migration.source_vm(), migration.error().unwrap().to_string())
        };
        let (outcome, vm, _) = reported(SourceEvent::VmIs(VmCondition::Runs));
        assert_eq!((outcome, vm), (Some(Outcome::Failed), Some(SourceVm::Runs)));
        let (outcome, vm, error) = reported(SourceEvent::VmIs(VmCondition::Paused));
        assert_eq!((outcome, vm), (Some(Outcome::Failed), Some(SourceVm::Paused)));
        assert!(error.contains("stands still on the source"), "{error}");
        let (outcome, vm, error) =
            reported(SourceEvent::VmIs(VmCondition::Ended(Problem::failed("by signal 6"))));
        assert_eq!((outcome, vm), (Some(Outcome::Lost), Some(SourceVm::Ended)));
        assert!(error.contains("the VM is lost") && error.contains("by signal 6"), "{error}");
        let (outcome, vm, error) = reported(SourceEvent::Failed(Problem::failed("QEMU did not answer")));
        assert_eq!((outcome, vm), (Some(Outcome::Failed), Some(SourceVm::Unknown)));
        assert!(error.contains("it is not known whether the VM runs on the source"), "{error}");
    }

    #[test]
    fn a_target_without_a_record_has_promised_nothing() {
        let (mut migration, _) = Migration::recover(Limits::default(), true);
        migration.handle(0.0, SourceEvent::SourceSays(SourceState::LetGo));
        let unknown = || SourceEvent::TargetSays(TargetState::Unknown);
        assert_eq!(migration.handle(0.0, unknown()), Some(SourceAction::AskTarget));
        assert_eq!(migration.handle(Limits::default().decision_ms, unknown()), Some(SourceAction::Finish));
        assert_eq!(migration.outcome(), Some(Outcome::InDoubt));
        assert!(migration.error().unwrap().to_string().contains("has no record"));
    }

    #[test]
    fn tidying_up_that_failed_is_told_as_such_and_not_as_what_is_left() {
        let mut migration = copying();
        let mut next = migration.handle(2_000.0, SourceEvent::Paused);
        while let Some(action) = next.filter(|action| *action != SourceAction::Finish) {
            let event = match action {
                SourceAction::CleanUp => SourceEvent::Failed(Problem::failed("QEMU did not end in time")),
                _ => well(action),
            };
            next = migration.handle(3_000.0, event);
        }
        assert_eq!(migration.outcome(), Some(Outcome::Completed));
        let message = migration.error().unwrap().to_string();
        for words in [
            "the VM has moved; the clean-up on the source failed",
            "when it restarts",
            "QEMU did not end in time",
        ] {
            assert!(message.contains(words), "`{words}` is missing: {message}");
        }
        assert!(!message.contains("not clean"), "nobody has looked: {message}");
    }

    #[test]
    fn while_the_source_does_not_say_whether_the_vm_runs_there_nothing_is_decided() {
        let silent = || SourceEvent::Failed(Problem::failed("QEMU does not answer"));
        for said in [None, Some(SourceEvent::SourceSays(SourceState::Kept))] {
            let (mut migration, _) = Migration::recover(Limits::default(), true);
            if let Some(said) = said {
                assert_eq!(migration.handle(0.0, said), Some(SourceAction::RevokeHandOver));
            }
            assert!(!migration.can_cancel());
            assert_eq!(migration.handle(0.0, silent()), Some(SourceAction::Finish));
            assert_eq!(migration.outcome(), Some(Outcome::InDoubt));
        }
    }
}
