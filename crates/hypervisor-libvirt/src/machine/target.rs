//! An incoming domain.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_hypervisor::{
    Address, DiskExports, MigrationStatus, Parcel, SharedPath, TargetVm, Transport, Vm, VmError, VmErrorKind,
    VmEvent,
};

use super::disks::check_closed;
use super::{CLOSED_WITHIN, DomainVm, lock, shared};
use crate::errors::failed;
use crate::files::ComingHere;
use crate::incoming::IncomingMigration;
use crate::meeting::Meeting;
use crate::phases::Handed;
use crate::{files, qemu_process};

impl DomainVm {
    /// What is known of it until it runs.
    fn note_coming(&self, note: impl FnOnce(&mut ComingHere)) -> Result<(), VmError> {
        let coming = files::read_coming(&self.directory)?;
        let mut coming = coming.ok_or_else(|| VmError::failed("it is not on its way here"))?;
        note(&mut coming);
        files::write_coming(&self.directory, coming)
    }

    /// For a `Finish` that was not answered. libvirt has the job until that is over, and ends the domain if it fails.
    pub(super) async fn await_finish(
        &self,
        coming: &IncomingMigration,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let (_, job) = self.look(deadline).await?;
        if self.has_job(&job) {
            let why = "libvirt does not say whether it has taken the last of the domain";
            return Err(VmError::new(VmErrorKind::Mute, why));
        }
        coming.has_finished();
        Ok(())
    }

    /// Whether others have let it run by now, as they cannot any more once it is protected.
    async fn has_been_let_run(&self, deadline: Duration) -> Result<bool, VmError> {
        if self.may_run(deadline).await? {
            files::write_let_run(&self.directory)?;
        }
        files::was_let_run(&self.directory)
    }
}

#[async_trait]
impl TargetVm for DomainVm {
    async fn listen(
        &self,
        transport: Transport,
        address: Address,
        parcel: &Parcel,
        deadline: Duration,
    ) -> Result<Parcel, VmError> {
        let handed = Handed::of(parcel)?;
        self.keep_snapshots_that_come(&handed.snapshots)?;
        let has_meeting = matches!(address, Address::Unix(_)) || !handed.disks.is_empty();
        let disks_at = self.meeting.disks();
        if has_meeting {
            self.meeting.open().map_err(|error| no_meeting(&self.meeting, &error))?;
        }
        let preparing = IncomingMigration::prepare(
            &self.daemon,
            &self.spec,
            transport,
            &address,
            &disks_at,
            parcel,
            deadline,
        );
        let prepared = preparing.await;
        if has_meeting {
            self.meeting.close().map_err(|error| no_meeting(&self.meeting, &error))?;
        }
        let (coming, answer) = prepared?;
        self.note_coming(|known| (known.is_prepared, known.autostart) = (true, coming.autostart()))?;
        let started = qemu_process::find_started(self.daemon.privileges(), self.spec.uuid(), deadline).await;
        let process = started.map_err(VmError::failed)?;
        self.process.send_replace(Some(Arc::new(process)));
        *lock(&self.coming) = Some(Arc::new(coming));
        Ok(answer)
    }

    fn starts_to_listen(&self) -> bool {
        true
    }

    async fn complete(&self, parcel: Parcel, deadline: Duration) -> Result<(), VmError> {
        let coming = self.coming().ok_or_else(|| VmError::failed("nothing was prepared for it here"))?;
        // After the record, the guest would stand still until libvirt answers.
        self.may_run(deadline).await?;
        if Handed::of(&parcel)?.is_suspended {
            files::write_suspended(&self.directory)?;
        }
        coming.keep(parcel);
        // Nobody may listen.
        let happening = drainpipe_hypervisor::Happening::Migration(MigrationStatus::PreSwitchover);
        let _unheard = self.events.send(VmEvent { what: happening, at: None });
        Ok(())
    }

    async fn take_last(&self, deadline: Duration) -> Result<(), VmError> {
        let coming = self.coming().ok_or_else(|| VmError::failed("nothing was prepared for it here"))?;
        if !coming.is_complete() {
            let last = coming.last()?;
            self.note_coming(|known| known.is_taken = true)?;
            coming.finish(&last, deadline).await?;
        }
        if !coming.disks().is_empty() {
            check_closed(&self.meeting.disks()).await?;
        }
        self.note_coming(|known| known.is_complete = true)
    }

    async fn bar_others(&self, deadline: Duration) -> Result<bool, VmError> {
        // Until its last is taken, libvirt lets nobody.
        if !files::is_taken(&self.directory)? || !self.alive() {
            return files::was_let_run(&self.directory);
        }
        if !self.is_protected() {
            let (_, domain) = self.domain(deadline).await?;
            self.protect(&domain, deadline).await?;
        }
        let has_run = self.has_been_let_run(deadline).await?;
        if has_run {
            self.unprotect().await;
        }
        Ok(has_run)
    }

    async fn end_unrun(&self, deadline: Duration) -> Result<bool, VmError> {
        let has_run = self.bar_others(deadline).await?;
        if has_run || !files::is_taken(&self.directory)? || !self.alive() {
            return Ok(has_run);
        }
        self.expect_end();
        let (connection, domain) = self.domain(deadline).await?;
        connection.destroy(&domain, false, deadline).await.map_err(failed)?;
        Ok(false)
    }

    async fn recover_listen(&self, _address: Address, _deadline: Duration) -> Result<(), VmError> {
        Err(VmError::failed("domains cannot move by post-copy yet"))
    }

    async fn cut_migration(&self, _deadline: Duration) {
        let coming = lock(&self.coming).clone();
        if let Some(coming) = coming.filter(|coming| !coming.is_complete()) {
            coming.close(CLOSED_WITHIN).await;
        }
    }

    fn forget_key(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn disk_exports(&self) -> Option<&dyn DiskExports> {
        Some(self)
    }

    fn incoming_disks(&self) -> Option<SharedPath> {
        Some(shared(self.meeting.disks()))
    }

    fn incoming_relay(&self) -> SharedPath {
        shared(self.meeting.incoming())
    }
}

fn no_meeting(meeting: &Meeting, error: &io::Error) -> VmError {
    let socket = meeting.incoming();
    VmError::failed(format!("cannot make a directory for QEMU to listen at {}: {error}", socket.display()))
}
