//! The guard of a migration: a small separate process that lets the VM run when its agent cannot.
//!
//! QEMU pauses the VM by itself when little memory remains, and waits for the agent. If the agent were killed or stood
//! still then, nobody would answer until its next start. So each migration has a guard. The agent tells it every 500
//! ms that it is alive. If the agent has ended, or stands still while the VM is paused, the guard forbids the
//! hand-over in the journal. Only if that came in time, it stops the migration and lets the VM run. An agent that
//! wakes up later finds the hand-over forbidden. If the hand-over is already recorded and the agent has ended, the
//! guard orders the target to run the VM. [`drainpipe_engine::migration::guard`] decides what it does when. While the
//! VM runs, an agent may stand still: the transfer continues without it, unless it is compressed or encrypted, which
//! is the agents' work.
//!
//! While disks are copied and each write goes to both hosts through the agents, the guest waits for an agent that
//! stands still. So the guard then cuts QEMU's connections to the agent, without asking QEMU, whose main thread may
//! wait for them too; the guest continues with its own disks, and the migration fails.
//!
//! In a compressed or encrypted migration, the guard also holds the agent's ends of QEMU's connections. If the agent
//! ends, QEMU then waits for somebody to read, and can be told to stop. If QEMU saw all of them close at once, it
//! might wait for its own threads without end (7.2, 10.0). But while it sends the last bytes of a paused VM, QEMU
//! waits for that reader while it holds the lock that each command needs. The agent reports when that begins: from
//! then on, a QEMU that does not answer is cut off at once, while one that runs its guest has more time.
//!
//! Each VM has one guard: no transfer begins before its guard is ready, and no guard is ready before that of the
//! previous migration has left. Otherwise a guard that was slow to act could let the VM run here after a later
//! migration has handed it over.

pub(crate) mod descriptors;
mod source;
pub(crate) mod source_state;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::migration::guard::{
    AGAIN_AFTER_MS, Guard as Decisions, GuardAction, GuardEvent, SILENCE_MS,
};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmName;
use drainpipe_hypervisor::{Hypervisor, Machine, VmDirectory};
use drainpipe_identity::Identity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::setsid;
use tokio::sync::oneshot;

use self::source::Source;
use crate::peers::client::ApiClient;
use crate::store::config::{Config, Peer, Tls};
use crate::store::journal::Journal;
use crate::vms::QMP_DEADLINE;

/// The agent's sign of life.
const SIGN_EVERY: Duration = Duration::from_millis(500);

/// [`SILENCE_MS`] as the kernel takes it.
const SILENCE_MAX: Timespec = Timespec {
    tv_sec: (SILENCE_MS / 1000).cast_signed(),
    tv_nsec: (SILENCE_MS % 1000 * 1_000_000).cast_signed(),
};

