//! Cores that are there for a migration: those that nobody uses, and those that running migrations use themselves.
//!
//! What a host was like a minute ago says little if it has become busy since. So the smaller of two means counts: over
//! the last second, and over the last five, since cores that are idle for a moment are not free. What migrations use
//! is added to what is idle, so that a drain is not mistaken for other work.
//!
//! Where nothing is idle, a thread still gets a part of a core: the kernel divides them among all threads that want
//! one. How large it is follows from the number of threads, unless the kernel divides the cores among control groups
//! or sessions first. So what the agent's own threads got when they wanted a core counts too: they are where
//! migrations are. They want little, so that alone says little. The smaller of both counts.

use std::collections::VecDeque;
use std::time::Duration;

/// Time between two looks.
pub const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Looks of the last second, and as many as count at most.
const LATEST: usize = 2;
const LOOKS_MAX: usize = 10;

/// A process that wanted a core for less than this, in seconds, shows nothing.
const WAITED_FOR_S: f64 = 0.02;

/// What became of a host's cores between two looks. In cores: CPU seconds per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoresLook {
    /// All of them.
    pub cores: f64,
    /// Used by nobody.
    pub idle: f64,
    /// Used by migrations that are under way here.
    pub migrating: f64,
    /// Threads that ran or waited for a core at that moment, for each core that there is; absent where that is not known.
    pub threads_per_core: Option<f64>,
    /// What the threads of the host's agent got of the cores.
    pub wait: CoreWait,
}

/// What threads got of the cores: for how long they ran, and for how long they waited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CoreWait {
    /// On a core.
    pub ran: Duration,
    /// For one.
    pub waited: Duration,
}

/// What the last looks have shown.
#[derive(Debug, Clone, Default)]
pub struct FreeCores {
    looks: VecDeque<f64>,
    // Among how many threads the kernel shares out each core, with one more.
    threads: VecDeque<f64>,
    waits: VecDeque<CoreWait>,
}

impl FreeCores {
    /// Takes the next look. One that says nothing is left out.
    pub fn look(&mut self, look: CoresLook) {
        let free = (look.idle + look.migrating.max(0.0)).clamp(0.0, look.cores.max(0.0));
        if !free.is_finite() {
            return;
        }
        self.looks.truncate(LOOKS_MAX - 1);
        self.looks.push_front(free);
        self.waits.truncate(LOOKS_MAX - 1);
        self.waits.push_front(look.wait);
        if let Some(threads) = look.threads_per_core.filter(|threads| *threads >= 0.0 && threads.is_finite())
        {
            self.threads.truncate(LOOKS_MAX - 1);
            self.threads.push_front(threads + 1.0 / look.cores.max(1.0));
        }
    }

    /// How many are free; none before there was a second to look at.
    pub fn free(&self) -> Option<f64> {
        let mean = |looks: usize| self.looks.iter().take(looks).sum::<f64>() / looks as f64;
        (self.looks.len() >= LATEST).then(|| mean(LATEST).min(mean(self.looks.len())))
    }

    /// The share of a core that one more thread gets, 0 to 1; none before there was a second to look at. A single moment
    /// says little, so all count.
    pub fn share(&self) -> Option<f64> {
        let threads = self.threads.iter().sum::<f64>() / self.threads.len() as f64;
        (self.threads.len() >= LATEST).then(|| (1.0 / threads).min(self.own_share()).min(1.0))
    }

    /// What the agent got while it wanted a core.
    fn own_share(&self) -> f64 {
        let ran_s: f64 = self.waits.iter().map(|wait| wait.ran.as_secs_f64()).sum();
        let waited_s: f64 = self.waits.iter().map(|wait| wait.waited.as_secs_f64()).sum();
        if ran_s + waited_s > WAITED_FOR_S { ran_s / (ran_s + waited_s) } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn look(idle: f64, migrating: f64) -> CoresLook {
        CoresLook { cores: 4.0, idle, migrating, threads_per_core: None, wait: CoreWait::default() }
    }

    fn after(idle: &[f64]) -> Option<f64> {
        let mut free = FreeCores::default();
        for idle in idle {
            free.look(look(*idle, 0.0));
        }
        free.free()
    }

    #[test]
    fn a_host_that_becomes_busy_is_seen_within_a_second_and_one_that_rests_for_a_moment_is_not_idle() {
        assert_eq!(after(&[4.0]), None, "too little to tell");
        assert_eq!(after(&[4.0; 20]), Some(4.0));
        let mut becoming_busy = vec![4.0; 10];
        becoming_busy.extend([0.5; LATEST]);
        assert_eq!(after(&becoming_busy), Some(0.5));
        let mut resting = vec![0.0; 10];
        resting.extend([4.0; LATEST]);
        assert!(after(&resting).is_some_and(|free| free < 1.0));
    }

    #[test]
    fn what_migrations_take_is_free_for_the_next_one() {
        let mut free = FreeCores::default();
        for _ in 0..LATEST {
            free.look(look(1.0, 2.5));
            free.look(look(f64::NAN, 0.0));
        }
        assert_eq!(free.free(), Some(3.5));
    }

    #[test]
    fn a_thread_more_gets_what_all_get_that_want_a_core() {
        let share = |threads_per_core: &[Option<f64>]| {
            let mut free = FreeCores::default();
            for threads in threads_per_core {
                free.look(CoresLook { threads_per_core: *threads, ..look(0.0, 0.0) });
            }
            free.share()
        };
        assert_eq!(share(&[Some(0.0); 3]), Some(1.0), "nobody else wants one");
        assert_eq!(share(&[Some(0.75); 3]), Some(1.0), "three of four cores are taken");
        assert_eq!(share(&[Some(4.75); 3]), Some(0.2), "19 others want the four");
        assert_eq!(
            share(&[Some(2.75), Some(0.75), None, Some(1.75), Some(f64::NAN)]),
            Some(0.5),
            "each moment counts"
        );
        assert_eq!((share(&[Some(4.0)]), share(&[None; 9])), (None, None), "too little to tell");
    }

    #[test]
    fn what_the_agent_got_counts_where_that_is_less() {
        let share = |ran_ms: u64, waited_ms: u64| {
            let [ran, waited] = [ran_ms, waited_ms].map(Duration::from_millis);
            let mut free = FreeCores::default();
            for _ in 0..10 {
                let (threads_per_core, wait) = (Some(4.75), CoreWait { ran, waited });
                free.look(CoresLook { threads_per_core, wait, ..look(0.0, 0.0) });
            }
            free.share()
        };
        let busy = share(10, 990).unwrap();
        assert!((busy - 0.01).abs() < 1e-9, "{busy}: its session shares a small part of the cores");
        assert_eq!(share(30, 10), Some(0.2), "it seldom wanted one, and 19 others want the four");
        assert_eq!(share(0, 1), Some(0.2), "too little to tell");
    }

    proptest! {
        #[test]
        fn never_more_than_there_are_and_never_more_than_the_last_second_had(
            cores in 0.0_f64..512.0,
            looks in prop::collection::vec((-1.0_f64..600.0, -1.0_f64..600.0), 2..40),
        ) {
            let mut free = FreeCores::default();
            let mut shown = vec![];
            for (idle, migrating) in looks {
                free.look(CoresLook { cores, ..look(idle, migrating) });
                shown.push((idle + migrating.max(0.0)).clamp(0.0, cores));
            }
            let latest = shown.iter().rev().take(LATEST).sum::<f64>() / LATEST as f64;
            let free = free.free().unwrap();
            prop_assert!((0.0..=cores).contains(&free) && free <= latest + 1e-9);
        }
    }
}
