//! One connection between the two ends of a relay: in the clear, or encrypted.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use socket2::SockRef;
use tracing::debug;

use crate::error::RelayError;
use crate::preamble::{self, PREAMBLE_BYTES, Token};
use crate::records::{Opener, Sealer, Session};
use crate::sockets::{Breaker, write_all};
use crate::tls::{self, ClientTls, ServerTls};

/// How long the receiver may take to accept a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How often an encrypted connection is tried that the receiver closes before it has accepted it: for another one it
/// closes the oldest of those that have not said what they are, and unauthenticated peers may come by the dozen.
const ATTEMPTS: u32 = 5;

/// Before the second attempt; twice as long before each further one, 0.75 s in all.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// How long the sender may take to say what a connection is.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(5);

/// What goes back in the clear, at a time: little does.
const COPIED_BYTES: usize = 4 << 10;

/// What the receiver says of an encrypted connection that it accepts. Until then the sender does not know
/// whether its certificate will do.
const ACCEPTED: [u8; 1] = [1];

/// One connection between the two ends of a relay, as it begins.
pub(crate) struct Wire {
    socket: TcpStream,
    // None in the clear.
    session: Option<Session>,
}

/// What goes out by a connection.
pub(crate) struct Outward {
    socket: Arc<TcpStream>,
    // None in the clear.
    sealer: Option<Sealer>,
}

/// What comes in by a connection.
pub(crate) struct Inward {
    socket: Arc<TcpStream>,
    // None in the clear.
    opener: Option<Opener>,
}

impl Wire {
    /// Connects to a receiver. An encrypted connection that is closed before it is accepted is tried again, with a
    /// handshake of its own; in the clear there is no telling.
    pub(crate) fn connect(
        address: SocketAddr,
        breaker: &Breaker,
        tls: Option<&ClientTls>,
        token: &Token,
        index: u8,
    ) -> Result<Self, RelayError> {
        let (end, mut pause) = (Instant::now() + CONNECT_DEADLINE, FIRST_PAUSE);
        for _ in 1..ATTEMPTS {
            let tried = Self::try_to_connect(address, breaker, tls, token, index);
            let may_try_again = tls.is_some() && Instant::now() + pause < end;
            match tried {
                Err(error) if may_try_again && is_shut_out(&error) => {
                    debug!(%address, %error, "a connection to a relay was closed before it was accepted; tried again");
                }
                tried => return tried,
            }
            thread::sleep(pause);
            pause *= 2;
        }
        Self::try_to_connect(address, breaker, tls, token, index)
    }

    fn try_to_connect(
        address: SocketAddr,
        breaker: &Breaker,
        tls: Option<&ClientTls>,
        token: &Token,
        index: u8,
    ) -> Result<Self, RelayError> {
        let failed = |error: io::Error| RelayError::Connect { address, source: Arc::new(error) };
        let socket = TcpStream::connect_timeout(&address, CONNECT_DEADLINE).map_err(failed)?;
        // Once all is to end, there is no further attempt.
        breaker.add(&socket).map_err(failed)?;
        socket.set_nodelay(true).map_err(failed)?;
        // A stream that breaks off leaves nothing behind that would be sent by whatever way there is then.
        SockRef::from(&socket).set_linger(Some(Duration::ZERO)).map_err(failed)?;
        let end = Instant::now() + CONNECT_DEADLINE;
        let session = tls.map(|tls| tls::connect(Within { socket: &socket, end }, tls)).transpose()?;
        let mut wire = Self { socket, session };
        wire.send(&preamble::encode(token, index))?;
        wire.wait_accepted(end)?;
        wire.without_deadline()
    }

    /// Lets a sender connect, whoever it is. Gives what it says of the connection.
    pub(crate) fn accept(
        socket: TcpStream,
        tls: Option<&ServerTls>,
    ) -> Result<(Self, [u8; PREAMBLE_BYTES]), RelayError> {
        let end = Instant::now() + ACCEPT_DEADLINE;
        let accepted = tls.map(|tls| tls::accept(Within { socket: &socket, end }, tls)).transpose();
        let mut session = accepted.map_err(|error| match error {
            // It is this end that accepts.
            RelayError::Refused => RelayError::Truncated,
            error => error,
        })?;
        let mut said = [0; PREAMBLE_BYTES];
        read_exact(opener_of(&mut session), Within { socket: &socket, end }, &mut said)?;
        Ok((Self { socket, session }, said))
    }

    /// Lets the sender send its stream.
    pub(crate) fn admit(mut self) -> Result<Self, RelayError> {
        if self.session.is_some() {
            self.send(&ACCEPTED)?;
        }
        self.without_deadline()
    }

    /// How it is encrypted; none in the clear.
    pub(crate) fn cipher_suite(&self) -> Option<String> {
        self.session.as_ref().map(Session::cipher_suite)
    }

