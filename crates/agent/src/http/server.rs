//! Accepts connections, finds out who is calling, and hands each request to the router with its
//! [`Caller`].

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use drainpipe_engine::connections::Priority;
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_identity::{Identity, JOIN_PROTOCOL, Peer};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use jiff::Timestamp;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::server::{Acceptor, ClientHello};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, warn};

use crate::http::api::authorization::Caller;
use crate::http::api::error::ApiError;
use crate::http::api::handlers::fleet::ComesFrom;
use crate::http::connection_slots::{Bounds, Closing, ConnectionSlot, ConnectionSlots};
use crate::joining::DEPARTURES;

/// Connections of root served at once; more wait in the kernel's queue.
const ROOTS_CONNECTIONS_MAX: usize = 256;

/// Connections that the kernel has accepted and the agent has not; it takes no more than `net.core.somaxconn`.
const BACKLOG: u32 = 4096;

/// A TLS handshake takes milliseconds; what needs longer is not a peer.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(3);

/// A host that joins sends one request.
const JOIN_DEADLINE: Duration = Duration::from_secs(15);

/// How long a connection whose slot another one has got may still take for the answer that is under way.
const CLOSING_MAX: Duration = Duration::from_millis(250);

/// How long a request's head may take, which also ends idle connections.
const HEAD_DEADLINE: Duration = Duration::from_mins(2);

/// A killed agent holds its sockets until its process has ended, which takes time on a busy host. An
/// agent that is started at once, as by a script, waits for that.
const ENDING_MAX: Duration = Duration::from_secs(3);
const ENDED_LOOK_EVERY: Duration = Duration::from_millis(50);

/// Serves root on this host over a Unix socket, until it is stopped.
pub(crate) async fn serve_socket(listener: UnixListener, router: Router, stop: watch::Receiver<bool>) {
    accept_each(
        ROOTS_CONNECTIONS_MAX,
        stop,
        || listener.accept(),
        |(stream, _), slot| {
            let router = router.clone();
            tokio::spawn(async move {
                end_of(serve(stream, Caller::Root, router, Activity::default()).await);
                drop(slot);
            });
        },
    )
    .await;
}

/// Which peers have priority.
pub(crate) type PriorityOf = Arc<dyn Fn(&Peer) -> Priority + Send + Sync>;

/// What answers somebody who has no certificate and wants one; none while nobody may join.
pub(crate) type JoinsBy = Arc<dyn Fn() -> Option<Router> + Send + Sync>;

/// How those are received who come over the network.
#[derive(Clone)]
pub(crate) struct Welcome {
    /// Which peers have priority.
    pub(crate) priority: PriorityOf,
    /// Whether hosts may join.
    pub(crate) joins: JoinsBy,
}

impl Welcome {
    /// For all alike, and nobody joins.
    #[cfg(test)]
    pub(crate) fn usual() -> Self {
        Self { priority: Arc::new(|_| Priority::Usual), joins: Arc::new(|| None) }
    }
}

/// Serves agents and operators by mutual TLS, until it is stopped.
pub(crate) async fn serve_tls(
    listener: TcpListener,
    identity: Identity,
    router: Router,
    welcome: Welcome,
    stop: watch::Receiver<bool>,
) {
    let bounds = Bounds::of_this_process();
    let unauthenticated = ConnectionSlots::new(bounds.unauthenticated);
    let joining = Arc::new(identity.join_server_config());
    let door =
        Arc::new(Door { identity, joining, known: ConnectionSlots::new(bounds.known), welcome, router });
    accept_each(
        bounds.all(),
        stop,
        || listener.accept(),
        |(stream, from), slot| {
            if let Some(admitted) = unauthenticated.take(&network_of(from.ip()), |_| Priority::Usual) {
                let door = Arc::clone(&door);
                tokio::spawn(async move {
                    door.receive(stream, from.ip(), admitted).await;
                    drop(slot);
                });
            }
        },
    )
    .await;
}

