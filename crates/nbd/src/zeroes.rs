//! Which part of a WRITE is nothing but zeroes. Pure.

use std::ops::Range;

/// Zeroes are found as long at least, and begin and end at a multiple of it on the disk, or where the request does.
pub(crate) const GRAIN_BYTES: usize = 64 << 10;

static ZEROES: [u8; GRAIN_BYTES] = [0; GRAIN_BYTES];

/// A part of a request's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) range: Range<usize>,
    pub(crate) is_zero: bool,
}

/// All of what is written at `offset`, cut where zeroes begin and end.
pub(crate) fn runs(data: &[u8], offset: u64) -> Vec<Run> {
    let mut found: Vec<Run> = vec![];
    let mut begin = 0;
    while begin < data.len() {
        let end = data.len().min(begin + grain_left(offset + begin as u64));
        let is_zero = is_zero(&data[begin..end]);
        match found.last_mut().filter(|last| last.is_zero == is_zero) {
            Some(last) => last.range.end = end,
            None => found.push(Run { range: begin..end, is_zero }),
        }
        begin = end;
    }
    found
}

fn grain_left(at: u64) -> usize {
    GRAIN_BYTES - usize::try_from(at % GRAIN_BYTES as u64).expect("it is less than a grain")
}

/// Most that is no zeroes shows it at once.
fn is_zero(grain: &[u8]) -> bool {
    grain == &ZEROES[..grain.len()]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::{DATA_BYTES_MAX, PIECES_MAX};

    #[test]
    fn runs_follow_the_disk_and_not_the_request() {
        let mut data = vec![0; 3 * GRAIN_BYTES];
        data[GRAIN_BYTES] = 1;
        let found = runs(&data, 512);
        let expected = [(0..GRAIN_BYTES - 512, true), (GRAIN_BYTES - 512..2 * GRAIN_BYTES - 512, false)];
        for (run, (range, is_zero)) in found.iter().zip(expected) {
            assert_eq!(run, &Run { range, is_zero });
        }
        assert_eq!(found.len(), 3);
        assert_eq!(runs(&[0; 512], 0), [Run { range: 0..512, is_zero: true }]);
    }

    proptest! {
        #[test]
        fn runs_are_the_whole_and_tell_the_truth(
            length in 1..=DATA_BYTES_MAX as usize, offset in 0..1_u64 << 40,
            at in prop::collection::vec(0..DATA_BYTES_MAX as usize, 0..6),
        ) {
            let mut data = vec![0; length];
            for at in at.into_iter().filter(|at| *at < length) {
                data[at] = 7;
            }
            let found = runs(&data, offset);
            prop_assert!(found.len() <= PIECES_MAX);
            let mut end = 0;
            for run in found {
                prop_assert_eq!(run.range.start, end);
                end = run.range.end;
                prop_assert!(run.is_zero == data[run.range].iter().all(|byte| *byte == 0));
            }
            prop_assert_eq!(end, length);
        }
    }
}
