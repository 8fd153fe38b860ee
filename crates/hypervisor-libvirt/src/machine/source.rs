//! An outgoing domain: its phases at the source, and the way back.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use drainpipe_hypervisor::{
    Address, Connections, DiskCopies, Hold, MigrationStatus, Parcel, SharedPath, SourceSettings, SourceVm,
    Transport, Vm, VmError, VmErrorKind,
};
use drainpipe_libvirt::{Connection, Domain, DomainStatus, JobKind, JobStats, migrate_flags};
use rustix::process::geteuid;
use tokio::time::{sleep, timeout};

use super::disks::{Copies, drives, targets};
use super::{ASK_EVERY, CLOSED_WITHIN, DomainVm, lock, shared};
use crate::errors::failed;
use crate::outgoing::OutgoingMigration;
use crate::phases::Handed;
use crate::snapshots::KnownSnapshot;
use crate::{files, qemu_process, states};

/// How long libvirt may take to be done with a job after it says that there is none, and how often to try.
const ENDED_WITHIN: Duration = Duration::from_secs(3);
const BEGIN_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// How long whoever performs a transfer may take to be done with one that has failed.
const DONE_WITHIN: Duration = Duration::from_secs(3);

/// How long a transfer may take to stop before QEMU's connections are cut.
const CUT_AFTER: Duration = Duration::from_secs(1);

/// How long the pause may be longer so that it is known what was sent.
const COUNTED_WITHIN: Duration = Duration::from_millis(10);

/// MiB/s for no limit (`QEMU_DOMAIN_MIG_BANDWIDTH_MAX` in libvirt).
const UNLIMITED_MIB_PER_S: u64 = (i64::MAX as u64) / (1 << 20);

impl DomainVm {
    /// A guest that its owner has suspended goes on being sent, and stays suspended wherever it then is.
    pub(super) async fn leaving_status(
        &self,
        leaving: &OutgoingMigration,
        state: DomainStatus,
        job: &JobStats,
        deadline: Duration,
    ) -> Result<(MigrationStatus, Option<String>), VmError> {
        let is_switched_over = self.leaving.is_switched_over.load(Ordering::Relaxed);
        if !is_switched_over && states::is_suspended_in_flight(state, job) {
            // What was counted before it was paused says nothing.
            let (state, job) = self.look(deadline).await?;
            if leaving.is_performing() && states::is_suspended_in_flight(state, &job) {
                files::write_suspended(&self.directory)?;
            }
        }
        let is_paused = state.is_paused_by_migration() && !files::is_suspended(&self.directory);
        Ok(leaving.status(is_paused, is_switched_over))
    }

    /// libvirt says that an aborted migration has no job any more a while before it begins another.
    async fn begin_leaving(
        &self,
        transport: Transport,
        disks: &[String],
        snapshots: &[KnownSnapshot],
        deadline: Duration,
    ) -> Result<(OutgoingMigration, Handed, String), VmError> {
        let end = Instant::now() + ENDED_WITHIN.min(deadline);
        loop {
            let (_, domain) = self.domain(deadline).await?;
            match OutgoingMigration::begin(&self.daemon, &domain, transport, disks, snapshots, deadline).await
            {
                Err(error)
                    if error.kind == VmErrorKind::Refused
                        && Instant::now() < end
                        && !self.look(deadline).await?.1.kind.may_be_under_way() =>
                {
                    tracing::debug!(vm = %self.spec.spec().name, %error, "not begun yet");
                    sleep(BEGIN_AGAIN_AFTER).await;
                }
                begun => return begun,
            }
        }
    }

    /// Gives up what libvirt does with it for a migration of ours.
    pub(super) async fn close_leaving(&self) {
        let leaving = lock(&self.leaving.migration).take();
        if let Some(leaving) = leaving {
            leaving.close(CLOSED_WITHIN).await;
        }
    }

    /// QEMU's threads may wait for a silent target, and libvirt cannot tell them that it is.
    async fn cancel_leaving(
        &self,
        leaving: &OutgoingMigration,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<bool, VmError> {
        self.or_cut(leaving.cancel(domain, deadline), deadline).await
    }

    /// Stops what an earlier agent has begun, and libvirt goes on with. The way to the target has been taken back since, so that
    /// QEMU's threads may wait as above.
    async fn cancel_found(
        &self,
        connection: &Connection,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let cancelling = async {
            connection.abort_job(domain, deadline).await.map_err(failed)?;
            self.end_performed(connection, domain, deadline).await?;
            self.free_failed(connection, domain, deadline).await?;
            self.wait_without_job(deadline).await.map(drop)
        };
        self.or_cut(cancelling, deadline).await
    }

    /// What may take until QEMU's connections are cut.
    async fn or_cut<T>(
        &self,
        stopping: impl Future<Output = Result<T, VmError>> + Send,
        deadline: Duration,
    ) -> Result<T, VmError> {
        let mut stopping = pin!(stopping);
        if let Ok(stopped) = timeout(CUT_AFTER.min(deadline / 2), &mut stopping).await {
            return stopped;
        }
        if let (Some(process), Some(peer)) = (self.process(), *lock(&self.leaving.peer))
            && let Err(error) = process.cut(peer)
        {
            tracing::warn!(%error, "QEMU may wait for as long as its target is silent");
        }
        stopping.await
    }

    async fn cancel_by_libvirt(&self, deadline: Duration) -> Result<MigrationStatus, VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        let was_sent = if let Some(leaving) = self.leaving() {
            self.cancel_leaving(&leaving, &domain, deadline).await?
        } else {
            let (state, job) = self.look(deadline).await?;
            if job.kind.may_be_under_way() {
                self.cancel_found(&connection, &domain, deadline).await?;
            } else {
                self.or_cut(self.free_failed(&connection, &domain, deadline), deadline).await?;
            }
            job.kind == JobKind::None && state.is_paused_by_migration()
        };
        self.close_leaving().await;
        let state = self.wait_without_job(deadline).await?;
        if files::is_suspended(&self.directory) && state.state.may_run() {
            // libvirt lets a guest run that ran before its migration.
            connection.suspend(&domain, deadline).await.map_err(failed)?;
        }
        Ok(if was_sent { MigrationStatus::Completed } else { MigrationStatus::Cancelled })
    }

