//! Programs of the host's owner that run around migrations: `[hooks]` in the configuration.
//!
//! They are informed and not asked: whatever becomes of a hook, the migration goes on. Each has a time limit, an
//! environment of its own, and no capabilities where the agent may take them from it.

use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use std::{fmt, io, thread};

use drainpipe_engine::format::{bound, one_line};
use drainpipe_identity::check_unchangeable;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::store::config::Hooks;
use crate::store::journal::HookDue;
use crate::store::lock::lock;

/// How much of a hook's output is kept for the log.
const OUTPUT_BYTES_MAX: usize = 4 << 10;

/// How long what a hook has printed last may take to get here, once it has ended. What it has started may go on.
const OUTPUT_WITHIN: Duration = Duration::from_millis(200);

/// Where hooks find programs.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// When a hook is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// On the source, before the VM is paused.
    BeforePause,
    /// On the target, once the VM runs there.
    Moved,
    /// On the source, where the VM has stayed though it was to be paused.
    Stayed,
}

/// What became of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// It has done its work, by its own word.
    Well,
    /// It has not.
    Badly(ExitStatus),
    /// It was ended after this time.
    TooLate(Duration),
    /// It was not run.
    NotRun(String),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Well => f.write_str("done"),
            Self::Badly(status) => write!(f, "failed: {status}"),
            Self::TooLate(after) => write!(f, "killed, because it took longer than {}", bound(*after)),
            Self::NotRun(why) => write!(f, "not run: {why}"),
        }
    }
}

impl Moment {
    fn name(self) -> &'static str {
        match self {
            Self::BeforePause => "before_pause",
            Self::Moved | Self::Stayed => "after",
        }
    }

    fn outcome(self) -> Option<&'static str> {
        match self {
            Self::BeforePause => None,
            Self::Moved => Some("moved"),
            Self::Stayed => Some("stayed"),
        }
    }

    fn program(self, hooks: &Hooks) -> Option<(&Path, Duration)> {
        let (program, seconds) = match self {
            Self::BeforePause => (&hooks.before_pause, hooks.before_pause_s),
            Self::Moved | Self::Stayed => (&hooks.after, hooks.after_s),
        };
        program.as_deref().map(|program| (program, Duration::from_secs(seconds.into())))
    }
}

/// Runs the hook that the host has for this moment, if it has one, and says in the log what became of it.
pub(crate) async fn run(hooks: &Hooks, moment: Moment, of: &HookDue) {
    let Some((program, within)) = moment.program(hooks) else { return };
    let (ended, output) = carry_out(program, moment, of, within).await;
    let (vm, hook, program, output) = (&of.vm, moment.name(), program.display(), one_line(&output));
    if ended == Ended::Well {
        info!(vm, hook, %program, output, "done");
    } else {
        warn!(vm, hook, %program, output, "{ended}; the migration goes on without it");
    }
}

async fn carry_out(program: &Path, moment: Moment, of: &HookDue, within: Duration) -> (Ended, String) {
    let not_run = |error: &dyn fmt::Display| (Ended::NotRun(error.to_string()), String::new());
    // A user who may write to it can do what the agent can.
    if let Err(error) = check_unchangeable(program, "hook") {
        return not_run(&error);
    }
    let started = command(program, moment, of).map(|(command, output)| (spawn(command), output));
    let (spawning, output) = match started {
        Ok(started) => started,
        Err(error) => return not_run(&error),
    };
    match spawning.await {
        Ok(child) => follow(child, output, within).await,
        Err(error) => not_run(&error),
    }
}

fn command(program: &Path, moment: Moment, of: &HookDue) -> io::Result<(Command, Receiver)> {
    let (read, write) = io::pipe()?;
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", SEARCH_PATH)
        .env("DRAINPIPE_HOOK", moment.name())
        .env("DRAINPIPE_VM", &of.vm)
        .env("DRAINPIPE_SOURCE", &of.source)
        .env("DRAINPIPE_TARGET", &of.target)
        .env("DRAINPIPE_MIGRATION", &of.migration)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(write.try_clone()?)
        .stderr(write)
        .process_group(0)
        .kill_on_drop(true);
    if let Some(outcome) = moment.outcome() {
        command.env("DRAINPIPE_OUTCOME", outcome);
    }
    Ok((command, Receiver::from_owned_fd(read.into())?))
}

/// By a thread of its own, which gives up first what the program is not to have.
async fn spawn(mut command: Command) -> io::Result<Child> {
    let (tell, result) = oneshot::channel();
    let runtime = Handle::current();
    thread::Builder::new().name("hook".into()).spawn(move || {
        let _entered = runtime.enter();
        let spawned = give_up_privileges().and_then(|()| command.spawn());
        // The task that waited for it may be gone: then this ends it.
        drop(tell.send(spawned));
    })?;
    result.await.map_err(io::Error::other)?
}

/// Gives up this thread's privileges. With no new privileges, not even root's program gets any back.
fn give_up_privileges() -> io::Result<()> {
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    match set_capabilities(None, none) {
        // The agent's unit forbids the call. It leaves few capabilities.
        Err(Errno::PERM) => {}
        given_up => given_up?,
    }
    Ok(set_no_new_privs(true)?)
}