/// Addresses that one party can have many of at no cost count as one: those of an IPv6 subnet.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64))),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// Accepts connections, no more at once than `max`, until it is stopped.
async fn accept_each<C, F>(
    max: usize,
    mut stop: watch::Receiver<bool>,
    accept: impl Fn() -> F,
    handle: impl Fn(C, OwnedSemaphorePermit),
) where
    F: Future<Output = io::Result<C>>,
{
    let slots = Arc::new(Semaphore::new(max));
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

/// Where those who come over the network show who they are.
struct Door {
    identity: Identity,
    joining: Arc<ServerConfig>,
    known: Arc<ConnectionSlots<Peer>>,
    welcome: Welcome,
    router: Router,
}

/// A client that has connected.
enum Guest {
    /// Somebody with a certificate.
    Known(TlsStream<TcpStream>, Peer),
    /// Somebody who wants one: this, and nothing else, answers.
    Joins(TlsStream<TcpStream>, Router),
}

impl Door {
    async fn receive(&self, stream: TcpStream, from: IpAddr, slot: (ConnectionSlot<IpAddr>, Closing)) {
        let (unauthenticated, mut closing) = slot;
        let greeted = tokio::select! {
            greeted = timeout(HANDSHAKE_DEADLINE, self.greet(stream)) => greeted,
            _ = &mut closing => return debug!("closed the oldest connection of the address that has the most"),
        };
        match greeted {
            Ok(Some(Guest::Known(stream, peer))) => {
                self.serve_known(stream, peer, unauthenticated).await;
            }
            // It keeps the slot of an unknown peer, and may lose it as one.
            Ok(Some(Guest::Joins(stream, router))) => {
                let served = serve_to_join(stream, router.layer(Extension(ComesFrom(from))));
                tokio::select! {
                    served = timeout(JOIN_DEADLINE, served) => {
                        if served.is_err() {
                            debug!(%from, "closed a connection that offered to join and did not");
                        }
                    }
                    _ = closing => debug!(%from, "closed a connection that offered to join: its address has the most"),
                }
                drop(unauthenticated);
            }
            _ => {}
        }
    }

    async fn serve_known(
        &self,
        stream: TlsStream<TcpStream>,
        peer: Peer,
        unauthenticated: ConnectionSlot<IpAddr>,
    ) {
        let expiry = sleep(self.valid_for(&stream));
        let Some((slot, closing)) = self.known.take(&peer, &*self.welcome.priority) else {
            return warn!(%peer, "closed a connection: all others are in use, and this peer has more than others");
        };
        drop(unauthenticated);
        let activity = Activity { slot: Some(Arc::new(slot)), holder: self.holder(&stream) };
        serve_until(closing, expiry, serve(stream, Caller::Peer(peer), self.router.clone(), activity)).await;
    }

    /// By what each request is looked at again: certificates may be revoked while a connection stands.
    fn holder(&self, stream: &TlsStream<TcpStream>) -> Option<Holder> {
        let certificate = stream.get_ref().1.peer_certificates()?.first()?.clone().into_owned();
        Some(Holder { identity: self.identity.clone(), certificate })
    }

    /// For how long the certificates of both ends will do, which TLS looks at in its handshake alone.
    fn valid_for(&self, stream: &TlsStream<TcpStream>) -> Duration {
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let left = self.identity.valid_with(chain).duration_since(Timestamp::now());
        // They are valid to the end of their last second.
        Duration::try_from(left).unwrap_or_default().saturating_add(Duration::from_secs(1))
    }

    async fn greet(&self, stream: TcpStream) -> Option<Guest> {
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let guest = self.shake_hands(stream).await;
        guest
            .inspect_err(|error| {
                let why = drainpipe_identity::explain(error).unwrap_or_else(|| error.to_string());
                debug!(why, "refused a connection");
            })
            .ok()?
    }

    /// A client that says it wants to join needs no certificate while a token is open, and reaches nothing but what lets
    /// it join. All others need one.
    async fn shake_hands(&self, stream: TcpStream) -> io::Result<Option<Guest>> {
        let hello = LazyConfigAcceptor::new(Acceptor::default(), stream).await?;
        if wants_to_join(&hello.client_hello())
            && let Some(router) = (self.welcome.joins)()
        {
            let stream = hello.into_stream(Arc::clone(&self.joining)).await?;
            return Ok(Some(Guest::Joins(stream, router)));
        }
        let stream = hello.into_stream(self.identity.server_config()).await?;
        let holder = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        match holder.map(Peer::from_certificate) {
            Some(Ok(peer)) => return Ok(Some(Guest::Known(stream, peer))),
            Some(Err(error)) => warn!(%error, "refused a certificate"),
            None => debug!("refused a connection without a certificate"),
        }
        Ok(None)
    }
}

fn wants_to_join(hello: &ClientHello<'_>) -> bool {
    hello.alpn().is_some_and(|mut protocols| protocols.any(|protocol| protocol == JOIN_PROTOCOL))
}

/// Answers one request, and no more.
async fn serve_to_join(stream: TlsStream<TcpStream>, router: Router) {
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HANDSHAKE_DEADLINE)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.layer(from_fn(to_the_end))));
    end_of(served.await);
}

