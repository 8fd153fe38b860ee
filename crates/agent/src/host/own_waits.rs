//! How long this agent's threads have waited for a core, by the kernel's count: it is right whatever the kernel
//! divides the cores among, be it control groups, sessions or threads.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use drainpipe_engine::host::free_cores::CoreWait;

const THREADS: &str = "/proc/self/task";

/// The kernel's counts for each thread, by its identifier.
#[derive(Debug, Default)]
pub(crate) struct OwnWaits(BTreeMap<u32, CoreWait>);

impl OwnWaits {
    /// Reads those of all threads; none if the kernel does not count.
    pub(crate) fn read() -> Self {
        let threads = fs::read_dir(THREADS).into_iter().flatten().flatten();
        let counted = threads.filter_map(|thread| {
            let counts = fs::read_to_string(thread.path().join("schedstat")).ok()?;
            Some((thread.file_name().to_str()?.parse().ok()?, wait_of(&counts)?))
        });
        Self(counted.collect())
    }

    /// What became of the threads that were there before.
    pub(crate) fn since(&self, before: &Self) -> CoreWait {
        let both = self.0.iter().filter_map(|(thread, now)| Some((now, before.0.get(thread)?)));
        both.fold(CoreWait::default(), |sum, (now, before)| CoreWait {
            ran: sum.ran + now.ran.saturating_sub(before.ran),
            waited: sum.waited + now.waited.saturating_sub(before.waited),
        })
    }
}

/// See the kernel's `scheduler/sched-stats.rst`: time on a core and time in which one was waited for, in ns.
fn wait_of(counts: &str) -> Option<CoreWait> {
    let mut counts =
        counts.split_ascii_whitespace().map(|count| count.parse().ok().map(Duration::from_nanos));
    Some(CoreWait { ran: counts.next()??, waited: counts.next()?? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(counts: &[(u32, &str)]) -> OwnWaits {
        OwnWaits(counts.iter().filter_map(|(thread, counts)| Some((*thread, wait_of(counts)?))).collect())
    }

    #[test]
    fn what_threads_have_waited_that_were_there_all_the_time_counts() {
        let before = of(&[(1, "1000 500 7\n"), (2, "9000 9000 9\n"), (4, "nonsense"), (5, "3 4 5")]);
        let now = of(&[(1, "1300 2500 9\n"), (3, "7000 7000 9\n"), (4, "5"), (5, "1 1 1")]);
        let [ran, waited] = [300, 2_000].map(Duration::from_nanos);
        assert_eq!(now.since(&before), CoreWait { ran, waited });
    }

    #[test]
    fn this_thread_has_run() {
        let before = OwnWaits::read();
        std::hint::black_box((0..3_000_000_u64).map(std::hint::black_box).sum::<u64>());
        assert!(OwnWaits::read().since(&before).ran > Duration::ZERO);
    }
}
