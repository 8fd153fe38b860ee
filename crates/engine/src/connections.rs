//! Which connection is closed when a new one comes and all places are taken.
//!
//! A holder is whoever connects: an address before anything else is known of it, a host or an operator after that.
//! Its share is what each would have if all holders divided the places evenly. Whoever keeps to its share is never
//! closed for somebody who does not, and somebody who has priority and keeps to its share is never refused.

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

/// A connection that has a place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held<H> {
    /// Whose it is.
    pub holder: H,
    /// That of its holder.
    pub priority: Priority,
    /// Nobody waits for an answer on it.
    pub is_idle: bool,
    /// Grows with each connection that comes or falls idle.
    pub since: u64,
}

/// What becomes of a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// There is a place for it.
    Free,
    /// It takes the place of this one, by its position.
    InPlaceOf(usize),
    /// It is closed itself.
    None,
}

/// Finds a place for a connection of `newcomer` among those that are `held`, where there are so many `places`.
pub fn room<H: Ord>(held: &[Held<H>], places: usize, newcomer: &H, priority: Priority) -> Room {
    if held.len() < places {
        return Room::Free;
    }
    let counts = Counts::of(held, places, newcomer);
    let may_go = held.iter().enumerate().filter(|(_, one)| counts.may_go(one, priority));
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
    fn of(held: &'a [Held<H>], places: usize, newcomer: &'a H) -> Self {
        let mut of = BTreeMap::from([(newcomer, 1)]);
        for one in held {
            *of.entry(&one.holder).or_default() += 1;
        }
        let share = (places / of.len()).max(1);
        let is_anybody_over = of.values().any(|count| *count > share);
        Self { newcomers: of[newcomer], of, newcomer, share, is_anybody_over }
    }

    fn may_go(&self, one: &Held<H>, priority: Priority) -> bool {
        let count = self.of[&one.holder];
        let keeps_to_share = self.newcomers <= self.share;
        if one.holder == *self.newcomer {
            one.is_idle
        } else if count > self.share {
            keeps_to_share || (count > self.newcomers && (one.is_idle || one.priority <= priority))
        } else {
            // More holders than places: nobody has more than one.
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

    const PLACES: usize = 12;

    /// As many names as there are places.
    const NAMES: std::ops::Range<u8> = 0..12;

    /// Holders 0 and 1 have priority.
    fn priority(holder: u8) -> Priority {
        if holder < 2 { Priority::First } else { Priority::Usual }
    }

    fn held(of: &[(u8, bool)]) -> Vec<Held<u8>> {
        let all = of.iter().enumerate();
        all.map(|(since, (holder, is_idle))| Held {
            holder: *holder,
            priority: priority(*holder),
            is_idle: *is_idle,
            since: since as u64,
        })
        .collect()
    }

    fn count(held: &[Held<u8>], holder: u8) -> usize {
        held.iter().filter(|one| one.holder == holder).count()
    }

    fn share(held: &[Held<u8>], newcomer: u8) -> usize {
        let mut holders: Vec<u8> = held.iter().map(|one| one.holder).chain([newcomer]).collect();
        holders.sort_unstable();
        holders.dedup();
        (PLACES / holders.len()).max(1)
    }

    #[test]
    fn the_oldest_of_the_greediest_goes_first() {
        let all = held(&[(3, true), (2, true), (2, true), (2, true)]);
        assert_eq!(room(&all, 4, &4, Priority::Usual), Room::InPlaceOf(1));
        assert_eq!(room(&all, 4, &2, Priority::Usual), Room::InPlaceOf(1), "its own");
        assert_eq!(room(&all, 5, &4, Priority::Usual), Room::Free);
    }

    #[test]
    fn what_is_idle_goes_before_what_is_waited_for() {
        let all = held(&[(2, false), (2, true), (2, false), (2, true)]);
        assert_eq!(room(&all, 4, &3, Priority::Usual), Room::InPlaceOf(1));
        let busy = held(&[(2, false); 4]);
        assert_eq!(room(&busy, 4, &3, Priority::Usual), Room::InPlaceOf(0));
        assert_eq!(room(&busy, 4, &2, Priority::Usual), Room::None, "it has them all already");
    }

    #[test]
    fn silent_addresses_that_are_more_than_the_places_keep_nobody_out() {
        let all = held(&[(2, true), (3, true), (4, true)]);
        assert_eq!(room(&all, 3, &5, Priority::Usual), Room::InPlaceOf(0));
    }

    #[test]
    fn where_all_have_one_who_has_priority_comes_in() {
        let all = held(&[(2, false), (3, false), (0, false)]);
        assert_eq!(room(&all, 3, &1, Priority::First), Room::InPlaceOf(0));
        assert_eq!(room(&all, 3, &4, Priority::Usual), Room::None);
    }

    proptest! {
        #[test]
        fn nobody_within_its_share_is_closed_for_one_beyond_it(
            of in prop::collection::vec((0u8..20, any::<bool>()), PLACES),
            newcomer in 0u8..20,
        ) {
            let held = held(&of);
            let share = share(&held, newcomer);
            let newcomers = count(&held, newcomer) + 1;
            if let Room::InPlaceOf(position) = room(&held, PLACES, &newcomer, priority(newcomer)) {
                let goes = &held[position];
                if goes.holder != newcomer && newcomers > share {
                    prop_assert!(count(&held, goes.holder) > newcomers, "{goes:?}");
                }
                if goes.holder != newcomer && count(&held, goes.holder) <= share {
                    prop_assert!(held.iter().all(|one| count(&held, one.holder) <= share), "{goes:?}");
                    prop_assert!(goes.priority <= priority(newcomer));
                }
            }
        }

        #[test]
        fn whoever_keeps_to_its_share_comes_in(
            of in prop::collection::vec((NAMES, any::<bool>()), PLACES),
            newcomer in NAMES,
        ) {
            let held = held(&of);
            if count(&held, newcomer) < share(&held, newcomer) {
                prop_assert_ne!(room(&held, PLACES, &newcomer, priority(newcomer)), Room::None);
            }
        }

        /// Whatever a few hosts do, the operators 0 and 1 get in with two each, and nobody else closes them.
        #[test]
        fn operators_are_never_locked_out(
            comes in prop::collection::vec((2u8..4, any::<bool>()), 0..200),
            operators in prop::collection::vec(0usize..200, 4),
        ) {
            let mut now: Vec<Held<u8>> = vec![];
            for (since, (host, is_idle)) in comes.iter().enumerate() {
                let operator = [0, 1, 0, 1].into_iter().zip(&operators).find(|(_, at)| **at == since);
                let operator = operator.map(|(operator, _)| operator);
                for holder in operator.into_iter().chain([*host]) {
                    let mut new = held(&[(holder, holder < 2 || *is_idle)]).remove(0);
                    new.since = since as u64;
                    match room(&now, PLACES, &holder, priority(holder)) {
                        Room::Free => now.push(new),
                        Room::InPlaceOf(position) => {
                            // An idle one of its own is as good as a place.
                            let goes = now[position].holder;
                            prop_assert!(goes >= 2 || goes == holder, "an operator was closed");
                            now[position] = new;
                        }
                        Room::None => prop_assert!(holder >= 2, "an operator was refused"),
                    }
                    prop_assert!(now.len() <= PLACES);
                }
            }
        }
    }
}
