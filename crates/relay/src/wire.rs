//! One connection between the two ends of a relay: in the clear, or encrypted.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use tracing::debug;

use crate::error::RelayError;
use crate::preamble::{self, PREAMBLE_BYTES, Token};
use crate::records::{Opener, Sealer, Session};
use crate::sockets::{Breaker, write_all};
use crate::tls::{self, ClientTls, ServerTls};

/// How long the receiver may take to accept a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How often an encrypted connection is tried that the receiver closes before it has accepted it: for another one it
/// closes the oldest of those that have not said what they are, and strangers may come by the dozen.
const ATTEMPTS: u32 = 5;

/// Before the second attempt; twice as long before each further one, 0.75 s in all.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// How long the sender may take to say what a connection is.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(5);

/// What the receiver says of an encrypted connection that it accepts. Until then the sender does not know
/// whether its certificate will do.
const ACCEPTED: [u8; 1] = [1];

/// How long the other host may answer nothing at all on a connection that goes both ways. Who watches the hosts may
/// know sooner. By itself the kernel would take a quarter of an hour where something was sent, and for ever where
/// nothing was, while a program waits for an answer. To the kernel a program that reads nothing for so long is silent too.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How often a connection that goes both ways is tried while nothing is sent.
const TRY_EVERY: Duration = Duration::from_secs(5);

/// One connection between the two ends of a relay: two directions, each of which may have a thread of its own. Who
/// needs one only drops the other, which closes nothing.
pub(crate) struct Wire {
    pub(crate) sending: Sending,
    pub(crate) receiving: Receiving,
}

/// What goes to the other end.
pub(crate) struct Sending {
    socket: Arc<TcpStream>,
    // None in the clear.
    sealer: Option<Sealer>,
}

/// What comes from the other end.
pub(crate) struct Receiving {
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
                    debug!(%address, %error, "a connection to a relay was closed before it was accepted; once more");
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
        let mut wire = Self::new(socket, session);
        wire.sending.send(&preamble::encode(token, index), &[])?;
        wire.receiving.wait_accepted(end)?;
        wire.without_deadline()
    }

    /// Lets a sender connect, whoever it is. Gives what it says of the connection.
    pub(crate) fn accept(
        socket: TcpStream,
        tls: Option<&ServerTls>,
    ) -> Result<(Self, [u8; PREAMBLE_BYTES]), RelayError> {
        let end = Instant::now() + ACCEPT_DEADLINE;
        let accepted = tls.map(|tls| tls::accept(Within { socket: &socket, end }, tls)).transpose();
        let session = accepted.map_err(|error| match error {
            // It is this end that accepts.
            RelayError::Refused => RelayError::Truncated,
            error => error,
        })?;
        let mut wire = Self::new(socket, session);
        let mut said = [0; PREAMBLE_BYTES];
        wire.receiving.read_exact_by(end, &mut said)?;
        Ok((wire, said))
    }

    /// Lets the sender send its stream.
    pub(crate) fn admit(mut self) -> Result<Self, RelayError> {
        if self.sending.sealer.is_some() {
            self.sending.send(&ACCEPTED, &[])?;
        }
        self.without_deadline()
    }

    /// Makes it fit for bytes that go both ways: some are few, and a program waits for them. Both ends do so.
    pub(crate) fn go_both_ways(&self) -> Result<(), RelayError> {
        let socket = SockRef::from(self.socket());
        socket.set_tcp_nodelay(true).map_err(RelayError::wire)?;
        // Either end sends now, and what one has sent is to outlast it no more than what the other has.
        socket.set_linger(Some(Duration::ZERO)).map_err(RelayError::wire)?;
        // Each sees to one half of it: what was sent and is not acknowledged, and a connection where all is.
        socket.set_tcp_user_timeout(Some(SILENCE_MAX)).map_err(RelayError::wire)?;
        let keepalive = TcpKeepalive::new().with_time(TRY_EVERY).with_interval(TRY_EVERY);
        socket.set_tcp_keepalive(&keepalive).map_err(RelayError::wire)
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.sending.socket
    }

    /// How it is encrypted; none in the clear.
    pub(crate) fn cipher_suite(&self) -> Option<String> {
        self.sending.sealer.as_ref().map(Sealer::cipher_suite)
    }

    fn new(socket: TcpStream, session: Option<Session>) -> Self {
        let socket = Arc::new(socket);
        let (sealer, opener) = session.map(|Session { sealer, opener }| (sealer, opener)).unzip();
        Self {
            sending: Sending { socket: Arc::clone(&socket), sealer },
            receiving: Receiving { socket, opener },
        }
    }

    fn without_deadline(self) -> Result<Self, RelayError> {
        self.socket().set_read_timeout(None).map_err(RelayError::wire)?;
        self.socket().set_write_timeout(None).map_err(RelayError::wire)?;
        Ok(self)
    }
}