/// How long a guard may take to its post. It takes 10 ms, and the wait for the one before.
const POST_DEADLINE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

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
    /// is not the relay, and where in the agent it copies disks to.
    pub async fn start(
        config: &Config,
        migration: &str,
        vmm: &dyn Machine,
        target: &Peer,
        peer: Option<SocketAddr>,
        disks: &[SocketAddr],
    ) -> Result<Self, Problem> {
        let failed =
            |error: io::Error| Problem::failed(format!("cannot start the migration's guard: {error}"));
        let (signs_heard, signs) = UnixStream::pair().map_err(failed)?;
        let keeping = signs.try_clone().map_err(failed)?;
        let signs_heard = OwnedFd::from(signs_heard);
        let (word, word_given) = io::pipe().map_err(failed)?;
        let child = command(config, migration, vmm, target, peer)
            .args(disks.iter().flat_map(|disk| ["--disk".into(), disk.to_string()]))
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

fn command(
    config: &Config,
    migration: &str,
    vmm: &dyn Machine,
    target: &Peer,
    peer: Option<SocketAddr>,
) -> Command {
    let Config { state_directory, runtime_directory, tls, .. } = config;
    // Not the path of this program: an upgrade may have removed it, or put another version there.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("drainpipe")
        .arg("guard")
        .args(["--migration", migration])
        .arg("--state-directory")
        .arg(state_directory)
        .arg("--runtime-directory")
        .arg(runtime_directory)
        .args(["--vm", vmm.spec().spec().name.as_str()])
        .args(["--target", &target.name, "--target-address", &target.address.to_string()])
        .arg("--certificate")
        .arg(&tls.certificate)
        .arg("--key")
        .arg(&tls.key)
        .arg("--authority")
        .arg(&tls.authority);
    if let Some(peer) = peer {
        command.args(["--peer", &peer.to_string()]);
    }
    if let Some(socket) = vmm.daemon() {
        command.arg("--daemon").arg(socket);
    }
    command
}

async fn keep_alive(mut child: Child, mut signs: UnixStream, mut left: oneshot::Receiver<Parting>) {
    let mut parting = Parting::Dismissed;
    // One byte a time into an empty socket never blocks.
    while signs.write_all(&[ALIVE]).is_ok() {
        tokio::select! {
            dismissal = &mut left => {
                parting = dismissal.unwrap_or(Parting::Dismissed);
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
        tracing::warn!(%error, "cannot wait for a guard");
    }
}

fn wait_until_at_post(mut word: PipeReader) -> io::Result<()> {
    if poll(&mut [PollFd::new(&word, PollFlags::IN)], Some(&POST_DEADLINE))? == 0 {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "it was not ready within 5 s: the guard of an earlier migration of this VM is still running, or \
            this host is too busy to start one; try again",
        ));
    }
    match word.read(&mut [0])? {
        0 => Err(io::Error::other("it ended at once; the agent's log says why")),
        _ => Ok(()),
    }
}

/// What a guard's process is started with.
#[derive(Debug, Clone)]
pub struct Orders {
    /// The migration's identifier.
    pub migration: String,
    /// The VM's name.
    pub vm: String,
    /// Where QEMU itself is connected to, if that is its target.
    pub peer: Option<SocketAddr>,
    /// Where in the agent it copies disks to.
    pub disks: Vec<SocketAddr>,
    /// Where the VM goes.
    pub target: Peer,
    /// This host's TLS identity towards the target.
    pub tls: Tls,
    /// Where the journal is.
    pub state_directory: PathBuf,
    /// Where the VM's QEMU has its sockets.
    pub runtime_directory: PathBuf,
}

/// The guard's own process: watches standard input, and acts when it falls silent.
pub async fn stand(orders: &Orders, hypervisor: Arc<dyn Hypervisor>) -> Result<(), Problem> {
    // A Ctrl-C at the agent's terminal is not for it, nor does the kernel end one that is stopped when the agent ends
    // (`kill_orphaned_pgrp`). The leader of a process group, such as a process started by a shell, cannot begin a session.
    let _leads_a_group = setsid();
    let vm = &orders.vm;
    let name: VmName = vm.parse().map_err(Problem::bad_input)?;
    let directory = hypervisor.directory(&name).map_err(Problem::refused)?;
    let _post = take_post(&directory)
        .map_err(|error| Problem::failed(format!("guard of VM {vm}: cannot begin: {error}")))?;
    let journal = Journal::open_beside_agent(&orders.state_directory, &orders.runtime_directory)?;
    // An agent that is gone already shows as silence.
    let _heard = io::stdout().write_all(&[AT_POST]).and_then(|()| io::stdout().flush());
    let source = Source::new(hypervisor, name, orders.peer, orders.disks.clone());
    Executor { orders, journal, source, problem: None }.run(&io::stdin()).await
}

/// Carries out what the machine decides.
struct Executor<'a> {
    orders: &'a Orders,
    journal: Journal,
    source: Source,
    // What went wrong last.
    problem: Option<Problem>,
}

