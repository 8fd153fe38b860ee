//! The guard of a migration: a small process of its own that lets the VM run on when its agent cannot.
//!
//! QEMU pauses the VM by itself when little memory remains, and waits for the agent. If the agent has
//! been killed, or stands still, nobody would answer until its next start. So a guard stands beside
//! each migration. While the agent lives it says so every 500 ms; when it has ended, or stands still
//! and the VM does too, the guard forbids the hand-over in the journal, and only if it was in time,
//! stops the migration and lets the VM run. An agent that wakes up later finds the hand-over forbidden.
//! While the VM runs, an agent may stand still: the transfer goes on without it, unless it is compressed or
//! encrypted, which the agents do.
//!
//! Of a compressed or encrypted migration the guard holds the agent's ends of QEMU's connections too.
//! Should the agent end, QEMU waits for somebody to read, and can be told to stop. If it saw all of them
//! close at once, it might wait for its own threads without end (7.2, 10.0). But while it sends the last bytes of a VM
//! that is paused for them, QEMU waits for that reader with the lock that each command needs. The agent says when that
//! begins: a QEMU that does not answer then is cut off at once, and one that runs its guest has more time.
//!
//! One guard a VM: no transfer begins before its guard stands, and none takes its post before the one
//! of the migration before has left. Otherwise a guard that was slow to act could let the VM run
//! here that a later migration has handed over.

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::pin::pin;
use std::process::{Child, Command};
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration as qemu;
use drainpipe_hypervisor::qmp::QmpError;
use drainpipe_hypervisor::{AttachError, RunState, RuntimePaths, Vmm, cut_connections};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, shutdown};
use rustix::process::setsid;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::agent::Agent;
use crate::descriptors;
use crate::journal::Journal;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};

/// How long QEMU may take for an answer while it has the last bytes of a paused VM to send. After that it is taken to wait
/// for whoever is to read them.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// The agent's sign of life.
const SIGN_EVERY: Duration = Duration::from_millis(500);

/// After this silence the agent is taken to stand still. Long enough for a host that swaps, short enough
/// that the VM's clients do not give up.
const SILENCE_MAX: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };

/// How often a guard lets an agent stand still while the VM runs: 5 minutes of silence. After that the
/// agent is not expected to wake up, and the transfer would have no end.
const SILENCES: u32 = 100;

/// How long a guard may take to its post. It takes 10 ms, and the wait for the one before.
const POST_DEADLINE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// How often a guard tries to let the VM run, with a pause between: the journal's disk may be full,
/// QEMU may hang for a while. Past this only a person helps.
const ATTEMPTS: u32 = 600;
const ATTEMPT_AGAIN_AFTER: Duration = Duration::from_secs(1);

const ALIVE: u8 = b'.';
const HOLD: u8 = b'h';
const DISMISSED: u8 = b'q';
const SWITCHES_OVER: u8 = b's';
const AT_POST: u8 = b'!';

/// The agent's hold of a guard; dismisses it when dropped, unless what drops it is a panic. Then nobody looks after the
/// VM for a while, and the guard acts as when the agent ends.
#[derive(Debug)]
pub struct Guard {
    signs: UnixStream,
    parting: Option<oneshot::Sender<Parting>>,
}

/// How a guard is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parting {
    Dismissed,
    Deserted,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let parting = if std::thread::panicking() { Parting::Deserted } else { Parting::Dismissed };
        if let Some(tell) = self.parting.take() {
            // Nobody hears it if the guard is gone.
            let _gone_already = tell.send(parting);
        }
    }
}

