//! Tries each path before a migration trusts it: a TCP connection from link to link, to a port of the
//! migration range, so that a cable, a VLAN or a firewall in the way shows in a second and not as a
//! hang.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::path::Path;
use drainpipe_engine::plan::PathTrial;
use drainpipe_engine::problem::Problem;
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::agent::Agent;
use crate::ports;
use crate::slots::Slot;

/// A path that needs longer for a connection and an answer is of no use. Covers one lost packet: the
/// kernel sends the first again after 1 s.
const TRIAL_DEADLINE: Duration = Duration::from_millis(1_500);

/// How long the target keeps its probe ports open.
const OPEN_FOR: Duration = Duration::from_secs(4);

/// A request to open a port on each of these addresses.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProbeRequest {
    /// Addresses of the target.
    #[schema(value_type = Vec<String>)]
    pub(crate) addresses: Vec<IpAddr>,
}

/// A port on one address, or why there is none.
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
    /// For each address its port, or why there is none.
    pub(crate) ports: Vec<ProbePort>,
}

/// Opens a port on each address, for a few seconds or until the tasks that answer there are dropped. They
/// hold the slot for as long.
pub(crate) async fn open(
    agent: &Agent,
    request: ProbeRequest,
    slot: &Arc<Slot>,
) -> Result<(ProbePorts, JoinSet<()>), Problem> {
    let distinct: HashSet<&IpAddr> = request.addresses.iter().collect();
    if distinct.len() != request.addresses.len() {
        return Err(Problem::bad_input("an address is to be probed twice"));
    }
    let token = Uuid::new_v4();
    let mut ports = Vec::with_capacity(request.addresses.len());
    let mut answering = JoinSet::new();
    for address in request.addresses {
        ports.push(match listen(agent, address).await {
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
    Ok((ProbePorts { token, ports }, answering))
}

async fn listen(agent: &Agent, address: IpAddr) -> Result<(TcpListener, u16), Problem> {
    ports::take(agent, |port| async move {
        let bound = ports::unless_in_use(TcpListener::bind((address, port)).await);
        let bound = bound.map(|listener| listener.map(|listener| (listener, port)));
        bound.map_err(|error| Problem::failed(format!("cannot listen on {address}: {error}")))
    })
    .await
}

// Strangers may connect too; only the one that knows the token ends the wait.
async fn answer(listener: TcpListener, token: Uuid) -> io::Result<()> {
    loop {
        let (mut stream, _) = listener.accept().await?;
        let mut said = [0; 16];
        let read = timeout(TRIAL_DEADLINE, stream.read_exact(&mut said)).await;
        if matches!(read, Ok(Ok(_))) && said == *token.as_bytes() {
            stream.write_all(&said).await?;
            // The other side closes first: it keeps the port's wait state, and QEMU gets the port.
            let _closed = stream.read(&mut said).await?;
            return Ok(());
        }
    }
}

/// Tries all paths at once; one answer for each, in their order.
pub(crate) async fn try_paths(paths: &[Path], ports: &ProbePorts) -> Vec<PathTrial> {
    join_all(paths.iter().zip(&ports.ports).map(|(path, port)| try_path(path, port, ports.token))).await
}

async fn try_path(path: &Path, port: &ProbePort, token: Uuid) -> PathTrial {
    let port = match port {
        ProbePort::Open(port) => *port,
        ProbePort::Refused(why) => return Err(why.clone()),
    };
    let target = SocketAddr::new(path.peer_address, port);
    match timeout(TRIAL_DEADLINE, exchange(path.address, target, token)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("{} does not reach {target}: {error}", path.address)),
        Err(_) => Err(format!("no answer from {target} within {} ms", TRIAL_DEADLINE.as_millis())),
    }
}

async fn exchange(own: IpAddr, target: SocketAddr, token: Uuid) -> io::Result<()> {
    let mut stream = connect_from(own, target).await?;
    stream.write_all(token.as_bytes()).await?;
    let mut heard = [0; 16];
    stream.read_exact(&mut heard).await?;
    if heard == *token.as_bytes() {
        return Ok(());
    }
    Err(io::Error::other("another program answers there"))
}

async fn connect_from(own: IpAddr, target: SocketAddr) -> io::Result<TcpStream> {
    let socket = if own.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.bind(SocketAddr::new(own, 0))?;
    socket.connect(target).await
}
