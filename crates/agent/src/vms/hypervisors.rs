//! Everything that runs VMs on this host: QEMU, driven directly, and what another manager of VMs runs. Only this
//! module maps a VM's manager to one of them; all other code asks for what it does.
//!
//! A VM's name shows which of them has it: [`crate::vms::Vms`] makes sure that no two have the same.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_engine::host::capabilities::Capabilities;
use drainpipe_engine::host::facts::HostFacts;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmName;
use drainpipe_hypervisor::{
    Hypervisor, HypervisorFacts, Machine, Managed, Manager, Need, PathTooLong, ResolvedSpec, Role,
    VmDirectory, VmError, VmSpec,
};

use super::Vms;

/// QEMU, and a manager of VMs.
#[derive(Debug)]
pub(crate) struct Hypervisors {
    own: Arc<dyn Hypervisor>,
    manager: Arc<dyn Hypervisor>,
}

impl Hypervisors {
    /// VMs of Drainpipe's are run by `own`, those of the manager by `manager`.
    pub(crate) fn new(own: Arc<dyn Hypervisor>, manager: Arc<dyn Hypervisor>) -> Self {
        Self { own, manager }
    }

    /// The manager has files of each VM of its that is dealt with, and of no other.
    fn of(&self, vm: &VmName) -> &dyn Hypervisor {
        let has_files = |hypervisor: &dyn Hypervisor| {
            hypervisor.directory(vm).is_ok_and(|directory| directory.path().exists())
        };
        if !has_files(&*self.own) && has_files(&*self.manager) { &*self.manager } else { &*self.own }
    }

    /// Whether or not it has files here.
    fn that_defines(&self, definition: &VmSpec) -> &dyn Hypervisor {
        match definition.manager {
            None => &*self.own,
            Some(Manager::Libvirt) => &*self.manager,
        }
    }
}

impl Vms {
    /// What whoever runs such a VM can do here; `None` where nobody is there to run it.
    pub(crate) fn capabilities_for(&self, definition: &VmSpec) -> Option<Capabilities> {
        match definition.manager {
            None => Some(self.facts().capabilities),
            Some(Manager::Libvirt) => self.facts_of_manager().map(|facts| facts.capabilities),
        }
    }
}

/// The owner of all of these VMs; none if Drainpipe owns some of them. Statements about the way to a host then concern
/// those.
pub(crate) fn manager_of_all<'a>(definitions: impl Iterator<Item = &'a VmSpec>) -> Option<Manager> {
    let mut managers = definitions.map(|definition| definition.manager);
    let first = managers.next()??;
    managers.all(|manager| manager == Some(first)).then_some(first)
}

/// What a host is to VMs of this manager.
pub(crate) fn facts_for(manager: Option<Manager>, facts: HostFacts) -> Result<HostFacts, Problem> {
    match manager {
        None => Ok(facts),
        Some(Manager::Libvirt) => facts.for_domain().map_err(Problem::refused),
    }
}

#[async_trait]
impl Hypervisor for Hypervisors {
    async fn probe(&self, deadline: Duration) -> Result<HypervisorFacts, VmError> {
        self.own.probe(deadline).await
    }

    async fn probe_manager(&self, deadline: Duration) -> Result<Option<HypervisorFacts>, VmError> {
        self.manager.probe_manager(deadline).await
    }

    async fn managed(&self, deadline: Duration) -> Result<Managed, VmError> {
        self.manager.managed(deadline).await
    }

    async fn lacking(&self, needs: &[Need], deadline: Duration) -> Result<Vec<usize>, VmError> {
        self.manager.lacking(needs, deadline).await
    }

    async fn end_managed(&self, definition: &VmSpec, deadline: Duration) -> Result<(), VmError> {
        self.that_defines(definition).end_managed(definition, deadline).await
    }

    fn note_managed(&self, definition: &VmSpec) -> Result<(), VmError> {
        self.that_defines(definition).note_managed(definition)
    }

    async fn managed_changed(&self) {
        self.manager.managed_changed().await;
    }

    fn directory(&self, vm: &VmName) -> Result<VmDirectory, PathTooLong> {
        self.of(vm).directory(vm)
    }

    fn with_files(&self) -> io::Result<Vec<VmName>> {
        let mut names = self.own.with_files()?;
        names.extend(self.manager.with_files()?);
        names.sort();
        names.dedup();
        Ok(names)
    }

    async fn start(
        &self,
        spec: ResolvedSpec,
        record: &[u8],
        role: Role,
        deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError> {
        self.that_defines(spec.spec()).start(spec, record, role, deadline).await
    }

    async fn attach(&self, vm: &VmName, deadline: Duration) -> Result<Arc<dyn Machine>, VmError> {
        self.of(vm).attach(vm, deadline).await
    }

    async fn attach_beside_agent(
        &self,
        vm: &VmName,
        deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError> {
        self.of(vm).attach_beside_agent(vm, deadline).await
    }

    fn specification(&self, vm: &VmName) -> Result<ResolvedSpec, VmError> {
        self.of(vm).specification(vm)
    }

    fn living(&self, vm: &VmName) -> Result<Option<u32>, VmError> {
        self.of(vm).living(vm)
    }

    fn clear(&self, vm: &VmName) -> Result<(), VmError> {
        self.of(vm).clear(vm)
    }

    async fn end_given_up(&self, vm: &VmName, deadline: Duration) -> Result<(), VmError> {
        self.of(vm).end_given_up(vm, deadline).await
    }

    fn was_let_run(&self, vm: &VmName) -> Result<bool, VmError> {
        self.of(vm).was_let_run(vm)
    }

    async fn kill_found(&self, vm: &VmName, deadline: Duration) -> Result<(), VmError> {
        self.of(vm).kill_found(vm, deadline).await
    }

    fn lift_throttle(&self, vm: &VmName) -> Result<(), VmError> {
        self.of(vm).lift_throttle(vm)
    }

    fn sweep_throttles(&self) -> Result<(), VmError> {
        self.own.sweep_throttles()
    }

    fn cut_connections(&self, vm: &VmName, peer: SocketAddr) -> io::Result<usize> {
        self.of(vm).cut_connections(vm, peer)
    }

    fn is_stopped(&self, vm: &VmName) -> bool {
        self.of(vm).is_stopped(vm)
    }
}