    /// Its two directions.
    pub(crate) fn split(self) -> (Outward, Inward) {
        let socket = Arc::new(self.socket);
        let (sealer, opener) = self.session.map(|Session { sealer, opener }| (sealer, opener)).unzip();
        (Outward { socket: Arc::clone(&socket), sealer }, Inward { socket, opener })
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), RelayError> {
        let sealer = self.session.as_mut().map(|session| &mut session.sealer);
        send(&self.socket, sealer, bytes, &[]).map(drop)
    }

    fn wait_accepted(&mut self, end: Instant) -> Result<(), RelayError> {
        if self.session.is_none() {
            return Ok(());
        }
        let mut answer = [0; ACCEPTED.len()];
        let answered =
            read_exact(opener_of(&mut self.session), Within { socket: &self.socket, end }, &mut answer);
        answered.map_err(|error| match error {
            RelayError::Truncated => RelayError::Refused,
            error => error,
        })
    }

    fn without_deadline(self) -> Result<Self, RelayError> {
        self.socket.set_read_timeout(None).map_err(RelayError::wire)?;
        self.socket.set_write_timeout(None).map_err(RelayError::wire)?;
        Ok(self)
    }
}

impl Outward {
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Sends both parts. Gives how many bytes that made.
    pub(crate) fn send(&mut self, first: &[u8], second: &[u8]) -> Result<usize, RelayError> {
        send(&self.socket, self.sealer.as_mut(), first, second)
    }

    /// Ends the stream.
    pub(crate) fn finish(mut self) -> Result<(), RelayError> {
        if let Some(sealer) = &mut self.sealer {
            (&*self.socket).write_all(&sealer.seal_end()?).map_err(RelayError::wire)?;
        }
        SockRef::from(&*self.socket).set_linger(None).map_err(RelayError::wire)?;
        self.socket.shutdown(Shutdown::Write).map_err(RelayError::wire)
    }
}

impl Inward {
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    pub(crate) fn read_exact(&mut self, bytes: &mut [u8]) -> Result<(), RelayError> {
        read_exact(self.opener.as_mut(), &*self.socket, bytes)
    }

    /// Gives all of a stream to a program, as it is.
    pub(crate) fn pass_to(&mut self, program: &UnixStream) -> Result<(), RelayError> {
        let Some(opener) = &mut self.opener else { return copy(&self.socket, program) };
        while opener.receive(&*self.socket)? {
            write_all(program, &mut opener.received()).map_err(|error| RelayError::Local(Arc::new(error)))?;
            opener.taken();
        }
        Ok(())
    }
}

fn copy(mut wire: &TcpStream, mut program: &UnixStream) -> Result<(), RelayError> {
    let mut bytes = [0; COPIED_BYTES];
    loop {
        match wire.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => {
                program.write_all(&bytes[..count]).map_err(|error| RelayError::Local(Arc::new(error)))?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(RelayError::wire(error)),
        }
    }
}

/// Sends both parts, sealed where there is something to seal them. Gives how many bytes that made.
fn send(
    socket: &TcpStream,
    sealer: Option<&mut Sealer>,
    first: &[u8],
    second: &[u8],
) -> Result<usize, RelayError> {
    let Some(sealer) = sealer else {
        write_all(socket, &mut [IoSlice::new(first), IoSlice::new(second)]).map_err(RelayError::wire)?;
        return Ok(first.len() + second.len());
    };
    let records = sealer.seal(first, second)?;
    write_all(socket, &mut slices(&records)).map_err(RelayError::wire)?;
    Ok(records.iter().map(Vec::len).sum())
}

/// Whether the receiver closed a connection without a word, as it does to unauthenticated peers.
fn is_shut_out(error: &RelayError) -> bool {
    match error {
        RelayError::Refused => true,
        RelayError::Wire(error) => {
            matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
        }
        _ => false,
    }
}

fn slices(records: &[Vec<u8>]) -> Vec<IoSlice<'_>> {
    records.iter().map(|record| IoSlice::new(record)).collect()
}

fn opener_of(session: &mut Option<Session>) -> Option<&mut Opener> {
    session.as_mut().map(|session| &mut session.opener)
}

fn read_exact(
    opener: Option<&mut Opener>,
    mut socket: impl Read,
    mut bytes: &mut [u8],
) -> Result<(), RelayError> {
    let Some(opener) = opener else {
        return socket.read_exact(bytes).map_err(RelayError::wire);
    };
    while !bytes.is_empty() {
        if !opener.receive(&mut socket)? {
            return Err(RelayError::Truncated);
        }
        let taken = opener.take(bytes);
        bytes = &mut bytes[taken..];
    }
    Ok(())
}

/// A socket until a moment: however slowly the peer sends, that is the end.
struct Within<'a> {
    socket: &'a TcpStream,
    end: Instant,
}

impl Within<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        left.map(Some).ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

impl Read for Within<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.read(bytes)
    }
}

impl Write for Within<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
