//! Whose turn it is among VMs that go to several targets.

use std::collections::{BTreeMap, VecDeque};

/// What goes to one target.
#[derive(Default)]
struct Queue<T> {
    left_ms: f64,
    // With what each takes, in ms.
    waiting: VecDeque<(f64, T)>,
}

/// Puts in order what goes to several targets, each of which has links of its own: the next one always goes where what
/// is left takes longest, so that all links are in use until the end. What goes to the same target keeps its order.
pub(super) fn in_turns<T>(
    items: Vec<T>,
    target_of: impl Fn(&T) -> usize,
    takes_ms: impl Fn(&T) -> f64,
) -> Vec<T> {
    let mut queues: BTreeMap<usize, Queue<T>> = BTreeMap::new();
    for item in items {
        let queue = queues
            .entry(target_of(&item))
            .or_insert_with(|| Queue { left_ms: 0.0, waiting: VecDeque::new() });
        let takes_ms = takes_ms(&item);
        queue.left_ms += takes_ms;
        queue.waiting.push_back((takes_ms, item));
    }
    let mut in_turns = vec![];
    while let Some(queue) = queues
        .values_mut()
        .filter(|queue| !queue.waiting.is_empty())
        // The first target of those that are alike.
        .rev()
        .max_by(|one, other| one.left_ms.total_cmp(&other.left_ms))
        && let Some((takes_ms, item)) = queue.waiting.pop_front()
    {
        queue.left_ms -= takes_ms;
        in_turns.push(item);
    }
    in_turns
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Of items that are a target and what they take.
    fn order(items: &[(usize, f64)]) -> Vec<(usize, f64)> {
        in_turns(items.to_vec(), |item| item.0, |item| item.1)
    }

    #[test]
    fn targets_take_turns_and_who_has_more_goes_before() {
        assert_eq!(
            order(&[(0, 4.0), (0, 4.0), (1, 4.0), (1, 4.0)]),
            [(0, 4.0), (1, 4.0), (0, 4.0), (1, 4.0)]
        );
        assert_eq!(
            order(&[(0, 3.0), (1, 2.0), (1, 2.0), (1, 2.0)]),
            [(1, 2.0), (1, 2.0), (0, 3.0), (1, 2.0)]
        );
        assert_eq!(order(&[(1, 9.0), (1, 1.0)]), [(1, 9.0), (1, 1.0)]);
        assert_eq!(order(&[]), []);
    }

    proptest! {
        #[test]
        fn none_is_lost_and_no_target_is_left_behind(
            items in prop::collection::vec((0..4_usize, 0.0..100.0_f64), 0..40),
        ) {
            let ordered = order(&items);
            let of = |items: &[(usize, f64)], target| {
                items.iter().filter(|item| item.0 == target).copied().collect::<Vec<_>>()
            };
            let largest = items.iter().map(|item| item.1).fold(0.0, f64::max);
            for target in 0..4 {
                prop_assert_eq!(of(&ordered, target), of(&items, target));
            }
            // From when each has had its turn, what is left for them differs by one item at most.
            let left = |from: usize, target| of(&ordered[from..], target).iter().map(|item| item.1).sum::<f64>();
            for from in 0..ordered.len() {
                let served: Vec<usize> = (0..4).filter(|target| !of(&ordered[..from], *target).is_empty()).collect();
                let lefts = || served.iter().map(|target| left(from, *target));
                let (most, least) = (lefts().fold(0.0, f64::max), lefts().fold(f64::INFINITY, f64::min));
                prop_assert!(served.is_empty() || most - least <= largest + 1e-6, "{most} and {least}");
            }
        }
    }
}
