//! How much other hosts may have this one do at once: each of them, and all together.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use drainpipe_engine::problem::Problem;

use crate::store::lock::lock;

/// How much there is of something.
#[derive(Debug)]
pub(crate) struct Slots {
    what: &'static str,
    each_max: usize,
    all_max: usize,
    taken: Arc<Taken>,
}

/// How many each host has taken.
#[derive(Debug, Default)]
struct Taken(Mutex<BTreeMap<String, usize>>);

/// One taken; given back when dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    host: String,
    taken: Arc<Taken>,
}

impl Taken {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        // One insertion or removal leaves it whole.
        lock(&self.0)
    }
}

impl Slots {
    /// Lets each host have this one do at most `each_max` of `what` (in the plural) at once, and all hosts together
    /// `all_max`.
    pub(crate) fn new(what: &'static str, each_max: usize, all_max: usize) -> Self {
        Self { what, each_max, all_max, taken: Arc::default() }
    }

    /// Takes one for a host.
    pub(crate) fn take(&self, host: &str) -> Result<Slot, Problem> {
        let mut taken = self.taken.lock();
        let refused = |whom: &str, max: usize| {
            let what = self.what;
            Problem::conflict(format!(
                "this host already takes part in {max} {what} {whom}: try again in a few seconds"
            ))
        };
        if taken.get(host).is_some_and(|count| *count >= self.each_max) {
            return Err(refused(&format!("of {host}"), self.each_max));
        }
        if taken.values().sum::<usize>() >= self.all_max {
            return Err(refused("of all hosts", self.all_max));
        }
        *taken.entry(host.into()).or_default() += 1;
        Ok(Slot { host: host.into(), taken: Arc::clone(&self.taken) })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        if let Some(count) = taken.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.host);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_host_takes_more_than_its_share_nor_all_of_them_more_than_there_is() {
        let slots = Slots::new("checks", 2, 3);
        let first = slots.take("a").unwrap();
        let _second = slots.take("a").unwrap();
        assert!(slots.take("a").unwrap_err().message.contains("takes part in 2 checks of a:"));
        let third = slots.take("b").unwrap();
        assert!(slots.take("c").unwrap_err().message.contains("takes part in 3 checks of all hosts:"));
        drop(third);
        let _third = slots.take("c").unwrap();
        drop(first);
        let _first = slots.take("a").unwrap();
    }

    #[test]
    fn nothing_is_kept_of_who_has_given_all_back() {
        let slots = Slots::new("checks", 2, 3);
        for host in 0..100 {
            drop(slots.take(&host.to_string()).unwrap());
        }
        assert!(slots.taken.lock().is_empty());
    }
}
