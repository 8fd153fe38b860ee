//! The processes in a lab, as the kernel knows them, and their end.

use std::collections::HashSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

use crate::error::Error;

/// An agent puts routes back and a VMM flushes within this, or is killed.
const TERM_LIMIT: Duration = Duration::from_secs(5);
const KILL_LIMIT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(5);

/// A namespace, whatever it is called: device and inode of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NamespaceId {
    device: u64,
    inode: u64,
}

impl NamespaceId {
    /// The namespace that `file` is, under `/proc/PID/ns` or `/run/netns`.
    pub(crate) fn of_file(file: &Path) -> Option<Self> {
        let metadata = fs::metadata(file).ok()?;
        Some(Self { device: metadata.dev(), inode: metadata.ino() })
    }

    fn of_process(pid: Pid) -> Option<Self> {
        Self::of_file(Path::new(&format!("/proc/{pid}/ns/net")))
    }
}

/// Whether the network namespace of the process is one of `namespaces`.
pub(crate) fn is_within(pid: Pid, namespaces: &HashSet<NamespaceId>) -> bool {
    NamespaceId::of_process(pid).is_some_and(|id| namespaces.contains(&id))
}

/// All processes whose network namespace is one of `namespaces`, except the caller.
pub(crate) fn within(namespaces: &HashSet<NamespaceId>) -> Result<HashSet<Pid>, Error> {
    let mut found = HashSet::new();
    for entry in fs::read_dir("/proc").map_err(Error::io("list", "/proc"))? {
        let entry = entry.map_err(Error::io("list", "/proc"))?;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(pid) = number.and_then(Pid::from_raw) else { continue };
        if is_within(pid, namespaces) && pid != getpid() {
            found.insert(pid);
        }
    }
    Ok(found)
}

/// Ends all processes within `namespaces`: asks, waits, then kills. Returns how many there were.
///
/// The machine's own namespace is spared even if someone gave it a lab's name (`ip netns attach`).
pub(crate) fn end(lab: &str, mut namespaces: HashSet<NamespaceId>) -> Result<usize, Error> {
    if let Some(machine) = NamespaceId::of_process(Pid::INIT) {
        namespaces.remove(&machine);
    }
    let namespaces = &namespaces;
    let mut ended = HashSet::new();
    for (signal, limit) in [(Signal::TERM, TERM_LIMIT), (Signal::KILL, KILL_LIMIT)] {
        let deadline = Instant::now() + limit;
        let mut signalled = HashSet::new();
        loop {
            let remaining = within(namespaces)?;
            if remaining.is_empty() {
                return Ok(ended.len());
            }
            // New ones appear while old ones end: each gets the signal, once.
            for pid in remaining.difference(&signalled) {
                send(*pid, signal, namespaces);
            }
            signalled.extend(remaining.iter().copied());
            ended.extend(remaining);
            if Instant::now() >= deadline {
                break;
            }
            thread::sleep(POLL);
        }
    }
    let pids = within(namespaces)?.into_iter().map(Pid::as_raw_pid).collect();
    Err(Error::ProcessesRemain { name: lab.to_owned(), pids })
}

/// The process among those within `namespaces` that has the number `inner` in a nested namespace of process ids.
pub(crate) fn by_inner_pid(namespaces: &HashSet<NamespaceId>, inner: i32) -> Result<Option<Pid>, Error> {
    let has_it = |pid: &Pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        inner_pid(&status) == Some(inner)
    };
    Ok(within(namespaces)?.into_iter().find(has_it))
}

/// The innermost number of a process, by its `/proc/PID/status`, if it has other numbers in other namespaces of process
/// ids; see `proc_pid_status(5)`. The line has as many numbers as there are namespaces from the one that `/proc` shows
/// to the process's own.
fn inner_pid(status: &str) -> Option<i32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().skip(1).last()?.parse().ok()
}

/// Signals `pid` if it is still within `namespaces`. The handle is taken before the check, so
/// that the signal cannot reach another process that was given the same number.
pub(crate) fn send(pid: Pid, signal: Signal, namespaces: &HashSet<NamespaceId>) {
    let Ok(handle): Result<OwnedFd, _> = pidfd_open(pid, PidfdFlags::empty()) else { return };
    if is_within(pid, namespaces) {
        // It may have ended by itself; whether it did is seen by the next look at /proc.
        let _ = pidfd_send_signal(handle, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_of_a_nested_namespace_has_an_inner_number() {
        assert_eq!(inner_pid("Name:\tsh\nNSpid:\t29809\t1\nNSpgid:\t29809\t1\n"), Some(1));
        assert_eq!(inner_pid("NSpid:\t7\t30\t4\n"), Some(4));
        assert_eq!(inner_pid("NSpid:\t1\n"), None);
        assert_eq!(inner_pid(""), None);
    }
}
