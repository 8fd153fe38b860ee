//! Copies of disks on their way from QEMU to QEMU, by both agents.
//!
//! ```text
//! QEMU ── NBD ──► splitter ══ TCP, over all of the plan's paths ══► splitter ── NBD, a Unix socket ──► QEMU
//! ```
//!
//! QEMU's NBD client has one connection, and so would use one path. The splitters at both ends (`drainpipe-nbd`)
//! spread its requests over several. This module decides where these connections come from, which are accepted, and
//! when they end.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskCopy, DiskName};
use drainpipe_hypervisor::Machine;
use drainpipe_identity::{Identity, explain};
use drainpipe_nbd::{
    DiskServer, Export, Pace, Reception, ServerAddress, Session, SourceSplitter, SourceWatch, TargetSplitter,
    There,
};
use drainpipe_relay::{Packers, Token};
use rustix::fs::{Mode, OFlags, open};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tracing::{debug, warn};
use uuid::Uuid;

use crate::store::lock::lock;
use crate::transfer::disk_socket::{DiskSocket, UnsentBytes};
use drainpipe_api_types::DiskEndpoint;

/// How long it may take until a connection stands on both sides.
const CONNECTED_WITHIN: Duration = Duration::from_secs(10);

/// Connections of one disk. The kernel places each on a path by its ports, so that there are more than paths; with eight
/// two equal paths carried 98 % of what they have.
const STREAMS: usize = 8;

/// Connections of one migration's disks at a time; those that are lost stand beside those that take their place.
const CONNECTIONS_MAX: usize = 256;

/// Connections that have not shown yet that they may be there.
const UNAUTHENTICATED_MAX: usize = 32;

/// How long the end of all connections may take. The VM stands still meanwhile.
const FINISHED_WITHIN: Duration = Duration::from_secs(2);

/// How often it is looked whether a connection is to take the place of one that was lost.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What each connection begins with: the token, and which disk it is for.
const PREAMBLE_BYTES: usize = size_of::<uuid::Bytes>() + 1;

/// What one end must know to find the other one, and no one else.
#[derive(Clone)]
pub(crate) struct Connector {
    address: SocketAddr,
    // What only both ends know, and for this migration only.
    token: Uuid,
    // The target, and who this host is to it; absent in the clear.
    tls: Option<(Arc<ClientConfig>, ServerName<'static>)>,
}

/// A connection between the two agents.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Connector {
    /// To `host`, which takes copies of disks at `address`; encrypted if the plan says so.
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

    async fn connect(&self, disk: u8, unsent: Option<&UnsentBytes>) -> io::Result<Box<dyn Stream>> {
        timeout(CONNECTED_WITHIN, self.connect_unbounded(disk, unsent)).await?
    }

    async fn connect_unbounded(&self, disk: u8, unsent: Option<&UnsentBytes>) -> io::Result<Box<dyn Stream>> {
        let socket = TcpStream::connect(self.address).await?;
        socket.set_nodelay(true)?;
        let socket = DiskSocket::new(socket, unsent.cloned());
        let mut stream: Box<dyn Stream> = match &self.tls {
            None => Box::new(socket),
            Some((config, host)) => {
                let connector = TlsConnector::from(Arc::clone(config));
                Box::new(connector.connect(host.clone(), socket).await?)
            }
        };
        let mut preamble = [disk; PREAMBLE_BYTES];
        preamble[..PREAMBLE_BYTES - 1].copy_from_slice(self.token.as_bytes());
        stream.write_all(&preamble).await?;
        stream.flush().await?;
        Ok(stream)
    }
}

/// A program that asks for disks by names of its own, all at one address.
#[derive(Clone)]
pub(crate) struct NamingClient {
    /// In the order of the disks.
    pub(crate) names: Vec<String>,
    pub(crate) vmm: Arc<dyn Machine>,
}

