//! How a host's links are divided among everything that migrations send or receive over them: memory and disks.
//!
//! ```text
//! goes first   memory, whose VM's disks are shared or mirrored by then; what a guest writes to mirrored disks, and waits for
//! yields       copies of disks, down to a part that they always have
//! ```
//!
//! One limit covers everything together, another one disks alone. Without a limit, copies still yield while memory is
//! sent.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::fair_shares;

/// The part of what storage may take that copies of disks keep while others go first: one of so many.
const COPIES_KEEP_ONE_OF: u64 = 8;

/// What a guest's writes to mirrored disks have in any case, whatever the limits are. The guest waits for each of them: 1
/// MB/s is little for the links, and nothing at all would be the end of the guest's patience.
const GUEST_WRITES_LEAST_MBPS: u64 = 8;

/// How far a guest's writes may exceed their recent rate, until somebody looks again.
const GUEST_WRITES_GROW: f64 = 2.0;

/// Megabits in a byte.
const MEGABITS_OF_BYTE: f64 = 8.0 / 1e6;

/// What is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrafficClass {
    /// A VM's memory.
    #[default]
    Memory,
    /// Its disks.
    Storage,
}

/// The limits that hold on a host now, in Mb/s and in each direction; absent for none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// For all together.
    pub all_mbps: Option<u64>,
    /// For disks alone.
    pub storage_mbps: Option<u64>,
}

/// One that takes of a host's links, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taker {
    /// What it sends.
    pub class: TrafficClass,
    /// Whether these are what a guest writes, and waits for; of disks only.
    pub guest_waits: bool,
    /// What its paths carry.
    pub paths_mbps: u64,
    /// What it could use of that.
    pub wanted_mbps: u64,
    /// What it takes until it asks again; 0 if it has no limit.
    pub held_mbps: u64,
}

impl Taker {
    fn is_storage(&self) -> bool {
        self.class == TrafficClass::Storage
    }

    fn yields(&self) -> bool {
        self.is_storage() && !self.guest_waits
    }

    fn is_guest_writing(&self) -> bool {
        self.is_storage() && self.guest_waits
    }

    /// What it gets in any case.
    fn least_mbps(&self) -> u64 {
        if self.is_guest_writing() { GUEST_WRITES_LEAST_MBPS } else { 1 }
    }
}

impl Limits {
    /// What disks may take.
    fn of_storage(self) -> Option<u64> {
        [self.all_mbps, self.storage_mbps].into_iter().flatten().min()
    }

    /// What copies of disks keep.
    fn kept_mbps(self, takers: &[Taker]) -> u64 {
        let wanted_mbps = sum(takers.iter().filter(|taker| taker.yields()).map(|taker| taker.wanted_mbps));
        let kept_mbps = self.of_storage().map_or(u64::MAX, |mbps| mbps / COPIES_KEEP_ONE_OF);
        kept_mbps.min(wanted_mbps)
    }
}

/// The fair share of each; none where no limit holds for it.
fn shares(limits: Limits, takers: &[Taker]) -> Vec<Option<u64>> {
    let kept_mbps = limits.kept_mbps(takers);
    let less = |limit: Option<u64>, mbps: u64| limit.map(|limit| limit.saturating_sub(mbps));
    let mut shares = vec![None; takers.len()];
    // Together, unless disks may take less than would be theirs then.
    divide(less(limits.all_mbps, kept_mbps), takers, &mut shares, |taker| !taker.yields());
    let writes_mbps = taken(takers, &shares, Taker::is_guest_writing);
    let may_write_mbps = less(limits.of_storage(), kept_mbps);
    if may_write_mbps.is_some_and(|may_mbps| limits.all_mbps.is_none() || writes_mbps > may_mbps) {
        divide(may_write_mbps, takers, &mut shares, Taker::is_guest_writing);
        let left_mbps = less(limits.all_mbps, kept_mbps + taken(takers, &shares, Taker::is_guest_writing));
        divide(left_mbps, takers, &mut shares, |taker| !taker.is_storage());
    }
    let left_of_all = less(limits.all_mbps, taken(takers, &shares, |taker| !taker.yields()));
    let left_of_storage = less(limits.of_storage(), taken(takers, &shares, Taker::is_guest_writing));
    divide([left_of_all, left_of_storage].into_iter().flatten().min(), takers, &mut shares, Taker::yields);
    shares
}

