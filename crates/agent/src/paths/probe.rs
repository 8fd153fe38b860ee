//! Tests each path before a migration trusts it: a TCP connection from link to link, to a port of the migration range,
//! so that a broken cable, a VLAN or a firewall shows within a second and not as a hang.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::check::trial::TcpRoundTrip;
use drainpipe_engine::format::bound;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::problem::Problem;
use drainpipe_net::Flow;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::host::Host;
use crate::host::network::HostNetwork;
use crate::host::ports;
use crate::paths::link_socket::on_link;
use crate::peers::slots::Slot;

/// A path that needs longer for a connection and an answer is of no use. Covers one lost packet: the
/// kernel sends the first again after 1 s.
const TRIAL_DEADLINE: Duration = Duration::from_millis(1_500);

/// More than what three of the largest packets of an MTU of 9000 carry. Where something in the way drops large
/// packets, small ones pass and a migration would stand still.
const LARGE_BYTES: usize = 28 << 10;

/// Between two attempts to connect.
const CONNECT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// How long the target keeps its probe ports open.
const OPEN_FOR: Duration = Duration::from_secs(4);

/// A request to open a port on the near end of each of these paths.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProbeRequest {
    /// The paths, seen from the host that is asked.
    pub(crate) paths: Vec<Path>,
}

/// A port on one link, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ProbePort {
    /// Open for a few seconds.
    Open(u16),
    /// Could not be opened; the text is for people.
    Refused(String),
}

/// The ports that were opened.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(crate) struct ProbePorts {
    /// What the one who connects must say, and hears again.
    #[schema(value_type = String)]
    pub(crate) token: Uuid,
    /// For each path its port, or why there is none.
    pub(crate) ports: Vec<ProbePort>,
}

/// Opens a port on each path, for a few seconds or until the tasks that answer there are dropped. They
/// hold the slot for as long. The caller has made sure that the paths are over this host's migration links.
pub(crate) async fn open(host: &Host, paths: &[Path], slot: &Arc<Slot>) -> (ProbePorts, JoinSet<()>) {
    let token = Uuid::new_v4();
    let mut ports = Vec::with_capacity(paths.len());
    let mut answering = JoinSet::new();
    for path in paths {
        ports.push(match listen(host, path).await {
            Ok((listener, port)) => {
                let slot = Arc::clone(slot);
                answering.spawn(async move {
                    // Over is over, whether it was used or not.
                    let _used = timeout(OPEN_FOR, answer(listener, token)).await;
                    drop(slot);
                });
                ProbePort::Open(port)
            }
            Err(problem) => ProbePort::Refused(problem.message),
        });
    }
    (ProbePorts { token, ports }, answering)
}

async fn listen(host: &Host, path: &Path) -> Result<(TcpListener, u16), Problem> {
    let listen = |port| async move {
        let bound = ports::unless_in_use(bind(path, port).await);
        let bound = bound.map(|listener| listener.map(|listener| (listener, port)));
        bound.map_err(|error| Problem::failed(format!("cannot listen on {}: {error}", path.address)))
    };
    host.ports.take(listen).await
}

async fn bind(path: &Path, port: u16) -> io::Result<TcpListener> {
    TcpListener::bind(on_link(&path.link, path.address, port)?).await
}

// Unauthenticated peers may connect too; only the one that knows the token ends the wait.
async fn answer(listener: TcpListener, token: Uuid) -> io::Result<()> {
    loop {
        let (mut stream, _) = listener.accept().await?;
        let mut said = [0; 16];
        let read = timeout(TRIAL_DEADLINE, stream.read_exact(&mut said)).await;
        if matches!(read, Ok(Ok(_))) && said == *token.as_bytes() {
            stream.write_all(&said).await?;
            let mut large = vec![0; LARGE_BYTES];
            // The side that asks for it tries large packets too. The other side closes first: it keeps the port's wait
            // state, and QEMU gets the port.
            if stream.read_exact(&mut large).await.is_ok() {
                stream.write_all(&said).await?;
                let _closed = stream.read(&mut said).await?;
            }
            return Ok(());
        }
    }
}

/// That a connection stood, and how long it takes there and back, where the kernel says so; or why it did
/// not.
pub(crate) type Connected = Result<Option<TcpRoundTrip>, String>;

/// The longest of the known round trips, measured while nothing else used the paths.
pub(crate) fn longest_round_trip(trials: &[Connected]) -> Option<Duration> {
    let known =
        trials.iter().filter_map(|trial| (*trial.as_ref().ok()?).map(|round_trip| round_trip.least_ms));
    known.reduce(f64::max).and_then(|ms| Duration::try_from_secs_f64(ms / 1_000.0).ok())
}

