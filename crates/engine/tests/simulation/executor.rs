//! The source's executor: carries out the engine's actions one by one, each in the parts between which its agent may
//! crash or fall asleep, and tells the engine what came of them.

use drainpipe_engine::journal::RECORD_AGAIN_AFTER;
use drainpipe_engine::migration::result::{Outcome, SourceVm};
use drainpipe_engine::migration::target::IncomingView as View;
use drainpipe_engine::migration::timing;
use drainpipe_engine::migration::{
    Migration, SourceAction, SourceEvent, SourceState, Stage, TargetState, VmCondition,
};
use drainpipe_engine::plan::{Plan, Protection, Transfer};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::transfer::transferred::Transferred;

use crate::faults::Fault;
use crate::libvirt::{LettingGo, SwitchedOver};
use crate::milliseconds::ms;
use crate::network::{Answer, Letter, Order, Question, TargetAnswer};
use crate::planted::Planted;
use crate::qemu::{Command, Reply, Sending, SourceQemu};
use crate::source::LIMITS;
use crate::world::{Host, Life, Sight, World};

/// Less often than the real one, which would only take more steps.
const LOOK_EVERY_MS: f64 = 500.0;
const ANSWER_DEADLINE_MS: f64 = ms(timing::QMP_DEADLINE);
const QEMU_DEADLINE_MS: f64 = ms(timing::QEMU_DEADLINE);
const MUTE_AFTER_MS: f64 = ms(timing::MUTE_AFTER);
const SWITCH_OVER_DEADLINE_MS: f64 = ms(timing::SWITCH_OVER_DEADLINE);
const ASK_FOR_PLACE_EVERY_MS: f64 = ms(timing::ASK_FOR_PLACE_EVERY);
const ASK_AGAIN_AFTER_MS: f64 = ms(timing::ASK_AGAIN_AFTER);
const IN_DOUBT_PAUSE_MS: f64 = ms(timing::IN_DOUBT_PAUSE);
const RECORD_AGAIN_AFTER_MS: f64 = ms(RECORD_AGAIN_AFTER);

/// The longest time without arrivals before the VM is no longer throttled: a second, and the time until the next look.
const THROTTLED_IN_SILENCE_MS_MAX: f64 = 1_000.0;

