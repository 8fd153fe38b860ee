//! The classic: jumbo frames on some and not on others. Small pings are fine, and migrations hang.

use super::ends;
use crate::check::Pair;
use crate::check::finding::Finding;
use crate::check::trial::PathTrial;
use crate::path::Path;

const EFFECT: &str = "small pings and the first connection are fine, then the migration hangs as soon as it sends \
                      full packets, until it is undone";

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
    Finding::error("mtu-differs", ends(pair, path))
        .what(format!(
            "the MTU of {} is {source_bytes} on {source}, that of {} is {target_bytes} on {target}",
            path.link, path.peer_link
        ))
        .effect(EFFECT)
        .remedy(format!(
            "{}; or, if every switch port between takes it, {}",
            set(greater, lesser.2),
            set(lesser, greater.2)
        ))
}

pub(super) fn does_not_pass(pair: Pair<'_>, trial: &PathTrial) -> Option<Finding> {
    let path = &trial.path;
    let [mtu_bytes, peer_mtu_bytes] = mtus_bytes(pair, path)?;
    // With nothing passing at all, or much of everything lost, size is not what is wrong.
    let tested = [&trial.forward, &trial.backward].into_iter().all(|way| way.passes() && !way.loses_much());
    let whole = trial.forward.passes_whole() && trial.backward.passes_whole();
    (mtu_bytes == peer_mtu_bytes && tested && !whole).then(|| mtu_does_not_pass(pair, trial, mtu_bytes))
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
    Finding::error("mtu-does-not-pass", ends(pair, path))
        .what(format!("both ends of {path} send packets of {mtu_bytes} bytes, but {}", limits.join(", and ")))
        .effect(EFFECT)
        .remedy(format!(
            "raise the MTU of every switch port between; or, on {source}: ip link set dev {} mtu {least}; on \
             {target}: ip link set dev {} mtu {least}",
            path.link, path.peer_link
        ))
}
