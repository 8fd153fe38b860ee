//! The order of VMs that go to several targets.

use std::collections::{BTreeMap, VecDeque};

/// What goes to one target.
struct Queue<T> {
    total_bytes: f64,
    left_bytes: f64,
    waiting: VecDeque<T>,
}

impl<T> Queue<T> {
    /// Share of it that has not had its turn, 0 to 1.
    fn left(&self) -> f64 {
        if self.total_bytes > 0.0 { self.left_bytes / self.total_bytes } else { 1.0 }
    }
}

/// Puts in order what goes to several targets: the next one is always for the target that has the largest share left,
/// so that the links to each are wanted from the beginning to the end. What goes to the same target keeps its order.
pub(super) fn in_turns<T>(
    items: Vec<T>,
    target_of: impl Fn(&T) -> usize,
    bytes_of: impl Fn(&T) -> u64,
) -> Vec<T> {
    let mut queues: BTreeMap<usize, Queue<T>> = BTreeMap::new();
    let mut in_turns = Vec::with_capacity(items.len());
    for item in items {
        let queue = queues.entry(target_of(&item));
        let queue =
            queue.or_insert_with(|| Queue { total_bytes: 0.0, left_bytes: 0.0, waiting: VecDeque::new() });
        queue.total_bytes += bytes_of(&item) as f64;
        queue.left_bytes = queue.total_bytes;
        queue.waiting.push_back(item);
    }
    let first = |one: &&mut Queue<T>, other: &&mut Queue<T>| {
        one.left().total_cmp(&other.left()).then(one.total_bytes.total_cmp(&other.total_bytes))
    };
    while let Some(queue) = queues.values_mut().filter(|queue| !queue.waiting.is_empty()).max_by(first)
        && let Some(item) = queue.waiting.pop_front()
    {
        queue.left_bytes -= bytes_of(&item) as f64;
        in_turns.push(item);
    }
    in_turns
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Orders items, each a target and its bytes.
    fn order(items: &[(usize, u64)]) -> Vec<(usize, u64)> {
        in_turns(items.to_vec(), |item| item.0, |item| item.1)
    }

    fn targets(items: &[(usize, u64)]) -> Vec<usize> {
        order(items).into_iter().map(|item| item.0).collect()
    }

    #[test]
    fn targets_take_turns_by_what_goes_to_each() {
        assert_eq!(targets(&[(0, 5), (0, 4), (1, 4), (1, 4)]), [0, 1, 1, 0]);
        // Two to the one, from the first to the last of eight to the other.
        let few_and_many = [[(1, 3); 2].as_slice(), &[(0, 4); 8]].concat();
        assert_eq!(targets(&few_and_many), [0, 1, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(order(&[(1, 9), (1, 1)]), [(1, 9), (1, 1)]);
        assert_eq!(targets(&[(0, 0), (1, 0), (0, 0)]).len(), 3);
        assert_eq!(order(&[]), []);
    }

    proptest! {
        #[test]
        fn none_is_lost_and_no_target_is_left_behind(
            items in prop::collection::vec((0..4_usize, 1..100_u64), 0..40),
        ) {
            let ordered = order(&items);
            let of = |items: &[(usize, u64)], target| {
                items.iter().filter(|item| item.0 == target).copied().collect::<Vec<_>>()
            };
            let bytes = |items: &[(usize, u64)], target| of(items, target).iter().map(|item| item.1).sum::<u64>() as f64;
            for target in 0..4 {
                prop_assert_eq!(of(&ordered, target), of(&items, target));
            }
            // What is left on each differs at most by its largest item.
            let there: Vec<usize> = (0..4).filter(|target| bytes(&items, *target) > 0.0).collect();
            for from in 0..ordered.len() {
                let left = |target| bytes(&ordered[from..], target) / bytes(&items, target);
                let most = there.iter().map(|target| left(*target)).fold(0.0, f64::max);
                for target in &there {
                    let largest = of(&items, *target).iter().map(|item| item.1).max().unwrap_or(0) as f64;
                    let behind = most - left(*target);
                    prop_assert!(behind <= largest / bytes(&items, *target) + 1e-9, "{behind} at {from}");
                }
            }
        }
    }
}
