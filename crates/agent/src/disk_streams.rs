//! Copies of disks on their way from QEMU to QEMU, by both agents.
//!
//! ```text
//! QEMU ── Unix socket ──► agent ── TCP, over the plan's paths ──► agent ── Unix socket ──► QEMU
//! ```
//!
//! What passes is NBD, of which nothing is changed. [`Connector::connect`] is where one connection between the hosts comes
//! from: whoever splits a disk's requests over several asks it for each.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_identity::{Identity, explain};
use drainpipe_relay::Token;
use rustix::fs::{Mode, OFlags, open};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, copy_bidirectional_with_sizes};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tracing::debug;
use uuid::Uuid;

use crate::lock::lock;

/// How long it may take until a connection stands on both sides.
const CONNECTED_WITHIN: Duration = Duration::from_secs(10);

/// Connections of one migration's disks at a time.
const CONNECTIONS_MAX: usize = 256;

/// Bytes of a direction that wait in an agent: a request of NBD has 32 MiB at most, QEMU's mirror sends 1 MiB.
const BUFFER_BYTES: usize = 256 << 10;

/// What one end must know to find the other one, and no one else.
#[derive(Clone)]
pub(crate) struct Connector {
    /// Where the target takes copies.
    pub(crate) address: SocketAddr,
    /// What only both ends know, and for this migration only.
    pub(crate) token: Uuid,
    /// The target, and who this host is to it; absent in the clear.
    pub(crate) tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
}

/// A connection between the two agents.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Connector {
    /// To `host`, encrypted if the plan says so.
    pub(crate) fn new(
        address: SocketAddr,
        token: Uuid,
        is_encrypted: bool,
        identity: &Identity,
        host: &str,
    ) -> Result<Self, Problem> {
        let name = ServerName::try_from(host.to_owned()).map_err(Problem::failed)?;
        let tls = is_encrypted.then(|| (Arc::new(identity.client_config()), name));
        Ok(Self { address, token, tls })
    }

    /// One more connection to the target's hypervisor: what is written to it is NBD.
    pub(crate) async fn connect(&self) -> io::Result<Box<dyn Stream>> {
        timeout(CONNECTED_WITHIN, self.connect_unbounded()).await?
    }

    async fn connect_unbounded(&self) -> io::Result<Box<dyn Stream>> {
        let socket = TcpStream::connect(self.address).await?;
        socket.set_nodelay(true)?;
        let mut stream: Box<dyn Stream> = match &self.tls {
            None => Box::new(socket),
            Some((config, host)) => {
                let connector = TlsConnector::from(Arc::clone(config));
                Box::new(connector.connect(host.clone(), socket).await?)
            }
        };
        stream.write_all(self.token.as_bytes()).await?;
        stream.flush().await?;
        Ok(stream)
    }
}

/// The end on the source. Once it is dropped, nothing more goes.
#[derive(Debug)]
pub(crate) struct DiskSender {
    path: PathBuf,
    passed: Arc<Passed>,
    _task: JoinSet<()>,
}

/// What has passed, and why no more does.
#[derive(Debug, Default)]
struct Passed {
    bytes: AtomicU64,
    problem: Mutex<Option<Problem>>,
}

impl DiskSender {
    /// Waits for QEMU's connections there.
    pub(crate) fn start(path: PathBuf, connector: Connector) -> Result<Self, Problem> {
        let listener = listen(&path)
            .map_err(|error| Problem::failed(format!("cannot listen on {}: {error}", path.display())))?;
        let passed = Arc::new(Passed::default());
        let mut task = JoinSet::new();
        task.spawn(send(listener, connector, Arc::clone(&passed)));
        Ok(Self { path, passed, _task: task })
    }

    /// Bytes that went to the target.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.passed.bytes.load(Ordering::Relaxed)
    }

    /// Why a connection to the target has broken; none if none has.
    pub(crate) fn problem(&self) -> Option<Problem> {
        lock(&self.passed.problem).clone()
    }
}