impl NamingClient {
    /// Whether a connection is its own: others may know the names.
    fn is(&self, from: SocketAddr, to: SocketAddr) -> bool {
        let has = self.vmm.connections().map(|connections| connections.has(from, to));
        has.is_some_and(|has| {
            has.unwrap_or_else(|error| {
                warn!(%error, "refused a connection for a disk, because it is not known whose it is");
                false
            })
        })
    }
}

/// Both ends must come to the same.
fn session(token: Uuid, disk: u8) -> Session {
    let mut bytes = token.into_bytes();
    bytes[0] ^= disk;
    Session(bytes)
}

fn number(disk: &DiskCopy) -> u8 {
    u8::try_from(disk.disk.index()).expect("there are as many names of disks as letters")
}

/// The end on the source. Once it is dropped, nothing more goes.
#[derive(Debug)]
pub(crate) struct DiskSender {
    disks: Vec<SentDisk>,
    problem: Arc<Mutex<Option<Problem>>>,
    packers: Option<Packers>,
    serving: JoinSet<()>,
    _bringing: JoinSet<()>,
}

/// Where QEMU sends the copy of one disk.
#[derive(Debug)]
pub(crate) struct SentDisk {
    /// Which of the VM's disks, from 0.
    pub(crate) disk: usize,
    /// Where to.
    pub(crate) address: SocketAddr,
    /// Under which name. Nobody can guess it, unless it is the program's own.
    pub(crate) name: String,
    named: DiskName,
    watch: SourceWatch,
    there: There,
}

/// What may show where nothing is written, and what to do about it; none where that is zeroes.
fn cure(there: There) -> Option<&'static str> {
    match there {
        There::Zeroes => None,
        There::Part => {
            Some("part of an earlier copy: remove it (`drainpipe disk left --remove`), and migrate again")
        }
        There::Other => Some(
            "something else on that device: fill it with zeroes there (`drainpipe disk create --force`), and migrate \
                 again",
        ),
    }
}

fn there(disk: DiskName, endpoint: &DiskEndpoint) -> There {
    match disk {
        disk if endpoint.begun.contains(&disk) => There::Part,
        disk if endpoint.overwritten.contains(&disk) => There::Other,
        _ => There::Zeroes,
    }
}

impl SentDisk {
    /// What the target had already, and was not sent.
    pub(crate) fn same_bytes(&self) -> u64 {
        self.watch.counters().found_same_bytes
    }

    /// What went over the network.
    pub(crate) fn wire_bytes(&self) -> u64 {
        self.watch.counters().sent_bytes()
    }

    /// Whether nothing shows of what may have been there.
    pub(crate) fn is_written_over(&self) -> bool {
        cure(self.there).is_none() || self.watch.is_all_written()
    }
}

impl DiskSender {
    /// Serves each of the disks to QEMU, all within one limit, and packed by these. What the target has of them already,
    /// `endpoint` says; by which names QEMU asks for them, `client`, where they are its own.
    pub(crate) async fn start(
        disks: &[DiskCopy],
        endpoint: &DiskEndpoint,
        connector: &Connector,
        pace: &Pace,
        packers: Option<Packers>,
        client: Option<NamingClient>,
    ) -> Result<Self, Problem> {
        let (mut serving, mut bringing) = (JoinSet::new(), JoinSet::new());
        let (problem, mut sent) = (Arc::default(), vec![]);
        let mut reception = match client {
            Some(client) => Some((Reception::listen().await.map_err(Problem::failed)?, client)),
            None => None,
        };
        for (place, disk) in disks.iter().enumerate() {
            let there = there(disk.disk, endpoint);
            let export = Export {
                session: session(connector.token, number(disk)),
                size_bytes: disk.size_bytes,
                finds_zeroes: true,
                there,
                is_thin: true,
                pace: pace.clone(),
                packers: packers.clone(),
            };
            let splitter = match &mut reception {
                Some((reception, client)) => reception.serve(&client.names[place], export),
                None => SourceSplitter::listen(export).await.map_err(Problem::failed)?,
            };
            let (address, name, watch) =
                (splitter.address(), splitter.export_name().to_owned(), splitter.watch());
            let (tell, streams) = mpsc::channel(STREAMS);
            bringing.spawn(bring(connector.clone(), number(disk), watch.clone(), packers.is_some(), tell));
            serving.spawn(serve(splitter, streams, disk.disk.to_string(), Arc::clone(&problem)));
            sent.push(SentDisk { disk: disk.disk.index(), address, name, named: disk.disk, watch, there });
        }
        if let Some((reception, client)) = reception {
            let address = reception.address();
            bringing.spawn(reception.run(move |from| client.is(from, address)));
        }
        Ok(Self { disks: sent, problem, packers, serving, _bringing: bringing })
    }

