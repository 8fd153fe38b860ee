//! Step 5 on the target: ports on which the source tests the paths, the network, and QEMU listening.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::migration::target::steps::OrderNeed;
use drainpipe_engine::migration::timing::fills_within;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::plan::Spread;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Protocol;
use drainpipe_engine::transfer::encryption::{refuses_clear, refuses_clear_again};
use drainpipe_engine::transfer::queue::unread_limit_bytes;
use drainpipe_hypervisor::{Machine, Parcel, TlsKey, Transport, VmError, VmErrorKind};
use ring::rand::{SecureRandom, SystemRandom};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use tracing::warn;

use super::free_port::bind_free_port;
use super::vm::IncomingVm;
use super::{Incoming, allowed_sources, disks, may_go_on};
use crate::paths::link_socket::on_link;
use crate::paths::path_watch::Joining;
use crate::paths::probe::{self, ProbePorts};
use crate::peers::slots::Slots;
use crate::transfer::relay::{self, OtherEnd, RelayedStream};
use crate::transfer::transport::transport;
use crate::vms::QMP_DEADLINE;
use drainpipe_api_types::{ConnectionRequest, Endpoint, WatchEnd, WatchRequest};
use uuid::Uuid;

/// Migrations of one host, and of all together, for which ports are open at once on which paths are tried.
/// They are for 1.5 s at most, unless the source has no good in mind.
const TRIALS_OF_ONE_MAX: usize = 8;
const TRIALS_MAX: usize = 32;

/// Nothing tried yet.
pub(super) fn trials() -> Slots {
    Slots::new("trials of paths", TRIALS_OF_ONE_MAX, TRIALS_MAX)
}

/// Opens ports on which the source tries each path. Those of an earlier request are closed.
pub(crate) async fn open_trials(
    incoming: &Incoming,
    id: &str,
    paths: &[Path],
) -> Result<ProbePorts, Problem> {
    let entry = incoming.entries.get(id)?;
    let _stepping = entry.stepping.lock().await;
    may_go_on(incoming, &entry, OrderNeed::Prepare)?;
    incoming.transfer.first_sessions.begin_step(None);
    entry.end_trials();
    let slot = Arc::new(incoming.entries.trials.take(&entry.source)?);
    let (ports, answering) = probe::open(&incoming.host, paths, &slot).await;
    entry.answer_trials_by(answering);
    Ok(ports)
}

/// Prepares the paths and listens.
pub(crate) async fn connect(
    incoming: &Arc<Incoming>,
    id: &str,
    request: ConnectionRequest,
) -> Result<Endpoint, Problem> {
    let entry = incoming.entries.get(id)?;
    let _stepping = entry.stepping.lock().await;
    may_go_on(incoming, &entry, OrderNeed::Prepare)?;
    entry.end_trials();
    request.parcel.check().map_err(Problem::bad_input)?;
    let is_encrypted = request.plan.is_encrypted();
    let obstacle =
        |protocol: Protocol| protocol.obstacle(request.plan.post_copy(), is_encrypted, &entry.source);
    if let Some(why) = entry.protocol.and_then(obstacle) {
        return Err(Problem::refused(why));
    }
    entry.set_encrypted(is_encrypted);
    if request.plan.post_copy() {
        incoming.journal.allow_post_copy(id)?;
        entry.memory().allow_post_copy();
    }
    if !is_encrypted && let Some(why) = refuses_clear(&incoming.facts().await?, &request.plan.paths) {
        return Err(Problem::refused(why));
    }
    may_go_on(incoming, &entry, OrderNeed::UseHypervisor)?;
    let vmm = entry.vmm()?;
    incoming.transfer.first_sessions.begin_sending(&*vmm);
    let endpoint = if request.plan.spread() == Spread::Routed {
        connect_routed(incoming, &entry, &*vmm, &request).await?
    } else {
        // That of the one path by which it comes.
        let address = request.plan.paths.first().address;
        listen(incoming, &entry, &*vmm, &request, address, Listening::First).await?
    };
    let disks = disks::open(incoming, &entry, &*vmm, &request, endpoint.address).await?;
    Ok(Endpoint { disks, ..endpoint })
}