    /// A job that has sent all is not aborted: it waits for the agent that has begun it, which may stand still. Another
    /// connection may confirm that the domain stays.
    async fn end_performed(
        &self,
        connection: &Connection,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let (state, job) = self.look(deadline).await?;
        if !job.kind.may_be_under_way() || !state.is_paused_by_migration() {
            return Ok(());
        }
        confirm_staying(connection, domain, deadline).await
    }

    /// libvirt keeps the job of a transfer that has failed until whoever began it confirms that the domain stays, or closes the
    /// connection. If the connection was closed before, nobody does: then libvirt would let nobody change or move the
    /// domain any more.
    async fn free_failed(
        &self,
        connection: &Connection,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let end = Instant::now() + DONE_WITHIN.min(deadline / 2);
        loop {
            let (_, job) = self.look(deadline).await?;
            if !matches!(job.kind, JobKind::Failed | JobKind::Cancelled) {
                return Ok(());
            }
            if Instant::now() >= end {
                return confirm_staying(connection, domain, deadline).await;
            }
            sleep(ASK_EVERY).await;
        }
    }

    /// One that was aborted is not over: whoever performs it lets the guest run, and puts QEMU's settings back, before libvirt
    /// begins another one.
    pub(super) async fn wait_without_job(&self, deadline: Duration) -> Result<DomainStatus, VmError> {
        let end = Instant::now() + deadline;
        loop {
            let (state, job) = self.look(deadline).await?;
            if job.kind == JobKind::None {
                return Ok(state);
            }
            if Instant::now() >= end {
                return Err(VmError::failed("libvirt continues the domain's job"));
            }
            sleep(ASK_EVERY).await;
        }
    }
}

#[async_trait]
impl SourceVm for DomainVm {
    async fn begin(
        &self,
        transport: Transport,
        disks: &[usize],
        deadline: Duration,
    ) -> Result<Parcel, VmError> {
        self.close_leaving().await;
        self.leaving.is_switched_over.store(false, Ordering::Relaxed);
        lock(&self.leaving.counted).take();
        files::is_not_suspended(&self.directory)?;
        self.daemon.leaving().await.insert(self.spec.uuid());
        let copied = self.copied(disks, deadline).await?;
        let targets = targets(&copied);
        let drives = drives(&copied);
        *lock(&self.leaving.copies) = Copies::of(copied);
        let snapshots = self.take_snapshots(deadline).await?;
        let (leaving, begun, description) =
            self.begin_leaving(transport, &targets, &snapshots, deadline).await?;
        *lock(&self.leaving.migration) = Some(Arc::new(leaving));
        self.prepare_protection(deadline).await?;
        Ok(Handed { drives, ..begun }.parcel(Some(description)))
    }

    async fn start_transfer(
        &self,
        _transport: Transport,
        address: Address,
        settings: SourceSettings,
        parcel: Parcel,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let leaving = self.leaving().ok_or_else(|| VmError::failed("libvirt was not asked to begin"))?;
        let handed = Handed::of(&parcel)?;
        let (connection, domain) = self.asked(deadline).await?;
        // QEMU keeps it until libvirt puts back what it had before the migration.
        let limit_ms = settings.downtime_limit_ms;
        connection.migrate_set_max_downtime(&domain, limit_ms, deadline).await.map_err(failed)?;
        let disks_to = lock(&self.leaving.copies).to();
        if disks_to.is_some() {
            // libvirt's copies keep to the speed of memory that was set last, and whoever carries them holds them back.
            self.set_bandwidth(None, deadline).await?;
        }
        let speed = settings.bandwidth_mbps.map(mib_per_s);
        let peer = match &address {
            Address::Tcp(peer) => Some(*peer),
            Address::Unix(_) => None,
        };
        files::write_peer(&self.directory, peer)?;
        *lock(&self.leaving.peer) = peer;
        leaving.perform(&domain, &address, disks_to, speed, &handed, Arc::clone(&self.events));
        Ok(())
    }

