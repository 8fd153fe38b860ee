//! Which addresses may connect to a QEMU that waits for memory in the clear: only its source's. QEMU takes the first
//! connection for its source's.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use drainpipe_net::Change;
use socket2::{Domain, Socket, Type};
use tracing::{debug, warn};

use super::{Incoming, IncomingVm};
use crate::host::ports;
use drainpipe_api_types::{ConnectionRequest, HostView};

/// How long the source may take to say which addresses it has. It has just asked for something itself.
const SOURCE_DEADLINE: Duration = Duration::from_secs(2);

/// Addresses of one host that are let in, at most.
const ADDRESSES_MAX: usize = 64;

/// The addresses that the source's connections may come from: those of the plan, and of its links, among which its kernel
/// chooses.
pub(super) async fn of(incoming: &Incoming, entry: &IncomingVm, request: &ConnectionRequest) -> Vec<IpAddr> {
    let mut sources: Vec<IpAddr> = request.plan.paths.iter().map(|path| path.peer_address).collect();
    sources.extend(request.migration_address);
    if let Some(source) = incoming.peers.get(&entry.source) {
        match source.get_within::<HostView>("/v1/host", SOURCE_DEADLINE).await {
            Ok(view) => {
                let links = view.facts.links.iter().chain(&view.facts.management_links);
                sources.extend(links.flat_map(|link| link.addresses.iter().map(ipnet::IpNet::addr)));
            }
            Err(problem) => debug!(%problem, "the source does not say which addresses it has"),
        }
    }
    sources.sort_unstable();
    sources.dedup();
    sources.truncate(ADDRESSES_MAX);
    sources
}

/// Whether somebody else has this port: nobody is kept from what is not this migration's.
pub(super) fn is_in_use(listen_at: SocketAddr) -> io::Result<bool> {
    let socket = Socket::new(Domain::for_address(listen_at), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    Ok(ports::unless_in_use(socket.bind(&listen_at.into()))?.is_none())
}

/// Before QEMU listens. A kernel that cannot do it keeps nobody from migrating: the network is one that the user trusts.
pub(super) async fn keep_out(
    incoming: &Incoming,
    entry: &IncomingVm,
    listen_at: SocketAddr,
    sources: &[IpAddr],
) {
    let change = only_from(listen_at, sources);
    if let Err(problem) = incoming.host.network.change_for(&entry.id, &[change]).await {
        warn!(%problem, vm = entry.definition.name.as_str(), "unauthenticated peers can reach the VM's port");
        let_in(incoming, entry, listen_at).await;
    }
}

/// The port is not this migration's.
pub(super) async fn let_in(incoming: &Incoming, entry: &IncomingVm, listen_at: SocketAddr) {
    let change = only_from(listen_at, &[]);
    if let Err(problem) = incoming.host.network.put_back_one(&entry.id, &change).await {
        // It stands in the journal, and is tried again at the end of the migration.
        warn!(%problem, "cannot open {listen_at} to others again");
    }
}

fn only_from(listen_at: SocketAddr, sources: &[IpAddr]) -> Change {
    Change::OnlyFrom { address: listen_at.ip(), port: listen_at.port(), sources: sources.to_vec() }
}
