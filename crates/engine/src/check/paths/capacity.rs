//! How much the paths can carry: speeds, and TCP's buffers against bandwidth × delay.

use std::collections::BTreeMap;

use super::ends;
use crate::check::Pair;
use crate::check::trial::PathTrial;
use crate::check::vm::VmCheck;
use crate::finding::code::FindingCode;
use crate::finding::fix::{Fix, TCP_BUFFER_BYTES_MAX};
use crate::finding::{Finding, Place, on};
use crate::format::mbps;
use crate::host::facts::MigrationLink;
use crate::paths::path::Path;
use crate::plan::standby::mark_standby;

/// What a NIC falls back to where a pair of the cable is broken.
const FALLBACK_MBPS: u64 = 100;

/// The kernel counts a buffer's overhead too, so that about half of it holds data
/// (`tcp_adv_win_scale` = 1, the default).
const BYTES_PER_BYTE_OF_DATA: f64 = 2.0;

const HEADROOM: f64 = 4.0;

/// `tcp_wmem`'s greatest where memory does not bound it (`tcp_init`, Linux 6.1); `tcp_rmem`'s is 6 MiB.
const KERNEL_DEFAULT_BYTES: u64 = 4 << 20;

pub(super) fn check(pair: Pair<'_>) -> Vec<Finding> {
    let paths = pair.paths;
    let mut findings: Vec<Finding> = paths.iter().filter_map(|path| speeds_of_path(pair, path)).collect();
    if findings.is_empty() {
        findings.extend(unequal_paths(pair, paths));
    }
    findings.extend(buffers(pair));
    findings
}

fn speeds_of_path(pair: Pair<'_>, path: &Path) -> Option<Finding> {
    let [link, peer_link] = links(pair, path)?;
    let (source, target) = (link.speed_mbps?, peer_link.speed_mbps?);
    let look = format!(
        "look at cable and switch port; on {}: ethtool {}; on {}: ethtool {}",
        pair.source.name(),
        link.name,
        pair.target.name(),
        peer_link.name
    );
    if source != target {
        return Some(
            Finding::new(FindingCode::SpeedDiffers, ends(pair, path))
                .what(format!(
                    "{} of {} runs at {}, {} of {} at {}",
                    link.name,
                    pair.source.name(),
                    mbps(source),
                    peer_link.name,
                    pair.target.name(),
                    mbps(target)
                ))
                .effect(format!("the path carries at most {}", mbps(source.min(target))))
                .remedy(look),
        );
    }
    // A migration does not say again what somebody has configured.
    let is_known = pair.trials.is_none()
        && [(pair.source, link), (pair.target, peer_link)]
            .iter()
            .all(|(facts, link)| facts.link(&link.name).is_some_and(|known| known.is_speed_configured));
    (source <= FALLBACK_MBPS && !is_known).then(|| {
        Finding::new(FindingCode::SpeedLow, ends(pair, path))
            .what(format!("both ends of {path} run at {}", mbps(source)))
            .effect("a GiB of memory takes well over a minute; a broken wire pair in a cable causes this")
            .remedy(look)
    })
}

fn links<'a>(pair: Pair<'a>, path: &Path) -> Option<[&'a MigrationLink; 2]> {
    Some([pair.source.migration_link(&path.link)?, pair.target.migration_link(&path.peer_link)?])
}

fn unequal_paths(pair: Pair<'_>, paths: &[Path]) -> Option<Finding> {
    let known: Vec<(&Path, u64)> = paths.iter().filter_map(|path| Some((path, path.speed_mbps?))).collect();
    let (_, first) = known.first()?;
    if known.iter().all(|(_, speed)| speed == first) {
        return None;
    }
    let places: Vec<Place> = known.iter().flat_map(|(path, _)| ends(pair, path)).collect();
    let speeds: Vec<String> = known.iter().map(|(path, speed)| format!("{path} {}", mbps(*speed))).collect();
    Some(
        Finding::new(FindingCode::PathsUnequal, places)
            .what(format!("the paths have different speeds: {}", speeds.join(", ")))
            .effect(effect_of_unequal(pair, paths))
            .remedy("nothing needs to be done"),
    )
}

