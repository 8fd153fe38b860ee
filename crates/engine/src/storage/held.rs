//! How far a VM's writes are held back if they cannot wait for the target. Pure.
//!
//! A copy that follows a VM goes again and again through what the VM has written since the last pass. When nothing is
//! left, it has caught up. If it catches up every few looks, the VM's pause suffices for the rest, however fast the
//! links are. If it does not, and the rest does not shrink by at least half of what is copied either, the VM's writes
//! are limited: they may cause half as much copying as is done, then half of that, and so on. While the copy keeps up,
//! the limit doubles again, up to the first one.

/// Limits of a VM's writes to all disks that are copied, together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteLimit {
    /// Bytes each second, at least 1.
    pub bytes_per_s: u64,
    /// Writes each second, at least 1.
    pub writes_per_s: u64,
}

/// A write is copied with all of this around it.
const GRANULE_BYTES: f64 = 65_536.0;

/// With no more than this left, a copy has caught up: there is a write under way at nearly any time.
const CAUGHT_UP_BYTES: u64 = 2 * 65_536;

/// A copy that is longer behind than this does not keep up.
const BEHIND_MS_MAX: f64 = 300.0;

/// So long it must have kept up.
const STEADY_MS: f64 = 500.0;

/// One that does not is judged over such a time.
const JUDGED_OVER_MS: f64 = 1_000.0;

/// What has kept up for so long may be held back less.
const RISES_AFTER_MS: f64 = 5_000.0;

/// For a VM whose copy has been too fast to be measured.
const COPIED_BYTES_PER_S_MIN: f64 = 2_000_000.0;

/// No VM is held back further: it would answer nobody.
const DIRTY_BYTES_PER_S_MIN: f64 = 524_288.0;

/// The decision for one migration.
#[derive(Debug, Clone, Default)]
pub(crate) struct HeldWrites {
    /// What the VM may make to be copied again; and what it might at first.
    dirty_bytes_per_s_max: Option<f64>,
    first_bytes_per_s_max: f64,
    /// Since when that is not more than was kept up with.
    risen_ms: f64,
    judged: Option<Judged>,
    caught_up_ms: Option<f64>,
    steady_since_ms: Option<f64>,
}

/// How far the copies of all disks are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading {
    pub(crate) copied_bytes: u64,
    pub(crate) left_bytes: u64,
    /// Whether all of each was there once.
    pub(crate) are_ready: bool,
}

/// Where the time that is judged next begins.
#[derive(Debug, Clone, Copy)]
struct Judged {
    at_ms: f64,
    reading: Reading,
}

impl HeldWrites {
    /// How far they are held back now; absent while they are not.
    pub(crate) fn limit(&self) -> Option<WriteLimit> {
        // A small write makes as much to be copied as a large one: the half for each.
        let half = self.dirty_bytes_per_s_max? / 2.0;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
        let [bytes_per_s, writes_per_s] = [half as u64, (half / GRANULE_BYTES) as u64];
        Some(WriteLimit { bytes_per_s: bytes_per_s.max(1), writes_per_s: writes_per_s.max(1) })
    }

    /// Whether what is left at any moment is little.
    pub(crate) fn keep_up(&self, now_ms: f64) -> bool {
        let is_steady = self.steady_since_ms.is_some_and(|since_ms| now_ms - since_ms >= STEADY_MS);
        is_steady && self.caught_up_ms.is_some_and(|at_ms| now_ms - at_ms <= BEHIND_MS_MAX)
    }

    /// Whether the VM may be paused: they are held back, and what is left then is little.
    pub(crate) fn let_pause(&self, now_ms: f64) -> bool {
        self.dirty_bytes_per_s_max.is_some() && self.keep_up(now_ms)
    }

    /// They are, from now on in any case: to half of what is copied at its best.
    pub(crate) fn begin(&mut self, copied_bytes_per_s: f64) {
        if self.dirty_bytes_per_s_max.is_none() {
            self.hold_to(copied_bytes_per_s.max(COPIED_BYTES_PER_S_MIN));
            // What was before says nothing of that: what was copied fastest may have been holes.
            (self.judged, self.steady_since_ms) = (None, None);
        }
    }

    /// Takes a reading. Readings come in the order of time. Where it does not matter whether the copy keeps up, nobody is held
    /// back further.
    pub(crate) fn record(&mut self, now_ms: f64, reading: Reading, matters: bool) {
        self.look_behind(now_ms, reading);
        let now = Judged { at_ms: now_ms, reading };
        if self.keep_up(now_ms) {
            self.rise(now_ms);
            self.judged = Some(now);
        } else {
            self.risen_ms = now_ms;
        }
        let since = self.judged.filter(|judged| judged.at_ms <= now_ms).unwrap_or(now);
        self.judged = Some(since);
        let passed_ms = now_ms - since.at_ms;
        if passed_ms < JUDGED_OVER_MS {
            return;
        }
        self.judged = Some(now);
        if !matters {
            return;
        }
        let gone_through = reading.copied_bytes.saturating_sub(since.reading.copied_bytes) as f64;
        let less = since.reading.left_bytes as f64 - reading.left_bytes as f64;
        if less < gone_through / 2.0 {
            self.hold_to(gone_through * 1e3 / passed_ms);
        }
    }

