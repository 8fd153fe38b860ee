//! The QEMUs of this host, started and found.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_hypervisor::spec::VmName;
use drainpipe_hypervisor::{
    Hypervisor, HypervisorFacts, Machine, PathTooLong, ResolvedSpec, Role, VmDirectory, VmError,
};

use crate::launcher::Launcher;
use crate::paths::RuntimePaths;
use crate::privileges::Privileges;
use crate::vmm::Vmm;
use crate::{facts, sockets, throttle};

/// QEMU, driven directly.
#[derive(Debug)]
pub struct Qemu {
    runtime_directory: PathBuf,
    privileges: Privileges,
    // Absent where no QEMU is to be started.
    launcher: Option<Launcher>,
}

impl Qemu {
    /// Starts QEMUs by `launcher`. What runs has its files in `runtime_directory`.
    pub fn new(runtime_directory: PathBuf, privileges: Privileges, launcher: Launcher) -> Self {
        Self { runtime_directory, privileges, launcher: Some(launcher) }
    }

    /// Finds what runs, and starts nothing.
    pub fn to_find(runtime_directory: PathBuf, privileges: Privileges) -> Self {
        Self { runtime_directory, privileges, launcher: None }
    }

    fn paths(&self, vm: &VmName) -> Result<RuntimePaths, PathTooLong> {
        RuntimePaths::new(&self.runtime_directory, vm)
    }

    fn found(&self, vm: &VmName) -> Result<RuntimePaths, VmError> {
        self.paths(vm).map_err(VmError::failed)
    }

    fn launcher(&self) -> Result<&Launcher, VmError> {
        self.launcher.as_ref().ok_or_else(|| VmError::failed("this process starts no QEMU"))
    }
}

#[async_trait]
impl Hypervisor for Qemu {
    async fn probe(&self, deadline: Duration) -> Result<HypervisorFacts, VmError> {
        Ok(facts::probe(&self.privileges, self.launcher()?, &self.runtime_directory, deadline).await?)
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
        deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError> {
        let launcher = self.launcher()?;
        let paths = self.found(&spec.spec().name)?;
        Ok(Arc::new(Vmm::start(&self.privileges, launcher, spec, paths, record, role, deadline).await?))
    }

    async fn attach(&self, vm: &VmName, deadline: Duration) -> Result<Arc<dyn Machine>, VmError> {
        Ok(Arc::new(Vmm::attach(&self.privileges, self.found(vm)?, deadline).await?))
    }

    async fn attach_beside_agent(
        &self,
        vm: &VmName,
        deadline: Duration,
    ) -> Result<Arc<dyn Machine>, VmError> {
        let paths = self.found(vm)?;
        Ok(Arc::new(Vmm::attach_beside_agent(&self.privileges, paths, deadline).await?))
    }

    fn specification(&self, vm: &VmName) -> Result<ResolvedSpec, VmError> {
        Ok(Vmm::specification(&self.found(vm)?)?)
    }

    fn living(&self, vm: &VmName) -> Result<Option<u32>, VmError> {
        Ok(Vmm::living(&self.found(vm)?)?)
    }

    fn clear(&self, vm: &VmName) -> Result<(), VmError> {
        Ok(Vmm::clear(&self.found(vm)?)?)
    }

    async fn end_given_up(&self, vm: &VmName, deadline: Duration) -> Result<(), VmError> {
        Ok(Vmm::end_given_up(&self.privileges, &self.found(vm)?, deadline).await?)
    }

    async fn kill_found(&self, vm: &VmName, deadline: Duration) -> Result<(), VmError> {
        Ok(Vmm::kill_found(&self.privileges, &self.found(vm)?, deadline).await?)
    }

    fn lift_throttle(&self, vm: &VmName) -> Result<(), VmError> {
        Ok(throttle::lift_throttle(&self.privileges, &self.found(vm)?)?)
    }

    fn sweep_throttles(&self) -> Result<(), VmError> {
        Ok(throttle::sweep_throttles()?)
    }

    fn cut_connections(&self, vm: &VmName, peer: SocketAddr) -> io::Result<usize> {
        let paths = self.paths(vm).map_err(io::Error::other)?;
        sockets::cut_connections(&self.privileges, &paths, peer)
    }

    fn is_stopped(&self, vm: &VmName) -> bool {
        self.paths(vm).is_ok_and(|paths| sockets::is_stopped(&paths))
    }
}