    /// QEMU has sent all: waits until the target knows so, too. One that does not say it changes nothing.
    pub(crate) async fn finish(mut self) {
        let over = async { while self.serving.join_next().await.is_some() {} };
        if timeout(FINISHED_WITHIN, over).await.is_err() {
            debug!("connections for disks are cut at the end");
        }
    }

    /// All was gone through. The guest waits for what is sent from now on, which is neither compared nor packed.
    ///
    /// Fails where a part of a disk was never written that may hold what was there before.
    pub(crate) fn end_comparing(&self) -> Result<(), Problem> {
        self.packers.iter().for_each(Packers::close);
        for disk in &self.disks {
            disk.watch.end_comparing();
            if let Some(cure) = cure(disk.there).filter(|_| !disk.is_written_over()) {
                let disk = disk.named;
                return Err(Problem::failed(format!(
                    "QEMU did not send all of {disk}, and the target has {cure}"
                )));
            }
        }
        Ok(())
    }

    /// Where QEMU sends each.
    pub(crate) fn disks(&self) -> &[SentDisk] {
        &self.disks
    }

    /// Why a disk's bytes go no further; none if they do.
    pub(crate) fn problem(&self) -> Option<Problem> {
        lock(&self.problem).clone()
    }
}

async fn serve(
    splitter: SourceSplitter,
    streams: mpsc::Receiver<Box<dyn Stream>>,
    disk: String,
    problem: Arc<Mutex<Option<Problem>>>,
) {
    if let Err(error) = splitter.run(streams, pending()).await {
        let why = Problem::failed(format!("the copy of {disk} does not get through: {error}"));
        lock(&problem).get_or_insert(why);
    }
}

/// Brings as many connections as there are to be, and others for those that are lost.
async fn bring(
    connector: Connector,
    disk: u8,
    watch: SourceWatch,
    packs: bool,
    tell: mpsc::Sender<Box<dyn Stream>>,
) {
    let (live, mut unsent) = (watch.live_streams(), packs.then(UnsentBytes::default));
    loop {
        if let Some(unsent) = &mut unsent {
            unsent.follow(&watch.counters(), STREAMS);
        }
        let missing = STREAMS.saturating_sub(*live.borrow());
        for _ in 0..missing {
            match connector.connect(disk, unsent.as_ref()).await {
                Ok(stream) => {
                    if tell.send(stream).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let why = explain(&error).unwrap_or_else(|| error.to_string());
                    debug!(address = %connector.address, why, "no connection for a disk; tried again");
                    break;
                }
            }
        }
        sleep(LOOK_EVERY).await;
    }
}

/// The end on the target. Once it is dropped, nobody writes to the disks by it.
#[derive(Debug)]
pub(crate) struct DiskReceiver {
    splitters: BTreeMap<u8, TargetSplitter>,
    tasks: JoinSet<()>,
}

