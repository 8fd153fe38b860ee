//! What can end a relay before its streams have ended.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use crate::CONNECTIONS_MAX;

/// Why a relay ended before its streams had.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RelayError {
    /// More connections than a relay may have, or none.
    #[error("{0} connections through a relay; 1 to {CONNECTIONS_MAX} are possible")]
    Connections(usize),
    /// No thread, or no socket for the local program.
    #[error("cannot begin to relay at {}: {source}", path.display())]
    Begin {
        /// The Unix socket.
        path: PathBuf,
        /// What the kernel said.
        source: Arc<io::Error>,
    },
    /// The other end does not take the connection.
    #[error("cannot connect to the relay at {address}: {source}; is its port open in the firewalls?")]
    Connect {
        /// The receiver.
        address: SocketAddr,
        /// What the kernel said.
        source: Arc<io::Error>,
    },
    /// The local program does not take the connection.
    #[error("cannot connect to the program at {}: {source}", path.display())]
    Program {
        /// Its Unix socket.
        path: PathBuf,
        /// What the kernel said.
        source: Arc<io::Error>,
    },
    /// The connection to the other host broke.
    #[error("the connection to the other host broke: {0}")]
    Wire(Arc<io::Error>),
    /// The connection to the program on this host broke.
    #[error("the connection to the program on this host broke: {0}")]
    Local(Arc<io::Error>),
    /// The other end says nothing.
    #[error("the other host did not answer in time; is its agent overloaded, or something else at its port?")]
    NoAnswer,
    /// The other end closed the connection before it had accepted it.
    #[error("the other host did not accept the connection; its agent's log says why")]
    Refused,
    /// The connection cannot be encrypted, or is not any more.
    #[error("the encrypted connection to the other host failed: {0}")]
    Tls(#[from] rustls::Error),
    /// The other end stopped in the middle of a stream.
    #[error("the other host ended a stream before its end")]
    Truncated,
    /// The other end sends what no relay sends.
    #[error("the other host sent something that is not a frame of a relay: {0}")]
    Malformed(&'static str),
    /// A block cannot be unpacked.
    #[error("the other host sent a block that cannot be decompressed: {0}")]
    Unpack(String),
    /// A block could not be packed, which should never be.
    #[error("a block could not be compressed: {0}")]
    Pack(String),
    /// The first connection never came, and the others wait for it.
    #[error("the first connection of the other host did not come")]
    FirstMissing,
}

impl RelayError {
    /// What the kernel says of the connection to the program on this host.
    pub(crate) fn local(error: io::Error) -> Self {
        Self::Local(Arc::new(error))
    }

    /// What the kernel says of the connection to the other host.
    pub(crate) fn wire(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::NoAnswer,
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            _ => Self::Wire(Arc::new(error)),
        }
    }
}
