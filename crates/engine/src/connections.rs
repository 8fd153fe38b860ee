//! Which connection is closed when a new one comes and all slots are taken.
//!
//! A holder is whoever connects: an address before anything else is known about it, and a host or an operator after
//! that. Its share is what it would have if all holders divided the slots evenly. A holder within its share is never
//! closed for one beyond it, and a holder with priority within its share is never refused.

use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Whether a holder goes before others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// As everybody.
    Usual,
    /// An operator, or a host in a migration.
    First,
}

/// A connection that has a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenConnection<H> {
    /// The holder of the connection.
    pub holder: H,
    /// The priority of its holder.
    pub priority: Priority,
    /// Nobody waits for an answer on it.
    pub is_idle: bool,
    /// Grows with each connection that comes or falls idle.
    pub since: u64,
}

/// What becomes of a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// There is a slot for it.
    Free,
    /// It takes the slot of this one, by its position.
    InPlaceOf(usize),
    /// It is closed itself.
    None,
}

/// Finds a slot for a connection of `newcomer` among those that are `open`, where there are so many `slots`.
pub fn room<H: Ord>(open: &[OpenConnection<H>], slots: usize, newcomer: &H, priority: Priority) -> Room {
    if open.len() < slots {
        return Room::Free;
    }
    let counts = Counts::of(open, slots, newcomer);
    let may_go = open.iter().enumerate().filter(|(_, one)| counts.may_go(one, priority));
    let goes = may_go.min_by_key(|(_, one)| {
        let count = counts.of[&one.holder];
        (!one.is_idle, count <= counts.share, one.priority, Reverse(count), one.since)
    });
    goes.map_or(Room::None, |(position, _)| Room::InPlaceOf(position))
}

/// How many connections each holder has, the new one among them.
struct Counts<'a, H> {
    of: BTreeMap<&'a H, usize>,
    newcomer: &'a H,
    newcomers: usize,
    share: usize,
    is_anybody_over: bool,
}

impl<'a, H: Ord> Counts<'a, H> {
    fn of(open: &'a [OpenConnection<H>], slots: usize, newcomer: &'a H) -> Self {
        let mut of = BTreeMap::from([(newcomer, 1)]);
        for one in open {
            *of.entry(&one.holder).or_default() += 1;
        }
        let share = (slots / of.len()).max(1);
        let is_anybody_over = of.values().any(|count| *count > share);
        Self { newcomers: of[newcomer], of, newcomer, share, is_anybody_over }
    }