    fn look_behind(&mut self, now_ms: f64, reading: Reading) {
        if reading.are_ready && reading.left_bytes <= CAUGHT_UP_BYTES {
            self.caught_up_ms = Some(now_ms);
            // A clock that was put back must not make this wait for what it showed before.
            let since_ms = self.steady_since_ms.map_or(now_ms, |since_ms| since_ms.min(now_ms));
            self.steady_since_ms = Some(since_ms);
        } else if self.caught_up_ms.is_none_or(|at_ms| now_ms - at_ms > BEHIND_MS_MAX) {
            self.steady_since_ms = None;
        }
    }

    /// To half of what was allowed before, or of this at first: one slow second, as while a link is lost, is no reason for more.
    fn hold_to(&mut self, bytes_per_s: f64) {
        let half = |bytes_per_s: f64| (bytes_per_s / 2.0).max(DIRTY_BYTES_PER_S_MIN);
        let most = half(self.dirty_bytes_per_s_max.unwrap_or(bytes_per_s));
        // The first is the largest.
        self.first_bytes_per_s_max = self.first_bytes_per_s_max.max(most);
        self.dirty_bytes_per_s_max = Some(most);
    }

    fn rise(&mut self, now_ms: f64) {
        if let Some(most) = self.dirty_bytes_per_s_max.as_mut()
            && now_ms - self.risen_ms >= RISES_AFTER_MS
        {
            *most = (*most * 2.0).min(self.first_bytes_per_s_max);
            self.risen_ms = now_ms;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEP_MS: f64 = 10.0;
    const LOOK_MS: f64 = 100.0;

    /// A VM, its disk, and the copy of it, which looks for writes each 100 ms once it has caught up.
    struct Copying {
        held: HeldWrites,
        now_ms: f64,
        link_bytes_per_s: f64,
        write_bytes: f64,
        writes_per_s: f64,
        copied: f64,
        left: f64,
        rests_until_ms: f64,
        is_ready: bool,
    }

    impl Copying {
        fn new(link_bytes_per_s: f64, left: f64, write_bytes: f64, writes_per_s: f64) -> Self {
            let (held, now_ms, copied, rests_until_ms) = (HeldWrites::default(), 0.0, 0.0, 0.0);
            let is_ready = false;
            Self {
                held,
                now_ms,
                link_bytes_per_s,
                write_bytes,
                writes_per_s,
                copied,
                left,
                rests_until_ms,
                is_ready,
            }
        }

        /// How much copying the guest's writes cause, as far as they are let through.
        fn dirty_bytes_per_s(&self) -> f64 {
            let allowed = self.held.limit().map_or(f64::INFINITY, |limit| {
                (limit.bytes_per_s as f64 / self.write_bytes).min(limit.writes_per_s as f64)
            });
            self.writes_per_s.min(allowed) * self.write_bytes.max(GRANULE_BYTES)
        }

        fn step(&mut self) {
            self.now_ms += STEP_MS;
            self.left += self.dirty_bytes_per_s() * STEP_MS / 1e3;
            if self.now_ms < self.rests_until_ms {
                return;
            }
            let gone_through = (self.link_bytes_per_s * STEP_MS / 1e3).min(self.left);
            self.copied += gone_through;
            self.left -= gone_through;
            if self.left < 1.0 {
                (self.is_ready, self.rests_until_ms) = (true, self.now_ms + LOOK_MS);
            }
        }

        fn look(&mut self) {
            let until_ms = self.now_ms + LOOK_MS;
            while self.now_ms < until_ms {
                self.step();
            }
            // QEMU's figures are from its last look.
            let left = if self.now_ms < self.rests_until_ms { 0.0 } else { self.left };
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "they are small")]
            let [copied_bytes, left_bytes] = [self.copied as u64, left as u64];
            self.held.record(
                self.now_ms,
                Reading { copied_bytes, left_bytes, are_ready: self.is_ready },
                true,
            );
        }

        /// Lets the copy go on until it keeps up, at most for this long; returns how long that took, in s.
        fn keeps_up_within(&mut self, most_s: f64) -> Option<f64> {
            let began_ms = self.now_ms;
            while self.now_ms - began_ms < most_s * 1e3 {
                self.look();
                if self.held.keep_up(self.now_ms) {
                    return Some((self.now_ms - began_ms) / 1e3);
                }
            }
            None
        }
    }

