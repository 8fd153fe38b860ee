//! A third host, which has nothing to do with the VM: by what it sends to the target itself old records go there, and it
//! asks and gives orders about a migration that is none of its own.

use crate::network::Letter;
use crate::planted::Planted;
use crate::world::{Life, Sight, World};
use drainpipe_engine::migration::target::IncomingState as State;
use drainpipe_engine::migration::target::order::Order;

/// How often it asks, once it has begun: more often than a target takes its source for silent.
const ASK_EVERY_MS: f64 = 4_000.0;

/// Who says something about a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Speaker {
    Source,
    ThirdHost,
}

impl World {
    /// So many VMs come and go that records of settled migrations are forgotten. Whatever was said of these is long past.
    pub(crate) fn forget_settled(&mut self) {
        if self.target.life != Life::Up || self.is_target_disk_full() || !self.target.lost_journal.is_empty()
        {
            return;
        }
        for (migration, state) in self.target.journal.clone() {
            if !self.is_settled(migration, state) && self.planted != Planted::PrunesUnsettled {
                continue;
            }
            self.saw(Sight::Forgotten);
            self.target.journal.remove(&migration);
            self.target.forgotten.insert(migration, state);
            self.network.letters.retain(|(_, letter)| !is_about(*letter, migration));
        }
    }

    /// Its source knows, and has recorded the end long since; and nothing of it is here.
    fn is_settled(&self, migration: usize, state: State) -> bool {
        let is_over = self.source.journal[migration].outcome.is_some();
        let is_gone = match state {
            State::Waiting | State::Running => false,
            State::Finished => !self.target.has_vm,
            State::Discarded => !self.target.remains.contains(&migration),
        };
        is_gone && is_over && self.target.known_to_source.contains(&migration)
    }

    /// The third host begins to ask about all migrations, and has the last one given up.
    pub(crate) fn meddle(&mut self) {
        self.third_host_asks_ms = self.now_ms;
        if self.target.life != Life::Up {
            return;
        }
        // It is refused: a migration is its source's.
        if let Some(last) = self.source.journal.len().checked_sub(1)
            && self.planted == Planted::ThirdHostCloses
        {
            self.own_task(Order::Discard { is_sources: true }, last);
        }
    }

    /// What was decided of each VM on its way, it may know.
    pub(crate) fn third_host_asks(&mut self) {
        if self.now_ms < self.third_host_asks_ms {
            return;
        }
        self.third_host_asks_ms = self.now_ms + ASK_EVERY_MS;
        if self.target.life != Life::Up {
            return;
        }
        let asked: Vec<usize> = self.target.entries.keys().copied().collect();
        for migration in asked {
            self.saw(Sight::ThirdHostAsked);
            self.hears(migration, Speaker::ThirdHost);
        }
    }
}

fn is_about(letter: Letter, of: usize) -> bool {
    match letter {
        Letter::Order { migration, .. } | Letter::Ask { migration, .. } => migration == of,
        Letter::Answer { .. } | Letter::Tell { .. } => false,
    }
}