impl Guard {
    /// Posts a guard beside a migration; back when it stands. It is told where QEMU itself is connected to, if that
    /// is not the relay.
    pub async fn start(
        agent: &Agent,
        migration: &str,
        vmm: &Vmm,
        peer: Option<SocketAddr>,
    ) -> Result<Self, Problem> {
        let failed =
            |error: io::Error| Problem::failed(format!("cannot start the migration's guard: {error}"));
        let (signs_heard, signs) = UnixStream::pair().map_err(failed)?;
        let keeping = signs.try_clone().map_err(failed)?;
        let signs_heard = OwnedFd::from(signs_heard);
        let (word, word_given) = io::pipe().map_err(failed)?;
        let child = command(agent, migration, vmm, peer)
            .stdin(signs_heard)
            .stdout(word_given)
            .spawn()
            .map_err(failed)?;
        let (parting, left) = oneshot::channel();
        tokio::spawn(keep_alive(child, keeping, left));
        let at_post = tokio::task::spawn_blocking(move || wait_until_at_post(word)).await;
        at_post.map_err(io::Error::other).and_then(|at_post| at_post).map_err(failed)?;
        Ok(Self { signs, parting: Some(parting) })
    }

    /// The VM is paused, and its last bytes are to go from now on.
    pub(crate) fn switches_over(&self) -> io::Result<()> {
        (&self.signs).write_all(&[SWITCHES_OVER])
    }

    /// What takes sockets for it to hold.
    pub(crate) fn hands(&self) -> io::Result<GuardsHands> {
        self.signs.try_clone().map(GuardsHands)
    }
}

/// Takes sockets for a guard to hold.
#[derive(Debug)]
pub(crate) struct GuardsHands(UnixStream);

impl GuardsHands {
    /// Has the guard keep a socket open for as long as it stands.
    pub(crate) fn hold(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        descriptors::send(&self.0, HOLD, socket)
    }
}

fn command(agent: &Agent, migration: &str, vmm: &Vmm, peer: Option<SocketAddr>) -> Command {
    // Not the path of this program: an upgrade may have removed it, or put another version there.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("drainpipe")
        .arg("guard")
        .args(["--migration", migration])
        .arg("--state-directory")
        .arg(&agent.config.state_directory)
        .arg("--runtime-directory")
        .arg(&agent.config.runtime_directory)
        .args(["--vm", vmm.spec().spec().name.as_str()]);
    if let Some(peer) = peer {
        command.args(["--peer", &peer.to_string()]);
    }
    command
}

async fn keep_alive(mut child: Child, mut signs: UnixStream, mut left: oneshot::Receiver<Parting>) {
    let mut parting = Parting::Dismissed;
    // One byte a time into an empty socket never blocks.
    while signs.write_all(&[ALIVE]).is_ok() {
        tokio::select! {
            told = &mut left => {
                parting = told.unwrap_or(Parting::Dismissed);
                break;
            }
            () = tokio::time::sleep(SIGN_EVERY) => {}
        }
    }
    if parting == Parting::Dismissed {
        let _gone_already = signs.write_all(&[DISMISSED]);
    }
    drop(signs);
    let waited = tokio::task::spawn_blocking(move || child.wait()).await;
    if let Ok(Err(error)) = waited {
        tracing::warn!(%error, "a guard cannot be waited for");
    }
}

fn wait_until_at_post(mut word: PipeReader) -> io::Result<()> {
    if poll(&mut [PollFd::new(&word, PollFlags::IN)], Some(&POST_DEADLINE))? == 0 {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the guard of an earlier migration of this VM is still at work; try again",
        ));
    }
    match word.read(&mut [0])? {
        0 => Err(io::Error::other("it ended at once; the agent's log says why")),
        _ => Ok(()),
    }
}

