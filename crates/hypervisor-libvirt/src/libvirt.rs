//! The domains of this host's libvirt.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_engine::host::capabilities::Capabilities;
use drainpipe_hypervisor::cpu_models::CpuModels;
use drainpipe_hypervisor::spec::VmName;
use drainpipe_hypervisor::words;
use drainpipe_hypervisor::{
    Connections, Hardware, Hypervisor, HypervisorFacts, Machine, Managed, ManagedVm, Manager, Need,
    PathTooLong, ResolvedSpec, Role, RunState, Unmanaged, Version, Vm, VmDirectory, VmError, VmErrorKind,
    VmSpec,
};
use drainpipe_hypervisor_qemu::{Privileges, Process, lift_throttle_of};
use drainpipe_libvirt::{Connection, Domain, DomainState, Error, JobKind, JobStatsOf, XmlFlags};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::demands::{self, Kept};
use crate::domain::{DomainDescription, DomainXmlError, Inexpressible};
use crate::errors::{failed, is_libvirts};
use crate::files::{self, ComingHere};
use crate::machine::DomainVm;
use crate::sockets::Sockets;
use crate::{needs, qemu_process, snapshots, states, versions};

/// The problem of a domain that libvirt was to end here, and that somebody resumed before.
const RUNS_TWICE: &str = "it has moved to another host, and somebody has let it run here too: destroy one of the two with `virsh destroy`";

/// How long the QEMU of a domain that libvirt calls active is looked for.
const PROCESS_WITHIN: Duration = Duration::from_secs(2);

/// QEMU's, where libvirt does not say it.
const UNKNOWN: Version = Version { major: 0, minor: 0, micro: 0 };

/// libvirt, with the domains that it has.
#[derive(Debug)]
pub struct Libvirt {
    runtime_directory: PathBuf,
    daemon: Arc<Daemon>,
}

impl Libvirt {
    /// The one that answers at one of `sockets`. What is kept of its domains is in `runtime_directory`, and what a boot of the host
    /// is not to take below `state_directory`.
    pub fn new(
        runtime_directory: PathBuf,
        state_directory: PathBuf,
        sockets: Sockets,
        privileges: Privileges,
    ) -> Self {
        Self { runtime_directory, daemon: Arc::new(Daemon::at(sockets, state_directory, privileges)) }
    }

    async fn connection(&self, deadline: Duration) -> Result<Connection, VmError> {
        self.daemon.shared(deadline).await.map_err(failed)
    }

    fn found_directory(&self, vm: &VmName) -> Result<VmDirectory, VmError> {
        self.directory(vm).map_err(VmError::failed)
    }

    fn found_process(&self, vm: &VmName) -> Result<Option<Process>, VmError> {
        let spec = files::read_spec(&self.found_directory(vm)?)?;
        qemu_process::find(self.daemon.privileges(), spec.uuid()).map_err(VmError::failed)
    }

