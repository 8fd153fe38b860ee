//! The guard of a migration: a small process of its own that lets the VM run on when its agent cannot.
//!
//! QEMU pauses the VM by itself when little memory remains, and waits for the agent. If the agent has
//! been killed, or stands still, nobody would answer until its next start. So a guard stands beside
//! each migration. While the agent lives it says so every 500 ms; when it has fallen silent, the
//! guard forbids the hand-over in the journal, and only if it was in time, stops the migration and
//! lets the VM run. An agent that wakes up later finds the hand-over forbidden.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration as qemu;
use drainpipe_hypervisor::{RuntimePaths, Vmm};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::agent::Agent;
use crate::journal::Journal;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};

/// The agent's sign of life.
const SIGN_EVERY: Duration = Duration::from_millis(500);

/// After this silence the agent is taken for dead. Long enough for a host that swaps, short enough
/// that the VM's clients do not give up.
const SILENCE_MAX: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };

const ALIVE: u8 = b'.';
const DISMISSED: u8 = b'q';

/// The agent's hold of a guard; dismisses it when dropped.
#[derive(Debug)]
pub struct Guard {
    dismissed: Arc<AtomicBool>,
}

impl Guard {
    /// Posts a guard beside a migration.
    pub fn start(agent: &Agent, migration: &str, vmm: &Vmm) -> Result<Self, Problem> {
        let failed =
            |error: io::Error| Problem::failed(format!("cannot start the migration's guard: {error}"));
        let mut child = command(agent, migration, vmm).map_err(failed)?.spawn().map_err(failed)?;
        let stdin = child.stdin.take().ok_or_else(|| failed(io::Error::other("it has no input")))?;
        let dismissed = Arc::new(AtomicBool::new(false));
        tokio::spawn(keep_alive(child, stdin, Arc::clone(&dismissed)));
        Ok(Self { dismissed })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.dismissed.store(true, Ordering::Relaxed);
    }
}

fn command(agent: &Agent, migration: &str, vmm: &Vmm) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .arg("guard")
        .args(["--migration", migration])
        .arg("--state-directory")
        .arg(&agent.config.state_directory)
        .arg("--runtime-directory")
        .arg(&agent.config.runtime_directory)
        .args(["--vm", vmm.spec().spec().name.as_str()])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        // Of a group of its own: a Ctrl-C at the agent's terminal is not for the guard.
        .process_group(0);
    Ok(command)
}

async fn keep_alive(mut child: Child, mut stdin: ChildStdin, dismissed: Arc<AtomicBool>) {
    // One byte a time into an empty pipe never blocks.
    while !dismissed.load(Ordering::Relaxed) && stdin.write_all(&[ALIVE]).is_ok() {
        tokio::time::sleep(SIGN_EVERY).await;
    }
    let _gone_already = stdin.write_all(&[DISMISSED]);
    drop(stdin);
    let waited = tokio::task::spawn_blocking(move || child.wait()).await;
    if let Ok(Err(error)) = waited {
        tracing::warn!(%error, "a guard cannot be waited for");
    }
}

/// The guard's own process: watches standard input, and acts when it falls silent.
pub async fn stand(
    migration: &str,
    vm: &str,
    state_directory: &Path,
    runtime_directory: &Path,
) -> Result<(), Problem> {
    if agent_dismissed_us() {
        return Ok(());
    }
    let journal = Journal::open(state_directory)?;
    if !journal.forbid_hand_over(migration)? {
        return Ok(());
    }
    let name = vm.parse().map_err(Problem::bad_input)?;
    let paths = RuntimePaths::new(runtime_directory, &name).map_err(Problem::refused)?;
    let vmm = Vmm::attach_beside_agent(paths, QMP_DEADLINE).await.map_err(Problem::failed)?;
    qemu::cancel(&vmm, QEMU_DEADLINE).await.map_err(Problem::failed)?;
    qemu::run(&vmm, QMP_DEADLINE).await.map_err(Problem::failed)
}

/// Waits for the agent's word or its silence.
fn agent_dismissed_us() -> bool {
    let mut input = io::stdin().lock();
    loop {
        let mut waiting = [PollFd::new(&input, PollFlags::IN)];
        match poll(&mut waiting, Some(&SILENCE_MAX)) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return false,
        }
        let mut signs = [0; 64];
        match input.read(&mut signs) {
            Ok(0) | Err(_) => return false,
            Ok(count) if signs[..count].contains(&DISMISSED) => return true,
            Ok(_) => {}
        }
    }
}
