//! A fuzzer's seeds and inputs that are like them, for unit tests: `make test` has them, and needs no libFuzzer.

use proptest::prelude::*;

/// Tries what holds for all of its seeds, and for so many inputs that differ from one in a few bytes.
pub(crate) fn holds(cases: u32, seeds: &[Vec<u8>], holds: impl Fn(&[u8])) {
    for seed in seeds {
        holds(seed);
    }
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) };
    proptest!(config, |(seed in prop::sample::select(seeds.to_vec()), changes in changes)| {
        let mut input = seed;
        for (at, byte) in changes {
            let at = at.index(input.len());
            input[at] = byte;
        }
        holds(&input);
    });
}
