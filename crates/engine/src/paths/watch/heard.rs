//! Which of the other end's hellos have been heard on one path.

/// Hellos that count for the loss: of the steady ones those of the last 6.4 s.
pub(super) const WINDOW: u32 = u128::BITS;

/// The hellos heard on one path: bit 0 is the newest, bit 1 the one sent before it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Heard {
    pub(super) newest: u64,
    bits: u128,
    expected: u32,
}

impl Heard {
    pub(super) fn first(sequence: u64) -> Self {
        Self { newest: sequence, bits: 1, expected: 1 }
    }

    /// Counts no losses any more, and takes no replay for new.
    pub(super) fn forget(&mut self) {
        *self = Self { newest: self.newest, ..Self::default() };
    }

    /// Whether nothing counts yet.
    pub(super) fn is_empty(self) -> bool {
        self.expected == 0
    }

    /// Whether the window is full: no more will count.
    pub(super) fn is_full(self) -> bool {
        self.expected == WINDOW
    }

    pub(super) fn next(self, sequence: u64) -> Self {
        let ahead = u32::try_from(sequence.saturating_sub(self.newest)).unwrap_or(u32::MAX);
        Self {
            newest: sequence,
            bits: self.bits.checked_shl(ahead).unwrap_or(0) | 1,
            expected: self.expected.saturating_add(ahead).min(WINDOW),
        }
    }

    pub(super) fn record_late(&mut self, sequence: u64) {
        let behind = u32::try_from(self.newest.saturating_sub(sequence)).unwrap_or(u32::MAX);
        // One from before the window began does not count.
        if behind < self.expected {
            self.bits |= 1_u128.checked_shl(behind).unwrap_or(0);
        }
    }

    /// How many times hellos were lost. Those lost in a row were lost once: a short silence, over now.
    pub(super) fn losses(self) -> u8 {
        let window = u128::MAX.checked_shr(WINDOW - self.expected).unwrap_or(0);
        let lost = !self.bits & window;
        let first_of_each_row = lost & !(lost << 1);
        u8::try_from(first_of_each_row.count_ones()).unwrap_or(u8::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hellos_lost_in_a_row_count_once(lost in prop::collection::btree_set(1_u64..127, 0..80)) {
            let mut heard = Heard::first(0);
            for sequence in (1..128).filter(|sequence| !lost.contains(sequence)) {
                heard = heard.next(sequence);
            }
            let rows = lost.iter().filter(|sequence| !lost.contains(&(*sequence + 1))).count();
            prop_assert_eq!(usize::from(heard.losses()), rows);
        }

        #[test]
        fn what_comes_late_was_not_lost(mut order in Just((1_u64..100).collect::<Vec<_>>()).prop_shuffle()) {
            let mut heard = Heard::first(0);
            order.push(100);
            for sequence in order {
                if sequence > heard.newest {
                    heard = heard.next(sequence);
                } else {
                    heard.record_late(sequence);
                }
            }
            prop_assert_eq!(heard.losses(), 0);
        }
    }
}
