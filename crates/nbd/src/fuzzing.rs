//! What parses a peer's bytes, as functions of bytes: each says what holds whatever the bytes are, and panics where
//! it does not. `make fuzz` looks for such bytes; see `fuzz/` and docs/architecture.md.
//!
//! Each has seeds, made by the real encoders, and a bound of the memory that it may hold on top of its input.

mod answers;
mod client;
mod questions;

pub use self::answers::{ANSWERS_HOLDS_BYTES, answers, answers_seeds};
pub use self::client::{CLIENT_HOLDS_BYTES, client, client_seeds};
pub use self::questions::{QUESTIONS_HOLDS_BYTES, questions, questions_seeds};

/// The disk that is asked for.
const DISK_BYTES: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Its seeds, and inputs that are like them.
    fn holds(seeds: &[Vec<u8>], holds: impl Fn(&[u8])) {
        for seed in seeds {
            holds(seed);
        }
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) };
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
        holds(&questions_seeds(), questions);
        holds(&answers_seeds(), answers);
        holds(&client_seeds(), client);
    }
}
