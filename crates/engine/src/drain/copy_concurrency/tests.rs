use proptest::prelude::*;

use super::super::disks::{DrainedDisk, device_pairs};
use super::*;
use crate::estimate::load::whole_bytes;
use crate::storage::{CopyReason, DiskCopy, DiskImage, DiskName};

const TICK_MS: f64 = 200.0;

fn pair(from_device: u64) -> DevicePair {
    let copy = DiskCopy {
        disk: DiskName::at(0).unwrap(),
        from: "/srv/disk".into(),
        to: "/srv/disk".into(),
        image: DiskImage::Raw,
        size_bytes: 1,
        allocated_bytes: 1,
        why: CopyReason::NotSeen,
        is_flattened: false,
        from_device: None,
    };
    device_pairs("b", &[DrainedDisk { copy, from_device, to_device: 7 }]).pop_first().unwrap()
}

/// Endless disks to copy. How many bytes per millisecond they carry depends on the number of copies between each pair.
struct Disks<F: Fn(&Busy) -> f64> {
    copy_concurrency: CopyConcurrency,
    wanted: BTreeSet<DevicePair>,
    carries: F,
    now_ms: f64,
    copied_bytes: f64,
}

impl<F: Fn(&Busy) -> f64> Disks<F> {
    fn new(count: u64, carries: F) -> Self {
        let wanted = (0..count).map(pair).collect();
        Self { copy_concurrency: CopyConcurrency::default(), wanted, carries, now_ms: 0.0, copied_bytes: 0.0 }
    }

    /// As many copies between each pair as may be, all the time.
    fn busy(&self) -> Busy {
        self.wanted.iter().map(|pair| (pair.clone(), self.copy_concurrency.allowed(pair))).collect()
    }

    fn run(&mut self, ms: f64) {
        let end_ms = self.now_ms + ms;
        while self.now_ms < end_ms {
            let busy = self.busy();
            self.now_ms += TICK_MS;
            self.copied_bytes += (self.carries)(&busy) * TICK_MS;
            self.copy_concurrency.observe(
                self.now_ms,
                Some(whole_bytes(self.copied_bytes)),
                &busy,
                &self.wanted,
            );
        }
    }

    fn allowed(&self) -> Vec<u8> {
        self.wanted.iter().map(|pair| self.copy_concurrency.allowed(pair)).collect()
    }

    /// The share of this time in which there were no more than this many copies between the first pair.
    fn share_within(&mut self, ms: f64, most: u8) -> f64 {
        let looks = 1_000_u32;
        let mut within = 0;
        for _ in 0..looks {
            self.run(ms / f64::from(looks));
            within += u32::from(self.allowed()[0] <= most);
        }
        f64::from(within) / f64::from(looks)
    }
}

fn count(busy: &Busy) -> f64 {
    busy.values().map(|count| f64::from(*count)).sum()
}

#[test]
fn each_pair_begins_with_one() {
    let copies = CopyConcurrency::default();
    let (one, other) = (pair(0), pair(1));
    let busy = Busy::from([(one.clone(), 1)]);
    assert!(!copies.have_room(&BTreeSet::from([one.clone()]), &busy));
    assert!(copies.have_room(&BTreeSet::from([other.clone()]), &busy));
    assert!(!copies.have_room(&BTreeSet::from([one, other]), &busy), "one of its disks is in the way");
}

#[test]
fn a_disk_that_seeks_has_one_at_a_time_but_for_seldom_tries() {
    let mut disks = Disks::new(1, |busy| 100_000.0 / count(busy));
    disks.run(12_000.0);
    assert_eq!(disks.allowed(), [1]);
    let share = disks.share_within(1_800_000.0, 1);
    assert!(share > 0.95, "{share}");
}

#[test]
fn a_disk_that_carries_more_with_three_gets_three() {
    let mut disks = Disks::new(1, |busy| 30_000.0 * count(busy).min(3.0));
    disks.run(20_000.0);
    assert_eq!(disks.allowed(), [3]);
    assert!(disks.share_within(1_800_000.0, 3) > 0.95);
}

/// What is carried in ten minutes, as a share of what the best fixed number carries: with the number that is found,
/// with one, and with four.
fn of_best_fixed(carries: impl Fn(f64) -> f64) -> [f64; 3] {
    let mut disks = Disks::new(1, |busy| carries(count(busy)));
    disks.run(600_000.0);
    let fixed = [1.0, 2.0, 3.0, 4.0].map(&carries);
    let best = fixed.into_iter().fold(0.0, f64::max);
    [disks.copied_bytes / disks.now_ms, fixed[0], fixed[3]].map(|carried| carried / best)
}

