//! A migration's VM here, as its guard deals with it.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::migration::guard::GuardEvent;
use drainpipe_engine::migration::timing::MUTE_FOR_GUARD_AFTER;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmName;
use drainpipe_hypervisor::{Hypervisor, Machine, MigrationStatus, RunState, VmError, VmErrorKind};
use rustix::net::{Shutdown, shutdown};
use tokio::time::timeout;

use super::AgentMessages;
use crate::guard::source_state::settled_source_state;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};

/// How often, and how soon again, a QEMU whose VM runs again gets the order to let its writes go.
const LET_GO_ATTEMPTS: u32 = 10;
const LET_GO_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The VM's QEMU, and what it is connected to.
pub(super) struct Source {
    hypervisor: Arc<dyn Hypervisor>,
    name: VmName,
    // Where it is connected to, if that is its target.
    peer: Option<SocketAddr>,
    // Where in the agent it copies disks to.
    disks: Vec<SocketAddr>,
    pub(super) messages: AgentMessages,
    // Whether it has answered so far.
    silence: Silence,
    // For how many times in a row its agent has said nothing.
    silences: u8,
    // Between two actions.
    attached: Option<Arc<dyn Machine>>,
}

/// Silences of [`drainpipe_engine::migration::guard::SILENCE_MS`] in a row until copies of disks are cut.
const SILENCES_MAX: u8 = 3;

/// Whether a QEMU has failed to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Silence {
    Never,
    /// For the first time, just now: it was cut off, and may answer at once.
    First,
    Again,
}

impl Source {
    /// Not taken hold of yet.
    pub(super) fn new(
        hypervisor: Arc<dyn Hypervisor>,
        name: VmName,
        peer: Option<SocketAddr>,
        disks: Vec<SocketAddr>,
    ) -> Self {
        Self {
            hypervisor,
            name,
            peer,
            disks,
            messages: AgentMessages::default(),
            silence: Silence::Never,
            silences: 0,
            attached: None,
        }
    }

    /// Whether the VM runs. One that does not answer may be mute for seconds while it does, and could not be told
    /// anything now. Its throttle is lifted then, and what it writes is not held back: nobody sees any more whether that still
    /// serves its purpose.
    pub(super) async fn look(&self) -> bool {
        let attached = self.attach(QMP_DEADLINE).await;
        let runs = match &attached {
            Ok(vmm) => match vmm.run_state(QMP_DEADLINE).await {
                Ok(state) => state == RunState::Running,
                Err(error) => error.is_mute(),
            },
            Err(error) => error.is_mute(),
        };
        if runs {
            self.lift_throttle();
            if let Ok(vmm) = attached {
                let_writes_go(&*vmm).await;
            }
        }
        runs
    }

    /// Nobody sees any more whether it still serves its purpose. An agent that wakes up throttles the VM again.
    pub(super) fn lift_throttle(&self) {
        if let Err(error) = self.hypervisor.lift_throttle(&self.name) {
            eprintln!("guard: the VM's CPUs stay throttled until its agent restarts: {error}");
        }
    }

    async fn attach(&self, deadline: Duration) -> Result<Arc<dyn Machine>, VmError> {
        self.hypervisor.attach_beside_agent(&self.name, deadline).await
    }

    /// Copies of disks go through the agent, and the guest's writes wait for them. Not at its first silence: the copy would
    /// have to begin again.
    pub(super) fn cut_disk_copies_if(&mut self, heard: GuardEvent) {
        self.silences =
            if matches!(heard, GuardEvent::Silent { .. }) { self.silences.saturating_add(1) } else { 0 };
        // Also one that QEMU has connected again since.
        if self.silences >= SILENCES_MAX {
            self.cut_disk_copies();
        }
    }

    /// Without asking QEMU: its main thread may wait for the same, and then hears nobody who comes now.
    fn cut_disk_copies(&self) {
        self.disks.iter().for_each(|disk| self.cut_disk_copy(*disk));
    }

    fn cut_disk_copy(&self, agent: SocketAddr) {
        match self.hypervisor.cut_connections(&self.name, agent) {
            Ok(0) => {}
            Ok(_) => eprintln!("guard: cut a copy of the VM's disk for which its writes wait"),
            Err(error) => eprintln!("guard: the VM may wait for a copy of its disk: {error}"),
        }
    }

    /// What it says of itself.
    pub(super) async fn ask(&self) -> Result<GuardEvent, Problem> {
        let vmm = match self.attach(QMP_DEADLINE).await {
            Err(error) if error.kind == VmErrorKind::NotRunning => return Ok(GuardEvent::HypervisorEnded),
            attached => attached.map_err(Problem::failed)?,
        };
        Ok(GuardEvent::SourceSays(settled_source_state(Some(&*vmm)).await?))
    }

