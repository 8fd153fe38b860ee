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
#[path = "../../../fuzz/like_seeds.rs"]
mod like_seeds;

#[cfg(test)]
mod tests {
    use super::like_seeds::holds;
    use super::*;

    const CASES: u32 = 256;

    #[test]
    fn what_is_fuzzed_holds_for_what_is_like_the_seeds() {
        holds(CASES, &questions_seeds(), questions);
        holds(CASES, &answers_seeds(), answers);
        holds(CASES, &client_seeds(), client);
    }
}