/// The guard's own process: watches standard input, and acts when it falls silent.
pub async fn stand(
    migration: &str,
    vm: &str,
    peer: Option<SocketAddr>,
    state_directory: &Path,
    runtime_directory: &Path,
) -> Result<(), Problem> {
    // A Ctrl-C at the agent's terminal is not for it, nor does the kernel end one that is stopped when the agent ends
    // (`kill_orphaned_pgrp`). Who leads a process group, as one that a shell has started, cannot have a session.
    let _leads_a_group = setsid();
    let name = vm.parse().map_err(Problem::bad_input)?;
    let paths = RuntimePaths::new(runtime_directory, &name).map_err(Problem::refused)?;
    let _post = take_post(&paths)
        .map_err(|error| Problem::failed(format!("guard of VM {vm}: cannot take its post: {error}")))?;
    let journal = Journal::open_beside_agent(state_directory, runtime_directory)?;
    // An agent that is gone already shows as silence.
    let _heard = io::stdout().write_all(&[AT_POST]).and_then(|()| io::stdout().flush());
    let mut silences_left = SILENCES;
    let mut told = Told::default();
    loop {
        match listen(&io::stdin(), &mut told) {
            Heard::Dismissed => return Ok(()),
            // A VM that is paused for its last bytes does not run.
            Heard::Nothing if silences_left > 0 && !told.switches_over && vm_runs(&paths).await => {
                silences_left -= 1;
                lift_throttle(&paths);
            }
            Heard::Nothing | Heard::End => break,
        }
    }
    let mut attempts_left = ATTEMPTS;
    let Told { held, switches_over } = told;
    let mut qemu = Qemu { paths, peer, held, switches_over, was_mute: false };
    loop {
        let was_mute = qemu.was_mute;
        let Err(problem) = qemu.let_run_on(&journal, migration).await else { return Ok(()) };
        eprintln!("guard of VM {vm}: {problem}; tried again");
        attempts_left -= 1;
        if attempts_left == 0 {
            return Err(problem.context(format!("guard of VM {vm}: it does not run")));
        }
        // One that was cut off just now answers at once.
        if was_mute || !qemu.was_mute {
            tokio::time::sleep(ATTEMPT_AGAIN_AFTER).await;
        }
    }
}

/// Held for as long as the process lives.
fn take_post(paths: &RuntimePaths) -> io::Result<File> {
    let post = File::create(paths.guard_post())?;
    post.lock()?;
    Ok(post)
}

/// The VM's QEMU, and what it is connected to.
struct Qemu {
    paths: RuntimePaths,
    // If that is its target.
    peer: Option<SocketAddr>,
    // The relay's ends of its connections, if that is what it is connected to.
    held: Vec<OwnedFd>,
    // The VM is paused, and QEMU was about to be told to send its last bytes.
    switches_over: bool,
    // It did not answer when it was asked before.
    was_mute: bool,
}

impl Qemu {
    async fn let_run_on(&mut self, journal: &Journal, migration: &str) -> Result<(), Problem> {
        lift_throttle(&self.paths);
        if !journal.forbid_hand_over(migration)? {
            return Ok(());
        }
        let vmm = match Vmm::attach_beside_agent(self.paths.clone(), self.patience()).await {
            // There is nothing left to let run.
            Err(AttachError::NotRunning { .. }) => return Ok(()),
            Err(error) => {
                if matches!(error, AttachError::Qmp(QmpError::Deadline { .. })) {
                    self.cut_if_mute();
                }
                return Err(Problem::failed(error));
            }
            Ok(vmm) => vmm,
        };
        if let Some(Err(error)) = self.peer.map(|peer| vmm.discard_unsent(peer)) {
            eprintln!("guard: the kernel goes on trying to send what QEMU has left: {error}");
        }
        let mut cancelling = pin!(qemu::cancel(&vmm, QEMU_DEADLINE));
        let cancelled = if let Ok(cancelled) = timeout(self.patience(), &mut cancelling).await {
            cancelled
        } else {
            // It became mute after it had answered.
            self.cut_if_mute();
            cancelling.await
        };
        self.cut();
        cut_relay(&self.held);
        cancelled.map_err(Problem::failed)?;
        qemu::run(&vmm, QMP_DEADLINE).await.map_err(Problem::failed)
    }

    /// How long it may take for an answer.
    fn patience(&self) -> Duration {
        if self.switches_over && !self.was_mute { ANSWERS_WITHIN } else { QMP_DEADLINE }
    }

    /// It may wait for its target, or for a relay that nobody drives any more, with the lock that every command needs.
    /// But one that looks for changed memory, while the VM runs, may be mute for 5 s, and should not see all ends of a
    /// relay close then.
    fn cut_if_mute(&mut self) {
        self.cut();
        if self.was_mute || self.switches_over {
            cut_relay(&self.held);
        }
        self.was_mute = true;
    }

