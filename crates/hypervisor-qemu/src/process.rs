//! A QEMU process, held by a pidfd, so that a recycled process id is never mistaken for it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::Duration;

use drainpipe_hypervisor::Exit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    ForeignRawFd, Pid, PidfdFlags, Resource, Rlimit, WaitId, WaitIdOptions, WaitIdStatus, prlimit,
};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::birth;
use crate::keeper::Kept;
use crate::privileges::Privileges;
use crate::reach::{ProcessFile, Reach, Reached, parse_pid, proc_path};

/// A guest can make QEMU print warnings without end. Past this the log is emptied.
const LOG_BYTES_MAX: u64 = 1 << 20;
const LOG_CHECK_EVERY: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// Its parent writes how it has ended as soon as it can.
const REPORTED_WITHIN: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A QEMU that this host runs, whoever has started it. It is identified by its pidfd, not by its ID.
#[derive(Debug)]
pub struct Process {
    privileges: Privileges,
    pid: Pid,
    pidfd: OwnedFd,
    exit: watch::Receiver<Option<Exit>>,
}

impl Process {
    /// Takes hold of our own child, which cannot be recycled before it is waited for.
    pub(crate) fn of_child(privileges: &Privileges, child: &Child, log_file: PathBuf) -> io::Result<Self> {
        let pid = Pid::from_child(child);
        Self::watched(privileges, (pid, open_pidfd(pid)?), Some(log_file), None)
    }

    /// Takes hold of one that the keeper has started.
    pub(crate) fn of_kept(privileges: &Privileges, kept: Kept, log_file: PathBuf) -> io::Result<Self> {
        let Kept { pid, pidfd, exit } = kept;
        Self::watched(privileges, (pid, pidfd), Some(log_file), Some(exit))
    }

    /// Takes hold of the process `pid`, if it lives and `is_wanted` says so of its command line.
    pub fn of_pid(
        privileges: &Privileges,
        pid: u32,
        is_wanted: impl Fn(&[u8]) -> bool,
    ) -> io::Result<Option<Self>> {
        let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let pidfd = match open_pidfd(pid) {
            Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
            pidfd => pidfd?,
        };
        // Only now, with the pidfd open, does the process stay the one that is looked at.
        let command_line = fs::read(proc_path(pid, "cmdline")).unwrap_or_default();
        is_wanted(&command_line).then(|| Self::watched(privileges, (pid, pidfd), None, None)).transpose()
    }

    /// Finds the QEMU that `pid_file` names, if it still lives.
    pub(crate) fn find(
        privileges: &Privileges,
        pid_file: &Path,
        log_file: PathBuf,
    ) -> io::Result<Option<Self>> {
        let found = find_pidfd(pid_file)?;
        found.map(|found| Self::watched(privileges, found, Some(log_file), None)).transpose()
    }

    /// The process id of the QEMU that `pid_file` names, if it lives.
    pub(crate) fn living(pid_file: &Path) -> io::Result<Option<u32>> {
        Ok(find_pidfd(pid_file)?.map(|(pid, _)| process_id(pid)))
    }

    /// Whether the QEMU that `pid_file` names lives, and is [stopped](Self::is_stopped). Without a thread that watches it.
    pub(crate) fn is_named_stopped(pid_file: &Path) -> io::Result<bool> {
        let Some((pid, _alive)) = find_pidfd(pid_file)? else { return Ok(false) };
        Ok(is_stopped(&fs::read_to_string(proc_path(pid, "stat"))?))
    }

    /// Its log is kept short if one is named. If it is no child of ours, `told` says how it ends, if anybody does.
    fn watched(
        privileges: &Privileges,
        (pid, pidfd): (Pid, OwnedFd),
        log_file: Option<PathBuf>,
        exit_pipe: Option<OwnedFd>,
    ) -> io::Result<Self> {
        let (exited, exit) = watch::channel(None);
        let watched = pidfd.try_clone()?;
        // A thread, because it outlives every runtime: it reaps a QEMU that dies while nobody
        // waits, and touches a file.
        thread::Builder::new().name(format!("qemu-{}", pid.as_raw_nonzero())).spawn(move || {
            wait_until_exit(&watched, log_file.as_deref());
            exited.send_replace(Some(exit_pipe.map_or_else(|| reap(watched.as_fd()), reported_exit)));
        })?;
        Ok(Self { privileges: privileges.clone(), pid, pidfd, exit })
    }

    /// Its id, for people and for the kernel's counters. Another process may have it once this one has ended.
    pub fn pid(&self) -> u32 {
        process_id(self.pid)
    }

    /// Whether it has not ended.
    pub fn alive(&self) -> bool {
        self.exit.borrow().is_none()
    }

    /// One of its files in `/proc`, open to be read.
    pub(crate) fn open(&self, name: &str) -> io::Result<File> {
        let file = File::open(proc_path(self.pid, name))?;
        self.must_live()?;
        Ok(file)
    }

