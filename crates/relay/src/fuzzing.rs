//! What parses a peer's bytes, as functions of bytes: each says what holds whatever the bytes are, and panics where
//! it does not. `make fuzz` looks for such bytes; see `fuzz/` and docs/architecture.md.
//!
//! Each has seeds, made by the real sender, and a bound of the memory that it may hold on top of its input.

mod blocks;
mod choices;
mod handshake;
mod multifd;
mod stream;

pub use self::blocks::{BLOCKS_HOLDS_BYTES, blocks, blocks_seeds};
pub(crate) use self::choices::Choices;
pub use self::handshake::{HANDSHAKE_HOLDS_BYTES, handshake, handshake_seeds};
pub use self::multifd::{MULTIFD_HOLDS_BYTES, multifd, multifd_seeds};
pub use self::stream::{STREAM_HOLDS_BYTES, stream, stream_seeds};
pub use crate::records::fuzzing::{RECORDS_HOLDS_BYTES, records, records_seeds};
pub use crate::sender::round_trip::{ROUND_TRIP_HOLDS_BYTES, round_trip, round_trip_seeds};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tls;

    /// Its seeds, and inputs that are like them.
    fn holds(seeds: &[Vec<u8>], holds: impl Fn(&[u8])) {
        for seed in seeds {
            holds(seed);
        }
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) };
        proptest!(config, |(seed in prop::sample::select(seeds.to_vec()), changes in changes)| {
            let mut input = seed;
            for (at, byte) in changes {
                let at = at.index(input.len());
                input[at] = byte;
            }
            holds(&input);
        });
    }

    #[test]
    fn what_is_fuzzed_holds_for_what_is_like_the_seeds() {
        holds(&stream_seeds(), stream);
        holds(&blocks_seeds(), blocks);
        holds(&multifd_seeds(), multifd);
        holds(&records_seeds(), records);
        holds(&round_trip_seeds(), round_trip);
    }

    #[test]
    fn a_handshake_with_nobody_ends() {
        let (client, server) = tls::two_hosts();
        holds(&handshake_seeds(&server, &client), |data| handshake(&server, &client, data));
    }
}