/// What an executor is doing. Crashes, freezes and the deeds of others come between any two of these.
#[derive(Debug)]
pub(crate) enum Doing {
    Act(SourceAction),
    /// The second part of an action that has two.
    Rest(SourceAction),
    Await {
        action: SourceAction,
        order: Order,
        question: Question,
        until_ms: f64,
    },
    /// The result of the action is known at `at_ms`.
    Later {
        at_ms: f64,
        event: SourceEvent,
    },
    /// The engine is to be given this event.
    Happened(SourceEvent),
    /// Nothing to do but to look at the transfer.
    Look {
        at_ms: f64,
    },
    /// The outcome is in doubt: the target is asked again after this time.
    Pause {
        until_ms: f64,
    },
    Conclude {
        at_ms: f64,
    },
    /// A domain's end at the source, after all of it has been sent.
    LetGo {
        at_ms: f64,
        step: LettingGo,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cancel {
    No,
    Requested,
    Delivered,
}

#[derive(Debug)]
pub(crate) struct Executor {
    migration: Migration,
    number: usize,
    doing: Doing,
    answer: Option<Answer>,
    plan: Option<Plan>,
    guard: Option<usize>,
    cancel: Cancel,
    switch_over_until_ms: f64,
    sent_bytes: u64,
    /// When something last arrived, by the executor's clock.
    grown_ms: f64,
    began_ms: f64,
    /// By how much the executor's clock has jumped.
    skew_ms: f64,
    was_in_doubt: bool,
    /// What the VM was doing at the last look, if its QEMU answered.
    seen: Option<SourceVm>,
    /// Whether the target has said that the VM has ended there.
    has_ended_there: bool,
    /// Whether the source's QEMU was there when the target was asked last.
    has_asked_with_qemu: bool,
    /// The engine's last action.
    action: SourceAction,
    /// The life of libvirt in which a domain's transfer began.
    pub libvirts_life: u32,
    pub switched_over: SwitchedOver,
}

impl Executor {
    pub(crate) fn new(number: usize, migration: Migration, first: SourceAction, now_ms: f64) -> Self {
        Self {
            migration,
            number,
            doing: Doing::Act(first),
            answer: None,
            plan: None,
            guard: None,
            cancel: Cancel::No,
            switch_over_until_ms: 0.0,
            sent_bytes: 0,
            grown_ms: 0.0,
            began_ms: now_ms,
            skew_ms: 0.0,
            was_in_doubt: false,
            seen: None,
            has_ended_there: false,
            has_asked_with_qemu: false,
            action: first,
            libvirts_life: 0,
            switched_over: SwitchedOver::default(),
        }
    }

    pub(crate) fn number(&self) -> usize {
        self.number
    }

    pub(crate) fn goes_on(&self, migration: usize) -> bool {
        self.number == migration && !self.was_in_doubt && !matches!(self.doing, Doing::Conclude { .. })
    }

    pub(crate) fn request_cancel(&mut self) {
        if self.cancel == Cancel::No {
            self.cancel = Cancel::Requested;
        }
    }

    pub(crate) fn jump(&mut self, by_ms: f64) {
        self.skew_ms += by_ms;
    }

    /// The action under way, from the order until the engine knows its result.
    pub(crate) fn action(&self) -> Option<SourceAction> {
        let is_at_it = !matches!(self.doing, Doing::Look { .. } | Doing::Pause { .. });
        is_at_it.then_some(self.action)
    }

    /// Whether the migration is between the VM's pause and its end.
    pub(crate) fn is_being_decided(&self) -> bool {
        matches!(self.migration.stage(), Stage::SwitchingOver | Stage::Sent | Stage::Undoing | Stage::Ended)
    }

    pub(crate) fn take_answer(&mut self, question: Question, answer: Answer) {
        if matches!(self.doing, Doing::Await { question: asked, .. } if asked == question) {
            self.answer = Some(answer);
        }
    }

    /// When it acts next, at the latest.
    pub(crate) fn wakes_ms(&self) -> f64 {
        let is_cancelled = self.cancel == Cancel::Requested;
        let waits_for_turn = self.migration.stage() == Stage::Ready;
        match self.doing {
            Doing::Await { .. } if self.answer.is_some() => 0.0,
            Doing::Later { .. } if is_cancelled && waits_for_turn => 0.0,
            Doing::Look { .. } if is_cancelled => 0.0,
            Doing::Await { until_ms: at_ms, .. }
            | Doing::Later { at_ms, .. }
            | Doing::Look { at_ms }
            | Doing::Pause { until_ms: at_ms }
            | Doing::Conclude { at_ms }
            | Doing::LetGo { at_ms, .. } => at_ms,
            Doing::Act(_) | Doing::Rest(_) | Doing::Happened(_) => 0.0,
        }
    }

    pub(crate) fn has_disks(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| !plan.disks.is_empty())
    }

    /// Whether the VM's writes are to be held back.
    pub(crate) fn holds_writes(&self) -> bool {
        self.migration.write_limit().is_some()
    }

    pub(crate) fn last_action(&self) -> SourceAction {
        self.action
    }

    pub(crate) fn describe(&self) -> String {
        format!("migration {}: {:?} {:?}", self.number, self.doing, self.answer)
    }

    fn now_ms(&self, now_ms: f64) -> f64 {
        now_ms - self.began_ms + self.skew_ms
    }
}

pub(crate) fn failed(why: &str) -> SourceEvent {
    SourceEvent::Failed(Problem::failed(why))
}

impl World {
    pub(crate) fn step_executor(&mut self) {
        let Some(mut executor) = self.source.executor.take() else { return };
        let doing = std::mem::replace(&mut executor.doing, Doing::Look { at_ms: 0.0 });
        let next = match doing {
            Doing::Act(action) => self.act(&mut executor, action),
            Doing::Rest(action) => self.rest(&mut executor, action),
            Doing::Await { action, order, question, .. } => {
                self.answered(&mut executor, action, order, question)
            }
            Doing::Later { event, .. } => Doing::Happened(event),
            Doing::Look { .. } => Doing::Happened(self.look(&mut executor)),
            Doing::Happened(event) => self.happened(&mut executor, event),
            Doing::Pause { .. } => self.ask_once_more(&mut executor),
            Doing::LetGo { step, .. } => self.let_go(&mut executor, step),
            Doing::Conclude { .. } => match self.conclude(&mut executor) {
                Some(again) => again,
                None => return,
            },
        };
        executor.doing = next;
        self.source.executor = Some(executor);
    }

