//! Whether repeated passes over a disk come to an end while the VM writes. Pure.
//!
//! A copy goes through the disk once, then through what the VM wrote meanwhile, then through what it wrote during that. Each
//! pass leaves less to the next one, or the copy never ends.

use super::DiskState;

/// A pass that leaves more of what it began with gains too little.
const LEFT_MAX: f64 = 0.5;

/// How often one disk was gone through, and what it has brought.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Passes {
    under_way: Option<Pass>,
    last: Option<Gain>,
}

#[derive(Debug, Clone, Copy)]
struct Pass {
    /// It is over when so much was gone through.
    over_at_bytes: u64,
    /// What it has to go through.
    began_with_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gain {
    Enough,
    TooLittle,
}

impl Passes {
    /// Takes a reading. Readings come in the order of time.
    pub(super) fn record(&mut self, state: &DiskState) {
        if let Some(pass) = self.under_way {
            if state.copied_bytes < pass.over_at_bytes {
                return;
            }
            self.last = Some(pass.gain(state.left_bytes()));
        }
        self.under_way = Pass::following(state);
    }

    /// Whether all of it was gone through at least once.
    pub(super) fn is_gone_through(&self) -> bool {
        self.last.is_some()
    }

    /// Whether it was, and going on like that brings no end.
    pub(super) fn gain_too_little(&self) -> bool {
        self.last == Some(Gain::TooLittle)
    }
}

impl Pass {
    /// None while it is not known yet what there is.
    fn following(state: &DiskState) -> Option<Self> {
        let began_with_bytes = state.left_bytes();
        (state.total_bytes > 0).then_some(Self { over_at_bytes: state.total_bytes, began_with_bytes })
    }

    fn gain(&self, left_bytes: u64) -> Gain {
        let is_enough = (left_bytes as f64) <= self.began_with_bytes as f64 * LEFT_MAX;
        // Where there was nothing, nothing can be gained: the copy is about to be ready, or never is.
        if is_enough && self.began_with_bytes > 0 { Gain::Enough } else { Gain::TooLittle }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::storage::DiskName;

    const GRANULE: f64 = 65_536.0;

    fn state(copied: f64, left: f64) -> DiskState {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "they are small")]
        let [copied_bytes, left_bytes] = [copied as u64, left as u64];
        DiskState {
            copied_bytes,
            total_bytes: copied_bytes + left_bytes,
            ..DiskState::begun(DiskName::at(0).unwrap())
        }
    }

    /// Copies a disk in which so many parts of 64 KiB get dirty each second, anywhere; looks every 100 ms. How long it
    /// takes until going on like that gains too little, in s; none where it ends by itself.
    fn stuck_after_s(disk: f64, bytes_per_s: f64, writes_per_s: f64) -> Option<f64> {
        let (mut passes, mut copied, mut left) = (Passes::default(), 0.0, disk);
        let per_look = bytes_per_s / 10.0;
        for look in 0..1_000_000_u32 {
            passes.record(&state(copied, left));
            if passes.gain_too_little() {
                return Some(f64::from(look) / 10.0);
            }
            if left < 1.0 {
                return None;
            }
            let gone_through = per_look.min(left);
            copied += gone_through;
            left -= gone_through;
            // Dirty parts get no dirtier.
            let dirtied = writes_per_s / 10.0 * GRANULE * (1.0 - left / disk);
            left += if dirtied < per_look / 4.0 && left < per_look { 0.0 } else { dirtied };
        }
        panic!("it neither ends nor is it stuck");
    }

    #[test]
    fn it_is_gone_through_once_its_first_size_is_and_not_before_that_is_known() {
        let mut passes = Passes::default();
        passes.record(&state(0.0, 0.0));
        passes.record(&state(0.0, 100.0));
        passes.record(&state(99.0, 40.0));
        assert!(!passes.is_gone_through() && !passes.gain_too_little());
        passes.record(&state(100.0, 40.0));
        assert!(passes.is_gone_through() && !passes.gain_too_little());
        passes.record(&state(139.0, 39.0));
        assert!(!passes.gain_too_little(), "the second pass is under way");
        passes.record(&state(140.0, 39.0));
        assert!(passes.gain_too_little());
    }

    #[test]
    fn a_vm_that_writes_little_is_left_alone_and_one_that_writes_much_is_noticed() {
        assert_eq!(stuck_after_s(1e9, 1e7, 10.0), None);
        assert!(stuck_after_s(1e9, 1e7, 200.0).is_some_and(|after_s| after_s < 250.0));
    }

    proptest! {
        /// However fast it writes, it ends or is noticed within four times of what a disk takes that nobody writes to.
        #[test]
        fn no_copy_goes_on_without_end(
            disk in 1e7..1e11_f64, bytes_per_s in 1e5..1e10_f64, writes_per_s in 0.0..1e6_f64,
        ) {
            prop_assume!(disk / bytes_per_s < 20_000.0);
            if let Some(after_s) = stuck_after_s(disk, bytes_per_s, writes_per_s) {
                prop_assert!(after_s <= 4.0 * disk / bytes_per_s + 10.0, "{after_s} s");
            }
        }
    }
}
