//! What migrations report: late, in order for each migration, and sometimes twice.

use std::collections::{BTreeMap, VecDeque};

use drainpipe_engine::drain::run::DrainEvent;

use crate::random::Random;

#[derive(Debug, Clone)]
struct Message {
    migration: u64,
    event: DrainEvent,
}

/// The messages that the drain has yet to hear.
#[derive(Debug, Default)]
pub(crate) struct News {
    /// The messages about each VM that were not heard yet.
    unheard: BTreeMap<usize, VecDeque<Message>>,
    /// Messages that were heard, and will arrive once more.
    doubled: Vec<(usize, Message)>,
}

/// A message that the drain hears.
pub(crate) struct Heard {
    pub vm: usize,
    pub migration: u64,
    pub event: DrainEvent,
    /// Whether it was heard before.
    pub again: bool,
}

impl News {
    pub(crate) fn tell(&mut self, vm: usize, migration: u64, event: DrainEvent) {
        self.unheard.entry(vm).or_default().push_back(Message { migration, event });
    }

    /// A message that was not heard yet, or, at any later moment, one that was.
    pub(crate) fn hear(&mut self, doubled: u64, random: &mut Random) -> Option<Heard> {
        if !self.doubled.is_empty() && random.chance(30) {
            let (vm, message) = self.doubled.swap_remove(random.index(self.doubled.len()));
            return Some(Heard { vm, migration: message.migration, event: message.event, again: true });
        }
        self.unheard.retain(|_, messages| !messages.is_empty());
        let talking: Vec<usize> = self.unheard.keys().copied().collect();
        if talking.is_empty() {
            return None;
        }
        let vm = talking[random.index(talking.len())];
        let message = self.unheard.get_mut(&vm)?.pop_front()?;
        if doubled > 0 && random.chance(doubled) {
            self.doubled.push((vm, message.clone()));
        }
        Some(Heard { vm, migration: message.migration, event: message.event, again: false })
    }

    /// Drops all messages that were not heard yet.
    pub(crate) fn forget(&mut self) {
        self.unheard.clear();
    }

    /// How many messages wait to be heard.
    pub(crate) fn len(&self) -> usize {
        self.unheard.values().map(VecDeque::len).sum()
    }

    /// Drops passing messages that newer ones have overtaken: a hanging agent misses how much had arrived, and that an
    /// end was near.
    pub(crate) fn overtake(&mut self) {
        for messages in self.unheard.values_mut() {
            let last = messages.len().saturating_sub(1);
            let mut index = 0;
            messages.retain(|message| {
                let is_passing =
                    matches!(message.event, DrainEvent::Arrived { .. } | DrainEvent::Ending { .. });
                index += 1;
                !is_passing || index > last
            });
        }
    }
}
