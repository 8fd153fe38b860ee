//! What the links of the host that is emptied carry to several targets at once: each link no more than it can, to each
//! target no more than its paths bring, all of them no more than the host's limit.

use std::collections::BTreeSet;

use super::speeds::speed_mbps;
use super::view::{DrainView, PathView, TargetView};

/// The links of the host, and the targets that they lead to. Speeds with headers, in Mb/s.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HostLinks {
    limit_mbps: u64,
    // The rate of each link, where it is known.
    links_mbps: Vec<Option<u64>>,
    // In the order of the view.
    targets: Vec<Ways>,
}

/// The paths to one target.
#[derive(Debug, Clone, PartialEq)]
struct Ways {
    /// The speed of all of them together.
    mbps: u64,
    is_known: bool,
    /// Over which link each goes, and what it brings.
    paths: Vec<(usize, u64)>,
}

impl HostLinks {
    pub(super) fn of(view: &DrainView) -> Self {
        let paths: Vec<&PathView> = view.targets.iter().flat_map(|target| &target.paths).collect();
        let names: BTreeSet<&str> = paths.iter().map(|path| path.link.as_str()).collect();
        let names: Vec<&str> = names.into_iter().collect();
        let own_mbps = |name: &&str| {
            let over = paths.iter().filter(|path| path.link == *name);
            over.filter_map(|path| path.link_mbps).max()
        };
        let ways = |target: &TargetView| {
            let mbps = speed_mbps(target);
            let path = |path: &PathView| {
                let link = names.binary_search(&path.link.as_str()).ok()?;
                Some((link, path.mbps.unwrap_or(mbps).min(mbps)))
            };
            let paths = target.paths.iter().filter_map(path).collect();
            Ways { mbps, is_known: target.paths_mbps > 0, paths }
        };
        Self {
            limit_mbps: view.limit.mbps.unwrap_or(u64::MAX),
            links_mbps: names.iter().map(own_mbps).collect(),
            targets: view.targets.iter().map(ways).collect(),
        }
    }

    /// For targets whose speed alone is known, but not which link leads to which.
    pub(super) fn of_speeds(targets_mbps: &[u64]) -> Self {
        let ways = |mbps: &u64| Ways { mbps: *mbps, is_known: true, paths: vec![] };
        Self { limit_mbps: u64::MAX, links_mbps: vec![], targets: targets_mbps.iter().map(ways).collect() }
    }

    /// What all paths to this target carry.
    pub(super) fn to_target_mbps(&self, target: usize) -> u64 {
        self.targets[target].mbps
    }

    /// What the links carry at once to these targets. A link whose speed is not known counts as no faster than
    /// the fastest path over it.
    pub(super) fn together_mbps(&self, targets: &BTreeSet<usize>) -> u64 {
        self.carried_mbps(targets, |fastest_mbps| fastest_mbps)
    }

    /// The same; absent where it hangs on a speed that is not known.
    pub(super) fn known_mbps(&self, targets: &BTreeSet<usize>) -> Option<u64> {
        let is_known = !targets.is_empty() && targets.iter().all(|target| self.targets[*target].is_known);
        let together_mbps = self.together_mbps(targets);
        (is_known && self.carried_mbps(targets, |_| u64::MAX) == together_mbps).then_some(together_mbps)
    }