/// With what paths are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// A connection and an answer.
    Small,
    /// Also packets as large as they may be, as a migration sends them.
    Large,
}

/// Tries all paths at once; one answer for each, in their order.
pub(crate) async fn try_paths(
    network: &HostNetwork,
    paths: &[Path],
    ports: &ProbePorts,
    load: Load,
) -> Vec<Connected> {
    let each = paths.iter().zip(&ports.ports);
    join_all(each.map(|(path, port)| try_path(network, path, port, ports.token, load))).await
}

async fn try_path(
    network: &HostNetwork,
    path: &Path,
    port: &ProbePort,
    token: Uuid,
    load: Load,
) -> Connected {
    let port = match port {
        ProbePort::Open(port) => *port,
        ProbePort::Refused(why) => return Err(why.clone()),
    };
    let target = SocketAddr::new(path.peer_address, port);
    let failed = |error: io::Error| format!("{} does not reach {target}: {error}", path.address);
    let mut unreachable = None;
    let trial = timeout(TRIAL_DEADLINE, exchange_soon(path, port, token, &mut unreachable)).await;
    let ended = trial.or_else(|_| unreachable.map(Err).ok_or(()));
    let mut stream = ended
        .map_err(|()| format!("no answer from {target} within {}", bound(TRIAL_DEADLINE)))?
        .map_err(failed)?;
    let round_trip = round_trip(network, &stream).await;
    if load == Load::Large {
        timeout(TRIAL_DEADLINE, send_large(&mut stream))
            .await
            .map_err(|_| {
                format!(
                    "small packets reach {target} and large ones do not; `drainpipe check` says how large they may be"
                )
            })?
            .map_err(failed)?;
    }
    Ok(round_trip)
}

async fn send_large(stream: &mut TcpStream) -> io::Result<()> {
    stream.write_all(&vec![0; LARGE_BYTES]).await?;
    let mut heard = [0; 16];
    stream.read_exact(&mut heard).await?;
    Ok(())
}

/// The kernel says at once that it does not reach a neighbour that it has just looked for in vain, also if the
/// neighbour's link is up again since.
async fn exchange_soon(
    path: &Path,
    port: u16,
    token: Uuid,
    unreachable: &mut Option<io::Error>,
) -> io::Result<TcpStream> {
    loop {
        match exchange(path, port, token).await {
            Err(error) if error.kind() == io::ErrorKind::HostUnreachable => *unreachable = Some(error),
            ended => return ended,
        }
        sleep(CONNECT_AGAIN_AFTER).await;
    }
}

async fn exchange(path: &Path, port: u16, token: Uuid) -> io::Result<TcpStream> {
    let own = on_link(&path.link, path.address, 0)?;
    let mut stream = connect_from(own, on_link(&path.link, path.peer_address, port)?).await?;
    stream.write_all(token.as_bytes()).await?;
    let mut heard = [0; 16];
    stream.read_exact(&mut heard).await?;
    if heard == *token.as_bytes() {
        return Ok(stream);
    }
    Err(io::Error::other("another program answers there"))
}

async fn round_trip(network: &HostNetwork, stream: &TcpStream) -> Option<TcpRoundTrip> {
    let flow = Flow { source: stream.local_addr().ok()?, destination: stream.peer_addr().ok()? };
    let counters = network.flow_counters(flow).await.ok()??;
    let known = counters.round_trip_us > 0 && counters.round_trip_least_us <= counters.round_trip_us;
    let ms = |us: u32| f64::from(us) / 1_000.0;
    known.then(|| TcpRoundTrip {
        smoothed_ms: ms(counters.round_trip_us),
        least_ms: ms(counters.round_trip_least_us),
    })
}

async fn connect_from(own: SocketAddr, target: SocketAddr) -> io::Result<TcpStream> {
    let socket = if own.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.bind(own)?;
    socket.connect(target).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_path_that_stood_has_the_longest_round_trip() {
        let stood = |least_ms| Ok(Some(TcpRoundTrip { smoothed_ms: 70.0, least_ms }));
        let trials = [stood(0.2), stood(3.5), Ok(None), Err("no answer".into())];
        assert_eq!(longest_round_trip(&trials), Some(Duration::from_micros(3_500)));
        assert_eq!(longest_round_trip(&trials[2..]), None);
    }
}
