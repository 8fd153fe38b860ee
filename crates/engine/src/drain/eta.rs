//! When a drain or a failback will be over.
//!
//! The estimate counts work: how long each VM's move would take alone, as planned. That includes steps whose time does
//! not depend on the memory, such as starting QEMU on the target: on busy cores, or with small VMs, they are most of
//! it. At first the plan says how fast that work goes, and soon the drain itself shows it.

use std::collections::VecDeque;

/// How fast it goes is measured over this, of time in which something was under way: long enough to hold the gaps
/// between VMs too.
const WINDOW_MS: f64 = 10_000.0;

/// If the steps before and after transfers are more than this share of the work, it goes by leaps. Then its pace is measured
/// over the last few VMs, within these bounds of time, so that it soon shows when cores become free or busy.
const LEAPS_FROM: f64 = 0.2;
const LEAPS_WINDOW_MS: f64 = 2_000.0;
const LEAPS_WINDOW_MS_MAX: f64 = 30_000.0;

/// At least this many VMs, or as many as are under way: VMs that were prepared together move together, and the wait before
/// that is part of the pace. The window begins when the VM before them has moved.
const WINDOW_VMS_MIN: u64 = 3;

/// The plan counts as if it had been seen to be right for so long at first, or for as long as one VM alone is to take
/// where work goes by leaps. It counts less and less until so much work was done, or so many VMs have moved: where
/// nothing moves, the reported time left grows.
const PLAN_COUNTS_MS: f64 = 4_000.0;
const PLAN_COUNTS_UNTIL_MS: f64 = 3_000.0;
const PLAN_COUNTS_UNTIL_VMS: f64 = 3.0;

/// The part that is assumed to be left of a VM that has sent all that was predicted.
const OVERDUE_SHARE: f64 = 0.02;

/// One VM's move, and how far it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// How far it is.
    pub stage: LoadStage,
    /// Its steps before and after the transfer, as planned; half of that before it.
    pub steps_ms: f64,
    /// Its transfer, as planned.
    pub transfer_ms: f64,
    /// Bytes that are to arrive, as predicted.
    pub predicted_bytes: u64,
    /// Bytes that have arrived.
    pub sent_bytes: u64,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadStage {
    /// It has not begun, or waits for others.
    ToCome,
    /// It is being prepared.
    Preparing,
    /// All is ready; it waits for its turn on the links.
    Ready,
    /// It is on them, or is taken over.
    OnLinks,
    /// The VM runs on its target.
    Moved,
    /// Nothing of it is to be expected any more.
    Over,
}

impl Load {
    fn is_under_way(&self) -> bool {
        matches!(self.stage, LoadStage::Preparing | LoadStage::Ready | LoadStage::OnLinks)
    }

    /// What was done for it. It is more than was planned where more has been sent, so that links which carry are seen to.
    fn done_ms(&self) -> f64 {
        match self.stage {
            LoadStage::ToCome | LoadStage::Preparing | LoadStage::Over => 0.0,
            LoadStage::Ready => self.steps_ms / 2.0,
            LoadStage::OnLinks => self.steps_ms / 2.0 + self.transfer_ms * self.sent_share(),
            LoadStage::Moved => self.steps_ms + self.transfer_ms * self.sent_share().max(1.0),
        }
    }

    fn sent_share(&self) -> f64 {
        if self.predicted_bytes == 0 { 0.0 } else { self.sent_bytes as f64 / self.predicted_bytes as f64 }
    }

    fn all_ms(&self) -> f64 {
        self.steps_ms + self.transfer_ms
    }

    /// The time that is left for it.
    pub fn left_ms(&self) -> f64 {
        let transfer_ms = self.transfer_ms * (1.0 - self.sent_share()).max(OVERDUE_SHARE);
        match self.stage {
            LoadStage::ToCome | LoadStage::Preparing => self.all_ms(),
            LoadStage::Ready => self.steps_ms / 2.0 + self.transfer_ms,
            LoadStage::OnLinks => self.steps_ms / 2.0 + transfer_ms,
            LoadStage::Moved | LoadStage::Over => 0.0,
        }
    }
}

