//! The records of TLS 1.3 once the handshake is over, many at a time.
//!
//! rustls' own connections hand out and take records one by one, copying each once or twice. A migration is nothing
//! but records. So here a block is sealed at once and written in one call, and received records are opened in place.
//! Sealing, opening and new keys are rustls' own; see [`rustls::kernel`].

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, OutboundChunks,
    OutboundPlainMessage,
};
use rustls::kernel::KernelConnection;
use rustls::{
    AlertDescription, ConnectionTrafficSecrets, ContentType, Error, ExtractedSecrets, ProtocolVersion,
    Tls13CipherSuite,
};

use crate::error::RelayError;
use crate::sockets::lock;

/// Longest content of a record, before it is sealed (RFC 8446, section 5.1).
const PLAIN_BYTES_MAX: usize = 1 << 14;

/// Longest record without its header (RFC 8446, section 5.2).
const SEALED_BYTES_MAX: usize = PLAIN_BYTES_MAX + 256;

/// What comes before each record: its type, a version, its length.
const HEADER_BYTES: usize = 5;

/// What one connection takes from its socket at a time: 16 records.
const RECEIVE_BYTES: usize = 16 * (HEADER_BYTES + SEALED_BYTES_MAX);

/// How many records before its limit a key is replaced.
const RENEW_EARLY: u64 = 1 << 10;

/// `close_notify`, as a warning.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// `key_update`, which asks for none in return.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];

/// New keys for the same connection.
pub(crate) trait Secrets: Send {
    /// For what is sealed from now on.
    fn next_outgoing(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;

    /// For what is opened from now on.
    fn next_incoming(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error>;
}

impl<Data: Send> Secrets for KernelConnection<Data> {
    fn next_outgoing(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.update_tx_secret()
    }

    fn next_incoming(&mut self) -> Result<(u64, ConnectionTrafficSecrets), Error> {
        self.update_rx_secret()
    }
}

/// Those of one connection, for both its directions.
type SharedSecrets = Arc<Mutex<Box<dyn Secrets>>>;

/// One encrypted connection. Its directions may be used apart.
pub(crate) struct Session {
    /// What goes out.
    pub(crate) sealer: Sealer,
    /// What comes in.
    pub(crate) opener: Opener,
}

/// One direction of an encrypted connection, out of here.
pub(crate) struct Sealer {
    suite: &'static Tls13CipherSuite,
    secrets: SharedSecrets,
    encrypter: Box<dyn MessageEncrypter>,
    next: u64,
    // Above this a key would have sealed too much.
    renew_at: u64,
}

/// One direction of an encrypted connection, into here.
pub(crate) struct Opener {
    suite: &'static Tls13CipherSuite,
    secrets: SharedSecrets,
    decrypter: Box<dyn MessageDecrypter>,
    next: u64,
    // Received up to `filled`, opened up to `opened`.
    buffer: Vec<u8>,
    filled: usize,
    opened: usize,
    // What lies open in the buffer, and is not taken yet.
    plain: VecDeque<Range<usize>>,
    has_ended: bool,
}

impl Session {
    /// With the secrets of a handshake. What has come with its last word: `early` is opened already, `incoming`
    /// is not.
    pub(crate) fn new(
        suite: &'static Tls13CipherSuite,
        extracted: ExtractedSecrets,
        secrets: Box<dyn Secrets>,
        early: &[u8],
        incoming: &[u8],
    ) -> Result<Self, Error> {
        let (sealed, sealing) = extracted.tx;
        let (opened, opening) = extracted.rx;
        let mut buffer = vec![0; RECEIVE_BYTES];
        let filled = early.len() + incoming.len();
        buffer[..early.len()].copy_from_slice(early);
        buffer[early.len()..filled].copy_from_slice(incoming);
        let plain = (!early.is_empty()).then_some(0..early.len());
        let secrets = Arc::new(Mutex::new(secrets));
        Ok(Self {
            sealer: Sealer {
                suite,
                secrets: Arc::clone(&secrets),
                encrypter: encrypter(suite, sealing)?,
                next: sealed,
                renew_at: suite.common.confidentiality_limit.saturating_sub(RENEW_EARLY),
            },
            opener: Opener {
                suite,
                secrets,
                decrypter: decrypter(suite, opening)?,
                next: opened,
                buffer,
                filled,
                opened: early.len(),
                plain: plain.into_iter().collect(),
                has_ended: false,
            },
        })
    }

    /// The name of the cipher suite, as IANA has it.
    pub(crate) fn cipher_suite(&self) -> String {
        let name = self.sealer.suite.common.suite.as_str().unwrap_or("a cipher suite without a name");
        name.replace("TLS13_", "TLS_")
    }
}

impl Sealer {
    /// Seals both parts as one.
    pub(crate) fn seal(&mut self, first: &[u8], second: &[u8]) -> Result<Vec<Vec<u8>>, RelayError> {
        let parts = [first, second];
        let mut rest = OutboundChunks::new(&parts);
        let mut records = Vec::with_capacity(rest.len().div_ceil(PLAIN_BYTES_MAX) + 1);
        while !rest.is_empty() {
            if self.next >= self.renew_at {
                records.push(self.renew()?);
            }
            let (now, later) = rest.split_at(PLAIN_BYTES_MAX);
            records.push(self.record(ContentType::ApplicationData, now)?);
            rest = later;
        }
        Ok(records)
    }

    /// The last record: nothing follows.
    pub(crate) fn seal_end(&mut self) -> Result<Vec<u8>, RelayError> {
        Ok(self.record(ContentType::Alert, OutboundChunks::Single(&CLOSE_NOTIFY))?)
    }

    /// The record that says that another key follows.
    fn renew(&mut self) -> Result<Vec<u8>, Error> {
        let record = self.record(ContentType::Handshake, OutboundChunks::Single(&KEY_UPDATE))?;
        self.replace_key()?;
        Ok(record)
    }

    fn replace_key(&mut self) -> Result<(), Error> {
        let (next, secrets) = lock(&self.secrets).next_outgoing()?;
        self.encrypter = encrypter(self.suite, secrets)?;
        self.next = next;
        Ok(())
    }

    fn record(&mut self, typ: ContentType, payload: OutboundChunks<'_>) -> Result<Vec<u8>, Error> {
        let plain = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_2, payload };
        let record = self.encrypter.encrypt(plain, self.next)?.encode();
        self.next += 1;
        Ok(record)
    }
}

enum Opened {
    Bytes,
    KeyUpdate,
    End,
}

impl Opener {
    /// Reads until there is something to take. False once the peer has ended the stream.
    pub(crate) fn receive(&mut self, mut socket: impl Read) -> Result<bool, RelayError> {
        loop {
            if self.plain.is_empty() {
                self.open_all()?;
            }
            if !self.plain.is_empty() {
                return Ok(true);
            }
            if self.has_ended {
                return Ok(false);
            }
            self.fill(&mut socket)?;
        }
    }