    /// One of its files in `/proc` that only some may see, open.
    pub fn open_hidden(&self, file: ProcessFile) -> io::Result<File> {
        self.reach(Reach::Open { file })?.file()
    }

    fn reach(&self, reach: Reach) -> io::Result<Reached> {
        self.privileges.reach(reach, self.pid, self.pidfd.as_fd())
    }

    /// Only after this is it certain that a file in `/proc` was this process's.
    fn must_live(&self) -> io::Result<()> {
        if self.alive() { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    /// Whether somebody has stopped it: `SIGSTOP`, or a debugger. A frozen cgroup does not show so.
    ///
    /// Its threads may be anywhere then: where its connections are cut meanwhile, some of them end before they have seen it,
    /// and QEMU (7.2, 10.0) may wait for those without end, with the lock that all else needs.
    pub fn is_stopped(&self) -> io::Result<bool> {
        let stat = fs::read_to_string(proc_path(self.pid, "stat"))?;
        self.must_live()?;
        Ok(is_stopped(&stat))
    }

    /// CPU used so far by all its threads, in user and kernel mode, in seconds.
    ///
    /// Fails once it has ended: read it before.
    pub fn cpu_seconds(&self) -> io::Result<f64> {
        let stat = fs::read_to_string(proc_path(self.pid, "stat"))?;
        self.must_live()?;
        let ticks = cpu_ticks(&stat).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
    }

    /// Gives the threads of one `nice` another. Those that are started later take theirs from the thread that
    /// starts them.
    pub(crate) fn renice(&self, from: i32, to: i32) -> io::Result<()> {
        self.reach(Reach::Renice { from, to }).map(drop)
    }

    /// Has it lock so much memory at least. What it may lock already it keeps, whoever gave it that.
    pub(crate) fn allow_memory_lock(&self, bytes: u64) -> io::Result<()> {
        let limits = fs::read_to_string(proc_path(self.pid, "limits"))?;
        self.must_live()?;
        if memory_lock_bytes(&limits).is_some_and(|allowed_bytes| allowed_bytes < bytes) {
            let raised = Rlimit { current: Some(bytes), maximum: Some(bytes) };
            prlimit(Some(self.pid), Resource::Memlock, raised)?;
        }
        Ok(())
    }

    /// Its sockets, by the numbers that it has for them; one that was closed since may be among them.
    pub(crate) fn socket_numbers(&self) -> io::Result<Vec<ForeignRawFd>> {
        Ok(self.reach(Reach::SocketNumbers)?.numbers)
    }

    /// A file descriptor for what it has open under `number`; none if that is closed.
    pub(crate) fn duplicate(&self, number: ForeignRawFd) -> io::Result<Option<OwnedFd>> {
        Ok(self.reach(Reach::Duplicate { number })?.descriptors.into_iter().next())
    }

    /// How it ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        self.exit.borrow().clone()
    }

    /// Waits for the end; `None` if it does not come in time.
    pub async fn wait_exit(&self, deadline: Duration) -> Option<Exit> {
        timeout(deadline, self.exited()).await.ok()
    }

    /// The end, for whoever waits without a hold of the process.
    pub fn exited(&self) -> impl Future<Output = Exit> + Send + use<> {
        let mut exit = self.exit.clone();
        async move {
            match exit.wait_for(Option::is_some).await {
                Ok(exit) => exit.clone().unwrap_or(Exit::Unknown),
                // The watching thread sends before it ends, so the sender cannot be gone first.
                Err(_) => Exit::Unknown,
            }
        }
    }

    /// As [`Self::wait_exit`], where nothing can be awaited.
    pub(crate) fn wait_exit_blocking(&self, deadline: &Timespec) -> io::Result<()> {
        match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(deadline))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    }

    /// Kills it, if it has not ended.
    pub fn kill(&self) -> io::Result<()> {
        if self.alive() { self.reach(Reach::Kill).map(drop) } else { Ok(()) }
    }
}