/// How fast the work goes.
#[derive(Debug)]
pub struct Eta {
    // Work in a millisecond, by the plan.
    planned: f64,
    // By how much it goes at once.
    leap_ms: f64,
    // The last look, if something was under way then.
    last_look_ms: Option<f64>,
    // As of the last look.
    done_ms: f64,
    moved: u64,
    now: Mark,
    // Of the window, the oldest first.
    marks: VecDeque<Mark>,
    completion_ms: Option<f64>,
}

/// How much had been done by then.
#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    // For so long something was under way.
    active_ms: f64,
    work_ms: f64,
    moved: u64,
}

impl Eta {
    /// For moves that should be over after this time.
    pub fn planned(loads: impl Iterator<Item = Load>, predicted_ms: f64) -> Self {
        Self {
            planned: work_per_ms(loads, predicted_ms),
            leap_ms: 0.0,
            last_look_ms: None,
            done_ms: 0.0,
            moved: 0,
            now: Mark::default(),
            marks: VecDeque::from([Mark::default()]),
            completion_ms: None,
        }
    }

    /// A new plan has all that is left over after so long; what was measured recently goes before that.
    pub(super) fn replanned(&mut self, loads: impl Iterator<Item = Load>, predicted_ms: f64) {
        self.planned = work_per_ms(loads, predicted_ms);
    }

    /// Looks how far all are. To be asked some times a second.
    pub fn look(&mut self, now_ms: f64, loads: impl Iterator<Item = Load> + Clone) {
        let under_way = loads.clone().filter(Load::is_under_way).count() as u64;
        let is_under_way = under_way > 0;
        let done_ms: f64 = loads.clone().map(|load| load.done_ms()).sum();
        let (steps_ms, all_ms, count) =
            loads.clone().fold((0.0, 0.0, 0.0), |(steps_ms, all_ms, count), load| {
                (steps_ms + load.steps_ms, all_ms + load.all_ms(), count + 1.0)
            });
        let moved = loads.filter(|load| load.stage == LoadStage::Moved).count() as u64;
        if let Some(last_ms) = self.last_look_ms {
            self.now.active_ms += now_ms - last_ms;
        }
        // What has failed is done again: that was work too.
        self.now.work_ms += (done_ms - self.done_ms).max(0.0);
        self.now.moved += moved.saturating_sub(self.moved);
        (self.done_ms, self.moved) = (done_ms, moved);
        // While nothing is under way there is nothing to measure, for however long.
        if is_under_way || self.last_look_ms.is_some() {
            self.marks.push_back(self.now);
        }
        self.last_look_ms = is_under_way.then_some(now_ms);
        let leaps = steps_ms > LEAPS_FROM * all_ms;
        self.leap_ms = if leaps { all_ms / count } else { 0.0 };
        let vms = WINDOW_VMS_MIN.max(under_way);
        let is_before_window = |mark: &Mark| {
            let (watched_ms, moved) = (self.now.active_ms - mark.active_ms, self.now.moved - mark.moved);
            if leaps {
                watched_ms >= LEAPS_WINDOW_MS_MAX || watched_ms >= LEAPS_WINDOW_MS && moved > vms
            } else {
                watched_ms >= WINDOW_MS
            }
        };
        while self.marks.len() > 2 && self.marks.front().is_some_and(is_before_window) {
            self.marks.pop_front();
        }
    }

    /// From a VM's pause to the end of its migration.
    pub(super) fn completed_in(&mut self, ms: f64) {
        self.completion_ms = Some(self.completion_ms.map_or(ms, |before| f64::midpoint(before, ms)));
    }

    /// Milliseconds until all of this is over, which takes no less than one completion if one is still to come; none while
    /// nobody knows.
    pub fn left_ms(&self, loads: impl Iterator<Item = Load>, one_completes: bool) -> Option<f64> {
        let left_ms: f64 = loads.map(|load| load.left_ms()).sum();
        let completion_ms = self.completion_ms.filter(|_| one_completes).unwrap_or(0.0);
        let per_ms = self.work_per_ms();
        match left_ms {
            0.0 => Some(completion_ms),
            _ => (per_ms > 0.0).then(|| (left_ms / per_ms).max(completion_ms)),
        }
    }

