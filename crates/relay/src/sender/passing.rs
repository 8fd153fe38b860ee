//! Connections that are encrypted and not packed. One thread each reads from the program, encrypts, and writes:
//! so there is nothing to hand over, and each keeps a core of its own busy if need be.

use std::io;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use socket2::SockRef;

use super::SenderSettings;
use super::rest::Rest;
use super::stream::{AT_ONCE, FILL_WAIT};
use super::unsent::{UNSENT_BYTES_MIN, unsent_bytes};
use crate::block::BLOCK_BYTES_MAX;
use crate::error::RelayError;
use crate::figures::Counters;
use crate::pace::{Pace, PacedSocket, SendQuota};
use crate::sockets::{Breaker, lock, read_block, spawn, wait_for};

/// What the threads of a sender share that packs nothing.
#[derive(Debug)]
pub(super) struct Passing {
    pub(super) settings: SenderSettings,
    pub(super) counters: Counters,
    /// The connections to the receiver.
    wire: Breaker,
    /// Those to the program, and where it makes them. They outlast a failure, as those of a sender that packs.
    pub(super) program: Breaker,
    rest: Rest,
    inner: Mutex<Inner>,
    wake: Condvar,
}

#[derive(Debug)]
struct Inner {
    pace: Pace,
    is_closed: bool,
    error: Option<RelayError>,
}

impl Passing {
    pub(super) fn new(settings: SenderSettings) -> Self {
        Self {
            settings,
            counters: Counters::default(),
            wire: Breaker::new(),
            program: Breaker::new(),
            rest: Rest::default(),
            inner: Mutex::new(Inner { pace: Pace::new(Instant::now()), is_closed: false, error: None }),
            wake: Condvar::new(),
        }
    }

    pub(super) fn error(&self) -> Option<RelayError> {
        lock(&self.inner).error.clone()
    }

    pub(super) fn set_limit(&self, bytes_per_second: Option<u64>) {
        lock(&self.inner).pace.set(bytes_per_second, Instant::now());
        self.wake.notify_all();
    }

    /// Ends everything but the program's connections, with the first error.
    pub(super) fn fail(&self, error: RelayError) {
        self.stop(Some(error));
    }

    /// Sends nothing more, and throws away what the program still gives.
    pub(super) fn stop_sending(&self) {
        self.stop(None);
        self.rest.throw_away();
    }

    /// Ends everything, the program's connections last: an end that the program seems to have made then finds no wire on
    /// which to be told as one.
    pub(super) fn close(&self) {
        self.stop_sending();
        self.program.break_all();
    }

    fn is_closed(&self) -> bool {
        lock(&self.inner).is_closed
    }

    fn stop(&self, error: Option<RelayError>) {
        let mut inner = lock(&self.inner);
        if !inner.is_closed {
            inner.is_closed = true;
            inner.error = error;
        }
        drop(inner);
        self.wire.break_all();
        self.wake.notify_all();
    }

    /// Waits until the limit lets a stream send, and takes what it may send of so many bytes: with its turn, or all streams
    /// that wait would have the same one; and says whether it has waited. None once all is over.
    fn take_quota(&self, bytes: usize) -> Option<(SendQuota, bool)> {
        let mut inner = lock(&self.inner);
        let mut has_waited = false;
        loop {
            if inner.is_closed {
                return None;
            }
            let now = Instant::now();
            let Some(wait) = inner.pace.wait(now) else {
                return Some((inner.pace.quota(bytes, now), has_waited));
            };
            has_waited = true;
            (inner, _) = self.wake.wait_timeout(inner, wait).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Begins to relay a connection of the program.
pub(super) fn begin(passing: &Arc<Passing>, stream: usize, program: UnixStream) -> io::Result<()> {
    passing.program.add(&program)?;
    program.set_read_timeout(Some(FILL_WAIT))?;
    let passing = Arc::clone(passing);
    spawn(format!("relay-pass-{stream}"), move || {
        if let Err(error) = pass(&passing, stream, &program) {
            passing.fail(error);
        }
        if passing.is_closed() {
            passing.rest.take(&program);
        }
    })
}

fn pass(passing: &Passing, stream: usize, program: &UnixStream) -> Result<(), RelayError> {
    let mut wire = passing.settings.connect(stream, program, &passing.wire, &passing.counters)?;
    let (mut paced, mut unsent) = (PacedSocket::new(), Unsent::new(wire.socket())?);
    let mut block = Vec::with_capacity(BLOCK_BYTES_MAX);
    loop {
        unsent.wait_for_wire(wire.socket())?;
        if !read_block(program, &mut block).map_err(|error| RelayError::Local(Arc::new(error)))? {
            return wire.finish();
        }
        let mut left = &block[..];
        while !left.is_empty() {
            let Some((quota, has_waited)) = passing.take_quota(left.len()) else { return Ok(()) };
            unsent.has_waited |= has_waited;
            paced.pace(wire.socket(), quota.socket_bytes_per_s).map_err(RelayError::wire)?;
            let (part, rest) = left.split_at(quota.bytes);
            let wire_bytes = wire.send(part, &[])?;
            passing.counters.sent(part.len(), wire_bytes);
            unsent.follow(wire.socket(), wire_bytes)?;
            left = rest;
        }
    }
}

/// How often it is looked how much a socket may hold.
const FOLLOW_EVERY: Duration = Duration::from_millis(100);

/// How much one socket may hold unsent, by what the wire takes of it.
struct Unsent {
    since: Instant,
    sent_bytes: usize,
    has_waited: bool,
}

impl Unsent {
    fn new(wire: &TcpStream) -> Result<Self, RelayError> {
        SockRef::from(wire).set_tcp_notsent_lowat(UNSENT_BYTES_MIN).map_err(RelayError::wire)?;
        Ok(Self { since: Instant::now(), sent_bytes: 0, has_waited: false })
    }

    /// Waits until the kernel has little left to send: more would only wait there.
    fn wait_for_wire(&mut self, wire: &TcpStream) -> Result<(), RelayError> {
        if !wait_for(wire, PollFlags::OUT, Some(&AT_ONCE)).map_err(RelayError::wire)? {
            self.has_waited = true;
            // A wire that takes nothing any more is for the owner to see; breaking wakes it.
            wait_for(wire, PollFlags::OUT, None).map_err(RelayError::wire)?;
        }
        Ok(())
    }

    /// So much has been sent. Where the wire was the limit, that says how fast it is.
    fn follow(&mut self, wire: &TcpStream, bytes: usize) -> Result<(), RelayError> {
        self.sent_bytes += bytes;
        let time = self.since.elapsed();
        if time < FOLLOW_EVERY {
            return Ok(());
        }
        if self.has_waited {
            let limit = unsent_bytes(self.sent_bytes as f64 / time.as_secs_f64(), 1.0);
            SockRef::from(wire).set_tcp_notsent_lowat(limit).map_err(RelayError::wire)?;
        }
        *self = Self { since: Instant::now(), sent_bytes: 0, has_waited: false };
        Ok(())
    }
}