/// Divides a limit among some of them, if there is one.
fn divide(
    limit_mbps: Option<u64>,
    takers: &[Taker],
    shares: &mut [Option<u64>],
    is_among: impl Fn(&Taker) -> bool,
) {
    let Some(limit_mbps) = limit_mbps else { return };
    let among: Vec<usize> = (0..takers.len()).filter(|index| is_among(&takers[*index])).collect();
    let wanted_mbps: Vec<u64> = among.iter().map(|index| takers[*index].wanted_mbps).collect();
    for (index, mbps) in among.into_iter().zip(fair_shares(limit_mbps, &wanted_mbps)) {
        shares[index] = Some(mbps.max(takers[index].least_mbps()));
    }
}

fn taken(takers: &[Taker], shares: &[Option<u64>], is_among: impl Fn(&Taker) -> bool) -> u64 {
    let among = takers.iter().zip(shares).filter(|(taker, _)| is_among(taker));
    sum(among.filter_map(|(_, share)| *share))
}

fn sum(mbps: impl Iterator<Item = u64>) -> u64 {
    mbps.fold(0, u64::saturating_add)
}

/// What one of them may take now: its fair share, if the others leave it that much already. A newcomer waits until they
/// have made room, so that all together never take more than the limits, but for the least that each gets. None where no
/// limit holds for it.
pub fn grant(limits: Limits, takers: &[Taker], own: usize) -> Option<u64> {
    let taker = takers.get(own)?;
    let Some(fair_mbps) = shares(limits, takers)[own] else { return way_left(takers, taker) };
    let others = || takers.iter().enumerate().filter(|(index, _)| *index != own).map(|(_, other)| other);
    let left = |limit: Option<u64>, held_mbps: u64| limit.map(|limit| limit.saturating_sub(held_mbps));
    let left_of_all = left(limits.all_mbps, sum(others().map(|other| other.held_mbps)));
    let held_by_storage = sum(others().filter(|other| other.is_storage()).map(|other| other.held_mbps));
    let left_of_storage = left(limits.storage_mbps, held_by_storage).filter(|_| taker.is_storage());
    let way_left = way_left(takers, taker).filter(|_| limits.all_mbps.is_none());
    let bounds = [left_of_all, left_of_storage, way_left].into_iter().flatten();
    Some(bounds.fold(fair_mbps, u64::min).max(taker.least_mbps()))
}

/// What a copy of disks takes where no limit says who goes first.
fn way_left(takers: &[Taker], own: &Taker) -> Option<u64> {
    let is_memory_sent = takers.iter().any(|taker| !taker.is_storage());
    (own.yields() && is_memory_sent).then(|| (own.paths_mbps / COPIES_KEEP_ONE_OF).max(1))
}

