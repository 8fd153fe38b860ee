//! How far a VM's CPUs are throttled because its memory gets dirty too fast to be sent.
//!
//! A VM whose memory gets dirty less than half as fast as it is sent leaves less than half for each next round, and
//! converges by itself: it is left alone. Any other is throttled further step by step. QEMU's `auto-converge` has the
//! same rule, and cannot be used (docs/decisions/0053).

use crate::transfer::transferred::Transferred;

/// The most that may be asked for, in percent: with less than nothing left, the guest would answer nobody.
pub const THROTTLE_PERCENT_MAX: u8 = 99;

/// At first, and each time that it was not enough, in percent. Each step costs rounds over all that gets dirty.
const FIRST_PERCENT: u8 = 30;
const STEP_PERCENT: u8 = 20;

/// Rounds are judged over such a time at least: within less, bursts would be taken for rates.
const JUDGED_OVER_MS: f64 = 1_000.0;

/// How often in a row, or with better times in between, it got dirty too fast before a step.
const TOO_FAST_BEFORE_STEP: u8 = 2;

/// While nothing arrives for this long, nobody is held back: it would help nobody.
const HELD_OFF_AFTER_MS: f64 = 1_000.0;

/// The decision for one migration.
#[derive(Debug, Clone, Default)]
pub(crate) struct Throttle {
    most_percent: u8,
    percent: u8,
    times_too_fast: u8,
    is_held_off: bool,
    was_held_off: bool,
    judged: Option<Judged>,
}

/// Where the time that is judged next begins.
#[derive(Debug, Clone, Copy)]
struct Judged {
    at_ms: f64,
    passed_bytes: u64,
    rounds: u64,
}

impl Throttle {
    /// With this share of its time at most, in percent; 0 for never.
    pub(crate) fn new(most_percent: u8) -> Self {
        Self { most_percent, ..Self::default() }
    }

    /// The share of their time for which the CPUs are to be held back now, in percent.
    pub(crate) fn percent(&self) -> Option<u8> {
        (self.percent > 0 && !self.is_held_off).then_some(self.percent)
    }

    /// The most that may be asked for, in percent; 0 for never.
    pub(crate) fn most_percent(&self) -> u8 {
        self.most_percent
    }

    /// From now on never.
    pub(crate) fn give_up(&mut self) {
        *self = Self::default();
    }

    /// Time has passed, and for so long nothing has arrived. True when that ends the throttle for the first time.
    pub(crate) fn wait(&mut self, silent_ms: f64) -> bool {
        let is_on = self.percent().is_some();
        self.is_held_off = silent_ms >= HELD_OFF_AFTER_MS;
        if self.is_held_off {
            // What did not arrive says nothing of the VM.
            self.judged = None;
        }
        is_on && self.is_held_off && !std::mem::replace(&mut self.was_held_off, true)
    }

    /// Takes a reading for [`Self::wait`].
    pub(crate) fn record(&mut self, now_ms: f64, transferred: &Transferred) {
        let &Transferred { passed_bytes, rounds, .. } = transferred;
        let now = Judged { at_ms: now_ms, passed_bytes, rounds };
        if self.is_held_off || self.most_percent == 0 {
            return;
        }
        let since = *self.judged.get_or_insert(now);
        let passed_ms = now_ms - since.at_ms;
        if rounds <= since.rounds || passed_ms < JUDGED_OVER_MS {
            return;
        }
        self.judged = Some(now);
        let sent_bytes_per_s = passed_bytes.saturating_sub(since.passed_bytes) as f64 * 1e3 / passed_ms;
        if transferred.dirty_bytes_per_s as f64 > sent_bytes_per_s / 2.0 {
            self.too_fast();
        }
    }

