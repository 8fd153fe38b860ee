//! The end at the target: streams on one side, an NBD connection for each to the disk's server on the other.

mod disk;
mod flushes;
mod registry;
mod stream;
mod unpacking;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use self::flushes::Flushes;
use self::registry::Registry;
use crate::buffers::Buffers;
use crate::counters::{Counters, Counting};
use crate::error::SplitterError;
use crate::greeting::Session;
use crate::limits::FENCE;

/// Where a disk's NBD server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerAddress {
    /// On loopback, which is faster than a Unix socket where `net.core.wmem_max` is small.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

/// A disk of the target's, as its NBD server has it. The server must take a connection for each stream.
#[derive(Debug, Clone)]
pub struct DiskServer {
    /// Which attempt this is; the source has the same.
    pub session: Session,
    /// The server.
    pub address: ServerAddress,
    /// The server's name for the disk.
    pub export_name: String,
    /// The disk's size, the same at the source.
    pub size_bytes: u64,
}

/// The target's end of one disk, for one session.
///
/// Another splitter may write to the same disk only after [`close`](Self::close) of this one has succeeded, or its NBD
/// server has ended.
#[derive(Debug, Clone)]
pub struct TargetSplitter {
    shared: Arc<Shared>,
}

/// What the streams share.
#[derive(Debug)]
struct Shared {
    disk: DiskServer,
    registry: Registry,
    buffers: Buffers,
    counting: Counting,
    flushes: Flushes,
}

impl TargetSplitter {
    /// Connects to nothing yet.
    pub fn new(disk: DiskServer) -> Self {
        let shared = Shared {
            disk,
            registry: Registry::default(),
            buffers: Buffers::default(),
            counting: Counting::default(),
            flushes: Flushes::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Serves one stream until its end. When this returns, nothing more of it will reach the disk, and what did is
    /// flushed; where that cannot be known, all streams end, and the splitter takes no other.
    ///
    /// To be run to its end: dropped before, it counts as the latter.
    pub async fn serve<S>(&self, stream: S) -> Result<(), SplitterError>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        stream::serve(&self.shared, stream).await
    }

    /// Takes no more streams, ends those that there are, and waits until the disk has done all of theirs.
    pub async fn close(&self) -> Result<(), SplitterError> {
        self.shared.registry.close();
        timeout(FENCE, self.shared.registry.all_ended()).await.map_err(|_| SplitterError::DiskSilent)?
    }

    /// What has been done so far. Sent bytes are those towards the disk.
    pub fn counters(&self) -> Counters {
        self.shared.counting.read(0)
    }
}
