//! What the links and the cores on the way to one target carry, and how long the steps before and after a transfer take.

use super::concurrency::NEARLY_FULL;
use super::view::{PathHistory, TargetView};
use crate::estimate::cores::{Work, carried_bytes_per_ms};
use crate::estimate::sending::{COMPLETION, GOODPUT_SHARE, SETUP, UNKNOWN_SPEED_MBPS};

/// A path history with less than this, in Mb/s, is of no transfer.
const SLOWEST_MBPS: f64 = 1.0;

/// A path history with more than this, in ms, is of no step that went well: Drainpipe waits for none so long.
const LONGEST_MS: f64 = 3_600_000.0;

/// What one VM's transfer to this target carries, in Mb/s.
pub(super) fn vm_mbps(target: &TargetView) -> f64 {
    links_mbps(target).min(cores_mbps(target.free_cores))
}

/// The same by the links alone.
fn links_mbps(target: &TargetView) -> f64 {
    let paths = paths_mbps(target);
    match target.path_history.map(|history| history.transfer_mbps) {
        Some(seen_mbps) if seen_mbps.is_finite() && seen_mbps >= SLOWEST_MBPS => match target.paths_mbps {
            0 => seen_mbps,
            // Links may have been lost since.
            known => seen_mbps.min(known as f64),
        },
        _ => paths,
    }
}

/// What the copies of one VM's disks to this target carry, in Mb/s: as earlier ones did, or as fast as the links.
pub(super) fn disk_mbps(target: &TargetView) -> f64 {
    let seen_mbps = target.path_history.and_then(|history| history.disk_mbps);
    let seen_mbps = seen_mbps.filter(|mbps| mbps.is_finite() && *mbps >= SLOWEST_MBPS);
    let links_mbps = all_mbps(target);
    seen_mbps.map_or(links_mbps, |mbps| mbps.min(links_mbps))
}

/// What the cores of both hosts carry, in Mb/s.
fn cores_mbps(free_cores: Option<f64>) -> f64 {
    carried_bytes_per_ms(free_cores) / 125.0
}

/// What all paths to this target carry, in Mb/s.
pub(super) fn paths_mbps(target: &TargetView) -> f64 {
    speed_mbps(target) as f64 * GOODPUT_SHARE
}

/// The same with headers.
pub(super) fn speed_mbps(target: &TargetView) -> u64 {
    match target.paths_mbps {
        0 => UNKNOWN_SPEED_MBPS,
        known => known,
    }
}

/// What all transfers to this target carry together, in Mb/s. Where one VM's nearly fills the paths, what is missing
/// is no room for another one.
pub(super) fn all_mbps(target: &TargetView) -> f64 {
    let (vm, paths) = (vm_mbps(target), paths_mbps(target));
    if vm >= NEARLY_FULL * paths { vm } else { paths.min(cores_mbps(target.free_cores)) }
}

/// Steps 1 to 5 of a migration to this target, in ms: not less than they take with the cores that there are now.
pub(super) fn setup_ms(target: &TargetView) -> f64 {
    let seen_ms = seen_ms(target, |history| history.setup_ms);
    with_cores(target, seen_ms, SETUP)
}

/// Steps 9 and 10 of a migration to this target, in ms.
pub(super) fn completion_ms(target: &TargetView) -> f64 {
    let seen_ms = seen_ms(target, |history| history.completion_ms);
    with_cores(target, seen_ms, COMPLETION)
}

fn with_cores(target: &TargetView, seen_ms: Option<f64>, usual: Work) -> f64 {
    let now_ms = usual.with_ms(target.free_cores);
    let is_slowed = now_ms > usual.ms;
    seen_ms.map_or(now_ms, |seen_ms| if is_slowed { seen_ms.max(now_ms) } else { seen_ms })
}

fn seen_ms(target: &TargetView, which: impl Fn(&PathHistory) -> f64) -> Option<f64> {
    target.path_history.as_ref().map(which).filter(|ms| (0.0..=LONGEST_MS).contains(ms))
}