    fn may_go(&self, one: &OpenConnection<H>, priority: Priority) -> bool {
        let count = self.of[&one.holder];
        let keeps_to_share = self.newcomers <= self.share;
        if one.holder == *self.newcomer {
            one.is_idle
        } else if count > self.share {
            keeps_to_share || (count > self.newcomers && (one.is_idle || one.priority <= priority))
        } else {
            // More holders than slots: nobody has more than one.
            keeps_to_share
                && !self.is_anybody_over
                && (one.priority < priority || (one.is_idle && one.priority == priority))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOTS: usize = 12;

    /// As many names as there are slots.
    const NAMES: std::ops::Range<u8> = 0..12;

    /// Holders 0 and 1 have priority.
    fn priority(holder: u8) -> Priority {
        if holder < 2 { Priority::First } else { Priority::Usual }
    }

    fn open(of: &[(u8, bool)]) -> Vec<OpenConnection<u8>> {
        let all = of.iter().enumerate();
        all.map(|(since, (holder, is_idle))| OpenConnection {
            holder: *holder,
            priority: priority(*holder),
            is_idle: *is_idle,
            since: since as u64,
        })
        .collect()
    }

    fn count(open: &[OpenConnection<u8>], holder: u8) -> usize {
        open.iter().filter(|one| one.holder == holder).count()
    }

    fn share(open: &[OpenConnection<u8>], newcomer: u8) -> usize {
        let mut holders: Vec<u8> = open.iter().map(|one| one.holder).chain([newcomer]).collect();
        holders.sort_unstable();
        holders.dedup();
        (SLOTS / holders.len()).max(1)
    }

    #[test]
    fn the_oldest_of_the_greediest_goes_first() {
        let all = open(&[(3, true), (2, true), (2, true), (2, true)]);
        assert_eq!(room(&all, 4, &4, Priority::Usual), Room::InPlaceOf(1));
        assert_eq!(room(&all, 4, &2, Priority::Usual), Room::InPlaceOf(1), "its own");
        assert_eq!(room(&all, 5, &4, Priority::Usual), Room::Free);
    }

    #[test]
    fn what_is_idle_goes_before_what_is_waited_for() {
        let all = open(&[(2, false), (2, true), (2, false), (2, true)]);
        assert_eq!(room(&all, 4, &3, Priority::Usual), Room::InPlaceOf(1));
        let busy = open(&[(2, false); 4]);
        assert_eq!(room(&busy, 4, &3, Priority::Usual), Room::InPlaceOf(0));
        assert_eq!(room(&busy, 4, &2, Priority::Usual), Room::None, "it has them all already");
    }

    #[test]
    fn silent_addresses_that_are_more_than_the_places_keep_nobody_out() {
        let all = open(&[(2, true), (3, true), (4, true)]);
        assert_eq!(room(&all, 3, &5, Priority::Usual), Room::InPlaceOf(0));
    }

    #[test]
    fn where_all_have_one_who_has_priority_comes_in() {
        let all = open(&[(2, false), (3, false), (0, false)]);
        assert_eq!(room(&all, 3, &1, Priority::First), Room::InPlaceOf(0));
        assert_eq!(room(&all, 3, &4, Priority::Usual), Room::None);
    }

    proptest! {
        #[test]
        fn nobody_within_its_share_is_closed_for_one_beyond_it(
            of in prop::collection::vec((0u8..20, any::<bool>()), SLOTS),
            newcomer in 0u8..20,
        ) {
            let open = open(&of);
            let share = share(&open, newcomer);
            let newcomers = count(&open, newcomer) + 1;
            if let Room::InPlaceOf(position) = room(&open, SLOTS, &newcomer, priority(newcomer)) {
                let goes = &open[position];
                if goes.holder != newcomer && newcomers > share {
                    prop_assert!(count(&open, goes.holder) > newcomers, "{goes:?}");
                }
                if goes.holder != newcomer && count(&open, goes.holder) <= share {
                    prop_assert!(open.iter().all(|one| count(&open, one.holder) <= share), "{goes:?}");
                    prop_assert!(goes.priority <= priority(newcomer));
                }
            }
        }

        #[test]
        fn whoever_keeps_to_its_share_comes_in(
            of in prop::collection::vec((NAMES, any::<bool>()), SLOTS),
            newcomer in NAMES,
        ) {
            let open = open(&of);
            if count(&open, newcomer) < share(&open, newcomer) {
                prop_assert_ne!(room(&open, SLOTS, &newcomer, priority(newcomer)), Room::None);
            }
        }

        /// Whatever a few hosts do, the operators 0 and 1 get in with two each, and nobody else closes them.
        #[test]
        fn operators_are_never_locked_out(
            comes in prop::collection::vec((2u8..4, any::<bool>()), 0..200),
            operators in prop::collection::vec(0usize..200, 4),
        ) {
            let mut now: Vec<OpenConnection<u8>> = vec![];
            for (since, (host, is_idle)) in comes.iter().enumerate() {
                let operator = [0, 1, 0, 1].into_iter().zip(&operators).find(|(_, at)| **at == since);
                let operator = operator.map(|(operator, _)| operator);
                for holder in operator.into_iter().chain([*host]) {
                    let mut new = open(&[(holder, holder < 2 || *is_idle)]).remove(0);
                    new.since = since as u64;
                    match room(&now, SLOTS, &holder, priority(holder)) {
                        Room::Free => now.push(new),
                        Room::InPlaceOf(position) => {
                            // An idle one of its own is as good as a slot.
                            let goes = now[position].holder;
                            prop_assert!(goes >= 2 || goes == holder, "an operator was closed");
                            now[position] = new;
                        }
                        Room::None => prop_assert!(holder >= 2, "an operator was refused"),
                    }
                    prop_assert!(now.len() <= SLOTS);
                }
            }
        }
    }
}
