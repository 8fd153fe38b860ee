//! The receiving end. It treats all input as hostile until it has understood it.

use std::io::{self, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use socket2::SockRef;
use tracing::warn;

use crate::error::RelayError;
use crate::page_slots::PageSlots;
use crate::preamble::{self, Token};
use crate::refusals::Refusals;
use crate::sockets::{Breaker, connect_program, lock, spawn};
use crate::tls::ServerTls;
use crate::treatment::Treatment;
use crate::unauthenticated::{UnauthenticatedPeer, UnauthenticatedPeers};
use crate::unpacking::Unpacking;
use crate::wire::{Inward, Outward, Wire};
use crate::{CONNECTIONS_MAX, MAIN_STREAM, answers};

/// How long the first connection may come after the others.
const FIRST_DEADLINE: Duration = Duration::from_secs(10);

/// How long the program may take to accept a connection.
const PROGRAM_DEADLINE: Duration = Duration::from_secs(5);

/// What may wait in one connection to be unpacked, in bytes. By itself the kernel would let it grow to 6 MiB
/// (`net.ipv4.tcp_rmem`) where unpacking is what limits, and the program at the other end counts that as
/// received. Sixteen connections carry 25 Gb/s with it at a round trip of 1 ms. What is only encrypted is not kept
/// waiting like that, and the kernel's own growth is what one connection needs for a far host.
const RECEIVED_BYTES: usize = 200 << 10;

/// What a receiver is to do.
#[derive(Debug, Clone)]
pub struct ReceiverSettings {
    /// Unix socket of the program, which listens there already.
    pub path: PathBuf,
    /// Connections that will come, 1 to [`CONNECTIONS_MAX`].
    pub connections: usize,
    /// What the sender is known by.
    pub token: Token,
    /// Where its connections come from, where that is known for certain: all others are closed at once.
    pub sender: Option<IpAddr>,
    /// What has become of the bytes.
    pub treatment: Treatment<ServerTls>,
    /// Pages of which a copy is kept for the sender to refer to, at most, in bytes. The sender must keep to it.
    pub page_cache_bytes: usize,
}

/// The receiving end of a relay. Dropping it breaks the connections that have not ended.
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    settings: ReceiverSettings,
    listener: TcpListener,
    breaker: Breaker,
    unauthenticated: Arc<UnauthenticatedPeers>,
    refusals: Refusals,
    inner: Mutex<Inner>,
    first_is_there: Condvar,
    page_slots: PageSlots,
}

#[derive(Debug)]
struct Inner {
    // For each connection whether it has come.
    has_come: Vec<bool>,
    first_is_there: bool,
    is_closed: bool,
    error: Option<RelayError>,
}

impl Receiver {
    /// Accepts the sender's connections at `listener`, and no others.
    pub fn start(listener: TcpListener, settings: ReceiverSettings) -> Result<Self, RelayError> {
        if !(1..=CONNECTIONS_MAX).contains(&settings.connections) {
            return Err(RelayError::Connections(settings.connections));
        }
        let path = settings.path.clone();
        let begin = |source: io::Error| RelayError::Begin { path: path.clone(), source: Arc::new(source) };
        let shared = Arc::new(Shared {
            breaker: Breaker::new(),
            unauthenticated: Arc::default(),
            refusals: Refusals::default(),
            inner: Mutex::new(Inner {
                has_come: vec![false; settings.connections],
                first_is_there: false,
                is_closed: false,
                error: None,
            }),
            first_is_there: Condvar::new(),
            page_slots: PageSlots::new(settings.page_cache_bytes),
            settings,
            listener,
        });
        let receiver = Self { shared: Arc::clone(&shared) };
        shared.breaker.add(&shared.listener).map_err(begin)?;
        if shared.settings.treatment.is_packed() {
            SockRef::from(&shared.listener).set_recv_buffer_size(RECEIVED_BYTES).map_err(begin)?;
        }
        spawn("relay-accept".into(), move || accept(&shared)).map_err(begin)?;
        Ok(receiver)
    }