/// The process that `pid_file` names, if it still lives.
fn find_pidfd(pid_file: &Path) -> io::Result<Option<(Pid, OwnedFd)>> {
    let text = match fs::read_to_string(pid_file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    let mut words = text.split_ascii_whitespace();
    let Some(pid) = words.next().and_then(parse_pid) else { return Ok(None) };
    let pidfd = match open_pidfd(pid) {
        Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
        pidfd => pidfd?,
    };
    // Only now, with the pidfd open, does the process stay the one that is looked at.
    if let Some(word) = words.next() {
        return Ok((birth::started(pid).ok().flatten() == word.parse().ok()).then_some((pid, pidfd)));
    }
    // A QEMU of an older agent wrote the file itself. Its command line names it, which no other process's does.
    let command_line = fs::read(proc_path(pid, "cmdline")).unwrap_or_default();
    let pid_file = pid_file.as_os_str().as_encoded_bytes();
    let is_named = command_line.split(|byte| *byte == 0).any(|argument| argument == pid_file);
    Ok(is_named.then_some((pid, pidfd)))
}

fn process_id(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

fn open_pidfd(pid: Pid) -> rustix::io::Result<OwnedFd> {
    rustix::process::pidfd_open(pid, PidfdFlags::empty())
}

fn wait_until_exit(pidfd: &OwnedFd, log_file: Option<&Path>) {
    loop {
        // A pidfd becomes readable when its process ends, and stays so.
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&LOG_CHECK_EVERY)) {
            Ok(0) => log_file.map_or((), bound_log),
            Ok(_) => return,
            // Interrupted, or the kernel is short of memory.
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn reap(pidfd: BorrowedFd<'_>) -> Exit {
    match rustix::process::waitid(WaitId::PidFd(pidfd), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
        Ok(Some(status)) => how_it_ended(&status),
        Ok(None) | Err(_) => Exit::Unknown,
    }
}

/// Nobody reports it where who has started it has ended before.
fn reported_exit(exit_pipe: OwnedFd) -> Exit {
    let mut status = [0; 4];
    // The end of the other end makes it readable too.
    let is_reported =
        matches!(poll(&mut [PollFd::new(&exit_pipe, PollFlags::IN)], Some(&REPORTED_WITHIN)), Ok(1));
    if !is_reported || File::from(exit_pipe).read_exact(&mut status).is_err() {
        return Exit::Unknown;
    }
    let status = ExitStatus::from_raw(i32::from_ne_bytes(status));
    status.code().map(Exit::Code).or_else(|| status.signal().map(Exit::Signal)).unwrap_or(Exit::Unknown)
}

fn how_it_ended(status: &WaitIdStatus) -> Exit {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Exit::Code(code),
        (None, Some(signal)) => Exit::Signal(signal),
        (None, None) => Exit::Unknown,
    }
}

/// QEMU has the log open for appending, so it writes on at the new end.
fn bound_log(log_file: &Path) {
    let too_long = fs::metadata(log_file).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX);
    if too_long && let Err(error) = fs::write(log_file, "(emptied: too long)\n") {
        tracing::warn!(log_file = %log_file.display(), %error, "cannot empty the log of QEMU");
    }
}

/// Field 3 of `/proc/PID/stat`.
fn is_stopped(stat: &str) -> bool {
    let state = stat.rsplit_once(')').and_then(|(_, from_third)| from_third.split_ascii_whitespace().next());
    matches!(state, Some("T" | "t"))
}

/// User and system time in `/proc/PID/stat`, in clock ticks (`proc_pid_stat(5)`, fields 14 and 15).
fn cpu_ticks(stat: &str) -> Option<u64> {
    // The second field is the process's name in parentheses, which may hold anything.
    let (_, fields_from_third) = stat.rsplit_once(')')?;
    let mut fields = fields_from_third.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    user.checked_add(system)
}

/// What `/proc` says that a process may lock; none for as much as it likes.
fn memory_lock_bytes(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::birth::Birth;

    #[test]
    fn a_limit_is_the_one_that_holds_and_unlimited_is_none() {
        let limits =
            |soft| format!("Limit Soft Hard Units\nMax locked memory    {soft}   unlimited   bytes\n");
        assert_eq!(memory_lock_bytes(&limits("8388608")), Some(8 << 20));
        assert_eq!(memory_lock_bytes(&limits("unlimited")), None);
    }

    #[test]
    fn cpu_time_is_read_whatever_the_process_is_called() {
        let stat = "42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 1 0 99";
        assert_eq!(cpu_ticks(stat), Some(200));
    }

    #[test]
    fn one_that_is_stopped_or_traced_is_told_from_one_that_sleeps() {
        assert!(["T", "t"].iter().all(|state| is_stopped(&format!("42 (a) S b) {state} 1 2"))));
        assert!(["S", "R", "D"].iter().all(|state| !is_stopped(&format!("42 (a) T b) {state} 1 2"))));
    }

    proptest! {
        #[test]
        fn reading_cpu_time_never_panics(stat in ".*") {
            let _ = cpu_ticks(&stat);
        }
    }

    #[test]
    fn a_recycled_process_id_is_not_taken_for_qemu() {
        let directory = tempfile::tempdir().expect("a directory");
        let (pid_file, log) = (directory.path().join("pid"), directory.path().join("log"));
        let find = || Process::find(&Privileges::own(), &pid_file, log.clone()).expect("readable");
        assert!(find().is_none(), "no file");
        for text in ["", "x", "-1", "0", "99999999999"] {
            fs::write(&pid_file, text).expect("writable");
            assert!(find().is_none(), "{text}");
        }
        // A live process that is not this QEMU: ourselves.
        fs::write(&pid_file, std::process::id().to_string()).expect("writable");
        assert!(find().is_none(), "another process");
        let own = Birth::of_this_process().expect("readable");
        fs::write(&pid_file, own.a_tick_earlier().to_string()).expect("writable");
        assert!(find().is_none(), "another process of this number");
        fs::write(&pid_file, own.to_string()).expect("writable");
        assert_eq!(Process::living(&pid_file).expect("readable"), Some(std::process::id()));
    }
}
