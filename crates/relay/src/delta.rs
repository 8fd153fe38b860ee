//! The difference between two versions of a page: runs of changed bytes, each preceded by the number of equal bytes
//! before it. Numbers are little-endian and have two bytes.

use crate::error::RelayError;
use crate::multifd::PAGE_BYTES;

/// Bytes that are compared at once. A run is as many of them as differ in a row.
const WORD: usize = 8;

/// Numbers before each run.
const RUN_HEADER: usize = 4;

/// A longer delta is not worth it: the page goes whole, and a codec packs it.
pub(crate) const DELTA_BYTES_MAX: usize = PAGE_BYTES / 2;

/// Appends what turns `base` into `page`, both of [`PAGE_BYTES`]. False, with `delta` as it was, if that is too
/// long.
pub(crate) fn encode(base: &[u8], page: &[u8], delta: &mut Vec<u8>) -> bool {
    let begin = delta.len();
    let mut differs = [false; PAGE_BYTES / WORD];
    let words = base.chunks_exact(WORD).zip(page.chunks_exact(WORD));
    differs.iter_mut().zip(words).for_each(|(differs, (base, page))| *differs = base != page);
    let (mut at, mut written) = (0, 0);
    while let Some(skip) = differs[at..].iter().position(|differs| *differs) {
        let from = at + skip;
        let to = differs[from..].iter().position(|differs| !differs).map_or(differs.len(), |run| from + run);
        let bytes = &page[from * WORD..to * WORD];
        if delta.len() - begin + RUN_HEADER + bytes.len() > DELTA_BYTES_MAX {
            delta.truncate(begin);
            return false;
        }
        for number in [from * WORD - written, bytes.len()] {
            delta.extend_from_slice(&u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes());
        }
        delta.extend_from_slice(bytes);
        (at, written) = (to, to * WORD);
    }
    true
}

/// Changes `page`, which is the base, as `delta` says.
pub(crate) fn apply(mut delta: &[u8], page: &mut [u8]) -> Result<(), RelayError> {
    let malformed = RelayError::Malformed("changes of a page that lie outside of it");
    let mut at = 0;
    while let Some((header, rest)) = delta.split_first_chunk::<RUN_HEADER>() {
        let [s0, s1, l0, l1] = *header;
        at += usize::from(u16::from_le_bytes([s0, s1]));
        let run = usize::from(u16::from_le_bytes([l0, l1]));
        let (Some(bytes), Some(changed)) = (rest.get(..run), page.get_mut(at..at + run)) else {
            return Err(malformed);
        };
        changed.copy_from_slice(bytes);
        at += run;
        delta = &rest[run..];
    }
    if delta.is_empty() { Ok(()) } else { Err(malformed) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_changed_comes_back(
            changes in prop::collection::vec((0..PAGE_BYTES, any::<u8>(), 1..60_usize), 0..40),
        ) {
            let base: Vec<u8> = (0..PAGE_BYTES / WORD).flat_map(|word| (word * word).to_le_bytes()).collect();
            let mut page = base.clone();
            for (at, byte, count) in changes {
                let end = (at + count).min(PAGE_BYTES);
                page[at..end].fill(byte);
            }
            let mut delta = b"before".to_vec();
            if encode(&base, &page, &mut delta) {
                let mut changed = base.clone();
                apply(&delta[6..], &mut changed).unwrap();
                prop_assert!(changed == page);
                prop_assert!(delta.len() <= 6 + DELTA_BYTES_MAX);
            } else {
                prop_assert_eq!(delta, b"before");
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(delta in prop::collection::vec(any::<u8>(), 0..300), small: bool) {
            let mut delta = delta;
            if small {
                // Numbers that lie within the page more often.
                delta.iter_mut().skip(1).step_by(2).for_each(|byte| *byte %= 4);
            }
            drop(apply(&delta, &mut vec![0; PAGE_BYTES]));
        }
    }

    #[test]
    fn a_page_that_is_another_one_is_none_that_has_changed() {
        let mut delta = vec![];
        assert!(!encode(&[0; PAGE_BYTES], &[1; PAGE_BYTES], &mut delta));
        assert!(delta.is_empty());
        assert!(encode(&[1; PAGE_BYTES], &[1; PAGE_BYTES], &mut delta));
        assert!(delta.is_empty());
    }
}