    #[test]
    fn a_vm_that_writes_little_is_not_held_back() {
        for writes_per_s in [0.0, 10.0, 400.0] {
            let mut copying = Copying::new(1e8, 0.0, 4096.0, writes_per_s);
            assert!(copying.keeps_up_within(2.0).is_some(), "{writes_per_s}");
            (0..200).for_each(|_| copying.look());
            assert_eq!(copying.held.limit(), None, "{writes_per_s}");
            assert!(!copying.held.let_pause(copying.now_ms), "the pause is not near yet");
            copying.held.begin(1e8);
            assert!(!copying.held.let_pause(copying.now_ms), "what was before says nothing of that");
            (0..10).for_each(|_| copying.look());
            assert!(copying.held.let_pause(copying.now_ms));
        }
    }

    #[test]
    fn one_that_writes_as_fast_as_is_copied_is_held_back_step_by_step() {
        let mut held = HeldWrites::default();
        let mut limits = vec![];
        for second in 0..6_u32 {
            let copied_bytes = u64::from(second) * 10_000_000;
            let behind = Reading { copied_bytes, left_bytes: 50_000_000, are_ready: false };
            held.record(f64::from(second) * 1e3, behind, true);
            limits.push(held.limit().map(|limit| limit.bytes_per_s));
        }
        let halves = [2_500_000, 1_250_000, 625_000, 312_500, 262_144].map(Some);
        assert_eq!(limits, [&[None], &halves[..]].concat());
    }

    #[test]
    fn nobody_is_held_back_for_what_becomes_less_nor_while_nothing_is_copied() {
        let mut held = HeldWrites::default();
        for second in 0..20_u64 {
            let (copied_bytes, left_bytes) = (second * 10_000_000, 200_000_000 - second * 6_000_000);
            held.record(second as f64 * 1e3, Reading { copied_bytes, left_bytes, are_ready: false }, true);
        }
        let stopped = Reading { copied_bytes: 190_000_000, left_bytes: 86_000_000, are_ready: false };
        (20..90_u32).for_each(|second| held.record(f64::from(second) * 1e3, stopped, true));
        assert_eq!(held.limit(), None);
    }

    #[test]
    fn what_was_steady_and_falls_behind_keeps_the_vm_from_its_pause() {
        let mut copying = Copying::new(1e7, 0.0, 4096.0, 10.0);
        copying.keeps_up_within(2.0).unwrap();
        copying.held.begin(1e7);
        copying.keeps_up_within(2.0).unwrap();
        assert!(copying.held.let_pause(copying.now_ms));
        copying.writes_per_s = 100_000.0;
        copying.link_bytes_per_s = 1e6;
        (0..10).for_each(|_| copying.look());
        assert!(!copying.held.let_pause(copying.now_ms));
        copying.keeps_up_within(60.0).unwrap();
        assert!(copying.held.let_pause(copying.now_ms));
    }

    proptest! {
        /// However fast it writes, and by however large writes: it keeps up in time, and what is left then is there within
        /// a fraction of a second.
        #[test]
        fn every_copy_keeps_up_and_leaves_little(
            link in 1e6..1e9_f64, left_s in 0.0..30.0_f64, write_bytes in 512.0..2e6_f64, load in 0.0..100.0_f64,
        ) {
            let per_write = write_bytes.max(GRANULE_BYTES);
            let mut copying = Copying::new(link, link * left_s, write_bytes, load * link / per_write);
            // What it writes before anybody has judged that is to be copied, too.
            let took_s = copying.keeps_up_within(15.0 + 4.0 * (left_s + 2.0 * load));
            prop_assert!(took_s.is_some(), "{:?} {} left", copying.held, copying.left);
            copying.held.begin(link);
            for _ in 0..50 {
                copying.look();
                if copying.held.let_pause(copying.now_ms) {
                    let drained_s = copying.left / link;
                    prop_assert!(drained_s < 0.5, "{drained_s} s: {:?}", copying.held);
                }
            }
        }

        /// Whatever is read: one step at a time, never above the first limit, and less held back only what has kept up for long.
        #[test]
        fn limits_halve_and_rise_again_only_after_long(
            readings in prop::collection::vec((0..2_000_u32, 0..1_000_000_u64, 0..1_000_000_u64, any::<bool>()), 1..200),
        ) {
            let (mut held, mut now_ms, mut copied_bytes) = (HeldWrites::default(), 0.0, 0);
            let (mut last, mut first, mut changed_ms) = (f64::INFINITY, None, 0.0);
            for (passed_ms, copied, left_bytes, matters) in readings {
                now_ms += f64::from(passed_ms);
                copied_bytes += copied;
                let reading = Reading { copied_bytes, left_bytes, are_ready: left_bytes % 2 == 0 };
                held.record(now_ms, reading, matters);
                let Some(now) = held.dirty_bytes_per_s_max else { continue };
                let first = *first.get_or_insert(now);
                prop_assert!(now <= first && (last.is_infinite() || now >= last / 2.0), "{now} after {last}");
                if now > last {
                    prop_assert!(now <= last * 2.0 && now_ms - changed_ms >= RISES_AFTER_MS, "{now} after {last}");
                }
                if now.total_cmp(&last).is_ne() {
                    (last, changed_ms) = (now, now_ms);
                }
            }
        }
    }
}