impl DiskReceiver {
    /// For a hypervisor that takes copies of these at `program`, each by its name, from the host that `tls` lets in, or in the
    /// clear from whoever has the token.
    pub(crate) fn start(
        listener: StdTcpListener,
        program: &Path,
        disks: &[(DiskCopy, String)],
        token: Uuid,
        tls: Option<ServerConfig>,
    ) -> Result<Self, Problem> {
        listener.set_nonblocking(true).map_err(Problem::failed)?;
        let listener = TcpListener::from_std(listener).map_err(Problem::failed)?;
        // A link at the end of the path is not followed: the program may be hostile, and link to another one's socket.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let itself = Arc::new(open(program, flags, Mode::empty()).map_err(Problem::failed)?);
        let address = ServerAddress::Unix(format!("/proc/self/fd/{}", itself.as_raw_fd()).into());
        let splitter = |(disk, name): &(DiskCopy, String)| {
            let server = DiskServer {
                session: session(token, number(disk)),
                address: address.clone(),
                export_name: name.clone(),
                size_bytes: disk.size_bytes,
            };
            (number(disk), TargetSplitter::new(server))
        };
        let splitters: BTreeMap<u8, TargetSplitter> = disks.iter().map(splitter).collect();
        let tls = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
        let entrance = Entrance { splitters: splitters.clone(), token, tls, _program: itself };
        let mut tasks = JoinSet::new();
        tasks.spawn(receive(listener, entrance));
        Ok(Self { splitters, tasks })
    }

    /// Lets nobody in any more, and waits until the disks have all that came.
    pub(crate) async fn close(self) -> Result<(), Problem> {
        let Self { splitters, tasks } = self;
        for splitter in splitters.values() {
            splitter.close().await.map_err(Problem::failed)?;
        }
        drop(tasks);
        Ok(())
    }
}

#[derive(Clone)]
struct Entrance {
    splitters: BTreeMap<u8, TargetSplitter>,
    token: Uuid,
    tls: Option<TlsAcceptor>,
    // By it the splitters find the program.
    _program: Arc<OwnedFd>,
}

async fn receive(listener: TcpListener, entrance: Entrance) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let unauthenticated = Arc::new(Semaphore::new(UNAUTHENTICATED_MAX));
    let mut connections = JoinSet::new();
    loop {
        let Ok(admission) = Arc::clone(&unauthenticated).acquire_owned().await else { return };
        let Ok((socket, from)) = listener.accept().await else {
            // Descriptors may be short for a while.
            sleep(LOOK_EVERY).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        let (entrance, places) = (entrance.clone(), Arc::clone(&places));
        connections.spawn(async move {
            if let Err(error) = entrance.let_in(socket, admission, &places).await {
                debug!(%from, %error, "a connection for a disk has ended");
            }
        });
    }
}

impl Entrance {
    /// Unknown peers take no place from those that are welcome.
    async fn let_in(
        self,
        socket: TcpStream,
        admission: OwnedSemaphorePermit,
        places: &Semaphore,
    ) -> io::Result<()> {
        let (source, splitter) = timeout(CONNECTED_WITHIN, self.welcome(socket)).await??;
        drop(admission);
        let _place = places.try_acquire().map_err(|_| io::Error::other("there are too many"))?;
        splitter.serve(source).await.map_err(io::Error::other)
    }

    async fn welcome(&self, socket: TcpStream) -> io::Result<(Box<dyn Stream>, TargetSplitter)> {
        socket.set_nodelay(true)?;
        let mut source: Box<dyn Stream> = match &self.tls {
            None => Box::new(socket),
            Some(acceptor) => Box::new(acceptor.accept(socket).await?),
        };
        let mut preamble = [0; PREAMBLE_BYTES];
        source.read_exact(&mut preamble).await?;
        let (token, disk) = preamble.split_at(PREAMBLE_BYTES - 1);
        let splitter = self.splitters.get(&disk[0]);
        match splitter {
            Some(splitter) if Token(self.token.into_bytes()).is(token) => Ok((source, splitter.clone())),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }
}
