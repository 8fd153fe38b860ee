//! A hypervisor without guests, for tests: its VMs live in memory, and fail on request.
//!
//! It outlives the agents of a test, as QEMUs do: a new agent over the same [`FakeHypervisor`] finds with
//! [`Hypervisor::attach`] what the one before has left. The test does what a network or a guest would do, for example
//! with [`FakeVm::receives_all`].

mod faults;
mod process;
mod vm;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_engine::host::capabilities::Capabilities;

use self::faults::Faults;
pub use self::faults::{Act, Fault};
pub use self::vm::FakeVm;
use crate::cpu_models::CpuModels;
use crate::directory::{PathTooLong, VmDirectory};
use crate::end::Exit;
use crate::error::{VmError, VmErrorKind};
use crate::facts::{HypervisorFacts, Version};
use crate::hardware::Hardware;
use crate::hypervisor::{Hypervisor, Managed};
use crate::role::Role;
use crate::spec::{ResolvedSpec, VmName};
use crate::state::RunState;
use crate::vm::{Machine, Vm};

/// The version that it reports.
const VERSION: Version = Version { major: 10, minor: 0, micro: 2 };

/// The machine types that it reports.
const MACHINES: [&str; 2] = ["pc-q35-7.2", "pc-q35-10.0"];

/// A hypervisor in memory.
#[derive(Debug)]
pub struct FakeHypervisor {
    runtime_directory: PathBuf,
    vms: Mutex<BTreeMap<VmName, Arc<FakeVm>>>,
    faults: Faults,
    managed: Mutex<Option<Managed>>,
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FakeHypervisor {
    /// A hypervisor without VMs. Those that are started have their files under this directory.
    pub fn new(runtime_directory: impl Into<PathBuf>) -> Arc<Self> {
        let runtime_directory = runtime_directory.into();
        Arc::new(Self {
            runtime_directory,
            vms: Mutex::default(),
            faults: Faults::default(),
            managed: Mutex::default(),
        })
    }

    /// From now on, its acts of this kind fail this way: [`Act::Start`], [`Act::Attach`] and [`Act::EndGivenUp`].
    pub fn fails(&self, act: Act, fault: Fault) {
        self.faults.set(act, fault);
    }

    /// The next act of this kind fails this way.
    pub fn fails_once(&self, act: Act, fault: Fault) {
        self.faults.set_once(act, fault);
    }

    /// Acts of this kind succeed again.
    pub fn succeeds(&self, act: Act) {
        self.faults.clear(act);
    }

    /// From now on it is another manager of VMs, which has these.
    pub fn manages(&self, managed: Managed) {
        *lock(&self.managed) = Some(managed);
    }

    /// The VM of this name that was started last, even if its process has ended.
    pub fn vm(&self, name: &str) -> Option<Arc<FakeVm>> {
        self.lock().iter().find(|(own, _)| own.as_str() == name).map(|(_, vm)| Arc::clone(vm))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmName, Arc<FakeVm>>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn living_vm(&self, name: &VmName) -> Option<Arc<FakeVm>> {
        self.lock().get(name).filter(|vm| vm.alive()).cloned()
    }

    fn remove_files(&self, name: &VmName) -> Result<(), VmError> {
        let directory = self.directory(name).map_err(VmError::failed)?;
        match fs::remove_dir_all(directory.path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(VmError::failed(error)),
            _ => Ok(()),
        }
    }

    fn lives(name: &VmName) -> VmError {
        VmError::failed(format!("a process of {name} lives, and nothing says that it may be ended"))
    }

    fn take_hold(&self, vm: &VmName) -> Result<Arc<dyn Machine>, VmError> {
        if let Some(fault) = self.faults.of(Act::Attach) {
            return Err(fault.error(Act::Attach));
        }
        match self.living_vm(vm) {
            Some(vm) => Ok(vm),
            None => Err(VmError::new(VmErrorKind::NotRunning, format!("no process of {vm} lives"))),
        }
    }
}

#[async_trait]
impl Hypervisor for FakeHypervisor {
    async fn probe(&self, _deadline: Duration) -> Result<HypervisorFacts, VmError> {
        Ok(HypervisorFacts {
            name: "fake".into(),
            capabilities: Capabilities::ALL,
            binary: "no such program".into(),
            version: VERSION,
            machines: MACHINES.map(Into::into).to_vec(),
            rdma: false,
            kvm_missing: Some("this hypervisor has no guests".into()),
            cpu_models: CpuModels::none(Hardware::Tcg),
            stamp: None,
        })
    }

    async fn probe_manager(&self, deadline: Duration) -> Result<Option<HypervisorFacts>, VmError> {
        let is_manager = lock(&self.managed).is_some();
        Ok(if is_manager { Some(self.probe(deadline).await?) } else { None })
    }

    async fn managed(&self, _deadline: Duration) -> Result<Managed, VmError> {
        Ok(lock(&self.managed).clone().unwrap_or_default())
    }

    fn directory(&self, vm: &VmName) -> Result<VmDirectory, PathTooLong> {
        VmDirectory::new(&self.runtime_directory, vm)
    }

    fn with_files(&self) -> io::Result<Vec<VmName>> {
        VmDirectory::list(&self.runtime_directory)
    }

    async fn start(
        &self,
        spec: ResolvedSpec,
        record: &[u8],
        role: Role,
        _deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError> {
        if let Some(fault) = self.faults.of(Act::Start) {
            return Err(fault.error(Act::Start));
        }
        let name = spec.spec().name.clone();
        if self.living_vm(&name).is_some() {
            return Err(Self::lives(&name));
        }
        let directory = self.directory(&name).map_err(VmError::failed)?;
        fs::create_dir_all(directory.path()).map_err(VmError::failed)?;
        fs::write(directory.record_file(), record).map_err(VmError::failed)?;
        let vm = Arc::new(FakeVm::started(spec, directory, role));
        self.lock().insert(name, Arc::clone(&vm));
        Ok(vm)
    }

    async fn attach(&self, vm: &VmName, _deadline: Duration) -> Result<Arc<dyn Machine>, VmError> {
        self.take_hold(vm)
    }

    async fn attach_beside_agent(
        &self,
        vm: &VmName,
        _deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError> {
        self.take_hold(vm)
    }

    fn specification(&self, vm: &VmName) -> Result<ResolvedSpec, VmError> {
        let found = self.lock().get(vm).map(|found| found.spec().clone());
        found.ok_or_else(|| VmError::failed(format!("there are no files of {vm}")))
    }

    fn living(&self, vm: &VmName) -> Result<Option<u32>, VmError> {
        Ok(self.living_vm(vm).map(|vm| vm.pid()))
    }

    fn clear(&self, vm: &VmName) -> Result<(), VmError> {
        match self.living_vm(vm) {
            Some(_) => Err(Self::lives(vm)),
            None => self.remove_files(vm),
        }
    }

    async fn end_given_up(&self, vm: &VmName, _deadline: Duration) -> Result<(), VmError> {
        if let Some(fault) = self.faults.of(Act::EndGivenUp) {
            return Err(fault.error(Act::EndGivenUp));
        }
        if let Some(living) = self.living_vm(vm) {
            if living.state() == RunState::Running || !matches!(living.role(), Ok(Role::Incoming)) {
                return Err(Self::lives(vm));
            }
            living.ends(Exit::Signal(9));
        }
        self.remove_files(vm)
    }

    fn was_let_run(&self, vm: &VmName) -> Result<bool, VmError> {
        let known = self.lock().get(vm).cloned();
        Ok(known.is_some_and(|known| known.obeys_others() && known.has_run()))
    }

    async fn kill_found(&self, vm: &VmName, _deadline: Duration) -> Result<(), VmError> {
        if let Some(living) = self.living_vm(vm) {
            living.ends(Exit::Signal(9));
        }
        self.remove_files(vm)
    }

    fn lift_throttle(&self, vm: &VmName) -> Result<(), VmError> {
        if let Some(living) = self.living_vm(vm) {
            living.hold_back(None);
        }
        Ok(())
    }

    fn sweep_throttles(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn cut_connections(&self, vm: &VmName, _peer: SocketAddr) -> io::Result<usize> {
        self.living_vm(vm).map_or(Ok(0), |vm| vm.cut_off())
    }

    fn is_stopped(&self, vm: &VmName) -> bool {
        self.living_vm(vm).is_some_and(|vm| vm.is_stopped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parcel::Parcel;
    use crate::spec::VmSpec;
    use crate::state::{Hold, MigrationStatus};
    use crate::transport::{SourceSettings, Transport};
    use crate::vm::{SourceVm, TargetVm};

    const DEADLINE: Duration = Duration::from_secs(1);
    const SETTINGS: SourceSettings =
        SourceSettings { downtime_limit_ms: 300, bandwidth_mbps: None, zero_pages: None };

    async fn started(hypervisor: &FakeHypervisor, role: Role) -> Arc<FakeVm> {
        let toml = "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-10.0\"\n";
        let definition = VmSpec::from_toml(toml, std::path::Path::new("web.toml")).unwrap();
        let facts = hypervisor.probe(DEADLINE).await.unwrap();
        let spec = definition.resolve(&facts).unwrap();
        hypervisor.start(spec, b"{}", role, DEADLINE).await.unwrap();
        hypervisor.vm("web").unwrap()
    }

    /// A source and a target on different hosts, with the source's guest about to be paused.
    async fn sending(transport: Transport) -> (Arc<FakeVm>, Arc<FakeVm>, [tempfile::TempDir; 2]) {
        let directories = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [here, there] = directories.each_ref().map(|directory| FakeHypervisor::new(directory.path()));
        let (source, target) = (started(&here, Role::Fresh).await, started(&there, Role::Incoming).await);
        let address = SocketAddr::from(([10, 0, 0, 2], 49152));
        target.listen(transport, address.into(), &Parcel::default(), DEADLINE).await.unwrap();
        source
            .start_transfer(transport, address.into(), SETTINGS, Parcel::default(), DEADLINE)
            .await
            .unwrap();
        (source, target, directories)
    }

    #[tokio::test]
    async fn a_guest_goes_over_by_the_acts_of_a_migration_and_runs_once() {
        let (source, target, _directories) = sending(Transport::Single).await;
        assert_eq!(target.run(DEADLINE).await.unwrap_err().kind, VmErrorKind::MemoryIncomplete);
        source.converges();
        assert_eq!(source.hold(DEADLINE).await, Ok(Hold::Kept));
        source.switch_over(DEADLINE).await.unwrap();
        target.receives_all();
        assert_eq!(source.hold(DEADLINE).await, Ok(Hold::LetGo));
        assert_eq!([source.state(), target.state()], [RunState::Postmigrate, RunState::Paused]);
        target.run(DEADLINE).await.unwrap();
        assert_eq!([source.state(), target.state()], [RunState::Postmigrate, RunState::Running]);
        source.destroy(DEADLINE).await.unwrap();
        assert!(!source.alive() && !source.directory().path().exists());
    }

    #[tokio::test]
    async fn a_guest_whose_migration_is_cancelled_goes_on_unless_it_was_stopped_for_post_copy() {
        for (transport, expected) in
            [(Transport::Single, RunState::Running), (Transport::CLEAR_POST_COPY, RunState::Paused)]
        {
            let (source, ..) = sending(transport).await;
            if transport.is_post_copy() {
                assert!(source.start_post_copy(DEADLINE).await.unwrap());
            } else {
                source.converges();
            }
            assert_eq!(source.cancel(DEADLINE).await, Ok(MigrationStatus::Cancelled));
            assert_eq!(source.state(), expected);
            source.run(DEADLINE).await.unwrap();
            assert_eq!(source.state(), RunState::Running);
        }
    }

    #[tokio::test]
    async fn it_fails_as_it_is_told_to() {
        let (source, target, _directories) = sending(Transport::Single).await;
        target.receives_all();
        target.fails(Act::Run, Fault::Refused);
        assert_eq!(target.run(DEADLINE).await.unwrap_err().kind, VmErrorKind::Refused);
        target.fails(Act::Run, Fault::MuteAndDone);
        assert_eq!(target.run(DEADLINE).await.unwrap_err().kind, VmErrorKind::Mute);
        assert_eq!(target.state(), RunState::Running);
        source.fails(Act::Migration, Fault::Ends);
        assert_eq!(source.migration(DEADLINE).await.unwrap_err().kind, VmErrorKind::Gone);
        assert!(!source.alive());
        assert_eq!(source.end().await.exit, Exit::Signal(9));
    }

    #[tokio::test]
    async fn what_lives_is_found_again_and_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let hypervisor = FakeHypervisor::new(directory.path());
        let vm = started(&hypervisor, Role::Fresh).await;
        let name = vm.spec().spec().name.clone();
        assert_eq!(hypervisor.attach(&name, DEADLINE).await.unwrap().pid(), vm.pid());
        assert!(hypervisor.clear(&name).is_err());
        assert!(hypervisor.end_given_up(&name, DEADLINE).await.is_err(), "its guest runs");
        vm.ends(Exit::Code(0));
        assert_eq!(hypervisor.attach(&name, DEADLINE).await.unwrap_err().kind, VmErrorKind::NotRunning);
        hypervisor.clear(&name).unwrap();
        assert_eq!(hypervisor.with_files().unwrap(), []);
    }
}