    fn happened(&mut self, executor: &mut Executor, event: SourceEvent) -> Doing {
        let now_ms = executor.now_ms(self.now_ms);
        let interrupted = if executor.cancel == Cancel::Requested {
            executor.cancel = Cancel::Delivered;
            executor.migration.handle(now_ms, SourceEvent::CancelRequested)
        } else {
            None
        };
        let mut next = interrupted.or_else(|| executor.migration.handle(now_ms, event));
        if next.is_none()
            && executor.migration.stage() == Stage::Sending
            && let Some(event) = self.held_progress()
        {
            next = executor.migration.handle(now_ms, event);
        }
        self.follow_throttle(executor, now_ms);
        self.follow_write_limit(executor);
        match next {
            Some(SourceAction::Finish) if executor.migration.outcome() == Some(Outcome::InDoubt) => {
                self.saw(Sight::InDoubt);
                executor.was_in_doubt = true;
                Doing::Pause { until_ms: self.now_ms + IN_DOUBT_PAUSE_MS }
            }
            Some(SourceAction::Finish) => {
                self.dismiss(executor.guard.take());
                executor.action = SourceAction::Finish;
                Doing::Conclude { at_ms: self.now_ms }
            }
            Some(action) => {
                executor.action = action;
                Doing::Act(action)
            }
            None => Doing::Look { at_ms: self.now_ms + LOOK_EVERY_MS },
        }
    }

    fn follow_throttle(&mut self, executor: &mut Executor, now_ms: f64) {
        let is_copying = matches!(executor.migration.stage(), Stage::Sending | Stage::Ending);
        if !is_copying {
            executor.grown_ms = now_ms;
        }
        let is_wanted = executor.migration.throttle_percent().is_some();
        let is_kept = match self.planted {
            Planted::ThrottleKept => is_copying,
            Planted::ThrottleLeft => !is_copying,
            _ => false,
        };
        let Some(qemu) = &mut self.source.qemu else { return };
        qemu.is_throttled = is_wanted || qemu.is_throttled && is_kept;
        if is_wanted {
            self.saw(Sight::Throttled);
        } else if is_copying && now_ms - executor.grown_ms > THROTTLED_IN_SILENCE_MS_MAX && qemu.is_throttled
        {
            self.breach("I3: the VM is throttled though nothing arrives".into());
        }
    }

    fn act(&mut self, executor: &mut Executor, action: SourceAction) -> Doing {
        if action == SourceAction::StopTransfer {
            self.abandon_disk_copies();
        }
        match action {
            SourceAction::EstablishHosts => Doing::Happened(self.establish_hosts(executor)),
            SourceAction::CheckPermissions => {
                let runs = self.copy_at(Host::Source).is_some_and(|copy| copy.runs);
                if !runs || !self.answers(Host::Source) {
                    return Doing::Happened(failed("only a running VM moves"));
                }
                self.order(executor, action, Order::Permit)
            }
            SourceAction::AllocateMemory => self.order(executor, action, Order::Memory),
            SourceAction::BuildIncomingVm => self.order(executor, action, Order::IncomingVm),
            SourceAction::ConnectHosts => self.connect_hosts(executor),
            SourceAction::AwaitTurn => self.await_turn(),
            SourceAction::SynchroniseDisks | SourceAction::StartTransfer => {
                executor.guard = executor.guard.or_else(|| self.post_guard(executor.number));
                executor
                    .guard
                    .map_or(Doing::Happened(failed("the guard before is at work")), |_| Doing::Rest(action))
            }
            SourceAction::StartDiskCopies => self.start_disk_copies(),
            SourceAction::EndDiskCopies => self.end_disk_copies(),
            SourceAction::BeginPostCopy if self.has_converged() => Doing::Happened(SourceEvent::Converged),
            SourceAction::BeginPostCopy => self.command(Command::BeginPostCopy, ANSWER_DEADLINE_MS),
            SourceAction::SwitchOver => self.switch_over(executor),
            SourceAction::RecordHandOver => self.record_hand_over(executor),
            SourceAction::ResumeOnTarget => self.order(executor, action, Order::Run),
            SourceAction::AskSource => self.ask_own_qemu(),
            SourceAction::AskTarget => self.ask_target(executor),
            SourceAction::EndOnSource if !self.serves(Host::Source) => {
                Doing::Happened(failed("libvirt does not end it"))
            }
            SourceAction::EndOnSource => {
                self.dismiss(executor.guard.take());
                self.source.qemu = None;
                Doing::Happened(SourceEvent::Done)
            }
            SourceAction::RevokeHandOver => Doing::Happened(self.revoke_hand_over(executor)),
            SourceAction::Reconnect => self.order(executor, action, Order::Reconnect),
            SourceAction::EndOnTarget => self.order(executor, action, Order::End),
            // The real agent does both at once: either may be first.
            SourceAction::CleanUp if self.random.chance(50) => self.order(executor, action, Order::Finish),
            SourceAction::CleanUp => {
                self.end_source();
                Doing::Rest(action)
            }
            SourceAction::StopTransfer if self.waits_for_target() => {
                // The connections to the target are cut.
                self.break_stream();
                Doing::Later { at_ms: self.now_ms + MUTE_AFTER_MS, event: SourceEvent::Done }
            }
            SourceAction::StopTransfer => self.command(Command::Cancel, QEMU_DEADLINE_MS),
            SourceAction::ResumeOnSource => self.resume_on_source(executor),
            SourceAction::DiscardTarget => self.order(executor, action, Order::Discard),
            SourceAction::PutBack => {
                self.source.is_network_changed = false;
                Doing::Happened(SourceEvent::Done)
            }
            SourceAction::LookAtVm => self.look_at_vm(executor),
            SourceAction::Finish => Doing::Conclude { at_ms: self.now_ms },
        }
    }

