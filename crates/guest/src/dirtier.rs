//! Rewrites pages at a given rate, in a given part of the memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::memory::Memory;
use crate::page::{PAGE_BYTES, Words};
use crate::protocol::Dirtying;

/// Pages in one MiB.
pub const PAGES_PER_MIB: u64 = (1 << 20) / PAGE_BYTES as u64;

/// How often a dirtying guest wakes to rewrite what is due. Longer than a tick of the guest's
/// kernel (4 ms), far shorter than a round of a migration.
const INTERVAL: Duration = Duration::from_millis(10);

/// What is owed after a longer silence than this is forgotten: a guest that was paused, or too
/// slow, must not answer with a burst.
const ARREARS_MAX: Duration = Duration::from_millis(100);

impl Dirtying {
    /// The page to rewrite, given a random number: uniform over the part that receives writes.
    pub fn pick(self, random: u64, pages: usize) -> usize {
        let window = (pages * usize::from(self.locality_percent) / 100).max(1);
        // The product's upper half is below `window`, which came from a `usize`.
        #[expect(clippy::cast_possible_truncation, reason = "below `window`")]
        let page = ((u128::from(random) * window as u128) >> 64) as usize;
        page
    }
}

/// Says how many pages are due, given how much time went by.
#[derive(Debug, Default)]
struct Pacer {
    /// What is left of a page not yet due, in pages per 10^9, so that slow rates add up.
    remainder: u64,
}

const NS_PER_S: u64 = 1_000_000_000;

impl Pacer {
    /// The whole pages due after another `elapsed` at `mib_per_s`.
    fn due(&mut self, mib_per_s: u32, elapsed: Duration) -> u64 {
        let elapsed_ns = u64::from(elapsed.min(ARREARS_MAX).subsec_nanos());
        let owed = self.remainder + elapsed_ns * u64::from(mib_per_s) * PAGES_PER_MIB;
        self.remainder = owed % NS_PER_S;
        owed / NS_PER_S
    }
}

/// The state that the dirtying thread shares with those that ask and set.
pub struct Dirtier {
    dirtying: Mutex<Period>,
    changed: Condvar,
    rewritten_pages: AtomicU64,
}

/// The time since the dirtying was last set.
#[derive(Clone, Copy)]
struct Period {
    dirtying: Dirtying,
    since: Instant,
    rewritten_pages_before: u64,
}

impl Dirtier {
    /// Starts with the given dirtying; [`Dirtier::run`] carries it out.
    pub fn new(dirtying: Dirtying) -> Self {
        let period = Period { dirtying, since: Instant::now(), rewritten_pages_before: 0 };
        Self { dirtying: Mutex::new(period), changed: Condvar::new(), rewritten_pages: AtomicU64::new(0) }
    }

    /// Changes rate and locality at once.
    pub fn set(&self, dirtying: Dirtying) {
        *self.period() =
            Period { dirtying, since: Instant::now(), rewritten_pages_before: self.rewritten_pages() };
        self.changed.notify_all();
    }

    /// The rate and locality asked for.
    pub fn asked(&self) -> Dirtying {
        self.period().dirtying
    }

    /// The rate reached since the dirtying was last set, in MiB/s.
    pub fn achieved_mib_per_s(&self) -> f64 {
        let period = *self.period();
        let pages = self.rewritten_pages() - period.rewritten_pages_before;
        let elapsed_s = period.since.elapsed().as_secs_f64();
        if elapsed_s > 0.0 { pages as f64 / PAGES_PER_MIB as f64 / elapsed_s } else { 0.0 }
    }

    /// How many pages were rewritten since the start.
    pub fn rewritten_pages(&self) -> u64 {
        self.rewritten_pages.load(Ordering::Acquire)
    }

    /// Rewrites pages for ever. The memory must be filled.
    pub fn run(&self, memory: &Memory, seed: u64) -> ! {
        let mut pacer = Pacer::default();
        let mut random = Words(seed);
        let mut last = Instant::now();
        loop {
            let dirtying = self.wait();
            let now = Instant::now();
            let mut due = pacer.due(dirtying.mib_per_s, now - std::mem::replace(&mut last, now));
            while due > 0 && self.asked() == dirtying {
                let batch = due.min(PAGES_PER_MIB);
                for number in random.by_ref().take(batch as usize) {
                    self.rewrite(memory, dirtying.pick(number, memory.pages()));
                }
                due -= batch;
            }
        }
    }

    fn rewrite(&self, memory: &Memory, page: usize) {
        if memory.rewrite(page).is_ok() {
            self.rewritten_pages.fetch_add(1, Ordering::Release);
        }
    }

    /// Sleeps for one interval; while the rate is 0, until it changes, so that an idle guest
    /// costs its host nothing.
    fn wait(&self) -> Dirtying {
        let idle = |period: &mut Period| period.dirtying.mib_per_s == 0;
        let period = self.changed.wait_while(self.period(), idle).unwrap_or_else(PoisonError::into_inner);
        let dirtying = period.dirtying;
        drop(period);
        std::thread::sleep(INTERVAL);
        dirtying
    }

    fn period(&self) -> MutexGuard<'_, Period> {
        self.dirtying.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::MIB_PER_S_MAX;
    use proptest::prelude::*;

    #[test]
    fn a_long_silence_is_not_made_up_for() {
        let due = Pacer::default().due(100, Duration::from_mins(1));
        assert_eq!(due, 10 * PAGES_PER_MIB);
    }

    #[test]
    fn a_new_rate_starts_a_new_measurement() {
        let dirtier = Dirtier::new(Dirtying::IDLE);
        dirtier.rewritten_pages.store(1_000_000, Ordering::Release);
        let dirtying = Dirtying { mib_per_s: 5, locality_percent: 50 };
        dirtier.set(dirtying);
        assert_eq!(dirtier.asked(), dirtying);
        assert!(dirtier.achieved_mib_per_s() < 1.0);
    }

    proptest! {
        #[test]
        fn writes_stay_in_the_part_asked_for(
            random: u64, pages in 1..1_usize << 30, locality_percent in 1..=100_u8,
        ) {
            let page = Dirtying { mib_per_s: 1, locality_percent }.pick(random, pages);
            prop_assert!(page < pages);
            prop_assert!(page * 100 <= pages * usize::from(locality_percent));
        }

        #[test]
        fn the_rate_is_kept_over_uneven_intervals(
            mib_per_s in 0..=MIB_PER_S_MAX,
            intervals_us in proptest::collection::vec(0..100_000_u64, 1..100),
        ) {
            let mut pacer = Pacer::default();
            let pages: u64 = intervals_us
                .iter()
                .map(|&interval_us| pacer.due(mib_per_s, Duration::from_micros(interval_us)))
                .sum();
            let due = intervals_us.iter().sum::<u64>() as f64 / 1e6
                * (u64::from(mib_per_s) * PAGES_PER_MIB) as f64;
            // Each interval may be read a nanosecond short.
            let rounding = 1.0 + f64::from(mib_per_s) * 256.0 * 1e-9 * intervals_us.len() as f64;
            prop_assert!((pages as f64 - due).abs() <= rounding, "{pages} pages, {due} due");
        }
    }
}
