//! The end at the source: an NBD server for the local QEMU, whose requests it spreads over streams.

mod client;
mod patience;
mod payload;
mod reception;
mod shared;
mod stream;
mod wire_load;

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use drainpipe_relay::Packers;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};
use tracing::{debug, warn};

use self::patience::{LOOK, Patience};
pub use self::reception::Reception;
use self::shared::Shared;
use crate::counters::Counters;
use crate::error::{Refusal, SplitterError};
use crate::frame::StreamNumber;
use crate::greeting::Session;
use crate::limits::{DISK_ANSWERS, STREAMS_MAX};
use crate::pace::Pace;

/// What the target has of a disk before anything is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum There {
    /// Nothing: what is never written are zeroes.
    Zeroes,
    /// Much of it, as from an earlier attempt: that goes without data.
    Part,
    /// Something else, as on a device that somebody had.
    Other,
}

/// A disk as it is served.
#[derive(Debug, Clone)]
pub struct Export {
    /// Which attempt this is; the target has the same.
    pub session: Session,
    /// The disk's size, the same at the target.
    pub size_bytes: u64,
    /// What is written as zeroes goes without data.
    pub finds_zeroes: bool,
    /// What the target has there.
    pub there: There,
    /// Zeroes may become holes, whatever QEMU asks for: its mirror asks to keep them allocated where the source's node
    /// does not unmap.
    pub is_thin: bool,
    /// Within which limit it goes; other disks may share it.
    pub pace: Pace,
    /// What packs while the wire has enough to do; other disks may share it. None where nothing is packed.
    pub packers: Option<Packers>,
}

/// The way by which the client comes.
#[derive(Debug)]
enum Entrance {
    /// The disk's own.
    Own(TcpListener),
    /// The one that several disks share.
    Reception(oneshot::Receiver<TcpStream>),
}

/// The source's end of one disk.
#[derive(Debug)]
pub struct SourceSplitter {
    entrance: Entrance,
    address: SocketAddr,
    shared: Arc<Shared>,
    done: mpsc::Receiver<shared::Reply>,
}

async fn listen_on_loopback() -> Result<(TcpListener, SocketAddr), SplitterError> {
    let failed = |error| SplitterError::Listen(Arc::new(error));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

impl SourceSplitter {
    /// Serves a disk on loopback. Needs a tokio runtime with I/O and time.
    pub async fn listen(export: Export) -> Result<Self, SplitterError> {
        let (listener, address) = listen_on_loopback().await?;
        let (shared, done) = Shared::new(export);
        Ok(Self { entrance: Entrance::Own(listener), address, shared: Arc::new(shared), done })
    }

    /// Where QEMU connects to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The name by which QEMU asks for the disk. Nobody can guess it, unless it is one of QEMU's ([`Reception::serve`]).
    pub fn export_name(&self) -> &str {
        self.shared.name()
    }

    /// What shows how far it has got, also while it runs.
    pub fn watch(&self) -> SourceWatch {
        SourceWatch { shared: Arc::clone(&self.shared) }
    }

    /// Serves one client over the streams that come, until the client disconnects. Streams may be lost and others added
    /// at any time; requests wait a while for one. When this returns without an error, all is done and flushed at the
    /// target, as far as the streams lived to tell.
    ///
    /// What ends before `cancel` does, or by it, closes the client's connection: QEMU sees an error for each request that
    /// is not answered.
    pub async fn run<S>(
        self,
        streams: mpsc::Receiver<S>,
        cancel: impl Future<Output = ()>,
    ) -> Result<(), SplitterError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Self { entrance, shared, done, .. } = self;
        let mut carriers =
            Carriers { shared: Arc::clone(&shared), tasks: JoinSet::new(), next_number: Some(0) };
        let serve = client::serve(entrance, Arc::clone(&shared), done);
        tokio::select! {
            () = cancel => return Err(SplitterError::Cancelled),
            served = serve => served?,
            failed = carriers.carry(streams) => return Err(failed),
        }
        shared.end();
        carriers.wait_for_end().await;
        Ok(())
    }
}

/// The streams, a task each.
struct Carriers {
    shared: Arc<Shared>,
    tasks: JoinSet<Result<(), SplitterError>>,
    next_number: Option<StreamNumber>,
}

impl Carriers {
    /// Takes streams as they come, until something is wrong that no other stream makes good.
    async fn carry<S>(&mut self, mut streams: mpsc::Receiver<S>) -> SplitterError
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut patience = Patience::default();
        let mut may_come = true;
        loop {
            let failed = tokio::select! {
                stream = streams.recv(), if may_come => {
                    may_come = stream.is_some();
                    stream.and_then(|stream| self.add(stream))
                }
                Some(ended) = self.tasks.join_next() => self.of_ended(ended),
                _ = looks.tick() => patience.look(self.shared.sight(), Instant::now()).err(),
            };
            if let Some(failed) = failed {
                return failed;
            }
        }
    }

    fn add<S>(&mut self, stream: S) -> Option<SplitterError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        if self.tasks.len() >= STREAMS_MAX {
            warn!("a stream too many for one disk: more than {STREAMS_MAX}; it is closed");
            return None;
        }
        let Some(number) = self.next_number else { return Some(SplitterError::TooManyStreams) };
        self.next_number = number.checked_add(1);
        self.tasks.spawn(stream::carry(Arc::clone(&self.shared), number, stream));
        None
    }

    /// Why all must end, if they must.
    fn of_ended(&self, ended: Result<Result<(), SplitterError>, JoinError>) -> Option<SplitterError> {
        let error = match ended {
            Ok(ended) => ended.err()?,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        // An NBD server may take no more connections than those that there are.
        let is_one_too_many = matches!(error, SplitterError::Refused(Refusal::Disk));
        if error.ends_all() && !(is_one_too_many && self.shared.sight().live_streams > 0) {
            return Some(error);
        }
        warn!(%error, "a stream of a disk is lost");
        None
    }

    /// The target flushes, and says so. One that does not changes nothing: all is acknowledged.
    async fn wait_for_end(&mut self) {
        let deadline = Instant::now() + DISK_ANSWERS;
        while let Ok(Some(ended)) = timeout_at(deadline, self.tasks.join_next()).await {
            if let Some(error) = self.of_ended(ended) {
                debug!(%error, "a stream failed at its end");
            }
        }
    }
}

/// How far a splitter is.
#[derive(Debug, Clone)]
pub struct SourceWatch {
    shared: Arc<Shared>,
}

impl SourceWatch {
    /// What it has done so far.
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// Whether each byte of a disk that the target may have had in part was written since, or found to be the same.
    /// Asked of no other one.
    pub fn is_all_written(&self) -> bool {
        self.shared.is_all_written()
    }

    /// What is written from now on is sent, whatever the target has: somebody waits for it.
    pub fn end_comparing(&self) {
        self.shared.end_comparing();
    }

    /// How many streams carry requests, as it changes: where it falls, bring another.
    pub fn live_streams(&self) -> watch::Receiver<usize> {
        self.shared.live_streams()
    }
}
