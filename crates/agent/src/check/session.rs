//! The other host's side of a check: for a while, it opens ports, sends and counts as the first host asks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use drainpipe_engine::check::sizes::Arrived;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::problem::Problem;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::sleep;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Checks;
use super::packets::PacketEnd;
use crate::paths::link_socket::on_link;
use crate::paths::path_watch;
use crate::paths::probe::{self, ProbePort, ProbePorts};
use crate::peers::slots::Slot;

/// How long a session lasts unless it is closed; a check takes a few seconds.
const SESSION_DEADLINE: Duration = Duration::from_secs(30);

/// Rounds of packets in one check.
pub(super) const ROUNDS_MAX: u32 = 8;

/// Sizes in one round on one path.
const SIZES_MAX: usize = 16;

/// What was sent last may still be in a queue; the longest honest ones are some 100 ms.
const SETTLE: Duration = Duration::from_millis(150);

/// A request to take part in a check.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionRequest {
    /// What each datagram of this check carries; also names the session.
    #[schema(value_type = String, format = "uuid")]
    pub(crate) token: Uuid,
    /// The paths, seen from the host that is asked.
    pub(crate) paths: Vec<Path>,
    /// For each path the UDP port of the host that asks.
    pub(crate) ports: Vec<u16>,
}

/// Where the host that was asked can be reached for a while.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(crate) struct SessionView {
    /// For each path a UDP port, or why there is none.
    pub(crate) datagrams: Vec<ProbePort>,
    /// For each path a TCP port, or why there is none.
    pub(crate) connections: ProbePorts,
}

/// What to send in a round.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Round {
    /// For each path the sizes of IP packets to send, in bytes.
    pub(crate) sizes: Vec<Vec<u16>>,
}

/// What has arrived so far.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(crate) struct RoundResult {
    /// For each path how many packets of each size.
    #[schema(value_type = Vec<std::collections::BTreeMap<String, u32>>)]
    pub(crate) arrived: Vec<Arrived>,
}

/// A check that another host leads.
#[derive(Debug)]
pub(crate) struct Session {
    source: String,
    ends: Vec<Option<PacketEnd>>,
    rounds: AtomicU32,
    // Those who answer to connections, and the one that ends the session; gone with it.
    _tasks: JoinSet<()>,
    _slot: Arc<Slot>,
}

/// Takes part in a check of `source`. The caller has made sure that the paths are over this host's
/// migration links.
pub(crate) async fn open(
    checks: &Arc<Checks>,
    source: &str,
    request: SessionRequest,
) -> Result<SessionView, Problem> {
    let SessionRequest { token, paths, ports } = request;
    if ports.len() != paths.len() {
        return Err(Problem::bad_input("a check needs one port for each path"));
    }
    let slot = Arc::new(checks.taken_part_in.take(source)?);
    let (connections, mut tasks) = probe::open(&checks.host, &paths, &slot).await;
    let mut ends = Vec::with_capacity(paths.len());
    let mut datagrams = Vec::with_capacity(paths.len());
    for (path, port) in paths.iter().zip(ports) {
        let (end, port) = begin(checks, path, port, token).await;
        ends.push(end);
        datagrams.push(port);
    }
    let held_by = Arc::clone(checks);
    tasks.spawn(async move {
        sleep(SESSION_DEADLINE).await;
        held_by.remove(token);
    });
    let (source, rounds) = (source.into(), AtomicU32::new(0));
    checks.add(token, Session { source, ends, rounds, _tasks: tasks, _slot: slot })?;
    Ok(SessionView { datagrams, connections })
}

async fn begin(checks: &Checks, path: &Path, peer_port: u16, token: Uuid) -> (Option<PacketEnd>, ProbePort) {
    let begun = path_watch::bind(&checks.host, path).await.and_then(|socket| {
        let port = socket.local_addr().map_err(Problem::failed)?.port();
        let peer = on_link(&path.link, path.peer_address, peer_port).map_err(Problem::failed)?;
        Ok((PacketEnd::begin(socket, peer, token).map_err(Problem::failed)?, port))
    });
    match begun {
        Ok((end, port)) => (Some(end), ProbePort::Open(port)),
        Err(problem) => (None, ProbePort::Refused(problem.message)),
    }
}

/// The host that leads a check.
pub(crate) fn source_of(checks: &Checks, token: Uuid) -> Result<String, Problem> {
    find(checks, token).map(|session| session.source.clone())
}

fn find(checks: &Checks, token: Uuid) -> Result<Arc<Session>, Problem> {
    checks.get(token).ok_or_else(|| Problem::not_found("no such check: it has ended, or took too long"))
}

/// Sends what is asked for, and says what has arrived.
pub(crate) async fn play(checks: &Checks, token: Uuid, round: &Round) -> Result<RoundResult, Problem> {
    let session = find(checks, token)?;
    let too_many = round.sizes.iter().any(|sizes| sizes.len() > SIZES_MAX);
    if round.sizes.len() != session.ends.len() || too_many {
        return Err(Problem::bad_input(format!("a round has at most {SIZES_MAX} sizes for each path")));
    }
    if session.rounds.fetch_add(1, Ordering::Relaxed) >= ROUNDS_MAX {
        return Err(Problem::refused(format!("a check has at most {ROUNDS_MAX} rounds")));
    }
    send_all(&session.ends, &round.sizes).await;
    sleep(SETTLE).await;
    Ok(RoundResult { arrived: arrived_at(&session.ends) })
}

/// Ends the part of this host.
pub(crate) fn close(checks: &Checks, token: Uuid) {
    checks.remove(token);
}

/// Sends on all paths at once.
pub(super) async fn send_all(ends: &[Option<PacketEnd>], sizes: &[Vec<u16>]) {
    let each = ends.iter().zip(sizes).filter(|(_, sizes)| !sizes.is_empty());
    join_all(each.filter_map(|(end, sizes)| Some(end.as_ref()?.send(sizes)))).await;
}

/// What has arrived so far on each path.
pub(super) fn arrived_at(ends: &[Option<PacketEnd>]) -> Vec<Arrived> {
    ends.iter().map(|end| end.as_ref().map(PacketEnd::arrived).unwrap_or_default()).collect()
}