/// Tells the slot of a connection whether somebody waits for an answer on it.
#[derive(Debug, Clone, Default)]
struct Activity {
    slot: Option<Arc<ConnectionSlot<Peer>>>,
    holder: Option<Holder>,
}

/// The holder of the connection, by its certificate.
#[derive(Debug, Clone)]
struct Holder {
    identity: Identity,
    certificate: CertificateDer<'static>,
}

impl Activity {
    fn set_idle(&self, is_idle: bool) {
        if let Some(slot) = &self.slot {
            slot.set_idle(is_idle);
        }
    }

    /// Refuses who was let in by a certificate that is revoked by now.
    fn check_not_revoked(&self) -> Result<(), Problem> {
        let revoked = |holder: &Holder| holder.identity.revocations().has(&holder.certificate);
        if self.holder.as_ref().is_some_and(revoked) {
            return Err(Problem::new(ProblemKind::Forbidden, "the caller's certificate is revoked"));
        }
        Ok(())
    }
}

/// One connection that is served by HTTP.
fn serve<S>(stream: S, caller: Caller, router: Router, activity: Activity) -> Served<S>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let answering = from_fn(move |request, next| answer(activity.clone(), request, next));
    let router = router.layer(axum::Extension(caller)).layer(answering);
    hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
}

type Served<S> = hyper::server::conn::http1::Connection<TokioIo<S>, TowerToHyperService<Router>>;

/// Serves a connection until its end; until a certificate expires, but for the answer that is under way; or until its
/// slot is another's, then at once, but for an answer that is ready soon.
async fn serve_until<S>(closing: Closing, expiry: Sleep, served: Served<S>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut served = pin!(served);
    tokio::select! {
        ended = &mut served => return end_of(ended),
        () = expiry => {
            served.as_mut().graceful_shutdown();
            return end_of(served.await);
        }
        _ = closing => served.as_mut().graceful_shutdown(),
    }
    if let Ok(ended) = timeout(CLOSING_MAX, served).await {
        end_of(ended);
    }
}

fn end_of(served: hyper::Result<()>) {
    if let Err(error) = served {
        debug!(%error, "a connection ended badly");
    }
}

async fn answer(activity: Activity, request: Request, next: Next) -> Response {
    if let Err(problem) = activity.check_not_revoked() {
        return ApiError::from(problem).into_response();
    }
    activity.set_idle(false);
    let leaves = request.uri().path() == DEPARTURES;
    let answer = to_the_end(request, next).await;
    activity.set_idle(true);
    // It may have been revoked meanwhile; who has left, has revoked itself.
    match activity.check_not_revoked() {
        Err(problem) if !leaves => ApiError::from(problem).into_response(),
        _ => answer,
    }
}

/// Carries a request through although its caller hangs up: otherwise it would be dropped half-way, as
/// when a source is killed just as the target lets the VM run.
async fn to_the_end(request: Request, next: Next) -> Response {
    tokio::spawn(next.run(request)).await.unwrap_or_else(|error| {
        warn!(%error, "a request was not completed");
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
pub(crate) async fn bind_tls(address: SocketAddr) -> Result<TcpListener, Problem> {
    let end = Instant::now() + ENDING_MAX;
    let bound = loop {
        match listen(address) {
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

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // As `TcpListener::bind` does: an agent starts again at once.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_of_an_ipv6_subnet_count_as_one() {
        let network = |address: &str| network_of(address.parse().unwrap());
        assert_eq!(network("fd00:0:0:1::1"), network("fd00:0:0:1:ffff::2"));
        assert_ne!(network("fd00:0:0:1::1"), network("fd00:0:0:2::1"));
        assert_ne!(network("192.0.2.1"), network("192.0.2.2"));
        assert_eq!(network("::ffff:192.0.2.1"), network("192.0.2.1"));
    }

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
