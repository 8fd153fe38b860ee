//! How much of the traffic each path gets.

use crate::route_attributes::WEIGHT_MAX;

const GREATEST: u64 = WEIGHT_MAX as u64;

/// Weights from 1 to 256 for paths of these speeds in Mb/s, so that together they carry the most.
///
/// A path whose speed is unknown counts as the slowest known one, so that it is not overloaded;
/// if none is known, all weigh the same. Traffic is spread by weight, so all paths together carry
/// `min(speed / weight) × Σ weight`, which no other weights exceed. Of equally good ones the
/// smallest are taken: `[10000, 1000]` gives `[10, 1]`.
///
/// # Why it is the best
/// Take any weights, and the path where `speed / weight` is least: raising every other weight to
/// the greatest that keeps that ratio the least carries no less. So the best are found among
/// those that some path and a weight for it lead to.
pub fn weights(speeds_mbps: &[Option<u64>]) -> Vec<u16> {
    let speeds = assumed_speeds(speeds_mbps);
    let mut best: Vec<u64> = vec![1; speeds.len()];
    for &limiting in &speeds {
        for weight in 1..=GREATEST {
            let candidate: Vec<u64> =
                speeds.iter().map(|&speed| greatest_weight(speed, limiting, weight)).collect();
            if is_better(&speeds, &candidate, &best) {
                best = candidate;
            }
        }
    }
    best.into_iter().map(|weight| u16::try_from(weight).expect("greatest_weight stays within 256")).collect()
}

/// The slowest known one for those that are not known.
pub(crate) fn assumed_speeds(speeds_mbps: &[Option<u64>]) -> Vec<u64> {
    let known = |speed: &Option<u64>| speed.filter(|&speed| speed > 0);
    let slowest = speeds_mbps.iter().filter_map(known).min().unwrap_or(1);
    speeds_mbps.iter().map(|speed| known(speed).unwrap_or(slowest)).collect()
}

/// The greatest weight for a path of `speed` that keeps `speed / weight` at or above
/// `limiting / weight_of_limiting`; at least 1.
fn greatest_weight(speed: u64, limiting: u64, weight_of_limiting: u64) -> u64 {
    let greatest = u128::from(speed) * u128::from(weight_of_limiting) / u128::from(limiting);
    u64::try_from(greatest).map_or(GREATEST, |weight| weight.clamp(1, GREATEST))
}

fn is_better(speeds: &[u64], candidate: &[u64], best: &[u64]) -> bool {
    let (carried, by) = carries(speeds, candidate);
    let (carried_best, by_best) = carries(speeds, best);
    let sum = |weights: &[u64]| weights.iter().sum::<u64>();
    match (carried * by_best).cmp(&(carried_best * by)) {
        std::cmp::Ordering::Equal => sum(candidate) < sum(best),
        order => order.is_gt(),
    }
}

/// How much all paths carry together, as a fraction.
fn carries(speeds: &[u64], weights: &[u64]) -> (u128, u128) {
    let sum: u128 = weights.iter().copied().map(u128::from).sum();
    let (speed, weight) = speeds
        .iter()
        .zip(weights)
        .map(|(&speed, &weight)| (u128::from(speed), u128::from(weight)))
        .min_by(|a, b| (a.0 * b.1).cmp(&(b.0 * a.1)))
        .unwrap_or((0, 1));
    (speed * sum, weight)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn usual_speeds() {
        assert_eq!(weights(&[]), Vec::<u16>::new());
        assert_eq!(weights(&[Some(10_000)]), [1]);
        assert_eq!(weights(&[Some(10_000), Some(10_000)]), [1, 1]);
        assert_eq!(weights(&[Some(1_000), Some(5_000)]), [1, 5]);
        assert_eq!(weights(&[Some(5_000), Some(100)]), [50, 1]);
        assert_eq!(weights(&[Some(25_000), Some(10_000)]), [5, 2]);
        assert_eq!(weights(&[Some(100_000), Some(100)]), [256, 1]);
        assert_eq!(weights(&[None, None]), [1, 1]);
        assert_eq!(weights(&[Some(10_000), None, Some(1_000)]), [10, 1, 1]);
        assert_eq!(weights(&[Some(0), Some(1_000)]), [1, 1]);
        assert_eq!(weights(&[Some(u64::MAX), Some(1)]), [256, 1]);
    }

    proptest! {
        // Each case tries all 65536 pairs of weights.
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn no_other_weights_of_two_paths_carry_more(a in 1_u64..200_000, b in 1_u64..200_000) {
            let speeds = [a, b];
            let chosen: Vec<u64> = weights(&speeds.map(Some)).into_iter().map(u64::from).collect();
            for x in 1..=256 {
                for y in 1..=256 {
                    prop_assert!(!is_better(&speeds, &[x, y], &chosen), "{x}:{y} beats {chosen:?}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_weight_is_valid(speeds in prop::collection::vec(any::<Option<u64>>(), 0..6)) {
            let weights = weights(&speeds);
            prop_assert_eq!(weights.len(), speeds.len());
            prop_assert!(weights.iter().all(|weight| (1..=256).contains(weight)));
        }

        #[test]
        fn a_faster_path_never_weighs_less(mut speeds in prop::collection::vec(1_u64..200_000, 1..6)) {
            speeds.sort_unstable();
            let known: Vec<_> = speeds.into_iter().map(Some).collect();
            prop_assert!(weights(&known).is_sorted());
        }

        #[test]
        fn only_ratios_matter(speeds in prop::collection::vec(1_u64..200_000, 1..5), factor in 2_u64..100) {
            let plain: Vec<_> = speeds.iter().copied().map(Some).collect();
            let scaled: Vec<_> = speeds.iter().map(|speed| Some(speed * factor)).collect();
            prop_assert_eq!(weights(&plain), weights(&scaled));
        }
    }
}