    /// With what a link of unknown speed carries, from the fastest path over it.
    fn carried_mbps(&self, targets: &BTreeSet<usize>, unknown_mbps: impl Fn(u64) -> u64) -> u64 {
        let mut over = vec![(0_u64, 0_u64); self.links_mbps.len()];
        for (link, mbps) in targets.iter().flat_map(|target| &self.targets[*target].paths) {
            let (wanted_mbps, fastest_mbps) = &mut over[*link];
            *wanted_mbps = wanted_mbps.saturating_add(*mbps);
            *fastest_mbps = (*fastest_mbps).max(*mbps);
        }
        let links = over.into_iter().zip(&self.links_mbps).map(|((wanted_mbps, fastest_mbps), own_mbps)| {
            wanted_mbps.min(own_mbps.unwrap_or_else(|| unknown_mbps(fastest_mbps)))
        });
        let to_each = targets.iter().map(|target| self.targets[*target].mbps);
        let to_all = to_each.clone().fold(0, u64::saturating_add);
        // Whatever is known of the links, they carry what the fastest paths to one target do.
        let fastest_mbps = to_each.max().unwrap_or(0);
        links.fold(0, u64::saturating_add).min(to_all).min(self.limit_mbps).max(fastest_mbps)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::drain::view::LimitView;

    fn path(link: &str, link_mbps: Option<u64>, mbps: Option<u64>) -> PathView {
        PathView { link: link.into(), link_mbps, mbps }
    }

    /// As many as all of its paths carry together, unless something else is said.
    fn target(paths_mbps: Option<u64>, paths: Vec<PathView>) -> TargetView {
        let sum_mbps = paths.iter().map(|path| path.mbps).try_fold(0, |sum: u64, mbps| Some(sum + mbps?));
        TargetView {
            name: "b".into(),
            unavailable: None,
            warnings: vec![],
            memory_available_bytes: 0,
            file_systems: vec![],
            makes_room: false,
            makes_room_now: false,
            vms: vec![],
            paths_mbps: paths_mbps.or(sum_mbps).unwrap_or(0),
            paths,
            limit: LimitView::default(),
            free_cores: None,
            relay: None,
            no_post_copy: None,
            path_history: None,
        }
    }

    fn view(limit_mbps: Option<u64>, targets: Vec<TargetView>) -> DrainView {
        let limit = LimitView { mbps: limit_mbps, later: vec![] };
        DrainView { host: "a".into(), vms: vec![], targets, limit }
    }

    /// To all of these.
    fn known_mbps(limit_mbps: Option<u64>, targets: Vec<TargetView>) -> Option<u64> {
        let all = (0..targets.len()).collect();
        HostLinks::of(&view(limit_mbps, targets)).known_mbps(&all)
    }

    fn to(link: &str, link_mbps: u64, mbps: u64) -> TargetView {
        target(None, vec![path(link, Some(link_mbps), Some(mbps))])
    }

    #[test]
    fn one_fast_link_carries_what_two_slow_targets_take() {
        assert_eq!(known_mbps(None, vec![to("e0", 10_000, 1_000), to("e0", 10_000, 1_000)]), Some(2_000));
        assert_eq!(known_mbps(None, vec![to("e0", 1_500, 1_000), to("e0", 1_500, 1_000)]), Some(1_500));
        assert_eq!(known_mbps(None, vec![to("e0", 1_000, 1_000), to("e0", 1_000, 1_000)]), Some(1_000));
    }

    #[test]
    fn links_to_different_targets_carry_at_once_within_the_limit() {
        let pairwise = || vec![to("e0", 1_000, 1_000), to("e1", 1_000, 1_000)];
        assert_eq!(known_mbps(None, pairwise()), Some(2_000));
        assert_eq!(known_mbps(Some(1_200), pairwise()), Some(1_200));
        let links = HostLinks::of(&view(None, pairwise()));
        assert_eq!(links.together_mbps(&BTreeSet::from([1])), 1_000);
        assert_eq!(links.together_mbps(&BTreeSet::new()), 0);
    }

    #[test]
    fn a_target_takes_no_more_than_all_of_its_paths_within_its_limit() {
        let both = || vec![path("e0", Some(1_000), Some(1_000)), path("e1", Some(1_000), Some(1_000))];
        assert_eq!(known_mbps(None, vec![target(Some(300), both())]), Some(300));
        assert_eq!(known_mbps(None, vec![target(Some(300), both()), to("e2", 1_000, 1_000)]), Some(1_300));
        // The other one over a link that both use.
        assert_eq!(known_mbps(None, vec![target(None, both()), to("e1", 1_000, 1_000)]), Some(2_000));
    }

    #[test]
    fn what_hangs_on_a_speed_that_is_not_known_is_not_known() {
        let unknown = || target(None, vec![path("e0", None, Some(1_000))]);
        assert_eq!(
            known_mbps(None, vec![unknown()]),
            Some(1_000),
            "the path is no faster than its slower end"
        );
        assert_eq!(known_mbps(None, vec![unknown(), unknown()]), None);
        assert_eq!(known_mbps(Some(1_000), vec![unknown(), unknown()]), Some(1_000));
        assert_eq!(known_mbps(None, vec![target(None, vec![path("e0", None, None)])]), None);
        assert_eq!(known_mbps(None, vec![]), None);
        let links = HostLinks::of(&view(None, vec![unknown(), unknown()]));
        assert_eq!(links.together_mbps(&BTreeSet::from([0, 1])), 1_000);
    }

    fn some_target() -> impl Strategy<Value = TargetView> {
        let speed = || prop::option::of(0..20_000_u64);
        let some_path = ("e[0-3]", speed(), speed()).prop_map(|(link, own, mbps)| path(&link, own, mbps));
        (speed(), prop::collection::vec(some_path, 0..4)).prop_map(|(mbps, paths)| target(mbps, paths))
    }

    proptest! {
        #[test]
        fn more_targets_take_no_less_and_no_more_than_each_for_itself(
            limit_mbps in prop::option::of(0..20_000_u64),
            targets in prop::collection::vec(some_target(), 1..5),
            of_fewer in prop::collection::btree_set(0..5_usize, 0..5),
        ) {
            let links = HostLinks::of(&view(limit_mbps, targets.clone()));
            let all: BTreeSet<usize> = (0..targets.len()).collect();
            let fewer: BTreeSet<usize> = all.intersection(&of_fewer).copied().collect();
            let each: Vec<u64> = all.iter().map(|target| links.to_target_mbps(*target)).collect();
            let (fastest, sum) = (each.iter().copied().max().unwrap(), each.iter().sum::<u64>());
            let together = links.together_mbps(&all);
            prop_assert!(links.together_mbps(&fewer) <= together);
            prop_assert!((fastest..=sum).contains(&together));
            prop_assert!(together <= limit_mbps.unwrap_or(u64::MAX).max(fastest));
            prop_assert!(links.known_mbps(&all).is_none_or(|mbps| mbps == together));
        }
    }
}
