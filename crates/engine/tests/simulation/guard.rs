//! The guard beside each migration: a process of its own, which lets the VM run when the agent has ended, or stands
//! still and the VM does too. An agent that wakes up meanwhile goes on beside it.

use crate::planted::Planted;
use crate::qemu::{Command, Reply};
use crate::world::{Host, Life, Sight, World};

const SILENCE_MS: f64 = 3_000.0;
const AGAIN_AFTER_MS: f64 = 1_000.0;

/// Fewer than the real ones', which only takes longer: silences while the VM runs, and attempts to let it run.
const SILENCES: u32 = 5;
const ATTEMPTS: u32 = 60;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Post {
    Watching,
    Forbidding,
    Cancelling,
    LettingRun,
    Left,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Guard {
    migration: usize,
    /// The life of the agent that posted it.
    life: u32,
    pub post: Post,
    /// What it does next, it does not do before.
    pub at_ms: f64,
    pub is_dismissed: bool,
    silences_left: u32,
    attempts_left: u32,
}

impl World {
    /// Posts a guard; `None` where that of the migration before has not left yet.
    pub(crate) fn post_guard(&mut self, migration: usize) -> Option<usize> {
        let is_taken = self.guards.iter().any(|guard| guard.post != Post::Left);
        if is_taken {
            self.saw(Sight::PostTaken);
            return None;
        }
        self.guards.push(Guard {
            migration,
            life: self.source.lives,
            post: Post::Watching,
            at_ms: self.now_ms + SILENCE_MS,
            is_dismissed: false,
            silences_left: SILENCES,
            attempts_left: ATTEMPTS,
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
            guard.post = Post::Left;
        }
    }

    /// While its agent lives and speaks, a guard does nothing.
    pub(crate) fn guard_is_ready(&self, guard: &Guard) -> bool {
        match guard.post {
            Post::Watching => {
                let is_silent = self.source.life == Life::Frozen && self.now_ms >= guard.at_ms;
                guard.is_dismissed || self.agent_has_ended(guard) || is_silent
            }
            Post::Left => false,
            _ => self.now_ms >= guard.at_ms,
        }
    }

    fn agent_has_ended(&self, guard: &Guard) -> bool {
        self.source.life == Life::Down || self.source.lives != guard.life
    }

    pub(crate) fn step_guard(&mut self, number: usize) {
        let mut guard = self.guards[number];
        match guard.post {
            Post::Watching => self.guard_listens(&mut guard),
            Post::Forbidding => self.guard_forbids(&mut guard),
            Post::Cancelling => {
                let reply = self.command_beside_agent(Command::Cancel);
                self.guard_goes_on(&mut guard, reply, Post::LettingRun);
            }
            Post::LettingRun => {
                let reply = self.command_beside_agent(Command::LetRun);
                self.guard_goes_on(&mut guard, reply, Post::Left);
                if reply == Reply::Done {
                    self.saw(Sight::GuardActed);
                }
            }
            Post::Left => {}
        }
        guard.at_ms = guard.at_ms.max(self.now_ms + self.random.below(self.guards_pause_ms) as f64);
        self.guards[number] = guard;
    }

    fn guard_listens(&mut self, guard: &mut Guard) {
        let vm_runs = self.source.qemu.as_ref().is_some_and(|qemu| {
            // Nothing could be told to one that does not answer.
            qemu.copy.runs || qemu.mute_until_ms.is_some()
        });
        if guard.is_dismissed {
            guard.post = Post::Left;
        } else if !self.agent_has_ended(guard) && vm_runs && guard.silences_left > 0 {
            guard.silences_left -= 1;
            guard.at_ms = self.now_ms + SILENCE_MS;
            self.source.lift_throttle();
        } else {
            guard.post = Post::Forbidding;
            self.source.lift_throttle();
        }
    }

    fn guard_forbids(&mut self, guard: &mut Guard) {
        let is_full = self.is_source_disk_full();
        let record = &mut self.source.journal[guard.migration];
        let is_too_late = record.handed_over || record.outcome.is_some();
        if self.planted == Planted::GuardDoesNotForbid {
            guard.post = if is_too_late { Post::Left } else { Post::Cancelling };
        } else if is_full {
            Self::guard_tries_again(guard, self.now_ms);
        } else if is_too_late {
            guard.post = Post::Left;
        } else {
            record.is_revoked = true;
            self.source.found_later = None;
            guard.post = Post::Cancelling;
        }
    }

    /// It asks before it commands, by a connection of its own: nothing of it is left for later.
    fn command_beside_agent(&mut self, command: Command) -> Reply {
        match self.copy_at(Host::Source) {
            None => Reply::Gone,
            Some(_) if !self.answers(Host::Source) => {
                // It may wait for its target, with the lock that every command needs.
                self.break_stream();
                Reply::None
            }
            Some(_) => self.command_source(command),
        }
    }

    fn guard_goes_on(&mut self, guard: &mut Guard, reply: Reply, next: Post) {
        match reply {
            Reply::Done => guard.post = next,
            Reply::Gone => guard.post = Post::Left,
            Reply::None | Reply::Refused => Self::guard_tries_again(guard, self.now_ms),
        }
    }

    fn guard_tries_again(guard: &mut Guard, now_ms: f64) {
        guard.attempts_left -= 1;
        guard.post = if guard.attempts_left == 0 { Post::Left } else { Post::Forbidding };
        guard.at_ms = now_ms + AGAIN_AFTER_MS;
    }
}