    pub(super) async fn stop_transfer(&mut self) -> Result<GuardEvent, Problem> {
        let vmm = match self.attach(self.patience()).await {
            Err(error) if error.kind == VmErrorKind::NotRunning => return Ok(GuardEvent::HypervisorEnded),
            Err(error) => {
                if error.is_mute() {
                    self.cut_if_mute();
                }
                return Err(Problem::failed(error));
            }
            Ok(vmm) => vmm,
        };
        self.cut_disk_copies();
        if let Some(Err(error)) =
            self.peer.zip(vmm.connections()).map(|(peer, of_vm)| of_vm.discard_unsent(peer))
        {
            eprintln!("guard: the kernel keeps trying to send what QEMU has left: {error}");
        }
        let cancelled = self.cancel(&*vmm).await;
        self.cut(true);
        cancelled.map_err(Problem::failed)?;
        self.attached = Some(vmm);
        Ok(GuardEvent::Done)
    }

    async fn cancel(&mut self, vmm: &dyn Machine) -> Result<MigrationStatus, VmError> {
        let mut cancelling = pin!(vmm.cancel(QEMU_DEADLINE));
        if let Ok(cancelled) = timeout(self.patience(), &mut cancelling).await {
            return cancelled;
        }
        // It became mute after it had answered.
        self.cut_if_mute();
        cancelling.await
    }

    pub(super) async fn run(&mut self) -> Result<GuardEvent, Problem> {
        let vmm =
            self.attached.take().ok_or_else(|| Problem::failed("it could not connect to the VM's QEMU"))?;
        vmm.run(QMP_DEADLINE).await.map_err(Problem::failed)?;
        // Only now: the VM waits for nothing that is less urgent. And nobody looks after it any more.
        for _ in 0..LET_GO_ATTEMPTS {
            if let_writes_go(&*vmm).await {
                break;
            }
            tokio::time::sleep(LET_GO_AGAIN_AFTER).await;
        }
        Ok(GuardEvent::Done)
    }

    /// How long it may take for an answer.
    fn patience(&self) -> Duration {
        if self.messages.switches_over && self.silence == Silence::Never {
            MUTE_FOR_GUARD_AFTER
        } else {
            QMP_DEADLINE
        }
    }

    /// It may wait for its target, or for a relay that nobody drives any more, with the lock that every command needs.
    /// But one that looks for changed memory, while the VM runs, may be mute for 5 s, and should not see all ends of a
    /// relay close then.
    fn cut_if_mute(&mut self) {
        if self.cut(self.silence != Silence::Never || self.messages.switches_over) {
            self.silence = if self.silence == Silence::Never { Silence::First } else { Silence::Again };
        }
    }

    /// Whether it was cut off for the first time just now: it may answer at once.
    pub(super) fn was_just_cut_off(&mut self) -> bool {
        let was_first = self.silence == Silence::First;
        if was_first {
            self.silence = Silence::Again;
        }
        was_first
    }

    /// As the agent does when it stops a transfer: docs/decisions/0040. False where somebody has stopped QEMU: what is cut
    /// off meanwhile may never run again.
    fn cut(&self, with_relay: bool) -> bool {
        if self.hypervisor.is_stopped(&self.name) {
            eprintln!("guard: somebody has stopped QEMU, for example by SIGSTOP: waiting for it");
            return false;
        }
        if let Some(Err(error)) = self.peer.map(|peer| self.hypervisor.cut_connections(&self.name, peer)) {
            eprintln!("guard: QEMU may wait for its target, and answer nothing: {error}");
        }
        if with_relay {
            cut_relay(&self.messages.held);
        }
        true
    }
}

/// Nobody sees any more whether it serves a purpose that what the VM writes is held back. Whether it is not.
async fn let_writes_go(vmm: &dyn Machine) -> bool {
    let let_go = match vmm.disk_copies() {
        Some(copies) => copies.let_writes_go(QMP_DEADLINE).await,
        None => Ok(()),
    };
    if let Err(error) = &let_go {
        eprintln!("guard: the VM's writes may stay held back until its agent restarts: {error}");
    }
    let_go.is_ok()
}

/// Has QEMU find its connections to a relay at their end.
fn cut_relay(held: &[OwnedFd]) {
    for socket in held {
        // Not closed: an agent that stands still has them open too. One whose other end is gone is cut already.
        let _cut_already = shutdown(socket, Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

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
}
