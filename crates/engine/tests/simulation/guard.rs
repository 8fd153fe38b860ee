//! The guard beside each migration, a process of its own: the real machine, and what carries out its actions. An agent
//! that wakes up, or is started anew, meanwhile goes on beside it.

use drainpipe_engine::migration::guard::{
    AGAIN_AFTER_MS, Guard as Machine, GuardAction as Action, GuardEvent as Event, HandOver, SILENCE_MS,
};

use crate::network::{Answer, Letter, Order, Question};
use crate::planted::Planted;
use crate::qemu::{Command, Reply};
use crate::world::{Host, Life, Sight, World};

/// How long the target may take for an answer.
const ANSWER_DEADLINE_MS: f64 = 5_000.0;

const FAILED: Event = Event::Failed { may_succeed_now: false };

#[derive(Debug, Clone, Copy)]
pub(crate) struct Guard {
    migration: usize,
    /// The life of the agent that posted it.
    life: u32,
    machine: Machine,
    next: Action,
    /// What it does next, it does not do before.
    pub at_ms: f64,
    pub is_dismissed: bool,
    /// What it waits to have answered.
    question: Option<Question>,
    answer: Option<Answer>,
}

impl Guard {
    pub(crate) fn has_left(&self) -> bool {
        matches!(self.next, Action::Leave | Action::GiveUp)
    }

    pub(crate) fn has_asked(&self, question: Question) -> bool {
        self.question == Some(question)
    }

    pub(crate) fn take_answer(&mut self, answer: Answer) {
        self.answer = Some(answer);
    }
}

impl World {
    /// Posts a guard; `None` where that of the migration before has not left yet.
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
        });
        Some(self.guards.len() - 1)
    }

    pub(crate) fn dismiss(&mut self, guard: Option<usize>) {
        if let Some(guard) = guard {
            self.guards[guard].is_dismissed = true;
        }
    }

    /// They end, at any point of what they do.
    pub(crate) fn dismiss_all_guards(&mut self) {
        for guard in &mut self.guards {
            guard.next = Action::Leave;
        }
    }

    /// While its agent lives and speaks, a guard does nothing.
    pub(crate) fn guard_is_ready(&self, guard: &Guard) -> bool {
        match guard.next {
            Action::Listen => {
                let is_silent = self.source.life == Life::Frozen && self.now_ms >= guard.at_ms;
                guard.is_dismissed || self.agent_has_ended(guard) || is_silent
            }
            Action::Leave | Action::GiveUp => false,
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
                Action::Listen => SILENCE_MS,
                Action::Pause => AGAIN_AFTER_MS,
                _ => self.random.below(self.guards_pause_ms),
            };
            guard.at_ms = self.now_ms + wait_ms as f64;
        }
        self.guards[number] = guard;
    }

    /// What comes of its action, once that is known.
    fn guard_performs(&mut self, guard: &mut Guard) -> Option<Event> {
        Some(match guard.next {
            Action::Listen if guard.is_dismissed => Event::Dismissed,
            Action::Listen if self.agent_has_ended(guard) => Event::AgentEnded,
            Action::Listen => Event::Silent { is_switching_over: false },
            Action::LookAtVm => self.guard_looks(),
            Action::ForbidHandOver => {
                self.source.lift_throttle();
                self.guard_forbids(guard.migration)
            }
            Action::StopTransfer => self.command_beside_agent(Command::Cancel),
            Action::ResumeOnSource => {
                let event = self.command_beside_agent(Command::LetRun);
                if event == Event::Done {
                    self.saw(Sight::GuardActed);
                }
                event
            }
            Action::AskSource => self.guard_asks_source(),
            Action::RevokeHandOver if self.is_source_disk_full() => FAILED,
            Action::RevokeHandOver => {
                let record = &mut self.source.journal[guard.migration];
                if record.outcome.is_none() {
                    (record.handed_over, record.is_revoked) = (false, true);
                }
                self.source.found_later = None;
                self.saw(Sight::GuardRevoked);
                Event::Done
            }
            Action::ResumeOnTarget => return self.guard_orders_target(guard),
            Action::Pause | Action::Leave | Action::GiveUp => Event::Done,
        })
    }

    fn guard_looks(&mut self) -> Event {
        let vm_runs = self.source.qemu.as_ref().is_some_and(|qemu| {
            // Nothing could be told to one that does not answer.
            qemu.copy.runs || qemu.mute_until_ms.is_some()
        });
        if vm_runs {
            self.source.lift_throttle();
        }
        Event::VmRuns(vm_runs)
    }

    fn guard_forbids(&mut self, migration: usize) -> Event {
        let is_full = self.is_source_disk_full();
        let record = &mut self.source.journal[migration];
        let answer = match (record.outcome, record.handed_over) {
            (Some(_), _) => HandOver::Over,
            (None, true) => HandOver::Recorded,
            (None, false) => HandOver::Forbidden,
        };
        if answer != HandOver::Forbidden || self.planted == Planted::GuardDoesNotForbid {
            return Event::HandOver(answer);
        }
        if is_full {
            return FAILED;
        }
        record.is_revoked = true;
        self.source.found_later = None;
        Event::HandOver(answer)
    }

    fn guard_asks_source(&mut self) -> Event {
        if self.source.qemu.is_none() {
            return Event::QemuEnded;
        }
        self.source_state().map_or(FAILED, Event::SourceSays)
    }

    /// Whether or not its agent lives: a guard has a connection of its own to the target.
    fn guard_orders_target(&mut self, guard: &mut Guard) -> Option<Event> {
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
                Some(Event::Done)
            }
            Some(Err(_)) | None => Some(FAILED),
        }
    }

    /// It asks before it commands, by a connection of its own: nothing of it is left for later.
    fn command_beside_agent(&mut self, command: Command) -> Event {
        match self.copy_at(Host::Source) {
            None => Event::QemuEnded,
            Some(_) if !self.answers(Host::Source) => {
                // It may wait for its target, with the lock that every command needs.
                self.break_stream();
                FAILED
            }
            Some(_) => match self.command_source(command) {
                Reply::Done => Event::Done,
                Reply::Gone => Event::QemuEnded,
                Reply::None | Reply::Refused => FAILED,
            },
        }
    }
}
