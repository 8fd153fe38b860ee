//! Weights that put a number of connections on the right paths.
//!
//! A route's weights are chances: the kernel makes a number of 31 bits of each connection's addresses
//! and ports, and each next hop gets an interval of numbers as wide as its weight, in their order
//! (`fib_rebalance` and `rt6_multipath_rebalance` in Linux). Of 16 connections over 5 and 1 Gb/s one
//! migration in 18 would leave the slow path empty. The numbers cannot be read, since their seed is
//! secret. But the kernel says which next hop it takes for a connection, so each answer narrows down
//! where its number is, and soon there are weights whose borders lie where they should.

use crate::route_attributes::WEIGHT_MAX;
use crate::weights::assumed_speeds;

/// The numbers are below this.
const NUMBERS: u64 = 1 << 31;

/// The least for one path: one connection of each of QEMU's migrations carries no memory.
const LEAST: usize = 3;

/// Where the numbers of some connections lie, as far as that is known.
#[derive(Debug, Clone)]
pub struct Placement {
    /// For each connection the least and the greatest number it may have.
    intervals: Vec<(u64, u64)>,
}

impl Placement {
    /// Connections about which nothing is known.
    pub fn new(connections: usize) -> Self {
        Self { intervals: vec![(0, NUMBERS - 1); connections] }
    }

    /// Takes what the kernel says: with these weights, each connection goes over the path of this index.
    /// False if that contradicts what it said before; then nothing is known any more.
    pub fn observe(&mut self, weights: &[u16], paths: &[usize]) -> bool {
        let ends = ends(weights);
        for (interval, &path) in self.intervals.iter_mut().zip(paths) {
            let Some(&end) = ends.get(path) else { return self.forget() };
            let begin = if path == 0 { 0 } else { ends[path - 1] };
            *interval = (interval.0.max(begin), interval.1.min(end.saturating_sub(1)));
            if interval.0 > interval.1 {
                return self.forget();
            }
        }
        true
    }

    fn forget(&mut self) -> bool {
        *self = Self::new(self.intervals.len());
        false
    }

    /// Whether each path has as many of the connections as fits its speed in Mb/s, when each goes over the
    /// path of this index.
    pub fn is_fair(paths: &[usize], speeds_mbps: &[Option<u64>]) -> bool {
        let fair = fair_counts(speeds_mbps, paths.len());
        let count = |path: usize| paths.iter().filter(|taken| **taken == path).count();
        fair.iter().enumerate().all(|(path, fair)| count(path) == *fair)
    }

    /// The weights that most likely bring as many connections to each path as fits its speed in Mb/s.
    pub fn weights(&self, speeds_mbps: &[Option<u64>]) -> Vec<u16> {
        let numbers = self.likely_numbers();
        let mut before = 0;
        let mut borders: Vec<f64> = fair_counts(speeds_mbps, numbers.len())
            .into_iter()
            .map(|count| {
                before += count;
                border(&numbers, before)
            })
            .collect();
        if let Some(last) = borders.last_mut() {
            *last = 1.0;
        }
        weights_of(&borders)
    }

    /// Where the numbers most likely are, from 0 to 1, in their order: evenly spread over the interval
    /// that they share.
    fn likely_numbers(&self) -> Vec<f64> {
        let mut sorted = self.intervals.clone();
        sorted.sort_unstable();
        let mut numbers: Vec<f64> = sorted
            .chunk_by(|one, other| one == other)
            .flat_map(|alike| {
                let (least, greatest) = alike[0];
                let step = (greatest - least + 1) as f64 / (alike.len() + 1) as f64;
                (1..=alike.len()).map(move |count| (least as f64 + step * count as f64) / NUMBERS as f64)
            })
            .collect();
        numbers.sort_by(f64::total_cmp);
        numbers
    }
}

/// How many of the connections each path should have: so many that no path has less than its part by speed,
/// as far as they go (Adams' method). A connection too many on a slow path costs less than one too few: on a
/// host at the limit of its CPU each connection carries the same, and the slow path would stay idle.
fn fair_counts(speeds_mbps: &[Option<u64>], connections: usize) -> Vec<usize> {
    let speeds = assumed_speeds(speeds_mbps);
    let mut counts = vec![0; speeds.len()];
    for _ in 0..connections {
        let next = (0..speeds.len()).max_by(|&one, &other| {
            let lacks = |path: usize| LEAST.saturating_sub(counts[path]);
            let speed_of_each = |path: usize| speeds[path] as f64 / counts[path].max(1) as f64;
            lacks(one)
                .cmp(&lacks(other))
                .then(speed_of_each(one).total_cmp(&speed_of_each(other)))
                .then(other.cmp(&one))
        });
        if let Some(next) = next {
            counts[next] += 1;
        }
    }
    counts
}

/// Where the interval of a path ends, from 0 to 1, if so many of the connections are to be before it:
/// half-way between the last of them and the next.
fn border(numbers: &[f64], before: usize) -> f64 {
    let last = before.checked_sub(1).and_then(|last| numbers.get(last));
    match (last, numbers.get(before)) {
        (Some(last), Some(next)) => f64::midpoint(*last, *next),
        (None, _) => 0.0,
        (_, None) => 1.0,
    }
}