/// A disk that reads 1 MiB in 7 ms, and needs 8 ms to get from one copy's place to another's.
#[test]
fn no_fixed_number_is_as_good_for_disks_that_seek_and_for_those_that_carry_more_together() {
    let [found, one, four] = of_best_fixed(|copies| if copies > 1.0 { 70_000.0 } else { 150_000.0 });
    assert!(found > 0.95 && one > 0.99 && four < 0.5, "{found:.3} {one:.3} {four:.3} of a disk that seeks");
    let [found, one, four] = of_best_fixed(|copies| 200_000.0 * copies.min(3.0));
    assert!(found > 0.95 && one < 0.4 && four > 0.99, "{found:.3} {one:.3} {four:.3} of an array");
}

#[test]
fn full_links_get_no_more() {
    let mut disks = Disks::new(2, |busy| 30_000.0 * count(busy));
    disks.copy_concurrency.carry_at_most(Some(60_000.0));
    disks.run(600_000.0);
    assert_eq!(disks.allowed(), [1, 1]);
}

#[test]
fn each_pair_gets_what_its_disks_bear() {
    let (one, other) = (pair(0), pair(1));
    let of = move |busy: &Busy, pair: &DevicePair| f64::from(busy.get(pair).copied().unwrap_or(0));
    let mut disks =
        Disks::new(2, move |busy| 50_000.0 * of(busy, &one).min(2.0) + 40_000.0 / of(busy, &other));
    disks.run(60_000.0);
    assert_eq!(disks.allowed()[0], 2, "this one is fast");
    let share = disks.share_within(600_000.0, 2);
    assert!(share > 0.9, "{share}");
}

#[test]
fn nothing_is_learnt_beside_memory_and_a_try_ends_with_who_wanted_it() {
    let (mut copies, one) = (CopyConcurrency::default(), pair(0));
    let (busy, wanted) = (Busy::from([(one.clone(), 1)]), BTreeSet::from([one.clone()]));
    let mut now_ms = 0.0;
    let mut watch = |copies: &mut CopyConcurrency, is_alone: bool, wanted: &BTreeSet<DevicePair>| {
        for _ in 0..60 {
            now_ms += TICK_MS;
            copies.observe(now_ms, is_alone.then_some(whole_bytes(now_ms * 1_000.0)), &busy, wanted);
        }
    };
    watch(&mut copies, false, &wanted);
    assert_eq!(copies.allowed(&one), 1);
    watch(&mut copies, true, &wanted);
    assert_eq!(copies.allowed(&one), 2);
    watch(&mut copies, true, &BTreeSet::new());
    assert_eq!(copies.allowed(&one), 1);
}

proptest! {
    #[test]
    fn whatever_is_seen_each_pair_has_one_to_four_and_one_is_tried_at_a_time(
        looks in prop::collection::vec(
            (0.0..3_000.0_f64, prop::option::weighted(0.8, 0..1_000_000_u64), prop::collection::vec(0..6_u8, 3), 0..8_u8),
            0..200,
        ),
    ) {
        let (mut copies, mut now_ms, mut copied) = (CopyConcurrency::default(), 0.0, 0);
        for (ms, more, counts, wants) in looks {
            now_ms += ms;
            let each = (0..).zip(&counts).filter(|(_, count)| **count > 0);
            let busy: Busy = each.map(|(index, count)| (pair(index), *count)).collect();
            let wanted = (0..3).filter(|index| wants & (1 << index) != 0).map(pair).collect();
            let before: Vec<u8> = (0..3).map(|index| copies.allowed(&pair(index))).collect();
            copies.observe(now_ms, more.map(|more| { copied += more; copied }), &busy, &wanted);
            let after: Vec<u8> = (0..3).map(|index| copies.allowed(&pair(index))).collect();
            prop_assert!(after.iter().all(|allowed| (1..=COPIES_MAX).contains(allowed)), "{after:?}");
            let grown = before.iter().zip(&after).filter(|(before, after)| after > before).count();
            prop_assert!(grown <= 1, "{before:?} {after:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn what_carries_no_more_is_left_again(quarters in 4..16_u8, each in 1_000.0..1e6_f64) {
        let (most, best) = (f64::from(quarters) / 4.0, quarters.div_ceil(4));
        let mut disks = Disks::new(1, |busy| each * count(busy).min(most));
        let share = disks.share_within(600_000.0, best);
        prop_assert!(share > 0.85, "{share} of the time with {best} at most");
        prop_assert!(disks.allowed()[0] >= best, "{:?} for {most}", disks.allowed());
    }
}
