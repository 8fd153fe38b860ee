//! Accepts connections, finds out who is calling, and hands each request to the router with its
//! [`Caller`].

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use drainpipe_engine::problem::Problem;
use drainpipe_identity::{Identity, Peer};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::sleep;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

use crate::api::authorization::Caller;

/// Connections served at once, on each listener; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 256;

/// A TLS handshake takes milliseconds; who needs longer is not a peer.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

/// How long a request's head may take, which also ends idle connections.
const HEAD_DEADLINE: Duration = Duration::from_mins(2);

/// A killed agent holds its sockets until its process has ended, which takes time on a busy host. Whoever starts the
/// next one at once, as a script that does not wait, waits for that.
const ENDING_MAX: Duration = Duration::from_secs(3);
const ENDED_LOOK_EVERY: Duration = Duration::from_millis(50);

/// Serves root on this host over a Unix socket, until told to stop.
pub(crate) async fn serve_socket(listener: UnixListener, router: Router, stop: watch::Receiver<bool>) {
    accept_each(
        stop,
        || listener.accept(),
        |(stream, _), slot| {
            let router = router.clone();
            tokio::spawn(async move { serve(stream, Caller::Root, router, slot).await });
        },
    )
    .await;
}

/// Serves agents and operators by mutual TLS, until told to stop.
pub(crate) async fn serve_tls(
    listener: TcpListener,
    identity: Identity,
    router: Router,
    stop: watch::Receiver<bool>,
) {
    let acceptor = TlsAcceptor::from(identity.server_config());
    accept_each(
        stop,
        || listener.accept(),
        |(stream, _), slot| {
            tokio::spawn(greet(acceptor.clone(), stream, router.clone(), slot));
        },
    )
    .await;
}

/// Accepts connections, no more at once than there are slots, until told to stop.
async fn accept_each<C, F>(
    mut stop: watch::Receiver<bool>,
    accept: impl Fn() -> F,
    handle: impl Fn(C, OwnedSemaphorePermit),
) where
    F: Future<Output = io::Result<C>>,
{
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    while let Some(slot) = free_slot(&slots, &mut stop).await {
        let accepted = tokio::select! {
            accepted = accept() => accepted,
            _ = stop.changed() => return,
        };
        match accepted {
            Ok(connection) => handle(connection, slot),
            Err(error) => pause_after(&error).await,
        }
    }
}

async fn free_slot(slots: &Arc<Semaphore>, stop: &mut watch::Receiver<bool>) -> Option<OwnedSemaphorePermit> {
    tokio::select! {
        slot = Arc::clone(slots).acquire_owned() => slot.ok(),
        _ = stop.changed() => None,
    }
}

// Out of descriptors, accept fails at once, again and again.
async fn pause_after(error: &io::Error) {
    warn!(%error, "cannot accept a connection");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

async fn greet(acceptor: TlsAcceptor, stream: TcpStream, router: Router, slot: OwnedSemaphorePermit) {
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "cannot set TCP_NODELAY");
    }
    let stream = match tokio::time::timeout(HANDSHAKE_DEADLINE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            let why = drainpipe_identity::explain(&error).unwrap_or_else(|| error.to_string());
            debug!(why, "refused a connection");
            return;
        }
        Err(_) => return,
    };
    let holder = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    match holder.map(Peer::from_certificate) {
        Some(Ok(peer)) => serve(stream, Caller::Peer(peer), router, slot).await,
        Some(Err(error)) => warn!(%error, "refused a certificate"),
        None => debug!("refused a connection without a certificate"),
    }
}

async fn serve<S>(stream: S, caller: Caller, router: Router, slot: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let router = router.layer(axum::Extension(caller)).layer(axum::middleware::from_fn(to_the_end));
    let service = TowerToHyperService::new(router);
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        debug!(%error, "a connection ended badly");
    }
    drop(slot);
}

/// Carries a request through although its caller hangs up: otherwise it would be dropped half-way, as
/// when a source is killed just as the target lets the VM run.
async fn to_the_end(request: Request, next: Next) -> Response {
    tokio::spawn(next.run(request)).await.unwrap_or_else(|error| {
        warn!(%error, "a request was not carried through");
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    })
}

/// Binds the Unix socket, readable by root only. A socket that a killed agent left is replaced; one
/// that another agent still serves is not.
pub(crate) async fn bind_socket(path: &Path) -> Result<UnixListener, Problem> {
    let failed = |error: io::Error| Problem::failed(format!("cannot listen on {}: {error}", path.display()));
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(failed)?;
    }
    let end = Instant::now() + ENDING_MAX;
    while is_served(path).await {
        if Instant::now() >= end {
            return Err(Problem::conflict(format!(
                "another agent serves {}: stop it first, or set `socket` in the configuration",
                path.display()
            )));
        }
        sleep(ENDED_LOOK_EVERY).await;
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Whether somebody listens there, who may be too busy to take more connections.
async fn is_served(path: &Path) -> bool {
    let nobody = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
    let connected = tokio::net::UnixStream::connect(path).await;
    connected.map_or_else(|error| !nobody.contains(&error.kind()), |_| true)
}

/// Binds the TCP address for TLS.
pub(crate) async fn bind_tls(address: std::net::SocketAddr) -> Result<TcpListener, Problem> {
    let end = Instant::now() + ENDING_MAX;
    let bound = loop {
        match TcpListener::bind(address).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < end => {
                sleep(ENDED_LOOK_EVERY).await;
            }
            bound => break bound,
        }
    };
    bound.map_err(|error| {
        let cure = match error.kind() {
            io::ErrorKind::AddrInUse => {
                "another program has the port: `ss -ltnp` tells which; change `listen`"
            }
            io::ErrorKind::AddrNotAvailable => {
                "this host has no such address: `ip address` lists them; change `listen`"
            }
            _ => "look at `listen` in the configuration",
        };
        Problem::failed(format!("cannot listen on {address}: {error}; {cure}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sockets_of_an_agent_that_is_just_ending_are_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.sock");
        let before = bind_socket(&path).await.unwrap();
        let tcp_before = bind_tls("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = tcp_before.local_addr().unwrap();
        tokio::spawn(async move {
            sleep(Duration::from_millis(200)).await;
            drop((before, tcp_before));
        });
        bind_socket(&path).await.unwrap();
        bind_tls(address).await.unwrap();
    }
}
