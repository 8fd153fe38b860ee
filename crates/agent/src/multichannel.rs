//! Routed multichannel on one host: its migration address, the weighted route to the peer's, the
//! kernel settings they need.

use std::net::IpAddr;

use drainpipe_engine::path::Path;
use drainpipe_engine::problem::Problem;
use drainpipe_net::{Change, NextHop, channel_congestion_control, multichannel_changes, weights};

use crate::agent::Agent;

/// Prepares this host; journaled under the migration's identifier. Returns this host's migration
/// address. `paths` are seen from this host.
pub(crate) async fn prepare(
    agent: &Agent,
    migration: &str,
    peer: IpAddr,
    paths: &[Path],
) -> Result<IpAddr, Problem> {
    let (own, changes) = changes(agent, peer, paths)?;
    agent.network.change_for(migration, &changes).await?;
    Ok(own)
}

/// Changes the route of a prepared migration to one over these paths.
pub(crate) async fn route_over(
    agent: &Agent,
    migration: &str,
    peer: IpAddr,
    paths: &[Path],
) -> Result<(), Problem> {
    agent.network.change_for(migration, &[route(agent, peer, paths)?]).await
}

/// Makes that route again should it be gone.
pub(crate) async fn restore_route(agent: &Agent, peer: IpAddr, paths: &[Path]) -> Result<(), Problem> {
    agent.network.restore_if_absent(&route(agent, peer, paths)?).await
}

fn route(agent: &Agent, peer: IpAddr, paths: &[Path]) -> Result<Change, Problem> {
    let (_, changes) = changes(agent, peer, paths)?;
    let route = changes.into_iter().find(|change| matches!(change, Change::Route { .. }));
    route.ok_or_else(|| Problem::failed("a migration without a route"))
}

fn changes(agent: &Agent, peer: IpAddr, paths: &[Path]) -> Result<(IpAddr, Vec<Change>), Problem> {
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
    Ok((own, changes))
}
