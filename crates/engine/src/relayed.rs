//! Where compression would cost more than it brings: the paths are faster than a relay can copy.

use crate::facts::HostFacts;
use crate::path::Path;

/// What a relay carries for each core of a host, in Mb/s, when it packs nothing. docs/decisions.md
/// says where the figure is from.
const RELAYED_MBPS_PER_CORE: u64 = 4_000;

/// Why a relay would only slow the transfer down; none if it does not, or if it is not known how fast the
/// paths are. A limit of either host makes the paths as slow as it is: one that is lifted while the transfer
/// goes on leaves a relay that is no faster than it can copy.
pub(crate) fn outruns_relay(paths: &[Path], source: &HostFacts, target: &HostFacts) -> Option<String> {
    let carrying = paths.iter().filter(|path| !path.is_spare);
    let speeds: Option<Vec<u64>> = carrying.map(|path| path.speed_mbps).collect();
    let speed_mbps = speeds.map(|speeds| speeds.into_iter().fold(0, u64::saturating_add));
    let limits = [source, target].into_iter().filter_map(|host| host.bandwidth_limit_mbps);
    let wire_mbps = limits.chain([speed_mbps?]).min()?;
    let (name, cores) =
        [source, target].map(|host| (&host.name, host.cores)).into_iter().min_by_key(|host| host.1)?;
    let relayed_mbps = u64::from(cores.max(1)) * RELAYED_MBPS_PER_CORE;
    (wire_mbps > relayed_mbps).then(|| {
        let gbps = |mbps: u64| mbps as f64 / 1000.0;
        format!(
            "not compressed: the paths carry {:.1} Gb/s, more than the {cores} cores of {name} could pass on \
             ({:.1} Gb/s)",
            gbps(wire_mbps),
            gbps(relayed_mbps)
        )
    })
}
