//! The data that fills disks in tests.

/// Bytes that no compression and no zero detection shortens.
pub(crate) fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::from_fn(|| Some(word())).flatten().take(length).collect()
}