async fn follow(mut child: Child, output: Receiver, within: Duration) -> (Ended, String) {
    let mut group = Group(child.id().and_then(|pid| Pid::from_raw(pid.cast_signed())));
    let kept = Arc::new(Mutex::new(vec![]));
    let mut reading = tokio::spawn(keep_beginning(output, Arc::clone(&kept)));
    let waited = timeout(within, child.wait()).await;
    if waited.is_ok() {
        // What it has left behind goes on.
        group.0 = None;
    }
    let ended = match waited {
        Ok(Ok(status)) if status.success() => Ended::Well,
        Ok(Ok(status)) => Ended::Badly(status),
        Ok(Err(error)) => Ended::NotRun(error.to_string()),
        Err(_) => {
            drop(group);
            drop(child.kill().await);
            Ended::TooLate(within)
        }
    };
    if timeout(OUTPUT_WITHIN, &mut reading).await.is_err() {
        reading.abort();
    }
    let output = String::from_utf8_lossy(&lock(&kept)).trim_end().to_owned();
    (ended, output)
}

/// A hook with all that it has started, but for what has left its process group. It ends when this is dropped.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.map(|pid| kill_process_group(pid, Signal::KILL)) {
            warn!(%error, "cannot kill a hook");
        }
    }
}

/// Reads all, so that nobody waits who prints, and keeps the beginning.
async fn keep_beginning(mut output: Receiver, kept: Arc<Mutex<Vec<u8>>>) {
    let mut buffer = [0; 1 << 10];
    while let Ok(bytes @ 1..) = output.read(&mut buffer).await {
        let mut kept = lock(&kept);
        let room = OUTPUT_BYTES_MAX - kept.len();
        kept.extend_from_slice(&buffer[..bytes.min(room)]);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::time::Instant;

    use tempfile::TempDir;

    use super::*;

    const LONG: Duration = Duration::from_mins(1);

    fn due() -> HookDue {
        HookDue { migration: "1".into(), vm: "web".into(), source: "a".into(), target: "b".into() }
    }

    fn script(directory: &TempDir, text: &str) -> PathBuf {
        let path = directory.path().join("hook");
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    async fn ran(text: &str, moment: Moment, within: Duration) -> (Ended, String) {
        let directory = TempDir::new().unwrap();
        carry_out(&script(&directory, text), moment, &due(), within).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_hook_is_told_what_happens_and_nothing_else() {
        let (ended, output) = ran("env | sort; pwd; cat", Moment::Moved, LONG).await;
        assert_eq!(ended, Ended::Well, "{output}");
        let variables: Vec<&str> = output.lines().filter(|line| line.starts_with("DRAINPIPE_")).collect();
        assert_eq!(
            variables,
            [
                "DRAINPIPE_HOOK=after",
                "DRAINPIPE_MIGRATION=1",
                "DRAINPIPE_OUTCOME=moved",
                "DRAINPIPE_SOURCE=a",
                "DRAINPIPE_TARGET=b",
                "DRAINPIPE_VM=web"
            ]
        );
        assert!(!output.contains("CARGO") && output.ends_with('/'), "{output}");
        let (_, output) = ran("env", Moment::BeforePause, LONG).await;
        assert!(output.contains("before_pause") && !output.contains("OUTCOME"), "{output}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_hook_has_no_privileges() {
        let (ended, output) = ran("grep -E 'Cap|NoNew' /proc/self/status", Moment::BeforePause, LONG).await;
        assert_eq!(ended, Ended::Well, "{output}");
        for field in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            let line = output.lines().find(|line| line.starts_with(field)).unwrap();
            assert!(line.ends_with("0000000000000000"), "{output}");
        }
        assert!(output.contains("NoNewPrivs:\t1"), "{output}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_hangs_is_ended_with_what_it_started() {
        // A busy machine has begun it by then.
        let within = Duration::from_secs(5);
        let running = ran("echo begun; sleep 600 & sleep 600", Moment::BeforePause, within);
        let (ended, output) = timeout(LONG, running).await.expect("what it started is not waited for");
        assert_eq!((ended, output.as_str()), (Ended::TooLate(within), "begun"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_nobody_waits_for_any_more_is_ended_with_what_it_started() {
        let directory = TempDir::new().unwrap();
        let written = directory.path().join("pid");
        let text = format!("sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait", written.display());
        let hook = script(&directory, &text);
        let running = tokio::spawn(async move { carry_out(&hook, Moment::BeforePause, &due(), LONG).await });
        let end = Instant::now() + LONG;
        while !written.exists() && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let pid = fs::read_to_string(&written).unwrap();
        running.abort();
        let is_there = || {
            let status = fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
            status.is_ok_and(|status| !status.contains(") Z "))
        };
        while is_there() {
            assert!(Instant::now() < end, "it goes on");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_it_leaves_behind_is_not_waited_for() {
        let running = ran("sleep 600 & echo $!", Moment::Moved, LONG);
        let (ended, output) = timeout(LONG, running).await.expect("what it leaves behind is not waited for");
        assert_eq!(ended, Ended::Well);
        let left = Pid::from_raw(output.parse().unwrap()).unwrap();
        rustix::process::kill_process(left, Signal::KILL).unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_prints_without_end_does_not_fill_the_log() {
        let (ended, output) = ran("yes 0123456789 | head -c 1000000; exit 3", Moment::Moved, LONG).await;
        assert!(matches!(ended, Ended::Badly(status) if status.code() == Some(3)), "{ended}");
        assert!(output.len() <= OUTPUT_BYTES_MAX && output.starts_with("0123456789"), "{}", output.len());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_is_not_there_or_that_others_may_write_is_not_run() {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("none");
        let (ended, _) = carry_out(&path, Moment::Moved, &due(), LONG).await;
        assert!(matches!(&ended, Ended::NotRun(why) if why.contains("No such file")), "{ended}");
        let path = script(&directory, "exit 0");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        let (ended, _) = carry_out(&path, Moment::Moved, &due(), LONG).await;
        assert!(matches!(ended, Ended::NotRun(_)), "{ended}");
    }
}
