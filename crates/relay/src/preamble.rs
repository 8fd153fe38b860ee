//! What a sender sends first on each connection: that it is a sender, that it is permitted, and which connection this
//! is.

use crate::error::RelayError;

const MAGIC: [u8; 8] = *b"DRPRELAY";
/// Counted up with any change of the preamble or the frames.
const VERSION: u8 = 3;

/// Length of a [`Token`].
pub const TOKEN_BYTES: usize = 16;

/// Length of a preamble.
pub(crate) const PREAMBLE_BYTES: usize = MAGIC.len() + 1 + TOKEN_BYTES + 1;

/// What only the two ends know, agreed on by another way: unauthenticated peers get no further.
#[derive(Clone, Copy)]
pub struct Token(pub [u8; TOKEN_BYTES]);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// Whether the other end has said it. Takes as long whether they differ early or late.
    pub fn is(&self, other: &[u8]) -> bool {
        let differ = self.0.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other));
        differ == 0 && other.len() == TOKEN_BYTES
    }
}

/// The beginning of connection `index`.
pub(crate) fn encode(token: &Token, index: u8) -> [u8; PREAMBLE_BYTES] {
    let mut preamble = [0; PREAMBLE_BYTES];
    preamble[..8].copy_from_slice(&MAGIC);
    preamble[8] = VERSION;
    preamble[9..PREAMBLE_BYTES - 1].copy_from_slice(&token.0);
    preamble[PREAMBLE_BYTES - 1] = index;
    preamble
}

/// The connection's index, if it is one of `connections`.
pub(crate) fn decode(
    preamble: &[u8; PREAMBLE_BYTES],
    token: &Token,
    connections: usize,
) -> Result<usize, RelayError> {
    let index = usize::from(preamble[PREAMBLE_BYTES - 1]);
    if preamble[..8] != MAGIC {
        return Err(RelayError::Malformed("no preamble of a relay"));
    }
    if !token.is(&preamble[9..PREAMBLE_BYTES - 1]) {
        return Err(RelayError::Malformed("a wrong token"));
    }
    if preamble[8] != VERSION {
        return Err(RelayError::Malformed("another version: run the same Drainpipe on both hosts"));
    }
    if index >= connections {
        return Err(RelayError::Malformed("more connections than were agreed on"));
    }
    Ok(index)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OURS: Token = Token([7; TOKEN_BYTES]);

    proptest! {
        #[test]
        fn one_changed_byte_is_refused(at in 0..PREAMBLE_BYTES - 1, change in 1..=u8::MAX) {
            let mut preamble = encode(&OURS, 3);
            preamble[at] ^= change;
            prop_assert!(decode(&preamble, &OURS, 17).is_err());
        }
    }

    #[test]
    fn connections_are_counted() {
        assert_eq!(decode(&encode(&OURS, 16), &OURS, 17).unwrap(), 16);
        assert!(decode(&encode(&OURS, 17), &OURS, 17).is_err());
    }
}