    /// Why it ended before the streams had; none as long as it goes on, or when it ended as it should.
    pub fn error(&self) -> Option<RelayError> {
        lock(&self.shared.inner).error.clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    /// Ends everything, with the first error.
    fn fail(&self, error: RelayError) {
        let mut inner = lock(&self.inner);
        if !inner.is_closed {
            warn!(%error, "a relay ended before its streams had");
            // At once, so that what follows from it is not taken for the cause.
            inner.is_closed = true;
            inner.error = Some(error);
        }
        drop(inner);
        self.close();
    }

    fn close(&self) {
        lock(&self.inner).is_closed = true;
        self.breaker.break_all();
        self.page_slots.close();
        self.first_is_there.notify_all();
    }

    fn all_have_come(&self) -> bool {
        let inner = lock(&self.inner);
        inner.is_closed || inner.has_come.iter().all(|has_come| *has_come)
    }

    /// Notes that a connection has come. Each comes once.
    fn come(&self, index: usize) -> Result<(), RelayError> {
        match lock(&self.inner).has_come.get_mut(index) {
            Some(has_come) if !*has_come => *has_come = true,
            _ => return Err(RelayError::Malformed("a connection that is there already")),
        }
        if self.all_have_come() {
            // Wakes who accepts; nobody else may come.
            drop(SockRef::from(&self.listener).shutdown(Shutdown::Both));
        }
        Ok(())
    }

    /// The program tells its connections apart by which comes first.
    fn wait_for_first(&self) -> Result<(), RelayError> {
        let is_missing = |inner: &mut Inner| !inner.is_closed && !inner.first_is_there;
        let waited = self.first_is_there.wait_timeout_while(lock(&self.inner), FIRST_DEADLINE, is_missing);
        let (inner, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        if inner.first_is_there { Ok(()) } else { Err(RelayError::FirstMissing) }
    }

    fn connect_program(&self, index: usize) -> Result<UnixStream, RelayError> {
        if index != MAIN_STREAM {
            self.wait_for_first()?;
        }
        let path = &self.settings.path;
        let failed = |error| RelayError::Program { path: path.clone(), source: Arc::new(error) };
        let program = connect_program(path, PROGRAM_DEADLINE).map_err(failed)?;
        self.breaker.add(&program).map_err(failed)?;
        if index == MAIN_STREAM {
            lock(&self.inner).first_is_there = true;
            self.first_is_there.notify_all();
        }
        Ok(program)
    }
}

fn accept(shared: &Arc<Shared>) {
    loop {
        let accepted = shared.listener.accept();
        if shared.all_have_come() {
            return;
        }
        let (wire, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => return shared.fail(RelayError::Wire(Arc::new(error))),
        };
        if shared.settings.sender.is_some_and(|sender| sender != peer.ip()) {
            shared.refusals.closed(peer, "it is not the sender's address");
            continue;
        }
        let Some(unauthenticated) = shared.unauthenticated.take_in(&wire) else {
            shared.refusals.closed(peer, "too many connections do not say what they are");
            continue;
        };
        let receiving = Arc::clone(shared);
        let begun = spawn("relay-receive".into(), move || receive(&receiving, wire, peer, unauthenticated));
        if let Err(error) = begun {
            return shared.fail(RelayError::Wire(Arc::new(error)));
        }
    }
}

fn receive(shared: &Shared, wire: TcpStream, peer: SocketAddr, unauthenticated: UnauthenticatedPeer) {
    let admitted = admit(shared, wire, &unauthenticated);
    drop(unauthenticated);
    let (index, wire) = match admitted {
        Ok(admitted) => admitted,
        // Whoever it is: the sender's own connections are not touched by it.
        Err(error) => return shared.refusals.refused(peer, &error),
    };
    if let Err(error) = relay(shared, index, wire) {
        shared.fail(error);
    }
}

fn admit(
    shared: &Shared,
    wire: TcpStream,
    unauthenticated: &UnauthenticatedPeer,
) -> Result<(usize, (Outward, Inward)), RelayError> {
    let ReceiverSettings { token, connections, treatment, .. } = &shared.settings;
    let (wire, said) = Wire::accept(wire, treatment.encryption())?;
    let index = preamble::decode(&said, token, *connections)?;
    // The other way round it would have come, and its next attempt be refused.
    if !unauthenticated.make_known() {
        return Err(RelayError::Truncated);
    }
    // Before it has come: where this fails, the sender's next attempt is to be taken.
    let (outward, inward) = wire.admit()?.split();
    shared.come(index)?;
    // Not before: an unauthenticated peer's would stay open with it.
    shared.breaker.add(inward.socket()).map_err(RelayError::wire)?;
    Ok((index, (outward, inward)))
}

fn relay(shared: &Shared, index: usize, (outward, mut inward): (Outward, Inward)) -> Result<(), RelayError> {
    let program = shared.connect_program(index)?;
    if index == MAIN_STREAM {
        answers::take(outward, &program).map_err(RelayError::local)?;
    }
    if shared.settings.treatment.is_packed() {
        unpack(&mut inward, &program, &shared.page_slots)?;
    } else {
        inward.pass_to(&program)?;
    }
    // The program may have closed it already.
    drop(program.shutdown(Shutdown::Write));
    Ok(())
}

/// Gives all of a packed stream to a program, as it was.
fn unpack(wire: &mut Inward, mut program: &UnixStream, slots: &PageSlots) -> Result<(), RelayError> {
    let mut unpacking = Unpacking::new()?;
    while let Some(block) = unpacking.next(|bytes| wire.read_exact(bytes), slots)? {
        program.write_all(block).map_err(|error| RelayError::Local(Arc::new(error)))?;
    }
    Ok(())
}
