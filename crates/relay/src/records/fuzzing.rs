//! Records of a peer that knows the keys, and of one that does not.

use std::io::{self, Read};

use rustls::crypto::cipher::{AeadKey, Iv, OutboundChunks};
use rustls::crypto::ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256;
use rustls::{ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, Tls13CipherSuite};

use super::{
    CLOSE_NOTIFY, HEADER_BYTES, KEY_UPDATE, PLAIN_BYTES_MAX, RECEIVE_BYTES, SEALED_BYTES_MAX, Secrets,
    Session,
};
use crate::choices::Choices;
use crate::error::RelayError;

/// So that one input does not take long.
const RECORDS_MAX: usize = 24;

/// All of an input's records.
const ALL_BYTES_MAX: usize = RECORDS_MAX * (HEADER_BYTES + SEALED_BYTES_MAX);

/// The buffers of the two ends; all that is told, as it is on the wire, as it was and as it came; a record that is
/// being made.
pub const RECORDS_HOLDS_BYTES: usize = 2 * RECEIVE_BYTES + 3 * ALL_BYTES_MAX + (128 << 10);

/// Records of one connection, as some decisions have them.
///
/// Holds: nothing gets through but what was sealed, in its order, and all of it where nothing is wrong. The stream
/// is whole only if it was ended.
pub fn records(data: &[u8]) {
    let mut choices = Choices::new(data);
    let piece = 1 + choices.below(1 << 15);
    let GeneratedStream { wire, plain, end } = generate(&mut choices);
    let mut receiver = session();
    let (got, result) = receive_all(&mut receiver, Pieces { rest: &wire, piece });
    assert!(plain.starts_with(&got), "{} bytes got through of {}", got.len(), plain.len());
    match (end, &result) {
        (End::Closed, Ok(())) | (End::Silent, Err(RelayError::Truncated)) => {
            assert_eq!(got.len(), plain.len());
        }
        (End::Malformed, Err(_)) => {}
        _ => panic!("{end:?} ends in {result:?}"),
    }
}

/// Streams with new keys, an end, and what has no place in them.
pub fn records_seeds() -> Vec<Vec<u8>> {
    let bytes = [DATA, 0x02, 9, 4, b'p', b'a', b'g', b'e'];
    let wrong = [OTHER, 22, 0x02, 5, 5, 24, 0, 0, 1, 7];
    let padded = [OTHER, 0, 0x02, 4, 4, b'd', b'a', b't', 23];
    let piece = [0, 16];
    vec![
        [&piece[..], &bytes, &[UPDATE, 1], &bytes, &[CLOSE]].concat(),
        [&[1, 0][..], &bytes, &padded, &bytes].concat(),
        [&piece[..], &bytes, &wrong, &bytes].concat(),
        [&piece[..], &[BROKEN, 3], &bytes].concat(),
        [&piece[..], &bytes, &[RAW, 5, 23, 3, 3, 0, 40], &bytes].concat(),
        [&piece[..], &[DATA, 0x41, 3, 7], &[DATA, 0x41, 4, 8], &[OTHER, 21, 2, 2, 2, 0]].concat(),
    ]
}

const DATA: u8 = 0;
const UPDATE: u8 = 1;
const OTHER: u8 = 2;
const RAW: u8 = 3;
const CLOSE: u8 = 4;
const BROKEN: u8 = 5;

#[derive(Debug)]
struct GeneratedStream {
    wire: Vec<u8>,
    /// What is to get through.
    plain: Vec<u8>,
    end: End,
}

/// How a stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It breaks off.
    Silent,
    /// By the record that says so.
    Closed,
    /// By what is none.
    Malformed,
}

fn generate(choices: &mut Choices<'_>) -> GeneratedStream {
    let mut sender = session();
    let mut generated = GeneratedStream { wire: room_for_all(), plain: room_for_all(), end: End::Silent };
    for _ in 0..RECORDS_MAX {
        if choices.are_used_up() {
            break;
        }
        let end = generate_one(choices, &mut sender, &mut generated);
        // What comes after an end is received too, and must make no difference.
        if generated.end == End::Silent {
            generated.end = end;
        }
    }
    generated
}

/// At once: a vector that grows holds up to three times what is in it.
fn room_for_all() -> Vec<u8> {
    Vec::with_capacity(ALL_BYTES_MAX)
}

