//! Routed multichannel on one host: its migration address, the weighted route to the peer's, the
//! kernel settings they need.

use std::net::IpAddr;

use drainpipe_engine::paths::path::Path;
use drainpipe_engine::problem::Problem;
use drainpipe_net::{Change, NextHop, channel_congestion_control, ignore_linkdown, multichannel_changes};
use tracing::info;

use crate::host::Host;

/// Where the route to a peer leads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WeightedPaths {
    /// Paths, seen from this host.
    pub(crate) paths: Vec<Path>,
    /// For each path its weight, 1 to 256.
    pub(crate) weights: Vec<u16>,
}

/// Prepares this host for a migration that needs `paths`, seen from this host, while the route to the peer
/// goes by `weighted`. Journaled under the migration's identifier.
pub(crate) async fn prepare(
    host: &Host,
    migration: &str,
    peer: IpAddr,
    paths: &[Path],
    weighted: &WeightedPaths,
) -> Result<(), Problem> {
    let mut needed =
        changes(host, peer, &WeightedPaths { paths: paths.to_vec(), weights: vec![1; paths.len()] })?;
    needed.retain(|change| !matches!(change, Change::Route { .. }));
    needed.push(route(host, peer, weighted)?);
    check_own_address(host).await?;
    check_peer_address(host, peer).await?;
    host.network.change_for(migration, &needed).await.map_err(|problem| problem.context(host.name()))
}

async fn check_own_address(host: &Host) -> Result<(), Problem> {
    let address = host.migration_address().await?;
    address.map(drop).map_err(|why| {
        Problem::refused(format!(
            "{}: {why}; set it to a free private address in its agent.toml",
            host.name()
        ))
    })
}

/// Refuses a peer's migration address that is somebody's already: a route to it would take traffic away
/// that is not the migration's.
async fn check_peer_address(host: &Host, address: IpAddr) -> Result<(), Problem> {
    let on_a_link = host.network.subnets().await?.iter().any(|net| net.contains(&address));
    let an_agents = host.peers().iter().any(|peer| peer.address.ip() == address);
    if on_a_link || an_agents {
        return Err(Problem::bad_input(format!(
            "migration_address {address} is within a subnet of {}, or is an agent's: choose a free private one",
            host.name()
        )));
    }
    Ok(())
}

/// Changes the route, for which a migration has been prepared.
pub(crate) async fn set_route(host: &Host, peer: IpAddr, weighted: &WeightedPaths) -> Result<(), Problem> {
    host.network.change_recorded(&route(host, peer, weighted)?).await
}

/// Sets a link that was deleted and made again to what a migration has set it to before: that went with it.
pub(crate) async fn set_link(host: &Host, link: &str) -> Result<(), Problem> {
    host.network.change_recorded(&ignore_linkdown(host.intended_address(), link)).await
}

/// Makes this host's address and that route again, should somebody have removed or changed them. A setting
/// that somebody has changed is theirs.
pub(crate) async fn restore(host: &Host, peer: IpAddr, weighted: &WeightedPaths) -> Result<(), Problem> {
    let ours =
        changes(host, peer, weighted)?.into_iter().filter(|change| !matches!(change, Change::Sysctl { .. }));
    for change in ours {
        if host.network.restore(&change).await? {
            info!(%change, "restored, because somebody had removed or changed it");
        }
    }
    Ok(())
}

fn route(host: &Host, peer: IpAddr, weighted: &WeightedPaths) -> Result<Change, Problem> {
    let route =
        changes(host, peer, weighted)?.into_iter().find(|change| matches!(change, Change::Route { .. }));
    route.ok_or_else(|| Problem::failed("a migration without a route"))
}

fn changes(host: &Host, peer: IpAddr, weighted: &WeightedPaths) -> Result<Vec<Change>, Problem> {
    let each = weighted.paths.iter().zip(&weighted.weights);
    let next_hops: Vec<NextHop> = each
        .map(|(path, weight)| NextHop {
            link: path.link.clone(),
            gateway: path.peer_address,
            weight: *weight,
        })
        .collect();
    let congestion_control = channel_congestion_control().map_err(Problem::failed)?;
    multichannel_changes(host.intended_address(), peer, &next_hops, congestion_control)
        .map_err(Problem::refused)
}
