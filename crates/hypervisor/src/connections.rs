//! The TCP connections of a migration, if Drainpipe may handle them.

use std::fmt;
use std::io;
use std::net::SocketAddr;

/// [`Pace::bytes_per_s`] of a connection that is not held back.
const UNPACED: u64 = u64::MAX;

/// How fast the kernel sends what a connection was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// The rate of TCP's payload, including what is sent again (`SO_MAX_PACING_RATE`).
    pub bytes_per_s: u64,
    /// What may wait for it (`TCP_NOTSENT_LOWAT`).
    pub unsent_bytes: u32,
}

/// What a hypervisor does with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionUse {
    /// Whether something waits in it to be sent, or went out a moment ago.
    pub is_in_use: bool,
    /// Whether something waits in it.
    pub has_unsent: bool,
    /// What the link has carried of it since it was made, by its counters: including headers and what was sent again.
    pub link_bytes: u64,
}

impl Pace {
    /// As the hypervisor made it.
    pub const NONE: Self = Self { bytes_per_s: UNPACED, unsent_bytes: 0 };
}

/// Makes paces of what is done with each connection.
pub type Paces<'a> = &'a mut (dyn FnMut(&[ConnectionUse]) -> Vec<Pace> + Send);

/// The connections of a running VM. Each act is for those to one peer, or taken at one address, and returns the number of
/// sockets.
pub trait Connections: fmt::Debug + Send + Sync {
    /// Lets each hold at most about `bytes` that the kernel has not sent yet; with 0, what is the host's default, as
    /// before.
    fn limit_unsent(&self, peer: SocketAddr, bytes: u32) -> io::Result<usize>;

    /// Lets each that is taken at `own`, where the VM listens, hold at most about `bytes` that the hypervisor has not read.
    fn limit_received(&self, own: SocketAddr, bytes: u32) -> io::Result<usize>;

    /// Whether it has the connection from `own` to `peer`.
    fn has(&self, own: SocketAddr, peer: SocketAddr) -> io::Result<bool>;

    /// Paces each, by what `paces` makes of the use of them all. It goes on when nobody looks.
    fn pace(&self, peer: SocketAddr, paces: Paces<'_>) -> io::Result<usize>;

    /// Makes the end of the peer's process a silence on each, which [`crate::SourceVm::cancel`] ends.
    fn ignore_resets(&self, peer: SocketAddr) -> io::Result<usize>;

    /// Has the kernel throw away what it has not sent on each when it is closed.
    fn discard_unsent(&self, peer: SocketAddr) -> io::Result<usize>;

    /// Cuts each, without asking the hypervisor.
    fn cut(&self, peer: SocketAddr) -> io::Result<usize>;
}