async fn connect_routed(
    incoming: &Arc<Incoming>,
    entry: &IncomingVm,
    vmm: &dyn Machine,
    request: &ConnectionRequest,
) -> Result<Endpoint, Problem> {
    let (Some(migration_address), Some(watch)) = (request.migration_address, request.watch.clone()) else {
        return Err(Problem::bad_input(
            "a routed migration without the source's migration_address or its watch of the paths",
        ));
    };
    let paths = request.plan.paths.to_vec();
    let request_to_watch = WatchRequest { paths, migration_address, watch };
    let own = join_watch(incoming, entry, &request_to_watch, &[]).await?;
    let address = incoming.host.intended_address();
    let endpoint = listen(incoming, entry, vmm, request, address, Listening::First).await?;
    // Not before: the source says nothing until it has this answer, and libvirt may take seconds to listen.
    meet(incoming, entry, &request_to_watch).await?;
    Ok(Endpoint { watch: Some(own), ..endpoint })
}

async fn watch_paths(
    incoming: &Arc<Incoming>,
    entry: &IncomingVm,
    request: &WatchRequest,
    absent: &[Path],
) -> Result<WatchEnd, Problem> {
    let own = join_watch(incoming, entry, request, absent).await?;
    meet(incoming, entry, request).await?;
    Ok(own)
}

/// From now on the source is heard, or missed.
async fn meet(incoming: &Incoming, entry: &IncomingVm, request: &WatchRequest) -> Result<(), Problem> {
    incoming.transfer.watches.meet(&entry.source, &request.paths, &request.watch).await
}

/// Makes the routes and addresses, and this end of the watch.
async fn join_watch(
    incoming: &Incoming,
    entry: &IncomingVm,
    request: &WatchRequest,
    absent: &[Path],
) -> Result<WatchEnd, Problem> {
    let joining = Joining {
        migration: &entry.id,
        peer: &entry.source,
        address: request.migration_address,
        paths: &request.paths,
        absent,
        news: None,
    };
    incoming.transfer.watches.join(joining).await
}

/// The source hears nothing of this host any more: this agent may have been restarted. For the paths that
/// are `absent`, this host has no address now.
pub(crate) async fn watch_again(
    incoming: &Arc<Incoming>,
    id: &str,
    request: &WatchRequest,
    absent: &[Path],
) -> Result<WatchEnd, Problem> {
    let entry = incoming.entries.get(id)?;
    let _stepping = entry.stepping.lock().await;
    may_go_on(incoming, &entry, OrderNeed::Prepare)?;
    if !entry.is_encrypted()
        && let Some(why) = refuses_clear_again(&incoming.facts().await?, &request.paths, absent)
    {
        return Err(Problem::refused(why));
    }
    watch_paths(incoming, &entry, request, absent).await
}

/// What QEMU is to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listening {
    /// A migration.
    First,
    /// One whose connection is broken.
    Again,
}

impl Listening {
    async fn at(
        self,
        vmm: &dyn Machine,
        transport: Transport,
        address: SocketAddr,
        parcel: &Parcel,
    ) -> Result<Parcel, VmError> {
        match self {
            Self::First => vmm.listen(transport, address.into(), parcel, listens_within(vmm)).await,
            Self::Again => {
                vmm.recover_listen(address.into(), QMP_DEADLINE).await?;
                Ok(Parcel::default())
            }
        }
    }
}

fn listens_within(vmm: &dyn Machine) -> Duration {
    if vmm.starts_to_listen() { fills_within(vmm.spec().memory_kib() << 10) } else { QMP_DEADLINE }
}

pub(super) async fn listen(
    incoming: &Incoming,
    entry: &IncomingVm,
    vmm: &dyn Machine,
    request: &ConnectionRequest,
    address: IpAddr,
    listening: Listening,
) -> Result<Endpoint, Problem> {
    let Some(stream) = RelayedStream::of(&request.plan) else {
        // A connection that takes the place of another one has its key.
        let is_to_have_key = listening == Listening::First && request.plan.is_encrypted_by_hypervisor();
        let tls_key = is_to_have_key.then(new_tls_key).transpose()?;
        let transport = transport(&request.plan, tls_key);
        let (port, parcel) =
            listen_on_free_port(incoming, entry, vmm, request, address, listening, transport).await?;
        let (relay_token, relay_page_cache_mib) = (None, 0);
        return Ok(Endpoint {
            address,
            port,
            watch: None,
            relay_token,
            relay_page_cache_mib,
            tls_key,
            parcel,
            disks: None,
        });
    };
    let path = vmm.incoming_relay().of_hypervisor;
    let transport = transport(&request.plan, None);
    let listening = vmm.listen(transport, path.into(), &request.parcel, listens_within(vmm));
    let parcel = listening.await.map_err(Problem::failed)?;
    let (listener, port) = bind_free_port(incoming, request, address).await?;
    limit_unread_of_relay(&listener, request);
    let token = Uuid::new_v4();
    let other = OtherEnd { identity: &incoming.peers.identity, host: &entry.source, token };
    // The source's route to this address says which its connections have. Where the kernel chooses, it may be any.
    let sender = request.migration_address.filter(|_| request.plan.spread() == Spread::Routed);
    let page_cache_mib = incoming.host.config.compression.page_cache_mib;
    let receiver = relay::receive(vmm, stream, listener, &other, sender, page_cache_mib)?;
    entry.relay_by(receiver);
    Ok(Endpoint {
        address,
        port,
        watch: None,
        relay_token: Some(token),
        relay_page_cache_mib: page_cache_mib,
        tls_key: None,
        parcel,
        disks: None,
    })
}