fn generate_one(choices: &mut Choices<'_>, sender: &mut Session, generated: &mut GeneratedStream) -> End {
    match choices.byte() % 6 {
        DATA => {
            let content = choices.content(PLAIN_BYTES_MAX);
            generate_sealed(sender, generated, ContentType::ApplicationData, &content)
        }
        UPDATE => generate_sealed(sender, generated, ContentType::Handshake, &KEY_UPDATE),
        OTHER => {
            let kind = ContentType::from(choices.byte());
            let content = choices.content(PLAIN_BYTES_MAX + 2);
            generate_sealed(sender, generated, kind, &content)
        }
        CLOSE => generate_sealed(sender, generated, ContentType::Alert, &CLOSE_NOTIFY),
        RAW => {
            let count = choices.below(64);
            let bytes = choices.bytes(count);
            generated.wire.extend(bytes);
            if bytes.is_empty() { End::Silent } else { End::Malformed }
        }
        _ => {
            let mut record = seal(sender, ContentType::ApplicationData, b"damaged");
            let at = HEADER_BYTES + choices.below(record.len() - HEADER_BYTES);
            record[at] ^= 1;
            generated.wire.extend(record);
            End::Malformed
        }
    }
}

fn generate_sealed(
    sender: &mut Session,
    generated: &mut GeneratedStream,
    kind: ContentType,
    content: &[u8],
) -> End {
    generated.wire.extend(seal(sender, kind, content));
    if content.len() > PLAIN_BYTES_MAX {
        return End::Malformed;
    }
    match without_padding(kind, content) {
        (ContentType::ApplicationData, content) => {
            if generated.end == End::Silent {
                generated.plain.extend(content);
            }
            End::Silent
        }
        (ContentType::Handshake, [24, 0, 0, 1, 0 | 1]) => {
            renew(sender);
            End::Silent
        }
        (ContentType::Alert, [_, 0]) => End::Closed,
        _ => End::Malformed,
    }
}

/// Zeros at the end are padding, and what is before them is the kind (RFC 8446, section 5.4).
fn without_padding(kind: ContentType, content: &[u8]) -> (ContentType, &[u8]) {
    if kind != ContentType::from(0) {
        return (kind, content);
    }
    let end = content.iter().rposition(|byte| *byte != 0);
    end.map_or((kind, content), |end| (ContentType::from(content[end]), &content[..end]))
}

fn seal(sender: &mut Session, kind: ContentType, content: &[u8]) -> Vec<u8> {
    let sealed = sender.sealer.record(kind, OutboundChunks::Single(content));
    sealed.expect("a key of this test's own seals whatever it is given")
}

fn renew(sender: &mut Session) {
    sender.sealer.replace_key().expect("it counts, and its cipher suite is known");
}

fn receive_all(session: &mut Session, mut wire: Pieces<'_>) -> (Vec<u8>, Result<(), RelayError>) {
    let mut all = room_for_all();
    loop {
        match session.opener.receive(&mut wire) {
            Ok(true) => {}
            Ok(false) => return (all, Ok(())),
            Err(error) => return (all, Err(error)),
        }
        session.opener.received().iter().for_each(|part| all.extend_from_slice(part));
        session.opener.taken();
    }
}

/// What comes in pieces.
#[derive(Debug)]
struct Pieces<'a> {
    rest: &'a [u8],
    piece: usize,
}

impl Read for Pieces<'_> {
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let count = self.piece.min(self.rest.len());
        let read = (&self.rest[..count]).read(room)?;
        self.rest = &self.rest[read..];
        Ok(read)
    }
}

/// An end that has the same keys as any other.
fn session() -> Session {
    let extracted = ExtractedSecrets { tx: (0, keys(0)), rx: (0, keys(0)) };
    let secrets = Box::new(Counted { outgoing: 0, incoming: 0 });
    Session::new(suite(), extracted, secrets, &[], &[]).expect("its cipher suite is known")
}

fn suite() -> &'static Tls13CipherSuite {
    TLS13_CHACHA20_POLY1305_SHA256.tls13().expect("it is of TLS 1.3")
}

fn keys(number: u8) -> ConnectionTrafficSecrets {
    ConnectionTrafficSecrets::Chacha20Poly1305 { key: AeadKey::from([number; 32]), iv: Iv::from([0; 12]) }
}

/// Keys by how often they were renewed.
struct Counted {
    outgoing: u8,
    incoming: u8,
}

impl Secrets for Counted {
    fn next_outgoing(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.outgoing = self.outgoing.wrapping_add(1);
        Ok((0, keys(self.outgoing)))
    }

    fn next_incoming(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.incoming = self.incoming.wrapping_add(1);
        Ok((0, keys(self.incoming)))
    }
}