    fn work_per_ms(&self) -> f64 {
        let since = self.marks.front().copied().unwrap_or_default();
        let (watched_ms, work_ms) = (self.now.active_ms - since.active_ms, self.now.work_ms - since.work_ms);
        let enough_ms = PLAN_COUNTS_UNTIL_MS.max(PLAN_COUNTS_UNTIL_VMS * self.leap_ms);
        let known = (self.now.work_ms / enough_ms).max(self.now.moved as f64 / PLAN_COUNTS_UNTIL_VMS);
        let plan_ms = PLAN_COUNTS_MS.max(self.leap_ms) * (1.0 - known.min(1.0));
        (plan_ms * self.planned + work_ms) / (plan_ms + watched_ms).max(f64::MIN_POSITIVE)
    }
}

fn work_per_ms(loads: impl Iterator<Item = Load>, predicted_ms: f64) -> f64 {
    loads.map(|load| load.left_ms()).sum::<f64>() / predicted_ms.max(1.0)
}

#[cfg(test)]
mod tests {
    use std::iter;

    use proptest::prelude::*;

    use super::*;

    /// VMs go one after the other: this one takes so long for its steps and as long for its transfer.
    #[derive(Debug, Clone, Copy)]
    struct Drained {
        steps_ms: f64,
        transfer_ms: f64,
    }

    impl Drained {
        /// The time until the next one begins.
        fn each_ms(self) -> f64 {
            self.steps_ms + self.transfer_ms + 200.0
        }

        /// The time left that is reported after so many like this one have moved.
        fn reported_after(self, vms: usize, bytes: u64) -> f64 {
            Self::reported(iter::repeat_n(self, vms), bytes)
        }

        /// The time left that is reported after these of 40 VMs have moved. By the plan each takes a second, half of it
        /// for the steps.
        fn reported(moved: impl Iterator<Item = Self>, bytes: u64) -> f64 {
            let planned = |stage, sent_bytes| Load {
                stage,
                steps_ms: 500.0,
                transfer_ms: 500.0,
                predicted_bytes: bytes,
                sent_bytes,
            };
            let mut loads = vec![planned(LoadStage::ToCome, 0); 40];
            let mut eta = Eta::planned(loads.iter().copied(), 40_000.0);
            let mut now_ms = 0.0;
            let mut look_for = |loads: &[Load], ms: f64| {
                let until_ms = now_ms + ms;
                while now_ms < until_ms {
                    eta.look(now_ms, loads.iter().copied());
                    now_ms += 200.0;
                }
                eta.left_ms(loads.iter().copied(), false).expect("it goes on")
            };
            let mut left_ms = f64::NAN;
            for (vm, Self { steps_ms, transfer_ms }) in moved.enumerate() {
                let stages = [
                    (LoadStage::Preparing, 0, steps_ms / 2.0),
                    (LoadStage::OnLinks, 0, transfer_ms),
                    (LoadStage::OnLinks, bytes, steps_ms / 2.0),
                    (LoadStage::Moved, bytes, 200.0),
                ];
                for (stage, sent_bytes, ms) in stages {
                    loads[vm] = planned(stage, sent_bytes);
                    left_ms = look_for(&loads, ms);
                }
            }
            left_ms
        }
    }