    /// What lies open.
    pub(crate) fn received(&self) -> Vec<IoSlice<'_>> {
        self.plain.iter().map(|range| IoSlice::new(&self.buffer[range.clone()])).collect()
    }

    /// Takes all that lies open.
    pub(crate) fn taken(&mut self) {
        self.plain.clear();
    }

    /// Takes as much as there is room for.
    pub(crate) fn take(&mut self, room: &mut [u8]) -> usize {
        let Some(range) = self.plain.front_mut() else { return 0 };
        let count = range.len().min(room.len());
        room[..count].copy_from_slice(&self.buffer[range.start..range.start + count]);
        range.start += count;
        if range.start == range.end {
            self.plain.pop_front();
        }
        count
    }

    fn open_all(&mut self) -> Result<(), RelayError> {
        while !self.has_ended
            && let Some(record) = self.next_record()?
        {
            match self.open(record)? {
                Opened::Bytes => {}
                Opened::KeyUpdate => {
                    let (next, secrets) = lock(&self.secrets).next_incoming()?;
                    self.decrypter = decrypter(self.suite, secrets)?;
                    self.next = next;
                }
                Opened::End => self.has_ended = true,
            }
        }
        Ok(())
    }

    /// The next record that is all there, without its header.
    fn next_record(&mut self) -> Result<Option<Range<usize>>, RelayError> {
        let received = &self.buffer[self.opened..self.filled];
        let Some(([kind, _, _, high, low], _)) = received.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        if ContentType::from(*kind) != ContentType::ApplicationData || length > SEALED_BYTES_MAX {
            return Err(RelayError::Malformed("what is no encrypted record"));
        }
        let begin = self.opened + HEADER_BYTES;
        Ok((begin + length <= self.filled).then_some(begin..begin + length))
    }

    fn open(&mut self, record: Range<usize>) -> Result<Opened, RelayError> {
        let Range { start, end } = record;
        self.opened = end;
        let sealed = InboundOpaqueMessage::new(
            ContentType::ApplicationData,
            ProtocolVersion::TLSv1_2,
            &mut self.buffer[start..end],
        );
        let plain = self.decrypter.decrypt(sealed, self.next)?;
        self.next += 1;
        match (plain.typ, plain.payload) {
            (ContentType::ApplicationData, []) => Ok(Opened::Bytes),
            (ContentType::ApplicationData, bytes) => {
                // Opened in place, at the beginning of the record.
                self.plain.push_back(start..start + bytes.len());
                Ok(Opened::Bytes)
            }
            // Nothing is sent back any more, so a request for a key of ours is none.
            (ContentType::Handshake, [24, 0, 0, 1, 0 | 1]) => Ok(Opened::KeyUpdate),
            (ContentType::Alert, [_, 0]) => Ok(Opened::End),
            (ContentType::Alert, [_, alert]) => {
                Err(Error::AlertReceived(AlertDescription::from(*alert)).into())
            }
            _ => Err(RelayError::Malformed("a record that has no place in a stream")),
        }
    }

