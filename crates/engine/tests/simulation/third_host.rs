//! A third host, which has nothing to do with the VM. By the VMs that it sends to the target, it makes the target
//! forget old records; and it asks and gives orders about a migration that is not its own.

use crate::network::Letter;
use crate::planted::Planted;
use crate::world::{Life, Sight, World};
use drainpipe_engine::migration::target::IncomingState as State;
use drainpipe_engine::migration::target::order::Order;

/// How often it asks once it has begun: more often than a target needs to consider its source silent.
const ASK_EVERY_MS: f64 = 4_000.0;

/// Who speaks about a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Speaker {
    Source,
    ThirdHost,
}

impl World {
    /// So many VMs come and go that records of settled migrations are forgotten. No message about these is under way
    /// any more.
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

    /// Whether the source has recorded the end long ago, and nothing of the migration is left here.
    fn is_settled(&self, migration: usize, state: State) -> bool {
        let is_over = self.source.journal[migration].outcome.is_some();
        let is_gone = match state {
            State::Waiting | State::Running => false,
            State::Finished => !self.target.has_vm,
            State::Discarded => !self.target.remains.contains(&migration),
        };
        is_gone && is_over && self.target.known_to_source.contains(&migration)
    }

    /// The third host begins to ask about all migrations, and orders the last one to be given up.
    pub(crate) fn meddle(&mut self) {
        self.third_host_asks_ms = self.now_ms;
        if self.target.life != Life::Up {
            return;
        }
        // The order is refused: only its source may give a migration up.
        if let Some(last) = self.source.journal.len().checked_sub(1)
            && self.planted == Planted::ThirdHostCloses
        {
            self.own_task(Order::Discard { is_sources: true }, last);
        }
    }

    /// The third host may know what was decided about each VM on its way.
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
