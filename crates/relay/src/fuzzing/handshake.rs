//! The first bytes from unauthenticated peers.

use std::io::{self, Read, Write};

use crate::CONNECTIONS_MAX;
use crate::preamble::{self, PREAMBLE_BYTES, TOKEN_BYTES, Token};
use crate::tls::{self, ClientTls, ServerTls};

/// The memory for what has arrived of a handshake, for what rustls assembles from it, and for the answer.
pub const HANDSHAKE_HOLDS_BYTES: usize = 384 << 10;

const TOKEN: Token = Token([42; TOKEN_BYTES]);

/// What comes to either end of a connection before it is known who the other one is: to the receiver where the first
/// byte is even, to the sender where it is odd. It comes in pieces as long as the second byte says.
///
/// Holds: nobody is let in who has no certificate, and the handshake ends. A preamble that is taken is the one that a
/// sender makes.
pub fn handshake(server: &ServerTls, client: &ClientTls, data: &[u8]) {
    if let Some(said) = data.first_chunk::<PREAMBLE_BYTES>()
        && let Ok(index) = preamble::decode(said, &TOKEN, CONNECTIONS_MAX)
    {
        assert!(index < CONNECTIONS_MAX);
        assert_eq!(u8::try_from(index).map(|index| preamble::encode(&TOKEN, index)), Ok(*said));
    }
    let [end, piece, incoming @ ..] = data else { return };
    let socket = Socket { incoming, piece: 1 + (usize::from(*piece) << 4), outgoing: None };
    let session = if end % 2 == 0 { tls::accept(socket, server) } else { tls::connect(socket, client) };
    assert!(session.is_err(), "a session with nobody");
}

/// What both ends of a true handshake say first, and preambles.
pub fn handshake_seeds(server: &ServerTls, client: &ClientTls) -> Vec<Vec<u8>> {
    let mut hello = vec![];
    let silent = Socket { incoming: &[], piece: 1, outgoing: Some(&mut hello) };
    assert!(tls::connect(silent, client).is_err());
    let mut answer = vec![];
    let said = Socket { incoming: &hello, piece: hello.len(), outgoing: Some(&mut answer) };
    assert!(tls::accept(said, server).is_err());
    let preamble = preamble::encode(&TOKEN, 3);
    vec![
        [&[0, 255], &hello[..]].concat(),
        [&[0, 1], &hello[..], &hello].concat(),
        [&[1, 255], &answer[..]].concat(),
        [&[1, 2], &answer[..], &answer].concat(),
        preamble.to_vec(),
    ]
}

/// The other end, in memory. Once it has said all, it hangs up.
struct Socket<'a> {
    incoming: &'a [u8],
    piece: usize,
    outgoing: Option<&'a mut Vec<u8>>,
}

impl Read for Socket<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let count = self.piece.min(room.len()).min(self.incoming.len());
        room[..count].copy_from_slice(&self.incoming[..count]);
        self.incoming = &self.incoming[count..];
        Ok(count)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