/// What a guest's writes to mirrored disks could use, by what came of them recently: what is kept for writes that do not come
/// is lost to memory.
pub fn guest_writes_mbps(sent_bytes: u64, within: Duration, paths_mbps: u64) -> u64 {
    let mbps = sent_bytes as f64 * MEGABITS_OF_BYTE / within.as_secs_f64().max(1e-3);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    let mbps = (mbps * GUEST_WRITES_GROW).ceil() as u64;
    mbps.min(paths_mbps).max(GUEST_WRITES_LEAST_MBPS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NONE: Limits = Limits { all_mbps: None, storage_mbps: None };

    fn limits(all_mbps: u64, storage_mbps: u64) -> Limits {
        let limit = |mbps: u64| (mbps > 0).then_some(mbps);
        Limits { all_mbps: limit(all_mbps), storage_mbps: limit(storage_mbps) }
    }

    fn memory(wanted_mbps: u64) -> Taker {
        let (class, paths_mbps) = (TrafficClass::Memory, wanted_mbps);
        Taker { class, guest_waits: false, paths_mbps, wanted_mbps, held_mbps: 0 }
    }

    fn copy(wanted_mbps: u64) -> Taker {
        Taker { class: TrafficClass::Storage, ..memory(wanted_mbps) }
    }

    fn writes(wanted_mbps: u64) -> Taker {
        Taker { guest_waits: true, ..copy(wanted_mbps) }
    }

    fn held(taker: Taker, held_mbps: u64) -> Taker {
        Taker { held_mbps, ..taker }
    }

    #[test]
    fn copies_yield_to_memory_and_keep_a_part() {
        let takers = [memory(1000), copy(1000), copy(1000)];
        assert_eq!(shares(limits(400, 0), &takers), [350, 25, 25].map(Some));
        let takers = [memory(100), copy(1000), copy(1000)];
        assert_eq!(
            shares(limits(400, 0), &takers),
            [100, 150, 150].map(Some),
            "what memory does not want is theirs"
        );
        assert_eq!(shares(limits(400, 80), &takers), [100, 40, 40].map(Some));
    }

    #[test]
    fn a_limit_of_storage_leaves_memory_alone() {
        let takers = [memory(1000), copy(1000)];
        assert_eq!(shares(limits(0, 80), &takers), [None, Some(80)]);
        assert_eq!(shares(limits(0, 80), &[copy(1000), copy(30)]), [50, 30].map(Some));
        assert_eq!(shares(limits(500, 80), &takers), [490, 10].map(Some));
        assert_eq!(shares(NONE, &takers), [None, None]);
    }

    #[test]
    fn a_guests_writes_share_with_memory_and_have_some_in_any_case() {
        let takers = [memory(1000), writes(1000)];
        assert_eq!(shares(limits(400, 0), &takers), [200, 200].map(Some));
        assert_eq!(shares(limits(400, 50), &takers), [350, 50].map(Some));
        assert_eq!(shares(limits(0, 50), &takers), [None, Some(50)]);
        assert_eq!(shares(limits(400, 0), &[memory(1000), writes(8)]), [392, 8].map(Some));
        assert_eq!(shares(limits(2, 0), &takers), [1, GUEST_WRITES_LEAST_MBPS].map(Some));
        let with_copy = [memory(1000), writes(1000), copy(1000)];
        assert_eq!(shares(limits(800, 0), &with_copy), [350, 350, 100].map(Some));
        assert_eq!(shares(limits(800, 80), &with_copy), [720, 70, 10].map(Some));
    }

    #[test]
    fn copies_leave_the_way_to_memory_without_a_limit_too() {
        assert_eq!(grant(NONE, &[memory(1000), copy(1000)], 1), Some(125));
        assert_eq!(grant(NONE, &[copy(1000), copy(1000)], 1), None);
        assert_eq!(grant(NONE, &[memory(1000), writes(1000)], 1), None);
        assert_eq!(grant(NONE, &[memory(1000), copy(1000)], 0), None);
        assert_eq!(grant(limits(0, 500), &[memory(1000), copy(1000)], 1), Some(125));
        let granted_there = Taker { wanted_mbps: 125, ..copy(1000) };
        assert_eq!(
            grant(NONE, &[memory(1000), granted_there], 1),
            Some(125),
            "it yields at both ends, and once"
        );
        assert_eq!(grant(limits(0, 50), &[memory(1000), copy(1000)], 1), Some(50));
    }

    #[test]
    fn a_newcomer_waits_until_the_others_make_room() {
        let all = limits(100, 0);
        let granted =
            |held_mbps: [u64; 2], own| grant(all, &held_mbps.map(|mbps| held(memory(1000), mbps)), own);
        assert_eq!(grant(all, &[memory(1000)], 0), Some(100));
        assert_eq!(granted([100, 0], 1), Some(1), "the first has all of it");
        assert_eq!(granted([100, 1], 0), Some(50), "and gives way when it asks again");
        assert_eq!(granted([50, 1], 1), Some(50));
        assert_eq!(granted([50, 50], 2), None);
        let lowered = [50, 50].map(|mbps| held(memory(1000), mbps));
        assert_eq!(grant(limits(40, 0), &lowered, 0), Some(1), "a limit that was lowered");
        assert_eq!(grant(limits(0, 40), &[held(copy(100), 30), copy(100)], 1), Some(10));
        assert_eq!(grant(limits(0, 40), &[held(copy(100), 30), memory(100)], 1), None);
    }

    #[test]
    fn a_guests_writes_may_double_and_never_want_nothing() {
        let second = Duration::from_secs(1);
        assert_eq!(guest_writes_mbps(0, second, 1000), GUEST_WRITES_LEAST_MBPS);
        assert_eq!(guest_writes_mbps(12_500_000, second, 1000), 200);
        assert_eq!(guest_writes_mbps(12_500_000, second, 150), 150);
        assert_eq!(guest_writes_mbps(u64::MAX, Duration::ZERO, 150), 150);
        assert_eq!(guest_writes_mbps(0, second, 1), GUEST_WRITES_LEAST_MBPS);
    }

    fn some_taker() -> impl Strategy<Value = Taker> {
        (0..3_u8, 8_u64..50_000).prop_map(|(kind, wanted_mbps)| match kind {
            0 => memory(wanted_mbps),
            1 => copy(wanted_mbps),
            _ => writes(wanted_mbps),
        })
    }

    fn some_limits() -> impl Strategy<Value = Limits> {
        let limit = || prop::option::of(100_u64..100_000);
        (limit(), limit()).prop_map(|(all_mbps, storage_mbps)| Limits { all_mbps, storage_mbps })
    }

    proptest! {
        #[test]
        fn what_is_granted_never_adds_up_to_more_than_the_limits_and_becomes_fair(
            limits in some_limits(),
            takers in prop::collection::vec(some_taker(), 1..10),
            asking in prop::collection::vec(0_usize..10, 1..40),
        ) {
            let mut takers = takers;
            let least = takers.len() as u64 * GUEST_WRITES_LEAST_MBPS;
            let rounds = (0..3).flat_map(|_| 0..takers.len());
            let asking: Vec<usize> = asking.into_iter().map(|index| index % takers.len()).chain(rounds).collect();
            for own in asking {
                takers[own].held_mbps = grant(limits, &takers, own).unwrap_or(0);
                let all = sum(takers.iter().map(|taker| taker.held_mbps));
                let disks = sum(takers.iter().filter(|taker| taker.is_storage()).map(|taker| taker.held_mbps));
                prop_assert!(limits.all_mbps.is_none_or(|limit| all <= limit + least), "{takers:?}");
                prop_assert!(limits.storage_mbps.is_none_or(|limit| disks <= limit + least), "{takers:?}");
            }
            if limits.all_mbps.is_some() {
                for (taker, fair) in takers.iter().zip(shares(limits, &takers)) {
                    prop_assert!(taker.held_mbps + 2 * least >= fair.unwrap(), "{takers:?}");
                }
            }
        }

        #[test]
        fn memory_goes_first_and_copies_keep_a_part(
            limits in some_limits(),
            takers in prop::collection::vec(some_taker(), 1..10),
        ) {
            let shares = shares(limits, &takers);
            let least = takers.len() as u64 * GUEST_WRITES_LEAST_MBPS;
            let of = |is_among: fn(&Taker) -> bool| taken(&takers, &shares, is_among);
            for (taker, share) in takers.iter().zip(&shares) {
                let is_limited = limits.all_mbps.is_some() || taker.is_storage() && limits.storage_mbps.is_some();
                prop_assert_eq!(share.is_some(), is_limited);
                prop_assert!(share.is_none_or(|mbps| (taker.least_mbps()..=taker.wanted_mbps).contains(&mbps)));
            }
            if limits.of_storage().is_some() {
                prop_assert!(of(Taker::yields) + least >= limits.kept_mbps(&takers), "{shares:?}");
            }
            if let Some(all_mbps) = limits.all_mbps {
                let wants: u64 = takers.iter().filter(|taker| !taker.is_storage()).map(|taker| taker.wanted_mbps).sum();
                let first = of(|taker| !taker.yields());
                let is_served = of(|taker| !taker.is_storage()) >= wants;
                // If memory wants more, copies have no more than their part.
                prop_assert!(is_served || first + limits.kept_mbps(&takers) + least >= all_mbps, "{shares:?}");
            }
        }

        #[test]
        fn memory_alone_is_divided_as_ever(
            limit in 1_u64..100_000,
            wanted in prop::collection::vec(1_u64..50_000, 1..10),
        ) {
            let takers: Vec<Taker> = wanted.iter().map(|mbps| memory(*mbps)).collect();
            let of_each: Vec<u64> = shares(limits(limit, 0), &takers).into_iter().flatten().collect();
            prop_assert_eq!(of_each, fair_shares(limit, &wanted));
        }
    }
}