/// Weights whose intervals end about there.
fn weights_of(borders: &[f64]) -> Vec<u16> {
    let begins = std::iter::once(&0.0).chain(borders);
    let widest = begins.clone().zip(borders).map(|(begin, end)| end - begin).fold(0.0, f64::max);
    let sum = f64::from(WEIGHT_MAX) / widest.max(f64::MIN_POSITIVE);
    let weight = |begin: &f64, end: &f64| (end * sum).round() - (begin * sum).round();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to WEIGHT_MAX")]
    let valid = |weight: f64| weight.clamp(1.0, f64::from(WEIGHT_MAX)) as u16;
    begins.zip(borders).map(|(begin, end)| valid(weight(begin, end))).collect()
}

/// Where the interval of each next hop ends, by the kernel's formula.
fn ends(weights: &[u16]) -> Vec<u64> {
    let sum: u64 = weights.iter().copied().map(u64::from).sum();
    let mut until = 0;
    let end = |weight: &u16| {
        until += u64::from(*weight);
        // DIV_ROUND_CLOSEST_ULL
        (until * NUMBERS + sum / 2) / sum
    };
    weights.iter().map(end).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The path that the kernel takes for each of these numbers.
    fn paths(weights: &[u16], numbers: &[u64]) -> Vec<usize> {
        let ends = ends(weights);
        numbers.iter().map(|number| ends.iter().position(|end| number < end).unwrap()).collect()
    }

    /// `count` numbers, no two of them so close that weights cannot separate them.
    fn numbers(count: usize) -> impl Strategy<Value = Vec<u64>> {
        prop::collection::vec(1_u64..8, count + 1).prop_map(|gaps| {
            let sum: u64 = gaps.iter().sum();
            let begins = gaps.iter().scan(0, |begin, gap| {
                *begin += gap;
                Some(*begin * NUMBERS / sum)
            });
            begins.take(gaps.len() - 1).collect()
        })
    }

    fn is_placed_within(attempts: usize, speeds: &[Option<u64>], numbers: &[u64]) -> bool {
        let mut placement = Placement::new(numbers.len());
        (0..attempts).any(|_| {
            let weights = placement.weights(speeds);
            let paths = paths(&weights, numbers);
            assert!(placement.observe(&weights, &paths));
            Placement::is_fair(&paths, speeds)
        })
    }

    #[test]
    fn connections_are_shared_by_speed_and_no_path_stays_empty() {
        let fair = |speeds: &[u64], connections| {
            let speeds: Vec<_> = speeds.iter().copied().map(Some).collect();
            fair_counts(&speeds, connections)
        };
        assert_eq!(fair(&[1_000, 1_000], 16), [8, 8]);
        assert_eq!(fair(&[5_000, 1_000], 17), [14, 3]);
        assert_eq!(fair(&[5_000, 2_500, 1_000], 17), [9, 5, 3]);
        assert_eq!(fair(&[100, 100_000], 16), [3, 13]);
        assert_eq!(fair(&[1_000; 4], 2), [1, 1, 0, 0]);
        assert_eq!(fair(&[1_000; 4], 5), [2, 1, 1, 1]);
        assert_eq!(fair(&[], 2), [0_usize; 0]);
        assert_eq!(fair_counts(&[None, Some(1_000)], 4), [2, 2]);
    }

    #[test]
    fn without_knowledge_the_weights_are_as_the_speeds() {
        assert_eq!(Placement::new(16).weights(&[Some(1_000), Some(1_000)]), [256, 256]);
        assert_eq!(Placement::new(0).weights(&[Some(1_000)]), [256]);
        assert_eq!(Placement::new(16).weights(&[]), [0_u16; 0]);
    }

    #[test]
    fn a_contradiction_is_noticed_and_forgotten() {
        let mut placement = Placement::new(1);
        assert!(placement.observe(&[1, 1], &[0]));
        assert!(!placement.observe(&[1, 3], &[1]) || placement.intervals[0].0 < NUMBERS / 2);
        assert!(!placement.observe(&[1, 1], &[2]));
        assert_eq!(placement.intervals, [(0, NUMBERS - 1)]);
    }

    proptest! {
        #[test]
        fn connections_are_placed_by_speed(
            speeds in prop::collection::vec((1_u64..100_000).prop_map(Some), 1..5),
            numbers in numbers(16),
        ) {
            prop_assert!(is_placed_within(12, &speeds, &numbers));
        }

        #[test]
        fn any_answer_gives_valid_weights(
            answers in prop::collection::vec((prop::collection::vec(1_u16..=256, 3), prop::collection::vec(0_usize..4, 5)), 0..8),
        ) {
            let mut placement = Placement::new(5);
            for (weights, paths) in answers {
                placement.observe(&weights, &paths);
                let weights = placement.weights(&[Some(10), None, Some(1_000)]);
                prop_assert!(weights.iter().all(|weight| (1..=256).contains(weight)), "{weights:?}");
            }
        }
    }
}