    async fn description(
        &self,
        connection: &Connection,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<Result<DomainDescription, DomainXmlError>, VmError> {
        let xml = connection.xml(domain, XmlFlags::default(), deadline).await.map_err(failed)?;
        Ok(DomainDescription::parse(&xml))
    }

    fn is_to_end(&self, definition: &VmSpec) -> Result<bool, VmError> {
        Ok(files::is_to_end(&self.found_directory(&definition.name)?))
    }

    /// What libvirt still has of a domain that is another host's by now, because it had ended when that was to be ended.
    /// One that somebody has let run is left alone, and what it does is returned: nobody but an operator knows which of the
    /// two is wanted.
    async fn end_left(&self, definition: &VmSpec, deadline: Duration) -> Result<Option<RunState>, VmError> {
        let directory = self.found_directory(&definition.name)?;
        let spec = files::read_spec(&directory)?;
        let role = files::role(&directory)?;
        let machine = DomainVm::new(&self.daemon, spec, directory, role, UNKNOWN, None);
        match machine.may_run(deadline).await {
            Ok(true) => return Ok(Some(RunState::Running)),
            // libvirt has nothing of it any more.
            Err(error) if error.kind == VmErrorKind::NotRunning => {}
            may_run => drop(may_run?),
        }
        machine.destroy(deadline).await?;
        Ok(None)
    }

    /// Tells libvirt of the snapshots of a domain that stays here, if that could not be done when it was known, or an agent
    /// that has ended had not come to it.
    async fn return_snapshots(
        &self,
        connection: &Connection,
        domain: &Domain,
        definition: &VmSpec,
        deadline: Duration,
    ) {
        if let Err(error) = self.try_return_snapshots(connection, domain, definition, deadline).await {
            tracing::warn!(vm = %definition.name, %error, "libvirt does not know its snapshots yet");
        }
    }

    async fn try_return_snapshots(
        &self,
        connection: &Connection,
        domain: &Domain,
        definition: &VmSpec,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let uuid = Uuid::from_bytes(domain.uuid);
        let file = self.daemon.snapshot_file(uuid);
        if !file.exists() || files::read_coming(&self.found_directory(&definition.name)?)?.is_some() {
            return Ok(());
        }
        // Held, so that it does not begin to leave meanwhile.
        let leaving = self.daemon.leaving().await;
        if leaving.contains(&uuid) {
            return Ok(());
        }
        if domain.id.is_some() {
            let job = connection.job_stats(domain, JobStatsOf::UnderWay, deadline).await.map_err(failed)?;
            if job.kind != JobKind::None {
                // Its holder ends it first.
                return Ok(());
            }
        }
        snapshots::tell(connection, domain, &file.read()?, deadline).await.map_err(failed)?;
        file.remove()
    }

    /// What a domain is that is on its way here, by what is kept of it: since some release after 9.0, libvirt keeps who asks
    /// for its XML waiting until all is there.
    async fn coming(
        &self,
        connection: &Connection,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<Option<VmSpec>, VmError> {
        let Ok(name) = domain.name.parse::<VmName>() else { return Ok(None) };
        let directory = self.found_directory(&name)?;
        let is_coming = files::read_coming(&directory)?.is_some_and(|coming| !coming.is_complete);
        if !is_coming || domain.id.is_none() {
            return Ok(None);
        }
        let spec = files::read_spec(&directory)?;
        let state = connection.state(domain, deadline).await.map_err(failed)?.state;
        let is_it = spec.uuid().as_bytes() == &domain.uuid && state == DomainState::Paused;
        Ok(is_it.then(|| spec.spec().clone()))
    }

    /// A domain, as one that may move or as one that stays.
    async fn find(
        &self,
        connection: &Connection,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<Result<ManagedVm, Unmanaged>, VmError> {
        if let Some(definition) = self.coming(connection, domain, deadline).await? {
            return Ok(Ok(ManagedVm { definition, is_active: true, obstacles: vec![] }));
        }
        let described = self.description(connection, domain, deadline).await?;
        let definition = match &described {
            Ok(description) => description.vm_spec().map_err(|reasons| Inexpressible::in_words(&reasons)),
            Err(error) => Err(error.to_string()),
        };
        let is_active = domain.id.is_some();
        let (Ok(description), Ok(definition)) = (&described, &definition) else {
            let why = definition.err().unwrap_or_default();
            let run_state = if is_active {
                let state = connection.state(domain, deadline).await.map_err(failed)?;
                Some(states::run_state(state, false))
            } else {
                None
            };
            return Ok(Err(unmanaged(domain, described.as_ref().ok(), run_state, why)));
        };
        let kept = if is_active {
            Kept::ask(connection, domain, description, deadline).await?
        } else {
            Kept::default()
        };
        let obstacles = demands::of(description, &kept).obstacles;
        Ok(Ok(ManagedVm { definition: definition.clone(), is_active, obstacles }))
    }

    /// By what was kept of it, while there is no libvirt to say more.
    fn orphaned(&self, vm: &VmName) -> Result<DomainVm, VmError> {
        let directory = self.found_directory(vm)?;
        let spec = files::read_spec(&directory)?;
        let process = qemu_process::find(self.daemon.privileges(), spec.uuid()).map_err(VmError::failed)?;
        let process = process.ok_or_else(|| {
            VmError::new(VmErrorKind::NotRunning, format!("the domain {vm} is off, and so is its libvirt"))
        })?;
        let role = files::role(&directory)?;
        Ok(DomainVm::new(&self.daemon, spec, directory, role, UNKNOWN, Some(process)))
    }

    async fn take_hold_of(&self, vm: &VmName, deadline: Duration) -> Result<DomainVm, VmError> {
        match self.take_hold(vm, deadline).await {
            Err(error) if error.kind == VmErrorKind::Gone && self.daemon.has_ended().await => {
                self.orphaned(vm)
            }
            taken => taken,
        }
    }

    async fn take_hold(&self, vm: &VmName, deadline: Duration) -> Result<DomainVm, VmError> {
        let connection = self.connection(deadline).await?;
        let domain = connection.domain_by_name(vm.as_str(), deadline).await.map_err(failed)?;
        if domain.id.is_none() {
            return Err(VmError::new(VmErrorKind::NotRunning, format!("the domain {vm} is off")));
        }
        let description = self.description(&connection, &domain, deadline).await?.map_err(VmError::failed)?;
        let spec =
            description.vm_spec().map_err(|reasons| VmError::failed(Inexpressible::in_words(&reasons)))?;
        let spec = ResolvedSpec::try_from(spec).map_err(VmError::failed)?;
        let directory = self.found_directory(vm)?;
        files::write_spec(&directory, &spec)?;
        let role = files::role(&directory)?;
        let version = versions::of_qemu(&connection, deadline).await?;
        let (privileges, within) = (self.daemon.privileges(), PROCESS_WITHIN.min(deadline));
        let process = qemu_process::find_started(privileges, spec.uuid(), within).await;
        let process = process.map_err(VmError::failed)?;
        Ok(DomainVm::new(&self.daemon, spec, directory, role, version, Some(process)))
    }
}

/// A domain that is shown, and stays.
fn unmanaged(
    domain: &Domain,
    description: Option<&DomainDescription>,
    run_state: Option<RunState>,
    why: String,
) -> Unmanaged {
    Unmanaged {
        name: words::plain(&domain.name),
        run_state,
        memory_mib: description.map_or(0, |described| described.memory.bytes >> 20),
        vcpus: description.map_or(0, |described| described.cpus.most),
        manager: Manager::Libvirt,
        why,
    }
}

/// libvirt protects no domain that has snapshots, and those of the one that comes may be others.
async fn check_without_snapshots(
    connection: &Connection,
    domain: &Domain,
    deadline: Duration,
) -> Result<(), VmError> {
    match connection.snapshot_count(domain, deadline).await.map_err(failed)? {
        0 => Ok(()),
        count => Err(VmError::failed(format!(
            "libvirt has a domain of this name and UUID here already, with {count} snapshots: make it \
            forget them with `virsh snapshot-delete {} NAME --metadata`",
            domain.name
        ))),
    }
}

/// None where libvirt has no such domain.
fn known(found: Result<Domain, Error>) -> Result<Option<Domain>, VmError> {
    match found {
        Err(error) if error.is_no_domain() => Ok(None),
        found => found.map(Some).map_err(failed),
    }
}

fn is_taken(what: &str, uuid: Uuid) -> VmError {
    VmError::failed(format!(
        "libvirt has {what} here: give one of the two another name (`virsh domrename`), or another UUID than {uuid}"
    ))
}

/// What a libvirt with this QEMU can do whose migration protocol two agents run phase by phase. `Perform` pauses the
/// guest and sends the rest in one act, and `Finish` leaves it paused. Any libvirt that Drainpipe works with sends by Unix
/// sockets, too (6.8).
fn capabilities(qemu: Version) -> Capabilities {
    Capabilities {
        pauses_before_switchover: false,
        zero_pages_in_parallel: false,
        packs: false,
        keeps_limit: false,
        post_copy: None,
        ..drainpipe_hypervisor_qemu::capabilities(qemu)
    }
}

#[async_trait]
impl Hypervisor for Libvirt {
    async fn probe(&self, deadline: Duration) -> Result<HypervisorFacts, VmError> {
        let facts = self.probe_manager(deadline).await?;
        facts.ok_or_else(|| VmError::new(VmErrorKind::Gone, "there is no libvirt on this host"))
    }

    async fn probe_manager(&self, deadline: Duration) -> Result<Option<HypervisorFacts>, VmError> {
        if !self.daemon.is_there() {
            return Ok(None);
        }
        let connection = self.connection(deadline).await?;
        let libvirt = versions::of_libvirt(&connection, deadline).await?;
        let qemu = versions::of_qemu(&connection, deadline).await?;
        Ok(Some(HypervisorFacts {
            name: "libvirt".into(),
            capabilities: capabilities(qemu),
            binary: PathBuf::new(),
            version: libvirt,
            machines: vec![],
            rdma: false,
            kvm_missing: None,
            cpu_models: CpuModels::new(
                Hardware::Kvm,
                std::collections::BTreeMap::new(),
                std::collections::BTreeMap::new(),
                std::collections::BTreeMap::new(),
            ),
            stamp: None,
        }))
    }

    async fn managed(&self, deadline: Duration) -> Result<Managed, VmError> {
        let mut managed = Managed::default();
        if !self.daemon.is_there() {
            return Ok(managed);
        }
        let connection = self.connection(deadline).await?;
        for domain in connection.domains(false, deadline).await.map_err(failed)? {
            match self.find(&connection, &domain, deadline).await {
                Ok(Ok(found)) if self.is_to_end(&found.definition)? => {
                    if let Some(run_state) = self.end_left(&found.definition, deadline).await? {
                        managed.unmanaged.push(unmanaged(&domain, None, Some(run_state), RUNS_TWICE.into()));
                    }
                }
                Ok(Ok(found)) => {
                    self.return_snapshots(&connection, &domain, &found.definition, deadline).await;
                    managed.found.push(found);
                }
                Ok(Err(one)) => managed.unmanaged.push(one),
                // It has gone meanwhile.
                Err(error) if error.kind == VmErrorKind::NotRunning => {}
                Err(error) if error.is_mute() || error.kind == VmErrorKind::Gone => return Err(error),
                Err(error) => managed.unmanaged.push(unmanaged(&domain, None, None, error.to_string())),
            }
        }
        Ok(managed)
    }

    async fn end_managed(&self, definition: &VmSpec, deadline: Duration) -> Result<(), VmError> {
        self.note_managed(definition)?;
        files::write_to_end(&self.found_directory(&definition.name)?)?;
        self.end_left(definition, deadline).await.map(drop)
    }

    fn note_managed(&self, definition: &VmSpec) -> Result<(), VmError> {
        let directory = self.found_directory(&definition.name)?;
        if directory.path().exists() {
            return Ok(());
        }
        let spec = ResolvedSpec::try_from(definition.clone()).map_err(VmError::failed)?;
        files::write_spec(&directory, &spec)
    }

    async fn lacking(&self, needs: &[Need], deadline: Duration) -> Result<Vec<usize>, VmError> {
        if !self.daemon.is_there() || !needs.iter().any(needs::is_libvirts) {
            return Ok(vec![]);
        }
        // A modular libvirt's connection has one to each other daemon that was asked by it, also once that has ended or is
        // another: so one that was made for this question alone.
        let connection = self.daemon.own(deadline).await.map_err(failed)?;
        needs::lacking(&connection, needs, deadline).await
    }

    async fn managed_changed(&self) {
        self.daemon.changed().await;
    }

    fn directory(&self, vm: &VmName) -> Result<VmDirectory, PathTooLong> {
        files::directory(&self.runtime_directory, vm)
    }

    fn with_files(&self) -> io::Result<Vec<VmName>> {
        let mut names = VmDirectory::list(&self.runtime_directory.join("libvirt"))?;
        // An agent may have ended as it made one.
        names.retain(|name| self.specification(name).is_ok());
        Ok(names)
    }

    async fn start(
        &self,
        spec: ResolvedSpec,
        record: &[u8],
        role: Role,
        deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError> {
        if role != Role::Incoming {
            return Err(is_libvirts("`virsh start` starts it"));
        }
        let name = spec.spec().name.clone();
        let connection = self.connection(deadline).await?;
        let by_name = connection.domain_by_name(name.as_str(), deadline).await;
        let by_uuid = connection.domain_by_uuid(*spec.uuid().as_bytes(), deadline).await;
        let was_defined = match (known(by_name)?, known(by_uuid)?) {
            (None, None) => false,
            (Some(named), Some(domain)) if named == domain && domain.id.is_none() => {
                check_without_snapshots(&connection, &domain, deadline).await?;
                true
            }
            (Some(other), _) => return Err(is_taken(&format!("another domain {}", other.name), spec.uuid())),
            (None, Some(other)) => {
                let what = format!("the domain {} of the same UUID", other.name);
                return Err(is_taken(&what, spec.uuid()));
            }
        };
        let version = versions::of_qemu(&connection, deadline).await?;
        let directory = self.found_directory(&name)?;
        files::remove(&directory)?;
        files::write_spec(&directory, &spec)?;
        files::write_coming(&directory, ComingHere { was_defined, ..ComingHere::default() })?;
        files::write_record(&directory, record)?;
        Ok(Arc::new(DomainVm::new(&self.daemon, spec, directory, role, version, None)))
    }

    async fn attach(&self, vm: &VmName, deadline: Duration) -> Result<Arc<dyn Machine>, VmError> {
        Ok(Arc::new(self.take_hold_of(vm, deadline).await?))
    }

    async fn attach_beside_agent(
        &self,
        vm: &VmName,
        deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError> {
        let mut machine = self.take_hold_of(vm, deadline).await?;
        machine.be_guards();
        Ok(Arc::new(machine))
    }

    fn specification(&self, vm: &VmName) -> Result<ResolvedSpec, VmError> {
        files::read_spec(&self.found_directory(vm)?)
    }

    fn living(&self, vm: &VmName) -> Result<Option<u32>, VmError> {
        let spec = files::read_spec(&self.found_directory(vm)?)?;
        qemu_process::number(self.daemon.privileges(), spec.uuid()).map_err(VmError::failed)
    }

    /// The domain is libvirt's: what is left of it is no matter of Drainpipe's. If it is to be ended, or was to come,
    /// it is known until that is done.
    fn clear(&self, vm: &VmName) -> Result<(), VmError> {
        let directory = self.found_directory(vm)?;
        if files::is_to_end(&directory) || files::read_coming(&directory)?.is_some() {
            return Ok(());
        }
        files::remove(&directory)
    }

    async fn end_given_up(&self, vm: &VmName, deadline: Duration) -> Result<(), VmError> {
        let directory = self.found_directory(vm)?;
        if files::read_coming(&directory)?.is_none() {
            return Err(VmError::failed(format!("the domain {vm} was not on its way here")));
        }
        let machine = match self.take_hold(vm, deadline).await {
            Ok(machine) => machine,
            // libvirt has ended it with the agent's connection; it may be defined still.
            Err(error) if error.kind == VmErrorKind::NotRunning => {
                let spec = files::read_spec(&directory)?;
                DomainVm::new(&self.daemon, spec, directory, Role::Incoming, UNKNOWN, None)
            }
            Err(error) => return Err(error),
        };
        if matches!(machine.run_state(deadline).await, Ok(RunState::Running)) {
            return Err(VmError::failed(format!("the domain {vm} runs here")));
        }
        machine.destroy(deadline).await
    }

    fn was_let_run(&self, vm: &VmName) -> Result<bool, VmError> {
        files::was_let_run(&self.found_directory(vm)?)
    }

    async fn kill_found(&self, _vm: &VmName, _deadline: Duration) -> Result<(), VmError> {
        Err(is_libvirts("`virsh destroy` ends it"))
    }

    fn lift_throttle(&self, vm: &VmName) -> Result<(), VmError> {
        match self.found_process(vm)? {
            Some(process) => lift_throttle_of(&process).map_err(VmError::failed),
            None => Ok(()),
        }
    }

    fn sweep_throttles(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn cut_connections(&self, vm: &VmName, peer: SocketAddr) -> io::Result<usize> {
        match self.found_process(vm).map_err(io::Error::other)? {
            Some(process) => process.cut(peer),
            None => Ok(0),
        }
    }

    fn is_stopped(&self, vm: &VmName) -> bool {
        let process = self.found_process(vm).ok().flatten();
        process.is_some_and(|process| process.is_stopped().unwrap_or(false))
    }
}
