//! What a person should know about bandwidth limits before a drain begins: a plan assumes those of its moment, and may
//! be made the day before.

use std::collections::BTreeSet;

use super::view::{DrainView, LimitView, TargetView};
use crate::bandwidth::LimitChange;
use crate::format;

/// The warnings about limits of this host and of each of these targets: the limit that the plan assumes, and those
/// that apply later. A limit that is at least what the paths carry is not mentioned.
pub(super) fn limit_warnings(view: &DrainView, targets: &BTreeSet<usize>) -> Vec<String> {
    let targets: Vec<&TargetView> = targets.iter().map(|target| &view.targets[*target]).collect();
    let of_each = targets.iter().map(|target| (&target.name, &target.limit, unlimited_mbps(target)));
    let all_mbps = targets.iter().map(|target| unlimited_mbps(target)).try_fold(0_u64, add);
    let of_host = (!targets.is_empty()).then_some((&view.host, &view.limit, all_mbps));
    let binding = of_host.into_iter().chain(of_each).filter(|(_, limit, mbps)| may_bind(limit, *mbps));
    binding.map(|(host, limit, _)| warning(host, limit)).collect()
}

/// What the paths to it would carry without any limit; absent where a speed is not known.
fn unlimited_mbps(target: &TargetView) -> Option<u64> {
    let mut speeds = target.paths.iter().map(|path| path.mbps);
    if target.paths.is_empty() { None } else { speeds.try_fold(0, add) }
}

fn add(sum_mbps: u64, mbps: Option<u64>) -> Option<u64> {
    Some(sum_mbps.saturating_add(mbps?))
}

/// Whether it holds migrations back at any time.
fn may_bind(limit: &LimitView, unlimited_mbps: Option<u64>) -> bool {
    let later = limit.later.iter().map(|change| change.limit_mbps);
    let mut limits = [limit.mbps].into_iter().chain(later).flatten();
    limits.any(|mbps| unlimited_mbps.is_none_or(|unlimited_mbps| mbps < unlimited_mbps))
}

fn warning(host: &str, limit: &LimitView) -> String {
    let now = match limit.mbps {
        Some(mbps) => {
            format!("predicted for the present bandwidth limit of {host}, {}", format::mbps(mbps))
        }
        None => format!("predicted without a bandwidth limit of {host}, since it has none at present"),
    };
    if limit.later.is_empty() {
        return now;
    }
    let later: Vec<String> = limit.later.iter().map(later).collect();
    format!("{now}; by its clock it is {}, and VMs that move then move slower or faster", later.join(", "))
}

fn later(change: &LimitChange) -> String {
    // Within a day, so each time of the day is there once.
    let from = change.at.strftime("%H:%M");
    match change.limit_mbps {
        Some(mbps) => format!("{} from {from} on", format::mbps(mbps)),
        None => format!("none from {from} on"),
    }
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;

    use super::*;
    use crate::drain::view::PathView;

    fn target(name: &str, mbps: Option<u64>, limit: LimitView) -> TargetView {
        TargetView {
            name: name.into(),
            unavailable: None,
            warnings: vec![],
            memory_available_bytes: 0,
            file_systems: vec![],
            makes_room: false,
            makes_room_now: false,
            vms: vec![],
            paths_mbps: 0,
            paths: vec![PathView { link: "e0".into(), link_mbps: None, mbps }],
            limit,
            free_cores: None,
            relay: None,
            no_post_copy: None,
            path_history: None,
        }
    }

    fn limit(mbps: Option<u64>, later: &[(i8, Option<u64>)]) -> LimitView {
        let change = |(hour, limit_mbps): &(i8, Option<u64>)| LimitChange {
            at: date(2026, 11, 21).at(*hour, 0, 0, 0),
            limit_mbps: *limit_mbps,
        };
        LimitView { mbps, later: later.iter().map(change).collect() }
    }

    /// To all of these targets.
    fn all_warnings(host: LimitView, targets: Vec<TargetView>) -> Vec<String> {
        let all = (0..targets.len()).collect();
        limit_warnings(&DrainView { host: "a".into(), vms: vec![], targets, limit: host }, &all)
    }

    #[test]
    fn a_limit_that_holds_is_told_and_those_that_hold_later() {
        let free = || target("b", Some(10_000), LimitView::default());
        let now = "predicted for the present bandwidth limit of a, 2000 Mb/s";
        assert_eq!(all_warnings(limit(Some(2_000), &[]), vec![free()]), [now]);
        let later =
            "by its clock it is 8000 Mb/s from 20:00 on, none from 22:00 on, and VMs that move then move";
        assert_eq!(
            all_warnings(limit(Some(2_000), &[(20, Some(8_000)), (22, None)]), vec![free()]),
            [format!("{now}; {later} slower or faster")]
        );
        let windows = target("b", Some(10_000), limit(None, &[(8, Some(2_000))]));
        let none = "predicted without a bandwidth limit of b, since it has none at present; by its clock it \
            is 2000 Mb/s from";
        assert_eq!(
            all_warnings(LimitView::default(), vec![windows]),
            [format!("{none} 08:00 on, and VMs that move then move slower or faster")]
        );
    }

    #[test]
    fn what_holds_nothing_back_is_not_told() {
        let slow = |name: &str| target(name, Some(1_000), limit(Some(1_000), &[]));
        assert_eq!(all_warnings(limit(Some(2_000), &[(8, None)]), vec![slow("b"), slow("c")]), [""; 0]);
        assert_eq!(all_warnings(limit(Some(1_999), &[(8, None)]), vec![slow("b"), slow("c")]).len(), 1);
        // The speed of its path is unknown.
        let unknown = target("b", None, limit(Some(1_000), &[]));
        assert_eq!(all_warnings(limit(Some(2_000), &[]), vec![unknown]).len(), 2);
        assert_eq!(all_warnings(limit(Some(2_000), &[]), vec![]), [""; 0]);
    }
}
