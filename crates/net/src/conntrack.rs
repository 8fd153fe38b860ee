//! The connections that the kernel tracks (`nf_conntrack`), on which stateful firewalls rely.
//!
//! The kernel's side of it is `ctnetlink`. No crate that we found has all that is needed of it (filters, zones, the
//! scales of TCP's windows), so its few messages are written and read here.

mod attribute;
mod message;
mod socket;

use std::net::IpAddr;
use std::time::Instant;

use drainpipe_engine::tracked::TrackedConnection;
use tokio::task::spawn_blocking;

use self::message::Listed;
use self::socket::Socket;
use crate::{Error, sysctl};

/// Most connections of one list: those of a busy server.
pub const LISTED_MAX: usize = 16_384;

/// Where the kernel counts them, in each network namespace by itself. Absent where it tracks none, as without its module:
/// then it is not asked, which would load the module.
const COUNT: &str = "net.netfilter.nf_conntrack_count";

/// How many it tracks at most.
const MAX: &str = "net.netfilter.nf_conntrack_max";

/// What a host tracks of some addresses.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tracked {
    /// Those that another host could track as well.
    pub connections: Vec<TrackedConnection>,
    /// How many others there are with addresses that the host translates: they end at this host's own.
    pub translated: usize,
    /// How many others there are, of protocols without connections or that Drainpipe knows too little about.
    pub others: usize,
    /// Whether that is all: not where there was no time for more, or there are too many.
    pub is_whole: bool,
}

/// What became of connections that were given to the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Loaded {
    /// It tracks these now, and did not before.
    pub loaded: Vec<TrackedConnection>,
    /// It did before.
    pub were_there: Vec<TrackedConnection>,
}

/// How many connections this host tracks; none where its kernel does not.
pub fn tracked_count() -> Result<Option<u64>, Error> {
    number(COUNT)
}

/// How many more it could track; none where its kernel tracks none.
pub fn tracked_room() -> Result<Option<u64>, Error> {
    let (count, max) = (number(COUNT)?, number(MAX)?);
    Ok(count.zip(max).map(|(count, max)| max.saturating_sub(count)))
}

/// Those from or to these addresses, as far as they can be listed until then.
pub async fn tracked_connections(addresses: &[IpAddr], until: Instant) -> Result<Tracked, Error> {
    let (socket, addresses) = (Socket::open()?, addresses.to_vec());
    off_the_runtime("list the tracked connections", move || list(&socket, &addresses, until)).await
}

/// Has the kernel track these, as far as that can be done until then. It keeps what it tracks already as it is.
pub async fn track(connections: Vec<TrackedConnection>, until: Instant) -> Result<Loaded, Error> {
    let socket = Socket::open()?;
    off_the_runtime("track connections", move || socket.load(&connections, until)).await
}

/// Has the kernel track these no more, as far as that can be done until then. How many that were.
pub async fn forget_tracked(connections: Vec<TrackedConnection>, until: Instant) -> Result<usize, Error> {
    let socket = Socket::open()?;
    off_the_runtime("forget tracked connections", move || socket.remove(&connections, until)).await
}

fn list(socket: &Socket, addresses: &[IpAddr], until: Instant) -> Result<Tracked, Error> {
    let mut tracked = Tracked { is_whole: true, ..Tracked::default() };
    for address in addresses {
        for is_source in [true, false] {
            let more = &mut |listed| tracked.add(listed, addresses, *address, is_source);
            if !socket.list(*address, is_source, until, more)? {
                tracked.is_whole = false;
                return Ok(tracked);
            }
        }
    }
    Ok(tracked)
}

impl Tracked {
    /// What was listed for one address on one side. Whether more may come.
    ///
    /// Older kernels list more than they were asked for; a connection between two of the addresses is listed twice.
    fn add(&mut self, listed: Listed, addresses: &[IpAddr], address: IpAddr, is_source: bool) -> bool {
        let (source, destination) = listed.ends();
        let asked_for = if is_source { source } else { destination };
        let came_before = !is_source && addresses.contains(&source);
        if asked_for == address && !came_before {
            match listed {
                Listed::Plain(connection) => self.connections.push(connection),
                Listed::Translated(..) => self.translated += 1,
                Listed::Other(..) => self.others += 1,
            }
        }
        self.connections.len() < LISTED_MAX
    }
}

/// The kernel works within the call, and long lists take it some milliseconds.
async fn off_the_runtime<T: Send + 'static>(
    operation: &str,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let crashed = |error: tokio::task::JoinError| Error::Protocol {
        operation: operation.to_owned(),
        detail: error.to_string(),
    };
    spawn_blocking(work).await.map_err(crashed)?
}

fn number(key: &str) -> Result<Option<u64>, Error> {
    match sysctl::read(key) {
        Ok(text) => Ok(text.parse().ok()),
        Err(Error::SysctlMissing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
