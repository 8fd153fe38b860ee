//! A QEMU as every hypervisor's VM. This module only says which of QEMU's operations implements which.

use std::io;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use drainpipe_hypervisor::{
    Address, Connections, Contents, DiskCopies, DiskExports, DiskMoves, End, Exit, Hold, MemorySample,
    MigrationStatus, Parcel, ResolvedSpec, Role, RunState, SharedPath, SourceSettings, SourceVm, TargetVm,
    TransferStatus, Transport, VcpuThrottle, VcpuTime, Version, Vm, VmDirectory, VmError, VmEvent,
};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::broadcast;

use crate::vmm::Vmm;
use crate::{hold, migration, throttle, vcpus};

#[async_trait]
impl Vm for Vmm {
    fn spec(&self) -> &ResolvedSpec {
        self.spec()
    }

    fn directory(&self) -> &VmDirectory {
        self.paths().vm_directory()
    }

    fn pid(&self) -> u32 {
        self.pid()
    }

    fn version(&self) -> Version {
        self.version()
    }

    fn role(&self) -> io::Result<Role> {
        self.role()
    }

    fn events(&self) -> broadcast::Receiver<VmEvent> {
        self.events()
    }

    fn alive(&self) -> bool {
        self.alive()
    }

    fn exit(&self) -> Option<Exit> {
        self.exit()
    }

    fn is_ending(&self) -> bool {
        self.is_ending()
    }

    fn expect_end(&self) {
        self.expect_end();
    }

    fn log_tail(&self) -> String {
        self.log_tail()
    }

    fn end(&self) -> BoxFuture<'static, End> {
        self.end().boxed()
    }

    async fn wait_exit(&self, deadline: Duration) -> Option<Exit> {
        self.wait_exit(deadline).await
    }

    fn cpu_seconds(&self) -> io::Result<f64> {
        self.cpu_seconds()
    }

    async fn run_state(&self, deadline: Duration) -> Result<RunState, VmError> {
        Ok(self.run_state(deadline).await?)
    }

    async fn migration(&self, deadline: Duration) -> Result<TransferStatus, VmError> {
        Ok(migration::status(self, deadline).await?)
    }

    fn owes_answer_since(&self) -> Option<Instant> {
        self.qmp().owes_since()
    }

    fn is_stopped(&self) -> bool {
        self.process().is_stopped().unwrap_or(false)
    }

    async fn read_console(&self, deadline: Duration) -> Result<String, VmError> {
        Ok(self.read_console(deadline).await?)
    }

    async fn run(&self, deadline: Duration) -> Result<(), VmError> {
        Ok(migration::run(self, deadline).await?)
    }

    async fn stop_guest(&self, deadline: Duration) -> Result<(), VmError> {
        Ok(self.stop_guest(deadline).await?)
    }

    async fn destroy(&self, deadline: Duration) -> Result<(), VmError> {
        Ok(self.destroy(deadline).await?)
    }

    async fn destroy_unrun(&self, deadline: Duration) -> Result<(), VmError> {
        Ok(self.destroy_unrun(deadline).await?)
    }

    fn go_first(&self) -> io::Result<()> {
        self.process().go_first()
    }

    fn take_turns(&self) -> io::Result<()> {
        self.process().take_turns()
    }

    async fn vcpu_time(&self, deadline: Duration) -> Result<Box<dyn VcpuTime>, VmError> {
        Ok(Box::new(vcpus::VcpuTime::of(self, deadline).await?))
    }

    async fn vcpu_throttle(&self, deadline: Duration) -> Result<Box<dyn VcpuThrottle>, VmError> {
        Ok(Box::new(throttle::VcpuThrottle::of(self, deadline).await?))
    }

    async fn sample_memory(&self) -> Result<MemorySample, VmError> {
        Ok(self.sample_memory().await?)
    }

    async fn sample_contents(&self) -> Result<(f64, Contents), VmError> {
        Ok(self.sample_contents().await?)
    }
}

#[async_trait]
impl SourceVm for Vmm {
    async fn start_transfer(
        &self,
        transport: Transport,
        address: Address,
        settings: SourceSettings,
        _parcel: Parcel,
        deadline: Duration,
    ) -> Result<(), VmError> {
        Ok(migration::start(self, transport, address, settings, deadline).await?)
    }

    async fn start_post_copy(&self, deadline: Duration) -> Result<bool, VmError> {
        Ok(migration::start_post_copy(self, deadline).await?)
    }

    async fn switch_over(&self, deadline: Duration) -> Result<(), VmError> {
        Ok(migration::switch_over(self, deadline).await?)
    }

    async fn cancel(&self, deadline: Duration) -> Result<MigrationStatus, VmError> {
        Ok(migration::cancel(self, deadline).await?)
    }

    async fn interrupt(&self, deadline: Duration) -> Result<(), VmError> {
        Ok(migration::interrupt(self, deadline).await?)
    }

    async fn resume_transfer(&self, address: Address, deadline: Duration) -> Result<(), VmError> {
        Ok(migration::resume(self, address, deadline).await?)
    }

    async fn set_downtime_limit(&self, downtime_limit_ms: u64, deadline: Duration) -> Result<(), VmError> {
        Ok(migration::set_downtime_limit(self, downtime_limit_ms, deadline).await?)
    }

    async fn set_bandwidth(&self, limit_mbps: Option<u64>, deadline: Duration) -> Result<(), VmError> {
        Ok(migration::set_bandwidth(self, limit_mbps, deadline).await?)
    }

    async fn hold(&self, deadline: Duration) -> Result<Hold, VmError> {
        hold::of(self, deadline).await
    }

    fn connections(&self) -> Option<&dyn Connections> {
        Some(self.process())
    }

    fn disk_copies(&self) -> Option<&dyn DiskCopies> {
        Some(self)
    }

    fn disk_moves(&self) -> Option<&dyn DiskMoves> {
        Some(self)
    }

    fn outgoing_relay(&self) -> SharedPath {
        self.paths().outgoing_relay()
    }
}

#[async_trait]
impl TargetVm for Vmm {
    async fn listen(
        &self,
        transport: Transport,
        address: Address,
        _parcel: &Parcel,
        deadline: Duration,
    ) -> Result<Parcel, VmError> {
        migration::listen(self, transport, address, deadline).await?;
        Ok(Parcel::default())
    }

    async fn recover_listen(&self, address: Address, deadline: Duration) -> Result<(), VmError> {
        Ok(migration::recover_listen(self, address, deadline).await?)
    }

    async fn cut_migration(&self, deadline: Duration) {
        migration::cut(self, deadline).await;
    }

    fn forget_key(&self) -> Result<(), VmError> {
        Ok(migration::forget_key(self.paths())?)
    }

    fn disk_exports(&self) -> Option<&dyn DiskExports> {
        Some(self)
    }

    fn incoming_disks(&self) -> Option<SharedPath> {
        Some(self.paths().incoming_disks())
    }

    fn incoming_relay(&self) -> SharedPath {
        self.paths().incoming_relay()
    }
}

impl VcpuTime for vcpus::VcpuTime {
    fn used(&self) -> io::Result<Duration> {
        self.used()
    }
}

impl VcpuThrottle for throttle::VcpuThrottle {
    fn hold(&self, percent: u8) -> Result<(), VmError> {
        Ok(self.hold(percent)?)
    }

    fn lift(&self) -> Result<(), VmError> {
        Ok(self.lift()?)
    }
}