    #[test]
    fn the_time_left_is_by_what_the_vms_that_have_moved_took() {
        for (steps_ms, transfer_ms) in [(4_000.0, 1_000.0), (2_000.0, 3_000.0), (8_000.0, 8_000.0)] {
            let drained = Drained { steps_ms, transfer_ms };
            let each_ms = drained.each_ms();
            for (vms, within) in [(3, 0.35), (4, 0.2), (10, 0.15), (30, 0.15)] {
                let (reported_ms, left_ms) =
                    (drained.reported_after(vms, 1 << 20), (40 - vms) as f64 * each_ms);
                assert!(
                    (reported_ms / left_ms - 1.0).abs() < within,
                    "{reported_ms} reported of {left_ms} after {vms} of {each_ms}"
                );
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn where_the_next_vms_take_longer_or_shorter_the_time_left_is_by_them_after_some(
            // There are five looks a second.
            first in 1..50_u16,
            next in 1..10_u16,
            firsts in 0..15_usize,
        ) {
            let like = |ms: u16| Drained { steps_ms: 400.0 * f64::from(ms), transfer_ms: 400.0 * f64::from(ms) };
            let (first, next) = (like(first), like(next));
            let nexts = 4 + (0..30).take_while(|vms| f64::from(*vms) * next.each_ms() < LEAPS_WINDOW_MS).count();
            let moved = iter::repeat_n(first, firsts).chain(iter::repeat_n(next, nexts));
            let reported_ms = Drained::reported(moved, 1 << 20);
            let left_ms = (40 - firsts - nexts) as f64 * next.each_ms();
            prop_assert!((reported_ms / left_ms - 1.0).abs() < 0.3, "{reported_ms} reported of {left_ms} after {firsts} + {nexts}");
        }
    }

    #[test]
    fn vms_without_anything_to_send_count_too() {
        let reported_ms = Drained { steps_ms: 2_800.0, transfer_ms: 1_000.0 }.reported_after(10, 0);
        assert!((reported_ms / 120_000.0 - 1.0).abs() < 0.15, "{reported_ms}");
    }

    #[test]
    fn a_vm_that_sends_more_than_was_predicted_is_work_too() {
        let load = |stage, sent_bytes| Load {
            stage,
            steps_ms: 200.0,
            transfer_ms: 60_000.0,
            predicted_bytes: 60_000,
            sent_bytes,
        };
        let mut loads = vec![load(LoadStage::ToCome, 0); 10];
        let mut eta = Eta::planned(loads.iter().copied(), 602_000.0);
        let mut last_ms = f64::NAN;
        for look in 0..450 {
            let ms = look * 200;
            loads[0] = load(LoadStage::OnLinks, ms);
            eta.look(ms as f64, loads.iter().copied());
            last_ms = eta.left_ms(loads.iter().copied(), false).expect("it goes on");
            let others_ms = 9.0 * 60_200.0;
            assert!((others_ms * 0.9..others_ms * 1.3).contains(&last_ms), "{last_ms} after {ms}");
        }
        loads[0] = load(LoadStage::Moved, 90_000);
        eta.look(90_000.0, loads.iter().copied());
        let left_ms = eta.left_ms(loads.iter().copied(), false).expect("it goes on");
        assert!((left_ms / last_ms - 1.0).abs() < 0.05, "{left_ms} after {last_ms}");
    }

    #[test]
    fn a_drain_that_waits_keeps_no_more_and_more() {
        let waits = [Load {
            stage: LoadStage::ToCome,
            steps_ms: 1.0,
            transfer_ms: 1.0,
            predicted_bytes: 1,
            sent_bytes: 0,
        }];
        let mut eta = Eta::planned(waits.into_iter(), 2.0);
        (0..1_000).for_each(|look| eta.look(f64::from(look) * 200.0, waits.into_iter()));
        assert!(eta.marks.len() < 3, "{}", eta.marks.len());
    }

    #[test]
    fn time_in_which_nothing_could_be_under_way_does_not_count() {
        let load =
            |stage| Load { stage, steps_ms: 0.0, transfer_ms: 1_000.0, predicted_bytes: 1, sent_bytes: 0 };
        let mut eta = Eta::planned([load(LoadStage::ToCome)].into_iter(), 1_000.0);
        eta.look(0.0, [load(LoadStage::ToCome)].into_iter());
        eta.look(300_000.0, [load(LoadStage::ToCome)].into_iter());
        assert_eq!(eta.left_ms([load(LoadStage::ToCome)].into_iter(), false), Some(1_000.0));
        eta.look(300_200.0, [load(LoadStage::Preparing)].into_iter());
        eta.look(330_000.0, [load(LoadStage::Preparing)].into_iter());
        let left_ms = eta.left_ms([load(LoadStage::Preparing)].into_iter(), false);
        assert_eq!(left_ms.map(f64::round), Some(8_450.0), "nothing has come of 30 s");
    }
}
