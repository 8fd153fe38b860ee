//! The guard beside each migration, a process of its own: the real machine, and what carries out its actions. An agent
//! that wakes up or is restarted meanwhile works beside it.

use drainpipe_engine::migration::SourceState;
use drainpipe_engine::migration::guard::{
    AGAIN_AFTER_MS, Guard as Machine, GuardAction, GuardEvent, HandOverRecord, SILENCE_MS,
};
use drainpipe_engine::migration::timing;

use crate::libvirt::By;
use crate::milliseconds::ms;
use crate::network::{Answer, Letter, Order, Question};
use crate::planted::Planted;
use crate::qemu::{Command, Reply, Sending};
use crate::world::{Host, Life, Sight, World};

/// How long the target may take to answer.
const ANSWER_DEADLINE_MS: f64 = ms(timing::QMP_DEADLINE);

const FAILED: GuardEvent = GuardEvent::Failed { may_succeed_now: false };

/// How long QEMU may take to answer before it is cut off.
const ANSWERS_WITHIN_MS: f64 = ms(timing::MUTE_FOR_GUARD_AFTER);

/// How long it may take while it looks for changed memory, during which the VM runs.
const ANSWERS_AT_ALL_WITHIN_MS: f64 = ms(timing::QMP_DEADLINE);

/// How long the guest may stand still before the record, once its agent has ended: one answer that does not come, and
/// the wait for the guard's turn. An agent that hangs counts once it has been silent for long enough.
const STANDS_STILL_MS_MAX: f64 = ANSWERS_WITHIN_MS + 1_500.0;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Guard {
    migration: usize,
    /// The life of the agent that posted this guard.
    life: u32,
    machine: Machine,
    next: GuardAction,
    /// When it carries out its next action, at the earliest.
    pub at_ms: f64,
    pub is_dismissed: bool,
    /// The question to which it awaits an answer.
    question: Option<Question>,
    answer: Option<Answer>,
    /// How often it has waited in vain since the last answer.
    waits: u32,
}

impl Guard {
    pub(crate) fn has_left(&self) -> bool {
        matches!(self.next, GuardAction::Leave | GuardAction::GiveUp)
    }

    pub(crate) fn has_asked(&self, question: Question) -> bool {
        self.question == Some(question)
    }

    pub(crate) fn take_answer(&mut self, answer: Answer) {
        self.answer = Some(answer);
    }
}

impl World {
    /// Posts a guard; `None` while the one of the migration before has not left.
    pub(crate) fn post_guard(&mut self, migration: usize) -> Option<usize> {
        let is_taken = self.guards.iter().any(|guard| !guard.has_left());
        if is_taken {
            self.saw(Sight::PostTaken);
            return None;
        }
        let (machine, next) = Machine::at_post();
        self.guards.push(Guard {
            migration,
            life: self.source.lives,
            machine,
            next,
            at_ms: self.now_ms + SILENCE_MS as f64,
            is_dismissed: false,
            question: None,
            answer: None,
            waits: 0,
        });
        Some(self.guards.len() - 1)
    }

    pub(crate) fn dismiss(&mut self, guard: Option<usize>) {
        if let Some(guard) = guard {
            self.guards[guard].is_dismissed = true;
        }
    }

    /// Guards may be ended at any point of their work.
    pub(crate) fn dismiss_all_guards(&mut self) {
        for guard in &mut self.guards {
            guard.next = GuardAction::Leave;
        }
    }

    /// A guard does nothing while its agent lives and speaks.
    pub(crate) fn guard_is_ready(&self, guard: &Guard) -> bool {
        match guard.next {
            GuardAction::Listen => {
                let is_silent = self.source.life == Life::Frozen && self.now_ms >= guard.at_ms;
                guard.is_dismissed || self.agent_has_ended(guard) || is_silent
            }
            GuardAction::Leave | GuardAction::GiveUp => false,
            _ => guard.answer.is_some() || self.now_ms >= guard.at_ms,
        }
    }

    fn agent_has_ended(&self, guard: &Guard) -> bool {
        self.source.life == Life::Down || self.source.lives != guard.life
    }

    pub(crate) fn step_guard(&mut self, number: usize) {
        let mut guard = self.guards[number];
        if let Some(event) = self.guard_performs(&mut guard) {
            guard.next = guard.machine.handle(event);
            let wait_ms = match guard.next {
                GuardAction::Listen => SILENCE_MS,
                GuardAction::Pause => AGAIN_AFTER_MS,
                _ => self.random.below(self.guards_pause_ms),
            };
            guard.at_ms = self.now_ms + wait_ms as f64;
        }
        self.guards[number] = guard;
    }

    /// What came of its action; `None` until that is known.
    fn guard_performs(&mut self, guard: &mut Guard) -> Option<GuardEvent> {
        Some(match guard.next {
            GuardAction::Listen if guard.is_dismissed => GuardEvent::Dismissed,
            GuardAction::Listen if self.agent_has_ended(guard) => GuardEvent::AgentEnded,
            GuardAction::Listen => GuardEvent::Silent { is_switching_over: false },
            GuardAction::LookAtVm => self.guard_looks(),
            GuardAction::ForbidHandOver => {
                self.source.lift_throttle();
                self.guard_forbids(guard.migration)
            }
            GuardAction::StopTransfer => {
                self.cut_disk_copies();
                return self.command_beside_agent(guard, Command::Cancel);
            }
            GuardAction::ResumeOnSource => {
                let event = self.command_beside_agent(guard, Command::LetRun)?;
                if event == GuardEvent::Done {
                    self.let_writes_go();
                    self.saw(Sight::GuardActed);
                }
                event
            }
            GuardAction::AskSource => self.guard_asks_source(),
            GuardAction::RevokeHandOver if self.is_source_disk_full() => FAILED,
            GuardAction::RevokeHandOver => {
                let record = &mut self.source.journal[guard.migration];
                if record.outcome.is_none() {
                    (record.handed_over, record.is_revoked) = (false, true);
                }
                self.source.found_later = None;
                self.saw(Sight::GuardRevoked);
                GuardEvent::Done
            }
            GuardAction::ResumeOnTarget => return self.guard_orders_target(guard),
            GuardAction::Pause | GuardAction::Leave | GuardAction::GiveUp => GuardEvent::Done,
        })
    }

