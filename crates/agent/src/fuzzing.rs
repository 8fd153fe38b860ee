//! Parsers of a peer's bytes, as functions of bytes: each asserts what holds whatever the bytes are, and panics where
//! it does not. `make fuzz` looks for such bytes.
//!
//! The datagrams of [`discovery`](crate::paths::discovery) are not among them: they are compared as a whole.

use uuid::Uuid;

use crate::check::packets;
pub use crate::http::api::fuzzing::{MESSAGES_HOLD_BYTES, messages, messages_seeds};
use crate::paths::path_watch::hello;

/// Nothing but the datagram itself.
pub const DATAGRAMS_HOLD_BYTES: usize = 4 << 10;

const TOKEN: Uuid = Uuid::max();

/// A datagram of the watch of paths, or of a check; with its token in front where the first byte is even.
///
/// Holds: what is heard is what the other end makes, and nothing from a sender without the token.
pub fn datagrams(data: &[u8]) {
    let (first, rest) = data.split_first().unwrap_or((&1, &[]));
    let token: &[u8] = if first % 2 == 0 { TOKEN.as_bytes() } else { &[] };
    let datagram = [token, rest].concat();
    let hello = hello::decode(&datagram, TOKEN);
    if let Some(hello) = hello {
        assert_eq!(hello::encode(hello, TOKEN)[..], datagram);
    }
    let kind = packets::kind_of(&datagram, TOKEN);
    if !datagram.starts_with(TOKEN.as_bytes()) {
        assert_eq!((hello, kind), (None, None));
    }
}

/// One of each kind.
pub fn datagrams_seeds() -> Vec<Vec<u8>> {
    vec![vec![0; 11], vec![0, 0, 0, 0, 0, 0, 0, 0, 9, 0x82, 1], vec![0, 1], vec![1; 27]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::api::fuzzing::is_message;

    #[test]
    fn what_is_fuzzed_holds_for_its_seeds() {
        for seed in datagrams_seeds() {
            datagrams(&seed);
        }
        for seed in messages_seeds() {
            assert!(is_message(&seed), "{}", String::from_utf8_lossy(&seed));
            messages(&seed);
        }
    }
}