    /// Takes more from the socket. Nothing may lie open.
    fn fill(&mut self, socket: &mut impl Read) -> Result<(), RelayError> {
        self.buffer.copy_within(self.opened..self.filled, 0);
        self.filled -= self.opened;
        self.opened = 0;
        match socket.read(&mut self.buffer[self.filled..]) {
            Ok(0) => Err(RelayError::Truncated),
            Ok(count) => {
                self.filled += count;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(RelayError::wire(error)),
        }
    }
}

fn encrypter(
    suite: &'static Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageEncrypter>, Error> {
    let (key, iv) = key_of(secrets)?;
    Ok(suite.aead_alg.encrypter(key, iv))
}

fn decrypter(
    suite: &'static Tls13CipherSuite,
    secrets: ConnectionTrafficSecrets,
) -> Result<Box<dyn MessageDecrypter>, Error> {
    let (key, iv) = key_of(secrets)?;
    Ok(suite.aead_alg.decrypter(key, iv))
}

fn key_of(secrets: ConnectionTrafficSecrets) -> Result<(AeadKey, Iv), Error> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(Error::General("keys of an unknown cipher suite".into())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::tls;

    /// A sender's and a receiver's end of one connection.
    fn sessions() -> (Session, Session) {
        let (client, server) = tls::two_hosts();
        let (here, there) = UnixStream::pair().unwrap();
        let accepting = thread::spawn(move || tls::accept(there, &server).unwrap());
        let sender = tls::connect(here, &client).unwrap();
        (sender, accepting.join().unwrap())
    }

    fn receive_all(session: &mut Session, wire: &[u8]) -> Result<Vec<u8>, RelayError> {
        let (mut wire, mut all) = (wire, vec![]);
        while session.opener.receive(&mut wire)? {
            all.extend(session.opener.received().iter().flat_map(|part| part.to_vec()));
            session.opener.taken();
        }
        Ok(all)
    }

    #[test]
    fn keys_are_replaced_before_they_have_sealed_too_much() {
        let (mut sender, mut receiver) = sessions();
        sender.sealer.renew_at = 3;
        let content: Vec<u8> = (0..=250_u8).cycle().take(40 * PLAIN_BYTES_MAX).collect();
        let mut wire = vec![];
        for block in content.chunks(100_000) {
            wire.extend(sender.sealer.seal(b"head", block).unwrap().concat());
            assert!(sender.sealer.next <= 3, "{}", sender.sealer.next);
        }
        wire.extend(sender.sealer.seal_end().unwrap());
        let expected = content.chunks(100_000).flat_map(|block| [b"head", block].concat());
        assert!(receive_all(&mut receiver, &wire).unwrap() == expected.collect::<Vec<u8>>());
    }

    #[test]
    fn a_stream_without_its_end_is_truncated() {
        let (mut sender, mut receiver) = sessions();
        let mut wire = sender.sealer.seal(b"memory", &[]).unwrap().concat();
        wire.extend(&sender.sealer.seal_end().unwrap()[..7]);
        assert!(matches!(receive_all(&mut receiver, &wire), Err(RelayError::Truncated)));
    }

    #[test]
    fn records_in_another_order_and_records_twice_are_refused() {
        for order in [[1, 0], [0, 0]] {
            let (mut sender, mut receiver) = sessions();
            let records = [b"one", b"two"].map(|part| sender.sealer.seal(part, &[]).unwrap().concat());
            let wire = order.map(|index| records[index].clone()).concat();
            let error = receive_all(&mut receiver, &wire).unwrap_err();
            assert!(matches!(error, RelayError::Tls(Error::DecryptError)), "{error:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30))]
        #[test]
        fn whatever_comes_nothing_but_what_was_sealed_gets_through(
            bytes in prop::collection::vec(any::<u8>(), 0..500),
            at in 0..1_000_usize,
            change in 1..=u8::MAX,
        ) {
            let (mut sender, mut receiver) = sessions();
            let mut wire = sender.sealer.seal(&[7; 1_000], &[]).unwrap().concat();
            wire[at] ^= change;
            wire.extend(&bytes);
            prop_assert!(receive_all(&mut receiver, &wire).is_err());
            let (_, mut receiver) = sessions();
            prop_assert!(receive_all(&mut receiver, &bytes).is_err());
        }
    }
}
