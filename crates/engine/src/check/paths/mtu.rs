//! The classic mistake: jumbo frames on some links and not on others. Small pings work, and large packets are lost.

use super::ends;
use crate::check::Pair;
use crate::check::trial::PathTrial;
use crate::finding::Finding;
use crate::finding::code::FindingCode;
use crate::paths::path::Path;

pub(super) fn differs(pair: Pair<'_>, path: &Path) -> Option<Finding> {
    let [source, target] = mtus_bytes(pair, path)?;
    (source != target).then(|| mtu_differs(pair, path, source, target))
}

fn mtus_bytes(pair: Pair<'_>, path: &Path) -> Option<[u32; 2]> {
    let link = pair.source.migration_link(&path.link)?;
    let peer_link = pair.target.migration_link(&path.peer_link)?;
    Some([link.mtu, peer_link.mtu])
}

fn mtu_differs(pair: Pair<'_>, path: &Path, source_bytes: u32, target_bytes: u32) -> Finding {
    let (source, target) = (pair.source.name(), pair.target.name());
    let (lesser, greater) = if source_bytes < target_bytes {
        ((source, &path.link, source_bytes), (target, &path.peer_link, target_bytes))
    } else {
        ((target, &path.peer_link, target_bytes), (source, &path.link, source_bytes))
    };
    let set = |(host, link, _): (&str, &String, u32), bytes: u32| {
        format!("on {host}: ip link set dev {link} mtu {bytes}")
    };
    let finding = if takes_over_larger(pair, path, lesser.2) {
        Finding::new(FindingCode::MtuDiffers, ends(pair, path)).effect(format!(
            "connections over another path have larger packets: one that moves to this path in flight \
            hangs, because packets above {} bytes are lost here",
            lesser.2
        ))
    } else {
        Finding::milder(FindingCode::MtuDiffers, ends(pair, path)).effect(format!(
            "migrations work, because TCP keeps to the smaller size; every other packet above {} bytes is lost",
            lesser.2
        ))
    };
    finding
        .what(format!(
            "the MTU of {} is {source_bytes} on {source}, that of {} is {target_bytes} on {target}",
            path.link, path.peer_link
        ))
        .remedy(format!(
            "{}; or, if every switch port between takes it, {}",
            set(greater, lesser.2),
            set(lesser, greater.2)
        ))
}

/// Whether a connection with larger packets than this path takes may come to it from another one.
fn takes_over_larger(pair: Pair<'_>, path: &Path, bytes_max: u32) -> bool {
    let others = pair.paths.iter().filter(|other| *other != path);
    let mut sizes = others.filter_map(|other| mtus_bytes(pair, other)).map(|[one, end]| one.min(end));
    pair.multichannel && sizes.any(|bytes| bytes > bytes_max)
}

pub(super) fn does_not_pass(pair: Pair<'_>, trial: &PathTrial) -> Option<Finding> {
    Some(mtu_does_not_pass(pair, trial, mtu_that_does_not_pass(pair, trial)?))
}

fn mtu_that_does_not_pass(pair: Pair<'_>, trial: &PathTrial) -> Option<u32> {
    let [mtu_bytes, peer_mtu_bytes] = mtus_bytes(pair, &trial.path)?;
    // With nothing passing at all, or much of everything lost, size is not what is wrong.
    let tested = [&trial.forward, &trial.backward].into_iter().all(|way| way.passes() && !way.loses_much());
    let whole = trial.forward.passes_whole() && trial.backward.passes_whole();
    (mtu_bytes == peer_mtu_bytes && tested && !whole).then_some(mtu_bytes)
}

/// A migration tries each path with packets as large as its own, and leaves out what does not take them.
fn of_severity(pair: Pair<'_>, trial: &PathTrial) -> Finding {
    let (source, target) = (pair.source.name(), pair.target.name());
    let warning = || Finding::milder(FindingCode::MtuDoesNotPass, ends(pair, &trial.path));
    if trial.forward.passes_whole() {
        return warning().effect(format!("migrations from {target} to {source} do not use this path"));
    }
    let carries = |other: &&PathTrial| {
        other.connection_error.is_none() && mtu_that_does_not_pass(pair, other).is_none()
    };
    if pair.trials().iter().any(|other| carries(&other)) {
        return warning().effect("migrations do not use this path");
    }
    Finding::new(FindingCode::MtuDoesNotPass, ends(pair, &trial.path))
        .effect("small pings work, but no path is left for migrations: every one fails")
}

fn mtu_does_not_pass(pair: Pair<'_>, trial: &PathTrial, mtu_bytes: u32) -> Finding {
    let path = &trial.path;
    let (source, target) = (pair.source.name(), pair.target.name());
    let directions = [(&trial.forward, source, target), (&trial.backward, target, source)];
    let limits: Vec<String> = directions
        .into_iter()
        .filter(|(packets, ..)| !packets.passes_whole())
        .map(|(packets, from, to)| {
            format!("from {from} to {to} none larger than {} arrives", packets.arrived_bytes_max.unwrap_or(0))
        })
        .collect();
    let passing = [trial.forward.arrived_bytes_max, trial.backward.arrived_bytes_max];
    let least = passing.into_iter().flatten().min().unwrap_or(0);
    of_severity(pair, trial)
        .what(format!("both ends of {path} send packets of {mtu_bytes} bytes, but {}", limits.join(", and ")))
        .remedy(format!(
            "raise the MTU of every switch port between; or, on {source}: ip link set dev {} mtu {least}; on \
             {target}: ip link set dev {} mtu {least}",
            path.link, path.peer_link
        ))
}