    fn too_fast(&mut self) {
        self.times_too_fast += 1;
        if self.times_too_fast < TOO_FAST_BEFORE_STEP {
            return;
        }
        self.times_too_fast = 0;
        let next = if self.percent == 0 { FIRST_PERCENT } else { self.percent.saturating_add(STEP_PERCENT) };
        self.percent = next.min(self.most_percent);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A transfer of 100 MB/s in rounds of a second, looked at ten times in each.
    struct Sending {
        throttle: Throttle,
        now_ms: f64,
        transferred: Transferred,
    }

    impl Sending {
        fn new(most_percent: u8) -> Self {
            let transferred = Transferred { rounds: 1, ..Transferred::default() };
            let mut sending = Self { throttle: Throttle::new(most_percent), now_ms: 0.0, transferred };
            sending.look(0, 0.0);
            sending
        }

        fn look(&mut self, bytes: u64, silent_ms: f64) {
            self.now_ms += 100.0;
            self.transferred.passed_bytes += bytes;
            self.throttle.wait(silent_ms);
            self.throttle.record(self.now_ms, &self.transferred);
        }

        /// A round in which so many MB/s get dirty.
        fn round(&mut self, dirty_mb_per_s: u64) -> Option<u8> {
            for _ in 0..10 {
                self.look(10_000_000, 0.0);
            }
            self.transferred.rounds += 1;
            self.transferred.dirty_bytes_per_s = dirty_mb_per_s * 1_000_000;
            self.look(10_000_000, 0.0);
            self.throttle.percent()
        }

        fn silence(&mut self, seconds: u32) -> Option<u8> {
            for tenth in 1..=seconds * 10 {
                self.look(0, f64::from(tenth) * 100.0);
            }
            self.throttle.percent()
        }
    }

    #[test]
    fn what_gets_dirty_too_fast_is_held_back_by_steps_up_to_what_is_allowed() {
        for (most, steps) in [(80, [30, 50, 70, 80, 80]), (99, [30, 50, 70, 90, 99]), (10, [10; 5])] {
            let mut sending = Sending::new(most);
            for step in steps {
                let before = sending.throttle.percent();
                assert_eq!(sending.round(60), before, "once is not enough");
                assert_eq!(sending.round(60), Some(step));
            }
        }
    }

    #[test]
    fn what_converges_by_itself_is_not_touched_nor_what_may_not_be() {
        let (mut slow, mut forbidden) = (Sending::new(80), Sending::new(0));
        for _ in 0..10 {
            assert_eq!((slow.round(40), forbidden.round(200)), (None, None));
        }
    }

    #[test]
    fn short_rounds_are_judged_together() {
        let mut sending = Sending::new(80);
        sending.transferred.dirty_bytes_per_s = 90_000_000;
        for _ in 0..15 {
            sending.transferred.rounds += 1;
            sending.look(10_000_000, 0.0);
        }
        assert_eq!(sending.throttle.percent(), None, "it was judged once in that second and a half");
        for _ in 0..10 {
            sending.transferred.rounds += 1;
            sending.look(10_000_000, 0.0);
        }
        assert_eq!(sending.throttle.percent(), Some(30));
    }

    #[test]
    fn while_nothing_arrives_it_is_held_off_and_nothing_is_judged() {
        let mut sending = Sending::new(80);
        assert_eq!((sending.round(60), sending.round(60)), (None, Some(30)));
        assert_eq!(sending.silence(20), None);
        // The state is as before once something arrives, and the time of silence does not count.
        sending.transferred.rounds += 1;
        sending.look(10_000_000, 0.0);
        assert_eq!(sending.throttle.percent(), Some(30));
        for _ in 0..5 {
            assert_eq!(sending.round(40), Some(30));
        }
    }

    #[test]
    fn what_cannot_be_held_back_is_not_asked_for_again() {
        let mut sending = Sending::new(80);
        assert_eq!((sending.round(60), sending.round(60)), (None, Some(30)));
        sending.throttle.give_up();
        assert_eq!((sending.round(60), sending.round(60)), (None, None));
    }
}
