//! The beginning of a stream: which disk it is for, and which of the disk's streams it is.

use crate::error::{Malformed, Refusal};
use crate::frame::StreamNumber;

const MAGIC: [u8; 8] = *b"DRPSPLIT";
/// Counted up with any change of the greeting or the frames.
const VERSION: u8 = 2;

/// Length of a [`Session`].
pub const SESSION_BYTES: usize = 16;

pub(crate) const GREETING_BYTES: usize = 8 + 1 + SESSION_BYTES + 2 + 8;
pub(crate) const WELCOME_BYTES: usize = 8 + 1;

/// One attempt at one disk: what only its two ends know, agreed on by another way. An attempt that follows has
/// another, so that no stream of an earlier one can be taken for its own.
#[derive(Clone, Copy)]
pub struct Session(pub [u8; SESSION_BYTES]);

impl Session {
    /// One that nobody can guess.
    pub fn new_random() -> Self {
        Self(uuid::Uuid::new_v4().into_bytes())
    }

    /// Takes as long whether they differ early or late.
    fn is(&self, other: &[u8; SESSION_BYTES]) -> bool {
        self.0.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Session(..)")
    }
}

/// What the source says first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Greeting {
    pub(crate) session: Session,
    pub(crate) number: StreamNumber,
    pub(crate) disk_bytes: u64,
}

impl Greeting {
    pub(crate) fn encode(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = VERSION;
        bytes[9..25].copy_from_slice(&self.session.0);
        bytes[25..27].copy_from_slice(&self.number.to_le_bytes());
        bytes[27..].copy_from_slice(&self.disk_bytes.to_le_bytes());
        bytes
    }

    /// The number of the stream, if it is one of this session, for a disk of this size.
    pub(crate) fn decode(
        bytes: &[u8; GREETING_BYTES],
        session: &Session,
        disk_bytes: u64,
    ) -> Result<StreamNumber, Refusal> {
        let (head, rest) = bytes.split_at(9);
        if head[..8] != MAGIC {
            return Err(Refusal::NoSplitter);
        }
        if head[8] != VERSION {
            return Err(Refusal::Version);
        }
        let (own, rest) = rest.split_first_chunk().expect("its length is known");
        if !session.is(own) {
            return Err(Refusal::Session);
        }
        let (number, size) = rest.split_first_chunk().expect("its length is known");
        let size: [u8; 8] = size.try_into().expect("its length is known");
        if u64::from_le_bytes(size) != disk_bytes {
            return Err(Refusal::Size);
        }
        Ok(StreamNumber::from_le_bytes(*number))
    }
}

/// The target's answer.
pub(crate) fn encode_welcome(refusal: Option<Refusal>) -> [u8; WELCOME_BYTES] {
    let mut bytes = [0; WELCOME_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8] = refusal.map_or(0, Refusal::number);
    bytes
}

/// What the target says of the greeting.
pub(crate) fn decode_welcome(bytes: &[u8; WELCOME_BYTES]) -> Result<Option<Refusal>, Malformed> {
    if bytes[..8] != MAGIC {
        return Err(Malformed("no greeting of a splitter"));
    }
    match bytes[8] {
        0 => Ok(None),
        number => Refusal::of_number(number).map(Some).ok_or(Malformed("an unknown refusal")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SESSION: Session = Session([7; SESSION_BYTES]);

    fn greeting() -> [u8; GREETING_BYTES] {
        Greeting { session: SESSION, number: 513, disk_bytes: 1 << 40 }.encode()
    }

    #[test]
    fn who_greets_well_is_known() {
        assert_eq!(Greeting::decode(&greeting(), &SESSION, 1 << 40), Ok(513));
        assert_eq!(Greeting::decode(&greeting(), &SESSION, 1 << 41), Err(Refusal::Size));
        let other = Session([8; SESSION_BYTES]);
        assert_eq!(Greeting::decode(&greeting(), &other, 1 << 40), Err(Refusal::Session));
    }

    #[test]
    fn each_refusal_is_understood() {
        assert_eq!(decode_welcome(&encode_welcome(None)).unwrap(), None);
        for refusal in Refusal::ALL {
            assert_eq!(decode_welcome(&encode_welcome(Some(refusal))).unwrap(), Some(refusal));
        }
        assert!(decode_welcome(b"DRPSPLIT\xff").is_err());
        assert!(decode_welcome(b"SSH-2.0-O").is_err());
    }

    proptest! {
        #[test]
        fn one_wrong_byte_is_one_too_many(at in 0..25_usize, byte: u8) {
            let mut bytes = greeting();
            prop_assume!(bytes[at] != byte);
            bytes[at] = byte;
            prop_assert!(Greeting::decode(&bytes, &SESSION, 1 << 40).is_err());
        }
    }
}