    /// As the agent does when it stops a transfer: docs/decisions.md, 40.
    fn cut(&self) {
        if let Some(Err(error)) = self.peer.map(|peer| cut_connections(&self.paths, peer)) {
            eprintln!("guard: QEMU may wait for its target, and answer nothing: {error}");
        }
    }
}

/// Nobody sees any more whether it still serves its purpose. An agent that wakes up throttles the VM again.
fn lift_throttle(paths: &RuntimePaths) {
    if let Err(error) = drainpipe_hypervisor::lift_throttle(paths) {
        eprintln!("guard: the VM's CPUs stay throttled until its agent is started anew: {error}");
    }
}

/// Has QEMU find its connections to a relay at their end.
fn cut_relay(held: &[OwnedFd]) {
    for socket in held {
        // Not closed: an agent that stands still has them open too. One whose other end is gone is cut already.
        let _cut_already = shutdown(socket, Shutdown::Both);
    }
}

/// Also if QEMU does not answer: it may be mute for seconds while the VM runs, and could not be told
/// anything now.
async fn vm_runs(paths: &RuntimePaths) -> bool {
    match Vmm::attach_beside_agent(paths.clone(), QMP_DEADLINE).await {
        Ok(vmm) => match vmm.run_state(QMP_DEADLINE).await {
            Ok(state) => state == RunState::Running,
            Err(error) => matches!(error, QmpError::Deadline { .. }),
        },
        Err(error) => matches!(error, AttachError::Qmp(QmpError::Deadline { .. })),
    }
}

/// What a guard was told by its agent.
#[derive(Debug, Default)]
struct Told {
    // The relay's ends of QEMU's connections.
    held: Vec<OwnedFd>,
    switches_over: bool,
}

/// What a guard hears of its agent.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    /// The migration needs no guard any more.
    Dismissed,
    /// The agent stands still.
    Nothing,
    /// The agent has ended.
    End,
}

/// Waits for the agent's word, its silence or its end.
fn listen(input: &impl AsFd, told: &mut Told) -> Heard {
    loop {
        let mut waiting = [PollFd::new(input, PollFlags::IN)];
        match poll(&mut waiting, Some(&SILENCE_MAX)) {
            Ok(0) => return Heard::Nothing,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return Heard::End,
        }
        let mut signs = [0; 64];
        match descriptors::receive(input, &mut signs, &mut told.held) {
            Ok(0) | Err(_) => return Heard::End,
            Ok(count) if signs[..count].contains(&DISMISSED) => return Heard::Dismissed,
            Ok(count) => told.switches_over |= signs[..count].contains(&SWITCHES_OVER),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_silence_and_the_end_are_told_apart() {
        let (heard, mut agent) = UnixStream::pair().unwrap();
        agent.write_all(&[ALIVE, ALIVE, DISMISSED]).unwrap();
        assert_eq!(listen(&heard, &mut Told::default()), Heard::Dismissed);
        let (heard, mut agent) = UnixStream::pair().unwrap();
        agent.write_all(&[ALIVE]).unwrap();
        let mut told = Told::default();
        assert_eq!(listen(&heard, &mut told), Heard::Nothing);
        assert!(!told.switches_over);
        agent.write_all(&[SWITCHES_OVER]).unwrap();
        drop(agent);
        assert_eq!(listen(&heard, &mut told), Heard::End);
        assert!(told.switches_over);
    }

    #[test]
    fn a_program_that_a_relay_stands_still_for_is_cut_off() {
        let (mut program, relay) = UnixStream::pair().unwrap();
        let held = [OwnedFd::from(relay.try_clone().unwrap())];
        program.set_nonblocking(true).unwrap();
        while program.write(&[0; 4096]).is_ok() {}
        assert_eq!(program.write(&[0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        cut_relay(&held);
        cut_relay(&held);
        assert_eq!(program.write(&[0]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        drop(relay);
    }

    #[test]
    fn a_guard_that_ends_before_its_post_is_noticed() {
        let (heard, word) = io::pipe().unwrap();
        drop(word);
        let error = wait_until_at_post(heard).unwrap_err();
        assert!(error.to_string().contains("ended at once"), "{error}");
    }
}
