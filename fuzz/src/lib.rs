//! Fuzzers of what parses a peer's bytes.
//!
//! What is to hold is said where it is parsed, in each crate's `fuzzing`. Here is what has libFuzzer look for bytes
//! with which it does not: each file of `targets/` is one fuzzer, and `run` builds and runs all of them.

mod json;
mod memory;
mod seeds;

pub use json::mutate;
pub use memory::within;
pub use seeds::write_seeds;

/// Makes a fuzzer of `run`, which begins with `seeds` and may hold `holds_bytes` on top of its input.
#[macro_export]
macro_rules! target {
    (run: $run:expr, seeds: $seeds:expr, holds_bytes: $holds_bytes:expr $(,)?) => {
        libfuzzer_sys::fuzz_target!(init: $crate::write_seeds(&$seeds()), |data: &[u8]| {
            $crate::within($holds_bytes, || $run(data));
        });
    };
}

/// The same, for one that takes JSON.
#[macro_export]
macro_rules! json_target {
    (run: $run:expr, seeds: $seeds:expr, holds_bytes: $holds_bytes:expr $(,)?) => {
        $crate::target!(run: $run, seeds: $seeds, holds_bytes: $holds_bytes);

        libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, bytes_max: usize, seed: u32| {
            // Now and then what is no JSON.
            let changed = if seed % 8 == 0 { None } else { $crate::mutate(&data[..size], seed) };
            match changed.filter(|changed| changed.len() <= bytes_max) {
                Some(changed) => {
                    data[..changed.len()].copy_from_slice(&changed);
                    changed.len()
                }
                None => libfuzzer_sys::fuzzer_mutate(data, size, bytes_max),
            }
        });
    };
}