    fn rest(&mut self, executor: &mut Executor, action: SourceAction) -> Doing {
        match action {
            SourceAction::SynchroniseDisks => self.synchronise_disks(),
            SourceAction::StartTransfer => {
                self.begin_along();
                self.start_transfer(executor)
            }
            SourceAction::EndDiskCopies => self.close_disks_there(executor),
            SourceAction::SwitchOver => self.order(executor, action, Order::Received),
            // Whatever was to come has arrived by now: the target does not have the rest.
            SourceAction::AskTarget => self.order(executor, action, Order::Discard),
            SourceAction::CleanUp => self.order(executor, action, Order::Finish),
            SourceAction::Reconnect => {
                let event = if self.reconnect() { SourceEvent::Done } else { failed("it does not connect") };
                Doing::Later { at_ms: self.now_ms + ASK_AGAIN_AFTER_MS, event }
            }
            _ => Doing::Happened(SourceEvent::Done),
        }
    }

    pub(crate) fn order(&mut self, executor: &Executor, action: SourceAction, order: Order) -> Doing {
        let question = self.network.new_question();
        self.send(Letter::Order { order, migration: executor.number, question });
        let has_deadline = self.planted != Planted::NoDeadline;
        let until_ms = if has_deadline { self.now_ms + ANSWER_DEADLINE_MS } else { f64::INFINITY };
        Doing::Await { action, order, question, until_ms }
    }

    fn answered(
        &mut self,
        executor: &mut Executor,
        action: SourceAction,
        order: Order,
        question: Question,
    ) -> Doing {
        let Some(answer) = executor.answer.take() else {
            // The executor hangs up, and the task that serves it at the target may be dropped.
            self.cut_tasks(Some(question));
            return self.came_of(executor, action, order, Err(ProblemKind::Unreachable));
        };
        self.came_of(executor, action, order, answer)
    }

