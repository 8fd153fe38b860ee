//! What of a piece is worth writing. Pure.

use std::ops::Range;

/// A hole is as long at least, and begins and ends at a multiple of it: shorter ones cost more than they save.
pub(crate) const GRAIN_BYTES: usize = 64 << 10;

static ZEROES: [u8; GRAIN_BYTES] = [0; GRAIN_BYTES];

/// The ranges of a piece that are not all zeroes.
pub(crate) fn data_in(piece: &[u8]) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = vec![];
    for (index, grain) in piece.chunks(GRAIN_BYTES).enumerate() {
        if grain == &ZEROES[..grain.len()] {
            continue;
        }
        let begin = index * GRAIN_BYTES;
        let end = begin + grain.len();
        match found.last_mut().filter(|last| last.end == begin) {
            Some(last) => last.end = end,
            None => found.push(begin..end),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_next_to_each_other_are_one() {
        let mut piece = vec![0; 5 * GRAIN_BYTES + 3];
        assert_eq!(data_in(&piece), []);
        piece[GRAIN_BYTES] = 1;
        piece[3 * GRAIN_BYTES - 1] = 1;
        piece[5 * GRAIN_BYTES + 2] = 1;
        let expected = [GRAIN_BYTES..3 * GRAIN_BYTES, 5 * GRAIN_BYTES..5 * GRAIN_BYTES + 3];
        assert_eq!(data_in(&piece), expected);
    }

    proptest! {
        #[test]
        fn nothing_but_zeroes_is_left_out(length in 0..400_000_usize, at in prop::collection::vec(0..400_000_usize, 0..6)) {
            let mut piece = vec![0; length];
            for at in at.into_iter().filter(|at| *at < length) {
                piece[at] = 7;
            }
            let mut made = vec![0; length];
            for range in data_in(&piece) {
                made[range.clone()].copy_from_slice(&piece[range]);
            }
            prop_assert_eq!(made, piece);
        }
    }
}