impl Drop for DiskSender {
    fn drop(&mut self) {
        // It may be gone with its directory.
        drop(fs::remove_file(&self.path));
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed?,
    }
    let listener = UnixListener::bind(path)?;
    // QEMU is another user. Its directory keeps all others away.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

async fn send(listener: UnixListener, connector: Connector, passed: Arc<Passed>) {
    let mut connections = JoinSet::new();
    while let Ok((program, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        if connections.len() < CONNECTIONS_MAX {
            connections.spawn(pass_on(program, connector.clone(), Arc::clone(&passed)));
        }
    }
}

async fn pass_on(program: UnixStream, connector: Connector, passed: Arc<Passed>) {
    let passing = async {
        let target = connector.connect().await?;
        copy(Counted { stream: program, passed: &passed }, target).await
    };
    if let Err(error) = passing.await {
        let why = explain(&error).unwrap_or_else(|| error.to_string());
        let problem =
            Problem::failed(format!("the connection for disks to {} broke: {why}", connector.address));
        lock(&passed.problem).get_or_insert(problem);
    }
}

/// QEMU's connection, of which what it sends is counted.
struct Counted<'a> {
    stream: UnixStream,
    passed: &'a Passed,
}

impl AsyncRead for Counted<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        let read = u64::try_from(buffer.filled().len() - before).unwrap_or(0);
        self.passed.bytes.fetch_add(read, Ordering::Relaxed);
        polled
    }
}

impl AsyncWrite for Counted<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

async fn copy(mut one: impl Stream, mut other: impl Stream) -> io::Result<()> {
    copy_bidirectional_with_sizes(&mut one, &mut other, BUFFER_BYTES, BUFFER_BYTES).await.map(drop)
}

/// The end on the target. Once it is dropped, nobody writes to the disks by it.
#[derive(Debug)]
pub(crate) struct DiskReceiver {
    _task: JoinSet<()>,
}

impl DiskReceiver {
    /// For a hypervisor that takes copies at `program`, from the host that `tls` lets in, or in the clear from whoever has
    /// the token.
    pub(crate) fn start(
        listener: StdTcpListener,
        program: PathBuf,
        token: Uuid,
        tls: Option<ServerConfig>,
    ) -> Result<Self, Problem> {
        listener.set_nonblocking(true).map_err(Problem::failed)?;
        let listener = TcpListener::from_std(listener).map_err(Problem::failed)?;
        let entrance =
            Entrance { program, token, tls: tls.map(|config| TlsAcceptor::from(Arc::new(config))) };
        let mut task = JoinSet::new();
        task.spawn(receive(listener, entrance));
        Ok(Self { _task: task })
    }
}

#[derive(Clone)]
struct Entrance {
    program: PathBuf,
    token: Uuid,
    tls: Option<TlsAcceptor>,
}

async fn receive(listener: TcpListener, entrance: Entrance) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let Ok((socket, from)) = listener.accept().await else {
            // Descriptors may be short for a while.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        let entrance = entrance.clone();
        connections.spawn(async move {
            if let Err(error) = entrance.let_in(socket).await {
                debug!(%from, %error, "a connection for disks has ended");
            }
            drop(place);
        });
    }
}

impl Entrance {
    async fn let_in(self, socket: TcpStream) -> io::Result<()> {
        let (source, program) = timeout(CONNECTED_WITHIN, self.welcome(socket)).await??;
        copy(source, program).await
    }

    async fn welcome(&self, socket: TcpStream) -> io::Result<(Box<dyn Stream>, UnixStream)> {
        socket.set_nodelay(true)?;
        let mut source: Box<dyn Stream> = match &self.tls {
            None => Box::new(socket),
            Some(acceptor) => Box::new(acceptor.accept(socket).await?),
        };
        let mut token = [0; size_of::<uuid::Bytes>()];
        source.read_exact(&mut token).await?;
        if !Token(self.token.into_bytes()).is(&token) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok((source, connect_program(&self.program).await?))
    }
}

/// A link at the end of the path is not followed: the program may be hostile, and link to another one's socket.
async fn connect_program(path: &Path) -> io::Result<UnixStream> {
    let itself = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    UnixStream::connect(format!("/proc/self/fd/{}", itself.as_raw_fd())).await
}
