//! Which part of a disk was written, or found to be what would be written. Pure.

use std::collections::BTreeMap;

/// How many separate ranges are kept. A copy that goes through the disk in order has a few.
const RANGES_MAX: usize = 1 << 16;

/// What is covered of a disk. It may forget, but never has more than there was.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    // The ends, by their begins; none touches another.
    ranges: BTreeMap<u64, u64>,
}

impl Coverage {
    /// From `begin` to before `end`.
    pub(crate) fn add(&mut self, mut begin: u64, mut end: u64) {
        while let Some((other, its_end)) = self.touching(begin, end) {
            self.ranges.remove(&other);
            (begin, end) = (begin.min(other), end.max(its_end));
        }
        if self.ranges.len() < RANGES_MAX {
            self.ranges.insert(begin, end);
        }
    }

    fn touching(&self, begin: u64, end: u64) -> Option<(u64, u64)> {
        // The last that begins before its end; those before it end before it.
        let (other, its_end) = self.ranges.range(..=end).next_back()?;
        (*its_end >= begin).then_some((*other, *its_end))
    }

    /// Whether that is all of a disk of this size.
    pub(crate) fn is_all(&self, disk_bytes: u64) -> bool {
        disk_bytes == 0 || self.ranges.get(&0).is_some_and(|end| *end >= disk_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_has_what_was_added_and_no_more(
            added in proptest::collection::vec((0..40_usize, 1..9_usize), 0..60), disk_bytes in 1..40_usize,
        ) {
            let mut coverage = Coverage::default();
            let mut bytes = [false; 64];
            for (begin, length) in added {
                coverage.add(begin as u64, (begin + length) as u64);
                bytes[begin..begin + length].fill(true);
                for (byte, is_covered) in bytes.iter().enumerate() {
                    let at = byte as u64;
                    let found = coverage.ranges.iter().filter(|(begin, end)| (**begin..**end).contains(&at));
                    prop_assert_eq!(found.count(), usize::from(*is_covered));
                }
            }
            prop_assert_eq!(coverage.is_all(disk_bytes as u64), bytes[..disk_bytes].iter().all(|byte| *byte));
        }
    }

    #[test]
    fn it_is_bounded() {
        let mut coverage = Coverage::default();
        for at in 0..2 * RANGES_MAX as u64 {
            coverage.add(2 * at, 2 * at + 1);
        }
        assert_eq!(coverage.ranges.len(), RANGES_MAX);
        coverage.add(0, 1 << 40);
        assert!(coverage.is_all(1 << 40));
    }
}
