//! How a migration's bytes travel.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::tls_key::TlsKey;

/// How a migration's bytes travel. Source and target must be given the same.
///
/// Post-copy goes over one connection: what may be had together with parallel ones, a capability says, and no plan asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// All goes over one connection.
    #[default]
    Single,
    /// Memory pages go over connections beside the main one.
    Parallel(Parallel),
    /// All goes over one connection, on which pages are also asked for: [`crate::SourceVm::start_post_copy`] may be called.
    /// The target needs `userfaultfd`.
    PostCopy {
        /// What the hypervisor encrypts it with; `None` for a migration in the clear.
        tls: Option<TlsKey>,
    },
    /// The source's network card writes into the target's memory, which both lock.
    Rdma,
}

impl Transport {
    /// Post-copy in the clear.
    pub const CLEAR_POST_COPY: Self = Self::PostCopy { tls: None };

    /// Whether pages may follow the guest.
    pub fn is_post_copy(self) -> bool {
        matches!(self, Self::PostCopy { .. })
    }

    /// What the hypervisor encrypts it with, if it does.
    pub fn tls(self) -> Option<TlsKey> {
        match self {
            Self::PostCopy { tls } => tls,
            Self::Single | Self::Parallel(_) | Self::Rdma => None,
        }
    }

    /// Its connections beside the main one, if it has some.
    pub fn parallel(self) -> Option<Parallel> {
        match self {
            Self::Parallel(parallel) => Some(parallel),
            Self::Single | Self::PostCopy { .. } | Self::Rdma => None,
        }
    }
}

/// Several connections for memory pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallel {
    /// Number of connections, 1 to 255; each has its own thread on either side.
    pub channels: u8,
    /// Compress every packet.
    pub compression: Option<Zstd>,
}

/// Compression with zstd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zstd {
    /// 1 (fastest) to 20 (smallest).
    pub level: u8,
}

/// Where a target listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// An address of its host.
    Tcp(SocketAddr),
    /// A Unix socket; something else brings the bytes there.
    Unix(PathBuf),
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl From<PathBuf> for Address {
    fn from(path: PathBuf) -> Self {
        Self::Unix(path)
    }
}

/// How a source sends its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SourceSettings {
    /// The hypervisor goes to pre-switchover once it expects the rest to take no longer.
    pub downtime_limit_ms: u64,
    /// What it may take of its links at first, in Mb/s; `None` for all that they have. With 0 it connects, and sends no
    /// memory in its first 100 ms. After a switchover to post-copy see [`crate::SourceVm::set_bandwidth`].
    pub bandwidth_mbps: Option<u64>,
    /// Where it says which pages are zero; absent where it can do so in one way only.
    pub zero_pages: Option<ZeroPages>,
}

/// Which connection says which pages are zero, where there are several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroPages {
    /// The main one, by one thread on either side.
    InMain,
    /// Each of the others, by its own threads.
    InParallel,
}