    fn came_of(
        &mut self,
        executor: &mut Executor,
        action: SourceAction,
        order: Order,
        answer: Answer,
    ) -> Doing {
        executor.has_ended_there |= matches!(answer, Ok(TargetAnswer::View(View::Ended)));
        let answer = self.misread(action, answer);
        let event = match (action, answer) {
            (SourceAction::SwitchOver, Ok(_)) if order == Order::Complete => {
                executor.switched_over.has_finished = true;
                return self.go_on_switching_over(executor);
            }
            (SourceAction::CheckPermissions, Ok(TargetAnswer::Busy)) => {
                let event = SourceEvent::Busy("two are on their way".into());
                return Doing::Later { at_ms: self.now_ms + ASK_FOR_PLACE_EVERY_MS, event };
            }
            (SourceAction::ConnectHosts, Ok(_)) => {
                executor.plan.clone().map_or(SourceEvent::Done, SourceEvent::Connected)
            }
            (SourceAction::SwitchOver, Ok(TargetAnswer::View(View::Ready | View::ReadyInPart)))
                if self.source_looks() && self.now_ms < executor.switch_over_until_ms =>
            {
                return Doing::Rest(action);
            }
            (SourceAction::SwitchOver, Ok(TargetAnswer::View(View::Ready | View::ReadyInPart)))
                if self.source_may_run_on() =>
            {
                failed("the source's QEMU does not say that it let go")
            }
            (SourceAction::SwitchOver, Ok(TargetAnswer::View(View::Ready | View::ReadyInPart))) => {
                SourceEvent::Done
            }
            (SourceAction::SwitchOver, Ok(_)) if self.now_ms < executor.switch_over_until_ms => {
                return Doing::Rest(action);
            }
            (SourceAction::SwitchOver, Ok(_)) => failed("the last of the state did not arrive"),
            (SourceAction::AskTarget, Ok(_)) if order == Order::Discard => {
                SourceEvent::TargetSays(TargetState::Discarded)
            }
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::Unknown))) => {
                let event = SourceEvent::TargetSays(TargetState::Unknown);
                return Doing::Later { at_ms: self.now_ms + ASK_AGAIN_AFTER_MS, event };
            }
            (SourceAction::AskTarget, Err(ProblemKind::NotFound)) if order == Order::Discard => {
                SourceEvent::TargetSays(TargetState::Unknown)
            }
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::Running))) => {
                SourceEvent::TargetSays(TargetState::Running)
            }
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::Ended))) => {
                SourceEvent::TargetSays(TargetState::Ended)
            }
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::RunningInPart))) => {
                SourceEvent::TargetSays(TargetState::RunningInPart)
            }
            // The target cannot have the rest, since the source's QEMU has failed to send it.
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::Ready | View::ReadyInPart)))
                if self.source_is_astray() =>
            {
                return Doing::Rest(action);
            }
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::Ready))) => {
                SourceEvent::TargetSays(TargetState::Ready)
            }
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::Waiting)) | Err(ProblemKind::Failed))
                if order == Order::View && self.target_may_be_needed(answer) =>
            {
                let event = failed("all of it is on its way");
                return Doing::Later { at_ms: self.now_ms + ASK_AGAIN_AFTER_MS, event };
            }
            // The source's QEMU may have sent the rest since the target answered.
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::ReadyInPart)))
                if order == Order::View && executor.has_asked_with_qemu && self.source.qemu.is_none() =>
            {
                failed("its QEMU has ended since the target was asked")
            }
            // Without the rest, the target's part is of no use; and the VM may have run on here for a while.
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::ReadyInPart)))
                if self.source.qemu.is_some() =>
            {
                SourceEvent::TargetSays(TargetState::Ready)
            }
            (SourceAction::AskTarget, Ok(TargetAnswer::View(View::Waiting | View::ReadyInPart)))
            | (SourceAction::Reconnect, Ok(_)) => {
                return Doing::Rest(action);
            }
            // The target's QEMU does not answer. It may hold the only copy.
            (SourceAction::AskTarget, Err(ProblemKind::Failed))
                if order == Order::View
                    && (self.source.qemu.is_some() || self.planted == Planted::DiscardsOnlyCopy) =>
            {
                self.source.has_given_up_target = self.source.qemu.is_some();
                return self.order(executor, action, Order::Discard);
            }
            (SourceAction::AskTarget, Ok(_)) => SourceEvent::TargetSays(TargetState::Discarded),
            (SourceAction::AskTarget, Err(kind)) if order == Order::View => {
                let event = SourceEvent::Failed(Problem::new(kind, "the target does not say"));
                return Doing::Later { at_ms: self.now_ms + ASK_AGAIN_AFTER_MS, event };
            }
            (SourceAction::CleanUp, _) => {
                self.end_source();
                SourceEvent::Done
            }
            // A target without a record was handed nothing that it could run.
            (_, Ok(_)) | (SourceAction::DiscardTarget, Err(ProblemKind::NotFound)) => SourceEvent::Done,
            (_, Err(kind)) => {
                SourceEvent::Failed(Problem::new(kind, "the target refuses, or does not answer"))
            }
        };
        Doing::Happened(event)
    }

    /// With post-copy: whether the source's QEMU reports that post-copy is active, but may still let the VM run on.
    fn source_looks(&self) -> bool {
        let looks = self.source.qemu.as_ref().is_some_and(|qemu| qemu.sending == Sending::LastLook);
        looks && self.planted != Planted::StatusBelieved
    }

    /// With post-copy: whether the source's QEMU may still decide that sending what the VM needs has failed.
    fn source_may_run_on(&self) -> bool {
        let Some(qemu) = &self.source.qemu else {
            // If the hand-over was recorded before the switchover, nobody knows any more.
            let is_post_copy = self.source.journal.last().is_some_and(|record| record.handed_over);
            return is_post_copy && self.planted != Planted::RunsDoubted;
        };
        if !qemu.is_post_copy {
            return false;
        }
        let has_let_go = match qemu.sending {
            Sending::Rest | Sending::Interrupted | Sending::LastWord | Sending::Completed => true,
            Sending::LastLook => !self.source_looks(),
            _ => false,
        };
        !has_let_go && self.planted != Planted::RunsDoubted
    }

    /// Whether the source's QEMU has stopped the VM because little of it is left to send.
    fn has_converged(&self) -> bool {
        let is_stopped = self.source.qemu.as_ref().is_some_and(|qemu| qemu.sending == Sending::PreSwitchover);
        is_stopped && self.answers(Host::Source)
    }

    /// With post-copy: whether the source's QEMU has failed.
    fn source_is_astray(&self) -> bool {
        let failed = |qemu: &SourceQemu| {
            qemu.is_post_copy && matches!(qemu.sending, Sending::Failed | Sending::Cancelled)
        };
        self.source.qemu.as_ref().is_some_and(failed) && self.planted != Planted::RunsDoubted
    }

    /// With post-copy: whether the target may have a part of the VM without which the source cannot run it any more.
    fn target_may_be_needed(&self, answer: Answer) -> bool {
        let Some(qemu) = self.source.qemu.as_ref().filter(|qemu| qemu.is_post_copy) else { return false };
        match qemu.sending {
            Sending::Device { .. } | Sending::LastLook | Sending::Rest | Sending::LastWord => true,
            // What has not arrived by now never will.
            Sending::Interrupted => answer.is_err(),
            _ => false,
        }
    }

    fn misread(&mut self, action: SourceAction, answer: Answer) -> Answer {
        match (self.planted, action, answer) {
            (Planted::SilenceIsSuccess, SourceAction::ResumeOnTarget, Err(ProblemKind::Unreachable)) => {
                Ok(TargetAnswer::Done)
            }
            (Planted::SilenceIsDiscarded, SourceAction::AskTarget, Err(ProblemKind::Unreachable))
            | (Planted::UnknownIsDiscarded, SourceAction::AskTarget, Ok(TargetAnswer::View(View::Unknown))) => {
                Ok(TargetAnswer::View(View::Discarded))
            }
            (Planted::RunsIncomplete, SourceAction::SwitchOver, Ok(TargetAnswer::View(View::Waiting))) => {
                Ok(TargetAnswer::View(View::Ready))
            }
            (Planted::EndedIsRunning, SourceAction::AskTarget, Ok(TargetAnswer::View(View::Ended))) => {
                Ok(TargetAnswer::View(View::Running))
            }
            _ => answer,
        }
    }

    fn establish_hosts(&mut self, executor: &mut Executor) -> SourceEvent {
        let is_silent = self.target.life != Life::Up || self.now_ms < self.network.parted_until_ms;
        if is_silent || self.faults.meets(Fault::Refused, &mut self.random) {
            return failed("the target does not answer");
        }
        match self.hosts.plan() {
            Ok(plan) => {
                let mut plan = self.with_disks(plan);
                if self.planted == Planted::SilentFallback {
                    let protection = Protection::of(plan.encryption(), plan.limit_keeper());
                    (plan.transfer, plan.reasons) = (Transfer::OneConnection(protection), vec![]);
                }
                executor.plan = Some(plan.clone());
                SourceEvent::Established(plan)
            }
            Err(problem) => SourceEvent::Failed(problem),
        }
    }

    fn connect_hosts(&mut self, executor: &mut Executor) -> Doing {
        let Some(plan) = executor.plan.take() else { return Doing::Happened(failed("there is no plan")) };
        let (faults, random) = (&self.faults, &mut self.random);
        let narrowed = self.hosts.try_paths(plan, |_| faults.meets(Fault::DeadPath, random));
        let mut plan = match narrowed {
            Ok(plan) => plan,
            Err(problem) => return Doing::Happened(SourceEvent::Failed(problem)),
        };
        if self.planted == Planted::Clear {
            plan = in_the_clear(&plan);
        }
        let is_taken = self.hosts.target_takes(&plan);
        executor.plan = Some(plan);
        self.source.is_network_changed = true;
        self.order(executor, SourceAction::ConnectHosts, Order::Connect { is_taken })
    }

    fn await_turn(&mut self) -> Doing {
        if self.source.qemu.is_none() {
            return Doing::Happened(failed("its QEMU has ended"));
        }
        if self.turns_awaited == 0 {
            return Doing::Happened(SourceEvent::Done);
        }
        self.turns_awaited -= 1;
        Doing::Later { at_ms: self.now_ms + LOOK_EVERY_MS, event: SourceEvent::Tick }
    }

    fn start_transfer(&mut self, executor: &mut Executor) -> Doing {
        let plan = executor.plan.as_ref();
        if let Some(breach) = plan.and_then(|plan| self.hosts.breach(plan, executor.migration.plan())) {
            self.breach(breach);
        }
        self.meet_libvirt(executor);
        match self.command_source(Command::Migrate { migration: executor.number }) {
            Reply::Done => Doing::Happened(SourceEvent::Done),
            reply => {
                self.dismiss(executor.guard.take());
                let wait_ms = if reply == Reply::None { ANSWER_DEADLINE_MS } else { 0.0 };
                Doing::Later { at_ms: self.now_ms + wait_ms, event: failed("QEMU does not begin to send") }
            }
        }
    }

    fn switch_over(&mut self, executor: &mut Executor) -> Doing {
        executor.switch_over_until_ms = self.now_ms + SWITCH_OVER_DEADLINE_MS;
        if self.is_domain() {
            return self.switch_domain_over();
        }
        match self.command_source(Command::Continue) {
            Reply::Done => Doing::Rest(SourceAction::SwitchOver),
            Reply::None => {
                let event = failed("QEMU does not answer");
                Doing::Later { at_ms: self.now_ms + ANSWER_DEADLINE_MS, event }
            }
            Reply::Refused | Reply::Gone => Doing::Happened(failed("QEMU does not send the rest")),
        }
    }

    fn record_hand_over(&mut self, executor: &mut Executor) -> Doing {
        if self.planted == Planted::RunsBeforeRecord {
            let question = self.network.new_question();
            self.send(Letter::Order { order: Order::Run, migration: executor.number, question });
        }
        let is_full = self.is_source_disk_full();
        let ignores = self.planted == Planted::ForbiddenIgnored;
        let may_be_found = self.random.chance(50);
        let record = &mut self.source.journal[executor.number];
        let event = if is_full && self.planted == Planted::UnrecordedHandOver {
            SourceEvent::Done
        } else if is_full {
            // Nothing is written if the hand-over was forbidden.
            self.source.found_later = (may_be_found && !record.is_revoked).then_some(executor.number);
            self.saw(Sight::NotRecorded);
            failed("the disk is full")
        } else if record.is_revoked && !ignores {
            self.saw(Sight::HandOverForbidden);
            failed("its guard let the VM run here")
        } else {
            (record.handed_over, record.is_revoked) = (true, false);
            self.source.found_later = None;
            SourceEvent::Done
        };
        Doing::Happened(event)
    }

    fn revoke_hand_over(&mut self, executor: &Executor) -> SourceEvent {
        if self.is_source_disk_full() {
            self.saw(Sight::NotRecorded);
            return failed("the disk is full");
        }
        let record = &mut self.source.journal[executor.number];
        (record.handed_over, record.is_revoked) = (false, true);
        self.source.found_later = None;
        self.saw(Sight::Revoked);
        SourceEvent::Done
    }

    fn ask_own_qemu(&mut self) -> Doing {
        let Some(state) = self.source_state() else {
            let event = failed("QEMU does not answer");
            return Doing::Later { at_ms: self.now_ms + ANSWER_DEADLINE_MS, event };
        };
        if state == SourceState::Kept {
            self.saw(Sight::HandOverInVain);
        }
        Doing::Happened(SourceEvent::SourceSays(state))
    }

    fn ask_target(&mut self, executor: &mut Executor) -> Doing {
        let is_lost = self.target.is_lost || self.planted == Planted::LostTooSoon;
        if self.operator.says_lost && is_lost {
            self.source.journal[executor.number].is_reclaimed = true;
            // The operator's word counts as the host's end.
            self.is_lost = true;
            return Doing::Happened(SourceEvent::TargetSays(TargetState::Lost));
        }
        executor.has_asked_with_qemu = self.source.qemu.is_some();
        self.order(executor, SourceAction::AskTarget, Order::View)
    }

    fn look_at_vm(&mut self, executor: &mut Executor) -> Doing {
        executor.seen = None;
        if self.source.qemu.is_some() && !self.answers(Host::Source) && self.planted != Planted::NotLookedAt {
            let event = failed("QEMU does not answer");
            return Doing::Later { at_ms: self.now_ms + ANSWER_DEADLINE_MS, event };
        }
        let copy = self.copy_at(Host::Source);
        let condition = match copy {
            _ if self.planted == Planted::NotLookedAt => VmCondition::Runs,
            Some(copy) if copy.runs => VmCondition::Runs,
            Some(_) => VmCondition::Paused,
            None => VmCondition::Ended(Problem::failed("its QEMU has ended")),
        };
        executor.seen = Some(match copy {
            Some(copy) if copy.runs => SourceVm::Runs,
            Some(_) => SourceVm::Paused,
            None => SourceVm::Ended,
        });
        Doing::Happened(SourceEvent::VmIs(condition))
    }

    fn command(&mut self, command: Command, deadline_ms: f64) -> Doing {
        match self.command_source(command) {
            Reply::Done => Doing::Happened(SourceEvent::Done),
            // Without a QEMU, nothing is being sent.
            Reply::Gone if command == Command::Cancel => Doing::Happened(SourceEvent::Done),
            Reply::Gone | Reply::Refused => Doing::Happened(failed("its QEMU has ended")),
            Reply::None => {
                let event = failed("QEMU does not answer");
                Doing::Later { at_ms: self.now_ms + deadline_ms, event }
            }
        }
    }

    fn resume_on_source(&mut self, executor: &mut Executor) -> Doing {
        let doing = self.command(Command::LetRun, ANSWER_DEADLINE_MS);
        if matches!(doing, Doing::Happened(SourceEvent::Done)) {
            self.dismiss(executor.guard.take());
        } else if self.source.qemu.is_some() {
            self.resumes_failed += 1;
        }
        doing
    }

    fn end_source(&mut self) {
        if self.is_in_parts() {
            self.breach("I3: the source's part of the VM is ended, which the target needs".into());
        }
        self.end_domain(Host::Source);
        self.source.is_network_changed = false;
    }

    fn look(&mut self, executor: &mut Executor) -> SourceEvent {
        if executor.cancel == Cancel::Requested {
            return SourceEvent::Tick;
        }
        let sends_rest = executor.migration.stage() == Stage::SendingRest;
        if self.source.qemu.is_none() {
            let ended = Problem::failed("its QEMU has ended");
            return if sends_rest {
                SourceEvent::RestLost(ended)
            } else {
                SourceEvent::TransferFailed(ended)
            };
        }
        if let Some(event) = self.looks_at_disks(executor).or_else(|| self.look_at_domain(executor)) {
            return event;
        }
        let Some(qemu) = &self.source.qemu else { return SourceEvent::Tick };
        match qemu.sending {
            _ if qemu.mute_until_ms.is_some() => SourceEvent::Tick,
            Sending::Interrupted if sends_rest => {
                SourceEvent::RestInterrupted(Problem::failed("connection reset"))
            }
            Sending::Completed if sends_rest => SourceEvent::RestSent,
            Sending::Failed if sends_rest => {
                SourceEvent::RestLost(Problem::failed("it failed as its last bytes went"))
            }
            Sending::PreSwitchover => SourceEvent::Paused,
            Sending::Idle | Sending::Failed | Sending::Cancelled => {
                SourceEvent::TransferFailed(Problem::failed("connection reset"))
            }
            _ => {
                let is_parted = self.now_ms < self.network.parted_until_ms;
                if !is_parted {
                    executor.sent_bytes += 1 << 20;
                    executor.grown_ms = executor.now_ms(self.now_ms);
                }
                let sent_bytes = executor.sent_bytes;
                let rounds = executor.sent_bytes >> 20;
                // The VM dirties its memory as fast as it is sent, so each round leaves as much.
                let remaining_bytes = if self.hosts.allow_post_copy() { 1 << 30 } else { 1 };
                let total_bytes = 1 << 30;
                let dirty_bytes_per_s = if self.is_busy() { total_bytes } else { 0 };
                let transferred = Transferred {
                    sent_bytes,
                    remaining_bytes,
                    total_bytes,
                    rounds,
                    passed_bytes: sent_bytes,
                    dirty_bytes_per_s,
                };
                SourceEvent::Progress(transferred, vec![])
            }
        }
    }

    fn ask_once_more(&mut self, executor: &mut Executor) -> Doing {
        let handed_over = self.planted != Planted::UndoneInDoubt;
        let (migration, first) = Migration::recover(LIMITS, handed_over);
        (executor.migration, executor.action) = (migration, first);
        Doing::Act(first)
    }

    /// Records the outcome; `None` once it is recorded.
    fn conclude(&mut self, executor: &mut Executor) -> Option<Doing> {
        if self.is_source_disk_full() {
            return Some(Doing::Conclude { at_ms: self.now_ms + RECORD_AGAIN_AFTER_MS });
        }
        let outcome = executor.migration.outcome().unwrap_or(Outcome::Failed);
        self.source.journal[executor.number].outcome = Some(outcome);
        (self.source.is_network_changed, self.source.found_later) = (false, None);
        let was_cancelled = executor.cancel != Cancel::No;
        let reported = executor.migration.source_vm();
        self.check_seen(executor.number, reported, executor.seen, outcome, executor.has_ended_there);
        self.check_outcome(executor.number, outcome, was_cancelled, executor.migration.error().is_some());
        self.outcomes.push(outcome);
        None
    }
}

/// As a bug would have it that loses what the plan says of encryption.
fn in_the_clear(plan: &Plan) -> Plan {
    let mut told = serde_json::to_value(plan).expect("it is told to other hosts");
    told["encryption"]["is_encrypted"] = false.into();
    serde_json::from_value(told).expect("nothing else depends on it")
}
