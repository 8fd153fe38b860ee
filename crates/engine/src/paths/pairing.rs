//! Which link of one host is paired with which link of the other, if several reach several.

/// For each link of the source its partner, an index into the target's links; each link has at most
/// one, so that a path's speed is its own.
///
/// As many links as possible get a partner, those of the source that are fastest before others. Each
/// prefers the partner closest in speed, and of equals the first: one of another speed would waste the
/// difference. The same links give the same pairs, whatever the order in which they were found to reach
/// each other.
pub(crate) fn pair_up(
    source_mbps: &[Option<u64>],
    target_mbps: &[Option<u64>],
    reaches: impl Fn(usize, usize) -> bool,
) -> Vec<Option<usize>> {
    let candidates = source_mbps.iter().enumerate().map(|(link, speed)| {
        let mut partners: Vec<usize> = (0..target_mbps.len()).filter(|peer| reaches(link, *peer)).collect();
        partners.sort_by_key(|peer| known(*speed).abs_diff(known(target_mbps[*peer])));
        partners
    });
    let mut pairs = Pairs { candidates: candidates.collect(), taken_by: vec![None; target_mbps.len()] };
    let mut fastest_first: Vec<usize> = (0..source_mbps.len()).collect();
    fastest_first.sort_by_key(|link| std::cmp::Reverse(known(source_mbps[*link])));
    for link in fastest_first {
        pairs.place(link, &mut vec![false; target_mbps.len()]);
    }
    let mut partners = vec![None; source_mbps.len()];
    for (peer, link) in pairs.taken_by.into_iter().enumerate() {
        if let Some(link) = link {
            partners[link] = Some(peer);
        }
    }
    partners
}

fn known(speed_mbps: Option<u64>) -> u64 {
    speed_mbps.unwrap_or(0)
}

struct Pairs {
    candidates: Vec<Vec<usize>>,
    taken_by: Vec<Option<usize>>,
}

impl Pairs {
    /// Gives `link` a partner, a free one if there is one. Else another link gives its own up, if it
    /// finds a new one (Kuhn's augmenting paths). Links that have a partner keep having one.
    fn place(&mut self, link: usize, asked: &mut [bool]) -> bool {
        let free = self.candidates[link].iter().copied().find(|peer| self.taken_by[*peer].is_none());
        let found = free.or_else(|| {
            self.candidates[link].clone().into_iter().find(|peer| {
                !std::mem::replace(&mut asked[*peer], true)
                    && self.taken_by[*peer].is_some_and(|other| self.place(other, asked))
            })
        });
        if let Some(peer) = found {
            self.taken_by[peer] = Some(link);
        }
        found.is_some()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL_REACH_ALL: fn(usize, usize) -> bool = |_, _| true;

    #[test]
    fn in_one_segment_equal_speeds_and_then_the_order_decide() {
        assert_eq!(pair_up(&[Some(1); 2], &[Some(1); 2], ALL_REACH_ALL), [Some(0), Some(1)]);
        let crossed = pair_up(&[Some(1_000), Some(5_000)], &[Some(5_000), Some(1_000)], ALL_REACH_ALL);
        assert_eq!(crossed, [Some(1), Some(0)]);
        assert_eq!(pair_up(&[Some(1_000), Some(5_000)], &[Some(5_000)], ALL_REACH_ALL), [None, Some(0)]);
        assert_eq!(pair_up(&[None, Some(1)], &[Some(1), None], ALL_REACH_ALL), [Some(1), Some(0)]);
        assert_eq!(pair_up(&[], &[None], ALL_REACH_ALL), []);
    }

    #[test]
    fn a_link_with_a_choice_makes_room_for_one_without() {
        let reaches = |link, peer| link == 0 || peer == 0;
        assert_eq!(pair_up(&[Some(9), Some(1)], &[Some(9), Some(1)], reaches), [Some(1), Some(0)]);
    }

    /// Most pairs that are possible, by trying all.
    fn most(reaches: &[Vec<bool>], link: usize, taken: &mut [bool]) -> usize {
        let Some(row) = reaches.get(link) else { return 0 };
        let mut best = most(reaches, link + 1, taken);
        for peer in 0..row.len() {
            if row[peer] && !std::mem::replace(&mut taken[peer], true) {
                best = best.max(1 + most(reaches, link + 1, taken));
                taken[peer] = false;
            }
        }
        best
    }

    fn speeds() -> impl Strategy<Value = Vec<Option<u64>>> {
        prop::collection::vec(prop::option::of(1_u64..4), 5)
    }

    proptest! {
        #[test]
        fn as_many_as_possible_and_none_twice(
            source in speeds(),
            target in speeds(),
            reaches in prop::collection::vec(prop::collection::vec(any::<bool>(), 5), 5),
        ) {
            let partners = pair_up(&source, &target, |link, peer| reaches[link][peer]);
            let mut taken: Vec<usize> = partners.iter().flatten().copied().collect();
            taken.sort_unstable();
            taken.dedup();
            prop_assert_eq!(taken.len(), partners.iter().flatten().count());
            for (link, peer) in partners.iter().enumerate() {
                prop_assert!(peer.is_none_or(|peer| reaches[link][peer]));
            }
            prop_assert_eq!(taken.len(), most(&reaches, 0, &mut [false; 5]));
        }

        #[test]
        fn equal_sets_of_speeds_are_paired_as_equals(speeds in speeds(), order in Just([3, 0, 4, 1, 2])) {
            let target: Vec<_> = order.iter().map(|index| speeds[*index]).collect();
            for (link, peer) in pair_up(&speeds, &target, |_, _| true).into_iter().enumerate() {
                prop_assert_eq!(peer.map(|peer| target[peer]), Some(speeds[link]));
            }
        }

        #[test]
        fn of_the_source_the_fastest_are_paired(source in speeds(), target in prop::option::of(1_u64..4)) {
            let partners = pair_up(&source, &[target], |_, _| true);
            let paired = partners.iter().position(Option::is_some).unwrap();
            prop_assert_eq!(source[paired], source.iter().copied().max().flatten());
        }
    }
}