    async fn start_post_copy(&self, _deadline: Duration) -> Result<bool, VmError> {
        Err(VmError::failed("domains cannot move by post-copy yet"))
    }

    /// libvirt goes on by itself.
    async fn switch_over(&self, _deadline: Duration) -> Result<(), VmError> {
        self.leaving.is_switched_over.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn sent(&self, deadline: Duration) -> Result<Option<Parcel>, VmError> {
        let leaving = self.leaving().ok_or_else(|| VmError::failed("libvirt was not asked to begin"))?;
        let sent = Handed::cookie(leaving.sent(deadline).await?)?;
        if lock(&self.leaving.counted).is_none() {
            // It has gone so fast that nobody has looked. What is not known then is no reason to go back.
            drop(timeout(COUNTED_WITHIN, self.migration(deadline)).await);
        }
        Ok(Some(Handed { is_suspended: files::is_suspended(&self.directory), ..sent }.parcel(None)))
    }

    /// libvirt's daemon, ended while it holds the job, lets the guest run by itself when it restarts.
    async fn let_go(&self, deadline: Duration) -> Result<(), VmError> {
        self.close_leaving().await;
        self.wait_without_job(deadline).await?;
        self.end_autostart(deadline).await?;
        let (connection, domain) = self.domain(deadline).await?;
        self.protect(&domain, deadline).await?;
        // Not before: somebody may have waited to let it run.
        if connection.state(&domain, deadline).await.map_err(failed)?.is_paused_by_migration() {
            return Ok(());
        }
        Err(VmError::failed(
            "the domain does not stand still here any more: somebody has let it run, or ended it",
        ))
    }

    /// libvirt lets nobody change the domain as long as it is ready to leave.
    async fn stay(&self) {
        self.close_leaving().await;
        self.return_snapshots().await;
    }

    async fn cancel(&self, deadline: Duration) -> Result<MigrationStatus, VmError> {
        self.unprotect().await;
        match self.cancel_by_libvirt(deadline).await {
            Err(error) => {
                let cancelled = self.orphaned(error, deadline).await?.cancel().await;
                self.close_leaving().await;
                cancelled
            }
            cancelled => cancelled,
        }
    }

    async fn interrupt(&self, _deadline: Duration) -> Result<(), VmError> {
        Err(VmError::failed("domains cannot move by post-copy yet"))
    }

    async fn resume_transfer(&self, _address: Address, _deadline: Duration) -> Result<(), VmError> {
        Err(VmError::failed("domains cannot move by post-copy yet"))
    }

    async fn set_downtime_limit(&self, downtime_limit_ms: u64, deadline: Duration) -> Result<(), VmError> {
        let (connection, domain) = self.asked(deadline).await?;
        connection.migrate_set_max_downtime(&domain, downtime_limit_ms, deadline).await.map_err(failed)
    }

    async fn set_bandwidth(&self, limit_mbps: Option<u64>, deadline: Duration) -> Result<(), VmError> {
        let (connection, domain) = self.asked(deadline).await?;
        let speed = limit_mbps.map_or(UNLIMITED_MIB_PER_S, mib_per_s);
        connection.migrate_set_max_speed(&domain, speed, deadline).await.map_err(failed)
    }

    async fn hold(&self, deadline: Duration) -> Result<Hold, VmError> {
        let (state, job) = match self.look(deadline).await {
            Err(error) => return self.orphaned(error, deadline).await?.hold().await,
            looked => looked?,
        };
        match (state.is_paused_by_migration(), self.has_job(&job)) {
            (true, true) => Err(VmError::failed("libvirt's migration still holds the domain")),
            (true, false) => Ok(Hold::LetGo),
            (false, _) => Ok(Hold::Kept),
        }
    }

    fn disk_copies(&self) -> Option<&dyn DiskCopies> {
        Some(self)
    }

    fn connections(&self) -> Option<&dyn Connections> {
        Some(self)
    }

    /// libvirt's own users may reach its directories.
    fn relay_users(&self) -> io::Result<Vec<u32>> {
        Ok(vec![geteuid().as_raw(), qemu_process::user(self.pid())?])
    }

    fn outgoing_relay(&self) -> SharedPath {
        if let Err(error) = self.meeting.make() {
            // The task that listens there fails, and says where.
            tracing::warn!(%error, "there is no directory in which QEMU can connect to the agent");
        }
        shared(self.meeting.outgoing())
    }
}

/// In place of whoever has begun its migration.
async fn confirm_staying(
    connection: &Connection,
    domain: &Domain,
    deadline: Duration,
) -> Result<(), VmError> {
    let flags = migrate_flags::LIVE | migrate_flags::CHANGE_PROTECTION;
    match connection.migrate_confirm(domain, &[], &[], flags, true, deadline).await {
        // It has ended by itself.
        Err(error) if error.is_operation_invalid() => Ok(()),
        confirmed => confirmed.map_err(failed),
    }
}

/// libvirt knows whole MiB/s, and takes 0 for no limit.
fn mib_per_s(mbps: u64) -> u64 {
    ((mbps * 1_000_000 / 8) >> 20).max(1)
}
