//! Routed multichannel on one host: its migration address, the weighted route to the peer's, the
//! kernel settings they need.

use std::net::IpAddr;

use drainpipe_engine::path::Path;
use drainpipe_engine::problem::Problem;
use drainpipe_net::{Change, NextHop, channel_congestion_control, multichannel_changes, weights};

use crate::agent::Agent;

/// Prepares this host for a migration that needs `paths`, seen from this host, while the route to the peer
/// is over `routed`. Journaled under the migration's identifier.
pub(crate) async fn prepare(
    agent: &Agent,
    migration: &str,
    peer: IpAddr,
    paths: &[Path],
    routed: &[Path],
) -> Result<(), Problem> {
    let mut needed = changes(agent, peer, paths)?;
    needed.retain(|change| !matches!(change, Change::Route { .. }));
    needed.push(route(agent, peer, routed)?);
    agent.network.change_for(migration, &needed).await
}

/// Changes the route, for which a migration has been prepared, to one over these paths.
pub(crate) async fn set_route(agent: &Agent, peer: IpAddr, paths: &[Path]) -> Result<(), Problem> {
    agent.network.change_recorded(&route(agent, peer, paths)?).await
}

/// Makes that route again should it be gone.
pub(crate) async fn restore_route(agent: &Agent, peer: IpAddr, paths: &[Path]) -> Result<(), Problem> {
    agent.network.restore_if_absent(&route(agent, peer, paths)?).await
}

fn route(agent: &Agent, peer: IpAddr, paths: &[Path]) -> Result<Change, Problem> {
    let route =
        changes(agent, peer, paths)?.into_iter().find(|change| matches!(change, Change::Route { .. }));
    route.ok_or_else(|| Problem::failed("a migration without a route"))
}

/// This host's migration address.
pub(crate) fn own_address(agent: &Agent) -> Result<IpAddr, Problem> {
    agent.config.migration_address.ok_or_else(|| {
        Problem::refused(format!("{} has no migration_address in its agent.toml", agent.name()))
    })
}

fn changes(agent: &Agent, peer: IpAddr, paths: &[Path]) -> Result<Vec<Change>, Problem> {
    let speeds: Vec<Option<u64>> = paths.iter().map(|path| path.speed_mbps).collect();
    let next_hops: Vec<NextHop> = paths
        .iter()
        .zip(weights(&speeds))
        .map(|(path, weight)| NextHop { link: path.link.clone(), gateway: path.peer_address, weight })
        .collect();
    let congestion_control = channel_congestion_control().map_err(Problem::failed)?;
    multichannel_changes(own_address(agent)?, peer, &next_hops, congestion_control).map_err(Problem::refused)
}