/// Which paths are on standby depends on a VM's memory.
fn effect_of_unequal(pair: Pair<'_>, paths: &[Path]) -> String {
    if pair.vms.is_empty() {
        return "none: each path gets traffic by its speed, and one that would cost a VM more than it brings is on standby"
            .into();
    }
    let mut vms_by_standby: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for VmCheck { vm, .. } in pair.vms {
        let mut paths = paths.to_vec();
        for path in &mut paths {
            path.is_standby = false;
        }
        mark_standby(&mut paths, vm.memory_bytes);
        let standby: Vec<String> =
            paths.iter().filter(|path| path.is_standby).map(ToString::to_string).collect();
        if !standby.is_empty() {
            vms_by_standby.entry(standby.join(", ")).or_default().push(&vm.name);
        }
    }
    if vms_by_standby.is_empty() {
        return "none: each path gets traffic by its speed".into();
    }
    let standby = vms_by_standby.iter().map(|(paths, vms)| match vms.as_slice() {
        [first, others @ ..] if !others.is_empty() => {
            format!("{paths} for VM {first} and {} more", others.len())
        }
        vms => format!("{paths} for VM {}", vms.concat()),
    });
    format!(
        "each path gets traffic by its speed, but one that would cost a VM more than it brings is on standby, and carries \
         when no other does: {}",
        standby.collect::<Vec<_>>().join("; ")
    )
}

/// A host's buffers are the same for all its paths; said of the path that needs most.
fn buffers(pair: Pair<'_>) -> Vec<Finding> {
    let needs = pair.trials().iter().filter_map(|trial| Some((trial, buffer_bytes_needed(trial)?)));
    let Some((trial, needed_bytes)) = needs.max_by(|(_, one), (_, other)| one.total_cmp(other)) else {
        return vec![];
    };
    let goal_bytes = buffer_goal_bytes(needed_bytes);
    let advised_bytes = goal_bytes.map_or(needed_bytes, |bytes| bytes as f64);
    let [sends, receives] = ends(pair, &trial.path);
    let ends = [
        ("tcp_wmem", pair.source.tcp_send_bytes, sends, send_buffer as fn(u64) -> Fix),
        ("tcp_rmem", pair.target.tcp_receive_bytes, receives, receive_buffer),
    ];
    let too_small = ends.into_iter().filter_map(|(setting, bytes, place, fix)| {
        let [least, at_first, bytes] = bytes.filter(|[.., most]| (*most as f64) < needed_bytes)?;
        let share = 100.0 * bytes as f64 / needed_bytes;
        let command = format!("sysctl -w net.ipv4.{setting}='{least} {at_first} {advised_bytes:.0}'");
        let remedy = on(&place.host, command);
        let what = format!(
            "{setting} of {} allows {bytes} bytes; path {} needs {needed_bytes:.0}, given its speed and \
            round-trip time, with the kernel's overhead",
            place.host, trial.path
        );
        let finding = Finding::new(FindingCode::TcpBuffersSmall, [place])
            .what(what)
            .effect(format!("one connection reaches at most {share:.0} % of this path's speed"))
            .remedy(remedy);
        Some(match goal_bytes {
            Some(bytes) => finding.fix(fix(bytes)),
            None => finding,
        })
    });
    too_small.collect()
}

/// With much to spare: the time there and back is longer when the path is full. And never below what the kernel allows
/// by itself, about 4 MiB to send (`tcp_wmem`): a time measured while the hosts are idle says little of busy ones.
fn buffer_goal_bytes(needed_bytes: f64) -> Option<u64> {
    let powers = (KERNEL_DEFAULT_BYTES.ilog2()..u64::BITS).map(|power| 1_u64 << power);
    powers
        .take_while(|bytes| *bytes <= TCP_BUFFER_BYTES_MAX)
        .find(|bytes| *bytes as f64 >= needed_bytes * HEADROOM)
}

fn send_buffer(bytes_max: u64) -> Fix {
    Fix::TcpSendBuffer { bytes_max }
}

fn receive_buffer(bytes_max: u64) -> Fix {
    Fix::TcpReceiveBuffer { bytes_max }
}

fn buffer_bytes_needed(trial: &PathTrial) -> Option<f64> {
    let bytes_per_ms = trial.path.speed_mbps? as f64 * 125.0;
    Some((bytes_per_ms * trial.least_round_trip_ms()? * BYTES_PER_BYTE_OF_DATA).ceil())
}
