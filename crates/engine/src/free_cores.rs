//! Cores that are there for a migration: those that nobody uses, and those that migrations under way take themselves.
//!
//! What a host was like a minute ago says little of one that has become busy since. So what counts is the less of two
//! means: of the last second, and of the last five, since cores that are idle for a moment are not free. What
//! migrations take is added up with what is idle, so that a drain is not taken for other work.

use std::collections::VecDeque;
use std::time::Duration;

/// Time between two looks.
pub const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Looks of the last second, and as many as count at most.
const LATEST: usize = 2;
const LOOKS_MAX: usize = 10;

/// What became of a host's cores between two looks. In cores: CPU seconds per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoresLook {
    /// All of them.
    pub cores: f64,
    /// Used by nobody.
    pub idle: f64,
    /// Used by migrations that are under way here.
    pub migrating: f64,
}

/// What the last looks have shown.
#[derive(Debug, Clone, Default)]
pub struct FreeCores {
    looks: VecDeque<f64>,
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
    }

    /// How many are free; none before there was a second to look at.
    pub fn free(&self) -> Option<f64> {
        let mean = |looks: usize| self.looks.iter().take(looks).sum::<f64>() / looks as f64;
        (self.looks.len() >= LATEST).then(|| mean(LATEST).min(mean(self.looks.len())))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(idle: &[f64]) -> Option<f64> {
        let mut free = FreeCores::default();
        for idle in idle {
            free.look(CoresLook { cores: 4.0, idle: *idle, migrating: 0.0 });
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
            free.look(CoresLook { cores: 4.0, idle: 1.0, migrating: 2.5 });
            free.look(CoresLook { cores: 4.0, idle: f64::NAN, migrating: 0.0 });
        }
        assert_eq!(free.free(), Some(3.5));
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
                free.look(CoresLook { cores, idle, migrating });
                shown.push((idle + migrating.max(0.0)).clamp(0.0, cores));
            }
            let latest = shown.iter().rev().take(LATEST).sum::<f64>() / LATEST as f64;
            let free = free.free().unwrap();
            prop_assert!((0.0..=cores).contains(&free) && free <= latest + 1e-9);
        }
    }
}