fn unread_limit(request: &ConnectionRequest) -> Option<u32> {
    let channels = request.plan.transfer.parallel()?.channels().get();
    let round_trip = request.round_trip_us.map(|us| Duration::from_micros(us.into()));
    unread_limit_bytes(&request.plan.paths, channels, round_trip)
}

/// What QEMU has not read when its VM is paused, it reads while that stands still.
fn limit_unread(vmm: &dyn Machine, request: &ConnectionRequest, listen_at: SocketAddr) {
    let Some(bytes) = unread_limit(request) else { return };
    let Some(connections) = vmm.connections() else { return };
    if let Err(error) = connections.limit_received(listen_at, bytes) {
        warn!(%error, "the VM may stand still for longer: much may wait for its QEMU");
    }
}

/// The same for a relay, which accepted connections inherit from the one that listens.
fn limit_unread_of_relay(listener: &TcpListener, request: &ConnectionRequest) {
    let Some(bytes) = unread_limit(request) else { return };
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    if let Err(error) = set_socket_recv_buffer_size_force(listener, bytes) {
        warn!(%error, "the VM may stand still for longer: much may wait for its relay");
    }
}

fn new_tls_key() -> Result<TlsKey, Problem> {
    let mut bytes = [0; 32];
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| Problem::failed("the kernel provides no random bytes for a key"))?;
    Ok(TlsKey::new(bytes))
}

async fn listen_on_free_port(
    incoming: &Incoming,
    entry: &IncomingVm,
    vmm: &dyn Machine,
    request: &ConnectionRequest,
    address: IpAddr,
    listening: Listening,
    transport: Transport,
) -> Result<(u16, Parcel), Problem> {
    let link = &request.plan.paths.first().link;
    let sources = &allowed_sources::of(incoming, entry, request).await;
    let parcel = &request.parcel;
    let listen = |port| async move {
        let failed = |error: &dyn Display| {
            Problem::failed(format!("{} cannot listen on {address}: {error}", incoming.host.name()))
        };
        let listen_at = on_link(link, address, port).map_err(Problem::failed)?;
        if allowed_sources::is_in_use(listen_at).map_err(|error| failed(&error))? {
            return Ok(None);
        }
        if transport == Transport::Rdma {
            // No firewall sees RDMA, and its ports are others: the TCP port stands for it among migrations.
            return listen_by_rdma(entry, vmm, listen_at, parcel).await.map_err(|error| failed(&error));
        }
        allowed_sources::keep_out(incoming, entry, listen_at, sources).await;
        match listening.at(vmm, transport, listen_at, parcel).await {
            Ok(parcel) => {
                limit_unread(vmm, request, listen_at);
                Ok(Some((port, parcel)))
            }
            Err(error) if error.kind == VmErrorKind::PortTaken => {
                allowed_sources::let_in(incoming, entry, listen_at).await;
                Ok(None)
            }
            Err(error) => Err(failed(&error)),
        }
    };
    incoming.host.ports.take(listen).await
}

async fn listen_by_rdma(
    entry: &IncomingVm,
    vmm: &dyn Machine,
    listen_at: SocketAddr,
    parcel: &Parcel,
) -> Result<Option<(u16, Parcel)>, VmError> {
    let parcel = vmm.listen(Transport::Rdma, listen_at.into(), parcel, listens_within(vmm)).await?;
    entry.keep_port(TcpListener::bind(listen_at).ok());
    Ok(Some((listen_at.port(), parcel)))
}