    fn guard_looks(&mut self) -> GuardEvent {
        let is_mute = self.is_libvirt_mute(Host::Source);
        let vm_runs = self.source.qemu.as_ref().is_some_and(|qemu| {
            // A QEMU that does not answer could not be told anything.
            qemu.copy.runs || qemu.mute_until_ms.is_some() || is_mute
        });
        if vm_runs {
            self.source.lift_throttle();
            self.let_writes_go();
        }
        GuardEvent::VmRuns(vm_runs)
    }

    fn guard_forbids(&mut self, migration: usize) -> GuardEvent {
        let is_full = self.is_source_disk_full();
        let record = &mut self.source.journal[migration];
        let answer = match (record.outcome, record.handed_over) {
            (Some(_), _) => HandOverRecord::Over,
            (None, true) => HandOverRecord::Recorded,
            (None, false) => HandOverRecord::Forbidden,
        };
        if answer != HandOverRecord::Forbidden || self.planted == Planted::GuardDoesNotForbid {
            return GuardEvent::HandOver(answer);
        }
        if is_full {
            return FAILED;
        }
        record.is_revoked = true;
        self.source.found_later = None;
        GuardEvent::HandOver(answer)
    }

    fn guard_asks_source(&mut self) -> GuardEvent {
        if self.source.qemu.is_none() {
            return GuardEvent::HypervisorEnded;
        }
        if self.planted == Planted::RecordBelieved {
            return GuardEvent::SourceSays(SourceState::LetGo);
        }
        self.source_state().map_or(FAILED, GuardEvent::SourceSays)
    }

    /// Works without the agent: a guard has a connection of its own to the target.
    fn guard_orders_target(&mut self, guard: &mut Guard) -> Option<GuardEvent> {
        if guard.question.is_none() {
            let question = self.network.new_question();
            (guard.question, guard.answer) = (Some(question), None);
            guard.at_ms = self.now_ms + ANSWER_DEADLINE_MS;
            self.send(Letter::Order { order: Order::Run, migration: guard.migration, question });
            return None;
        }
        guard.question = None;
        match guard.answer.take() {
            Some(Ok(_)) => {
                self.saw(Sight::GuardOrdered);
                Some(GuardEvent::Done)
            }
            Some(Err(_)) | None => Some(FAILED),
        }
    }

    /// The guard asks for QEMU's state before it commands, over a connection of its own, so no command waits there for
    /// later. `None` while it awaits the answer.
    fn command_beside_agent(&mut self, guard: &mut Guard, command: Command) -> Option<GuardEvent> {
        let (waits, within_ms) = match self.planted {
            Planted::GuardWaits => (2, ANSWERS_AT_ALL_WITHIN_MS),
            _ => (1, ANSWERS_WITHIN_MS),
        };
        let event = match self.copy_at(Host::Source) {
            None => GuardEvent::HypervisorEnded,
            Some(_) if self.answers(Host::Source) => match self.command_source_by(command, By::Guard) {
                Reply::Done => GuardEvent::Done,
                Reply::Gone => GuardEvent::HypervisorEnded,
                Reply::None | Reply::Refused => FAILED,
            },
            Some(_) if guard.waits < waits => {
                guard.waits += 1;
                guard.at_ms = self.now_ms + within_ms;
                return None;
            }
            Some(_) => {
                // QEMU may be waiting for its target, and holding the lock that every command needs.
                self.break_stream();
                FAILED
            }
        };
        guard.waits = 0;
        Some(event)
    }

    /// Before the hand-over is recorded, a guest whose agent is gone or hangs stands still only for a while.
    pub(crate) fn check_stands_still(&mut self, since_ms: f64) {
        self.stood_still_ms =
            if self.guard_alone_can_let_run() { self.stood_still_ms + since_ms } else { 0.0 };
        let silence_ms = if self.source.life == Life::Frozen { SILENCE_MS as f64 } else { 0.0 };
        if self.stood_still_ms > STANDS_STILL_MS_MAX + silence_ms {
            self.breach(format!(
                "I3: the guest has stood still for {} ms beside its guard",
                self.stood_still_ms
            ));
        }
    }

    /// Whether a guard could let the guest run, and nothing such as a hanging QEMU or a full disk keeps it from that.
    fn guard_alone_can_let_run(&self) -> bool {
        let Some(qemu) = self.source.qemu.as_ref().filter(|qemu| !qemu.copy.runs) else { return false };
        let is_kept =
            qemu.mute_until_ms.is_some() || self.is_source_disk_full() || self.faults.guards_are_slow();
        let is_kept = is_kept || self.is_libvirt_mute(Host::Source);
        // With post-copy, the source's part is of no use once the target's is lost.
        let is_kept =
            is_kept || matches!(qemu.sending, Sending::Rest | Sending::Interrupted | Sending::LastWord);
        let stands = |guard: &Guard| {
            let record = self.source.journal[guard.migration];
            let is_open = record.outcome.is_none() && !record.handed_over;
            // A guard that awaits the target's answer does not know yet that the hand-over was revoked.
            !guard.has_left() && !guard.is_dismissed && guard.question.is_none() && is_open
        };
        self.source.life != Life::Up && !is_kept && self.guards.iter().any(stands)
    }
}
