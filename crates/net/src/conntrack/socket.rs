//! A conversation with the kernel about the connections that it tracks.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use drainpipe_engine::tracked::TrackedConnection;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use super::Loaded;
use super::message::{Listed, Said, list_request, put_delete, put_new, read};
use crate::Error;

/// As long as the kernel makes its datagrams at most.
const DATAGRAM_BYTES_MAX: usize = 64 << 10;

/// How many requests it gets at a time. All of them may be refused, and each refusal waits in the socket's buffer.
const BATCH: usize = 64;

/// A datagram socket of netlink's for the netfilter.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// In the network namespace of the calling thread.
    pub(super) fn open() -> Result<Self, Error> {
        let made = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(netlink::NETFILTER),
        );
        made.map(Self).map_err(|error| Error::Open(error.into()))
    }

    /// Those with this address on one side, each of which is given to `take` until that wants no more. Whether these were
    /// all.
    pub(super) fn list(
        &self,
        address: IpAddr,
        is_source: bool,
        until: Instant,
        take: &mut dyn FnMut(Listed) -> bool,
    ) -> Result<bool, Error> {
        let refused = |error| refused(&format!("list the tracked connections of {address}"), error);
        self.send(&list_request(address, is_source)).map_err(refused)?;
        let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
        while self.wait(until) {
            let bytes = self.receive(&mut buffer).map_err(refused)?;
            for said in read(&buffer[..bytes]) {
                match said {
                    Said::Listed(listed) if take(listed) => {}
                    Said::Listed(_) => return Ok(false),
                    Said::Done(done) => return done.map(|()| true).map_err(refused),
                    Said::Refused(_, error) => return Err(refused(error)),
                    Said::Acknowledged => {}
                }
            }
        }
        Ok(false)
    }

    /// Has the kernel track these.
    pub(super) fn load(&self, connections: &[TrackedConnection], until: Instant) -> Result<Loaded, Error> {
        let mut loaded = Loaded::default();
        self.in_batches("track connections", connections, put_new, until, |batch, refusals| {
            for (number, connection) in (0..).zip(batch) {
                match refusals.get(&number) {
                    None => loaded.loaded.push(*connection),
                    Some(&Errno::EXIST) => loaded.were_there.push(*connection),
                    Some(_) => {}
                }
            }
        })?;
        Ok(loaded)
    }

    /// Has it track these no more. How many it did.
    pub(super) fn remove(&self, connections: &[TrackedConnection], until: Instant) -> Result<usize, Error> {
        let mut removed = 0;
        self.in_batches("forget tracked connections", connections, put_delete, until, |batch, refusals| {
            removed += batch.len() - refusals.len();
        })?;
        Ok(removed)
    }

    /// Sends a request for each of them, and tells of each batch which the kernel refused.
    fn in_batches(
        &self,
        operation: &str,
        connections: &[TrackedConnection],
        put: fn(&mut Vec<u8>, u32, &TrackedConnection),
        until: Instant,
        mut tell: impl FnMut(&[TrackedConnection], &HashMap<u32, Errno>),
    ) -> Result<(), Error> {
        let refused = |error| refused(operation, error);
        let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
        for batch in connections.chunks(BATCH) {
            if Instant::now() >= until {
                break;
            }
            let mut bytes = vec![];
            (0..).zip(batch).for_each(|(number, connection)| put(&mut bytes, number, connection));
            self.send(&bytes).map_err(refused)?;
            let refusals = self.refusals(&mut buffer).map_err(refused)?;
            if let Some(error) = refusals.values().find(|error| is_for_all(**error)) {
                return Err(refused(*error));
            }
            tell(batch, &refusals);
        }
        Ok(())
    }

    /// What the kernel has refused, by the numbers of the requests. It has done what was asked for, or has said why not,
    /// before `send` returns.
    fn refusals(&self, buffer: &mut [u8]) -> Result<HashMap<u32, Errno>, Errno> {
        let mut refusals = HashMap::new();
        loop {
            let bytes = match self.receive(buffer) {
                Err(Errno::AGAIN) => return Ok(refusals),
                received => received?,
            };
            for said in read(&buffer[..bytes]) {
                if let Said::Refused(number, error) = said {
                    refusals.insert(number, error);
                }
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> Result<(), Errno> {
        send(&self.0, bytes, SendFlags::empty()).map(drop)
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        recv(&self.0, buffer, RecvFlags::empty()).map(|(_, bytes)| bytes)
    }

    /// Whether something came in time.
    fn wait(&self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let mut waiting = [PollFd::new(&self.0, PollFlags::IN)];
        !left.is_zero() && poll(&mut waiting, Some(&timespec(left))).is_ok_and(|ready| ready > 0)
    }
}

/// What is refused of one is refused of each.
fn is_for_all(error: Errno) -> bool {
    matches!(error, Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP)
}

fn timespec(duration: Duration) -> Timespec {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec: seconds, tv_nsec: duration.subsec_nanos().into() }
}

fn refused(operation: &str, error: Errno) -> Error {
    let operation = operation.to_owned();
    if matches!(error, Errno::PERM | Errno::ACCESS) {
        return Error::NotPermitted { operation };
    }
    Error::Kernel { operation, source: error.into() }
}
