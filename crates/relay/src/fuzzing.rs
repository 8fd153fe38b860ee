//! Parsers of a peer's bytes, as functions of bytes: each asserts what holds whatever the bytes are, and panics where
//! it does not. `make fuzz` looks for such bytes; see `fuzz/` and docs/architecture.md.
//!
//! Each has seeds, made by the real sender, and a bound of the memory that it may hold on top of its input.

mod blocks;
mod handshake;
mod multifd;
mod receiving;
mod stream;

pub use self::blocks::{BLOCKS_HOLDS_BYTES, blocks, blocks_seeds};
pub use self::handshake::{HANDSHAKE_HOLDS_BYTES, handshake, handshake_seeds};
pub use self::multifd::{MULTIFD_HOLDS_BYTES, multifd, multifd_seeds};
pub use self::stream::{STREAM_HOLDS_BYTES, stream, stream_seeds};
pub use crate::records::fuzzing::{RECORDS_HOLDS_BYTES, records, records_seeds};
pub use crate::sender::round_trip::{ROUND_TRIP_HOLDS_BYTES, round_trip, round_trip_seeds};

#[cfg(test)]
#[path = "../../../fuzz/like_seeds.rs"]
mod like_seeds;

#[cfg(test)]
mod tests {
    use super::like_seeds::holds;
    use super::*;
    use crate::tls;

    const CASES: u32 = 64;

    #[test]
    fn what_is_fuzzed_holds_for_what_is_like_the_seeds() {
        holds(CASES, &stream_seeds(), stream);
        holds(CASES, &blocks_seeds(), blocks);
        holds(CASES, &multifd_seeds(), multifd);
        holds(CASES, &records_seeds(), records);
        holds(CASES, &round_trip_seeds(), round_trip);
    }

    #[test]
    fn a_handshake_with_nobody_ends() {
        let (client, server) = tls::two_hosts();
        holds(CASES, &handshake_seeds(&server, &client), |data| handshake(&server, &client, data));
    }
}
