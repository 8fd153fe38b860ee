//! What a process can do to a QEMU, which is another user's, only with capabilities.

use std::fs::{self, File};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{
    ForeignRawFd, Pid, PidfdGetfdFlags, Signal, getpriority_process, pidfd_getfd, pidfd_send_signal,
    setpriority_process,
};
use serde::{Deserialize, Serialize};

/// One such act. Needs `CAP_KILL`, `CAP_SYS_NICE` or `CAP_SYS_PTRACE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Reach {
    /// Ends it.
    Kill,
    /// Gives the threads of one `nice` another.
    Renice { from: i32, to: i32 },
    /// Says which numbers its sockets have.
    SocketNumbers,
    /// Duplicates what it has open; nothing where that is closed.
    Duplicate { number: ForeignRawFd },
    /// Opens what `/proc` has of it.
    Open { file: ProcessFile },
}

/// Something of a process in `/proc` that nobody else may open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessFile {
    /// Where its memory is.
    Maps,
    /// Which of its pages are there.
    Pagemap,
    /// Its memory.
    Memory,
    /// The directory that it takes for the root.
    Root,
    /// Its network namespace.
    Network,
}

impl ProcessFile {
    /// Below `/proc/PID`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Maps => "maps",
            Self::Pagemap => "pagemap",
            Self::Memory => "mem",
            Self::Root => "root",
            Self::Network => "ns/net",
        }
    }

    fn open(self, pid: Pid) -> io::Result<OwnedFd> {
        let flags = match self {
            Self::Root => OFlags::PATH,
            Self::Maps | Self::Pagemap | Self::Memory | Self::Network => OFlags::RDONLY,
        };
        Ok(rustix::fs::open(proc_path(pid, self.name()), flags | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// What an act has brought.
#[derive(Debug, Default)]
pub(crate) struct Reached {
    pub(crate) numbers: Vec<i32>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Reached {
    /// The one that it was for.
    pub(crate) fn file(self) -> io::Result<File> {
        let opened = self.descriptors.into_iter().next().ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(opened.into())
    }
}

impl Reach {
    /// By this process.
    pub(crate) fn perform(self, pid: Pid, pidfd: BorrowedFd<'_>) -> io::Result<Reached> {
        let (mut numbers, mut descriptors) = (vec![], vec![]);
        match self {
            Self::Kill => kill(pidfd)?,
            Self::Renice { from, to } => renice(pid, pidfd, from, to)?,
            Self::SocketNumbers => numbers = socket_numbers(pid)?,
            Self::Duplicate { number } => descriptors.extend(duplicate(pidfd, number)?),
            Self::Open { file } => descriptors.push(file.open(pid)?),
        }
        if self != Self::Kill {
            must_live(pidfd)?;
        }
        Ok(Reached { numbers, descriptors })
    }
}

/// Only after this is it certain that a file in `/proc` was this process's.
pub(crate) fn must_live(pidfd: BorrowedFd<'_>) -> io::Result<()> {
    // A pidfd becomes readable when its process ends.
    match poll(&mut [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)], Some(&Timespec::default()))? {
        0 => Ok(()),
        _ => Err(Errno::NOENT.into()),
    }
}

pub(crate) fn proc_path(pid: Pid, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{}/{file}", pid.as_raw_nonzero()))
}

fn kill(pidfd: BorrowedFd<'_>) -> io::Result<()> {
    match pidfd_send_signal(pidfd, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Threads that are started later take their `nice` from the thread that starts them.
fn renice(pid: Pid, pidfd: BorrowedFd<'_>, from: i32, to: i32) -> io::Result<()> {
    for entry in fs::read_dir(proc_path(pid, "task"))? {
        let Some(thread) = entry?.file_name().to_str().and_then(parse_pid) else { continue };
        must_live(pidfd)?;
        // The calls take a thread's id for that thread alone, as POSIX would not have it: setpriority(2).
        let renice = |nice| if nice == from { setpriority_process(Some(thread), to) } else { Ok(()) };
        match getpriority_process(Some(thread)).and_then(renice) {
            // It has ended.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// One that was closed since may be among them.
fn socket_numbers(pid: Pid) -> io::Result<Vec<ForeignRawFd>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(proc_path(pid, "fd"))? {
        let entry = entry?;
        let is_socket = fs::read_link(entry.path())
            .is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"socket:"));
        if is_socket && let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

fn duplicate(pidfd: BorrowedFd<'_>, number: ForeignRawFd) -> io::Result<Option<OwnedFd>> {
    match pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty()) {
        Ok(duplicate) => Ok(Some(duplicate)),
        Err(Errno::BADF) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub(crate) fn parse_pid(text: &str) -> Option<Pid> {
    text.trim().parse().ok().filter(|pid| *pid > 0).and_then(Pid::from_raw)
}