impl Sending {
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Sends both parts. Gives how many bytes that made.
    pub(crate) fn send(&mut self, first: &[u8], second: &[u8]) -> Result<usize, RelayError> {
        let Some(sealer) = &mut self.sealer else {
            write_all(&*self.socket, &mut [IoSlice::new(first), IoSlice::new(second)])
                .map_err(RelayError::wire)?;
            return Ok(first.len() + second.len());
        };
        let records = sealer.seal(first, second)?;
        write_all(&*self.socket, &mut slices(&records)).map_err(RelayError::wire)?;
        Ok(records.iter().map(Vec::len).sum())
    }

    /// Ends the stream of this direction.
    pub(crate) fn finish(mut self) -> Result<(), RelayError> {
        let mut socket = &*self.socket;
        if let Some(sealer) = &mut self.sealer {
            socket.write_all(&sealer.seal_end()?).map_err(RelayError::wire)?;
        }
        SockRef::from(socket).set_linger(None).map_err(RelayError::wire)?;
        socket.shutdown(Shutdown::Write).map_err(RelayError::wire)
    }
}

impl Receiving {
    pub(crate) fn read_exact(&mut self, bytes: &mut [u8]) -> Result<(), RelayError> {
        read_exact(self.opener.as_mut(), &*self.socket, bytes)
    }

    /// Gives all of an encrypted stream to a program, as it is, and then its end.
    pub(crate) fn pass_to(mut self, program: &UnixStream) -> Result<(), RelayError> {
        let opener = self.opener.as_mut().expect("what is not encrypted is packed, as Treatment says");
        while opener.receive(&*self.socket)? {
            write_all(program, &mut opener.received()).map_err(|error| RelayError::Local(Arc::new(error)))?;
            opener.taken();
        }
        // The program may have closed it already.
        drop(program.shutdown(Shutdown::Write));
        Ok(())
    }

    fn read_exact_by(&mut self, end: Instant, bytes: &mut [u8]) -> Result<(), RelayError> {
        read_exact(self.opener.as_mut(), Within { socket: &self.socket, end }, bytes)
    }

    fn wait_accepted(&mut self, end: Instant) -> Result<(), RelayError> {
        if self.opener.is_none() {
            return Ok(());
        }
        let answered = self.read_exact_by(end, &mut [0; ACCEPTED.len()]);
        answered.map_err(|error| match error {
            RelayError::Truncated => RelayError::Refused,
            error => error,
        })
    }
}

/// Whether the receiver closed a connection without a word, as it does to strangers.
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::preamble::TOKEN_BYTES;

    #[test]
    fn neither_end_that_goes_both_ways_holds_back_what_is_little_or_outlasts_a_silent_host() {
        let (client, server) = tls::two_hosts();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let token = Token([7; TOKEN_BYTES]);
        let accepting = thread::spawn(move || {
            let (wire, _) = Wire::accept(listener.accept().unwrap().0, Some(&server)).unwrap();
            wire.admit().unwrap()
        });
        let here = Wire::connect(address, &Breaker::new(), Some(&client), &token, 0).unwrap();
        for end in [here, accepting.join().unwrap()] {
            end.go_both_ways().unwrap();
            let socket = SockRef::from(end.socket());
            assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
            assert_eq!(socket.linger().unwrap(), Some(Duration::ZERO));
            assert_eq!(socket.tcp_user_timeout().unwrap(), Some(SILENCE_MAX));
        }
    }
}
