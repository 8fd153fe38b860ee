//! A hypervisor of this host.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_engine::check::vm::Notice;

use crate::demands::Need;
use crate::directory::{PathTooLong, VmDirectory};
use crate::error::VmError;
use crate::facts::HypervisorFacts;
use crate::role::Role;
use crate::spec::{Manager, ResolvedSpec, VmName, VmSpec};
use crate::state::RunState;
use crate::vm::Machine;

/// A VM that somebody else than Drainpipe has defined here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagedVm {
    /// What it is.
    pub definition: VmSpec,
    /// Whether its guest is here, running or not.
    pub is_active: bool,
    /// What keeps it here.
    pub obstacles: Vec<Notice>,
}

impl ManagedVm {
    /// As what it is shown while Drainpipe has a VM of the same name here, which commands mean then; `None` where it is
    /// Drainpipe's own.
    pub fn as_namesake(&self) -> Option<Unmanaged> {
        let Self { definition, is_active, .. } = self;
        let VmSpec { name, memory_mib, vcpus, .. } = definition;
        let (manager, renaming) = definition.renamed_by_owner()?;
        Some(Unmanaged {
            // It must not be taken for the other one.
            name: format!("{name} ({manager})"),
            run_state: is_active.then_some(RunState::Running),
            memory_mib: *memory_mib,
            vcpus: *vcpus,
            manager,
            why: format!(
                "Drainpipe has a VM of the same name on this host: give one of the two another name, as by {renaming}"
            ),
        })
    }
}

/// A VM that somebody else has defined here, and that no specification describes: it is shown, and stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unmanaged {
    /// Its name, as it may be shown.
    pub name: String,
    /// What its guest does; none where it is off, or not known.
    pub run_state: Option<RunState>,
    /// Its memory; 0 where that is not known.
    pub memory_mib: u64,
    /// Its virtual CPUs; 0 where that is not known.
    pub vcpus: u32,
    /// The owner.
    pub manager: Manager,
    /// Why it stays.
    pub why: String,
}

/// All VMs that somebody else has defined here.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Managed {
    /// Those that may move.
    pub found: Vec<ManagedVm>,
    /// The others.
    pub unmanaged: Vec<Unmanaged>,
}

/// Starts VMs, and finds those that run.
///
/// One rule holds everywhere: a guest never starts to run by itself, but only by [`Self::start`] of a fresh VM, and
/// by [`crate::Vm::run`].
#[async_trait]
pub trait Hypervisor: fmt::Debug + Send + Sync {
    /// Asks what it can do on this host.
    async fn probe(&self, deadline: Duration) -> Result<HypervisorFacts, VmError>;

    /// Asks what it can do with VMs that another [manager](crate::Manager) of VMs on this host owns; `None` where there is
    /// no such manager.
    async fn probe_manager(&self, deadline: Duration) -> Result<Option<HypervisorFacts>, VmError> {
        let _has_none = deadline;
        Ok(None)
    }

    /// The VMs that such a manager has here now.
    async fn managed(&self, deadline: Duration) -> Result<Managed, VmError> {
        let _has_none = deadline;
        Ok(Managed::default())
    }

    /// Those of these needs that such a manager lacks here, by their places: among its own kinds.
    async fn lacking(&self, needs: &[Need], deadline: Duration) -> Result<Vec<usize>, VmError> {
        let _has_none = (needs, deadline);
        Ok(vec![])
    }

    /// A VM is another host's by now, and has no process here: ends what a manager of its still has of it, at once or when
    /// that answers again. Does nothing where it has none.
    async fn end_managed(&self, definition: &VmSpec, deadline: Duration) -> Result<(), VmError> {
        let _has_none = (definition, deadline);
        Ok(())
    }

    /// One of these is dealt with from now on: it is known by its name.
    fn note_managed(&self, _definition: &VmSpec) -> Result<(), VmError> {
        Ok(())
    }

    /// Returns when [`Self::managed`] may have changed; never where it cannot.
    async fn managed_changed(&self) {
        std::future::pending::<()>().await;
    }

    /// Where a VM has its files while it runs.
    fn directory(&self, vm: &VmName) -> Result<VmDirectory, PathTooLong>;

    /// The VMs that have files here, running or not.
    fn with_files(&self) -> io::Result<Vec<VmName>>;

    /// Starts a VM: with [`Role::Fresh`] the guest boots, with [`Role::Incoming`] it waits for
    /// [`crate::TargetVm::listen`]. `record` is what the agent keeps of it, at [`VmDirectory::record_file`]: there before
    /// the process is. If it fails, or is dropped before it is done, nothing is left.
    async fn start(
        &self,
        spec: ResolvedSpec,
        record: &[u8],
        role: Role,
        deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError>;

    /// Takes hold of a VM that an earlier agent started. [`crate::VmErrorKind::NotRunning`] where none runs.
    async fn attach(&self, vm: &VmName, deadline: Duration) -> Result<Arc<dyn Machine>, VmError>;

    /// Takes hold of a VM whose agent may still have its own hold, as a watchdog does.
    async fn attach_beside_agent(&self, vm: &VmName, deadline: Duration)
    -> Result<Arc<dyn Machine>, VmError>;

    /// What the VM here was started from, whether or not it answers.
    fn specification(&self, vm: &VmName) -> Result<ResolvedSpec, VmError>;

    /// The process id of the VM, if one lives here.
    fn living(&self, vm: &VmName) -> Result<Option<u32>, VmError>;

    /// Removes what is left of a VM whose process has ended. Leaves one that lives alone, and says so. Does nothing where
    /// there is nothing.
    fn clear(&self, vm: &VmName) -> Result<(), VmError>;

    /// Ends a VM that was to receive a guest which was given up, and removes what is left; kills one that does not answer.
    /// Leaves one alone whose guest runs, or that was started to boot a guest.
    async fn end_given_up(&self, vm: &VmName, deadline: Duration) -> Result<(), VmError>;

    /// Whether others than its agent are known to have let a VM run that was on its way here. Its process may have ended since.
    fn was_let_run(&self, _vm: &VmName) -> Result<bool, VmError> {
        // Nobody else can.
        Ok(false)
    }

    /// Kills the VM's process, whatever it does, and removes what is left: because somebody who knows what is lost wants it,
    /// and it does not answer.
    async fn kill_found(&self, vm: &VmName, deadline: Duration) -> Result<(), VmError>;

    /// Lets the vCPUs of a VM run as they like, whoever held them back, also if it answers nothing.
    fn lift_throttle(&self, vm: &VmName) -> Result<(), VmError>;

    /// Removes what is left of VMs that have ended while their vCPUs were held back by nobody who still lives.
    fn sweep_throttles(&self) -> Result<(), VmError>;

    /// Cuts each connection of a VM to `peer` without asking the hypervisor, and returns their number. Fails where somebody
    /// has [stopped](crate::Vm::is_stopped) it.
    fn cut_connections(&self, vm: &VmName, peer: SocketAddr) -> io::Result<usize>;

    /// Whether somebody has stopped the VM's process.
    fn is_stopped(&self, vm: &VmName) -> bool;
}
