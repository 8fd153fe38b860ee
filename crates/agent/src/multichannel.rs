//! Routed multichannel on one host: its migration address, the weighted route to the peer's, the
//! kernel settings they need.

use std::net::IpAddr;

use drainpipe_engine::path::Path;
use drainpipe_engine::problem::Problem;
use drainpipe_net::{NextHop, channel_congestion_control, multichannel_changes, weights};

use crate::agent::Agent;

/// Prepares this host; journaled under the migration's identifier. Returns this host's migration
/// address. `paths` are seen from this host.
pub(crate) async fn prepare(
    agent: &Agent,
    migration: &str,
    peer: IpAddr,
    paths: &[Path],
) -> Result<IpAddr, Problem> {
    let own = agent.config.migration_address.ok_or_else(|| {
        Problem::refused(format!("{} has no migration_address in its agent.toml", agent.name()))
    })?;
    let speeds: Vec<Option<u64>> = paths.iter().map(|path| path.speed_mbps).collect();
    let next_hops: Vec<NextHop> = paths
        .iter()
        .zip(weights(&speeds))
        .map(|(path, weight)| NextHop { link: path.link.clone(), gateway: path.peer_address, weight })
        .collect();
    let congestion_control = channel_congestion_control().map_err(Problem::failed)?;
    let changes =
        multichannel_changes(own, peer, &next_hops, congestion_control).map_err(Problem::refused)?;
    agent.network.change_for(migration, &changes).await?;
    Ok(own)
}
