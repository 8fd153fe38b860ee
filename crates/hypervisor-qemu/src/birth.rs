//! What tells a process from all others of this host since it was booted.

use std::fmt;
use std::fs;
use std::io;

use rustix::process::Pid;

use crate::reach::proc_path;

/// A process's number, and when it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Birth {
    pid: Pid,
    /// After boot, in clock ticks.
    started: u64,
}

impl Birth {
    pub(crate) fn of_this_process() -> io::Result<Self> {
        let pid = rustix::process::getpid();
        let started = started(pid)?.ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { pid, started })
    }
}

impl fmt::Display for Birth {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{} {}", self.pid.as_raw_nonzero(), self.started)
    }
}

/// When a process started, after boot in clock ticks; none if it has ended.
pub(crate) fn started(pid: Pid) -> io::Result<Option<u64>> {
    Ok(start_ticks(&fs::read_to_string(proc_path(pid, "stat"))?))
}

/// Fields 3 and 22 of `/proc/PID/stat`.
fn start_ticks(stat: &str) -> Option<u64> {
    let (_, fields_from_third) = stat.rsplit_once(')')?;
    let mut fields = fields_from_third.split_ascii_whitespace();
    let has_ended = matches!(fields.next()?, "Z" | "X");
    let ticks = fields.nth(18)?.parse().ok()?;
    (!has_ended).then_some(ticks)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    impl Birth {
        /// The birth of an earlier process with the same number.
        pub(crate) fn a_tick_earlier(self) -> Self {
            Self { started: self.started - 1, ..self }
        }
    }

    proptest! {
        #[test]
        fn any_stat_is_read(stat in ".*") {
            let _ = start_ticks(&stat);
        }
    }

    #[test]
    fn one_that_has_ended_and_is_not_waited_for_does_not_live() {
        let mut child = std::process::Command::new("true").spawn().expect("true(1)");
        let pid = Pid::from_child(&child);
        let running = start_ticks("7 (a) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 1 0 99 1");
        assert_eq!(running, Some(99));
        let end = Instant::now() + Duration::from_secs(20);
        while started(pid).expect("its zombie is there").is_some() {
            assert!(Instant::now() < end, "it has not ended");
            thread::sleep(Duration::from_millis(1));
        }
        child.wait().expect("it is ours");
    }
}