impl Executor<'_> {
    /// By the agent's word, or its silence, in `signs`.
    async fn run(mut self, signs: &impl AsFd) -> Result<(), Problem> {
        let vm = &self.orders.vm;
        let (mut machine, mut next) = Decisions::at_post();
        loop {
            let event = match next {
                GuardAction::Leave => return Ok(()),
                GuardAction::GiveUp => {
                    let problem = self.problem.unwrap_or_else(|| Problem::failed("the attempts failed"));
                    return Err(problem.context(format!("guard of VM {vm}: it does not run")));
                }
                action => self.perform(action, signs).await.unwrap_or_else(|problem| {
                    eprintln!("guard of VM {vm}: {problem}; tried again");
                    self.problem = Some(problem);
                    GuardEvent::Failed { may_succeed_now: self.source.was_just_cut_off() }
                }),
            };
            next = machine.handle(event);
        }
    }

    async fn perform(&mut self, action: GuardAction, signs: &impl AsFd) -> Result<GuardEvent, Problem> {
        let migration = &self.orders.migration;
        match action {
            GuardAction::Listen => {
                let heard = listen(signs, &mut self.source.messages);
                self.source.cut_disk_copies_if(heard);
                return Ok(heard);
            }
            GuardAction::LookAtVm => return Ok(GuardEvent::VmRuns(self.source.look().await)),
            GuardAction::ForbidHandOver => {
                self.source.lift_throttle();
                return Ok(GuardEvent::HandOver(self.journal.forbid_hand_over(migration)?));
            }
            GuardAction::StopTransfer => return self.source.stop_transfer().await,
            GuardAction::ResumeOnSource => return self.source.run().await,
            GuardAction::AskSource => return self.source.ask().await,
            GuardAction::RevokeHandOver => drop(self.journal.revoke_hand_over(migration)?),
            GuardAction::ResumeOnTarget => self.order_target().await?,
            GuardAction::Pause => tokio::time::sleep(Duration::from_millis(AGAIN_AFTER_MS)).await,
            GuardAction::Leave | GuardAction::GiveUp => {}
        }
        Ok(GuardEvent::Done)
    }

    /// As the agent does in step 9, in its name. The target's journal sees to it that the VM runs there once.
    async fn order_target(&self) -> Result<(), Problem> {
        let Orders { migration, target, tls, .. } = self.orders;
        let identity =
            Identity::load(&tls.certificate, &tls.key, &tls.authority).map_err(Problem::refused)?;
        let target = ApiClient::over_tls(&target.name, target.address, &identity)?;
        target.post_within(&format!("/v1/incoming/{migration}/run"), &(), QMP_DEADLINE).await
    }
}

/// Held for as long as the process lives.
fn take_post(directory: &VmDirectory) -> io::Result<File> {
    let post = File::create(directory.guard_post())?;
    post.lock()?;
    Ok(post)
}

/// What its agent has sent to a guard.
#[derive(Debug, Default)]
struct AgentMessages {
    // The relay's ends of QEMU's connections.
    held: Vec<OwnedFd>,
    switches_over: bool,
}

/// Waits for the agent's word, its silence or its end.
fn listen(input: &impl AsFd, messages: &mut AgentMessages) -> GuardEvent {
    loop {
        let mut waiting = [PollFd::new(input, PollFlags::IN)];
        match poll(&mut waiting, Some(&SILENCE_MAX)) {
            Ok(0) => return GuardEvent::Silent { is_switching_over: messages.switches_over },
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return GuardEvent::AgentEnded,
        }
        let mut signs = [0; 64];
        match descriptors::receive(input, &mut signs, &mut messages.held) {
            Ok(0) | Err(_) => return GuardEvent::AgentEnded,
            Ok(count) if signs[..count].contains(&DISMISSED) => return GuardEvent::Dismissed,
            Ok(count) => messages.switches_over |= signs[..count].contains(&SWITCHES_OVER),
        }
    }
}
