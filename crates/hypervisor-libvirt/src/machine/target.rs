//! An incoming domain.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_hypervisor::{
    Address, DiskExports, MigrationStatus, Parcel, SharedPath, TargetVm, Transport, VmError, VmEvent,
};
use drainpipe_libvirt::Domain;

use super::disks::check_closed;
use super::{CLOSED_WITHIN, DomainVm, lock, shared};
use crate::errors::failed;
use crate::files::ComingHere;
use crate::incoming::IncomingMigration;
use crate::meeting::Meeting;
use crate::phases::Handed;
use crate::{files, qemu_process};

/// How often others may let a domain run that has come and stands still.
const PAUSED_AGAIN_MAX: usize = 3;

impl DomainVm {
    /// What is known of it until it runs.
    fn note_coming(&self, note: impl FnOnce(&mut ComingHere)) -> Result<(), VmError> {
        let coming = files::read_coming(&self.directory)?;
        let mut coming = coming.ok_or_else(|| VmError::failed("it is not on its way here"))?;
        note(&mut coming);
        files::write_coming(&self.directory, coming)
    }

    /// Protects the domain that has come. Others may have waited to let it run, and libvirt lets them in as its own job ends:
    /// then it is paused again, with what its guest has done since.
    async fn keep_paused(&self, domain: &Domain, deadline: Duration) -> Result<(), VmError> {
        for _ in 0..PAUSED_AGAIN_MAX {
            self.protect(domain, deadline).await?;
            if !self.may_run(deadline).await? {
                return Ok(());
            }
            tracing::warn!(vm = %self.spec.spec().name, "somebody has let it run before its hand-over: it is paused again");
            self.unprotect().await;
            let connection = self.shared(deadline).await?;
            connection.suspend(domain, deadline).await.map_err(failed)?;
        }
        Err(VmError::failed("somebody lets the domain run here again and again before its hand-over"))
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
        self.prepare_protection(deadline).await?;
        Ok(answer)
    }

    fn starts_to_listen(&self) -> bool {
        true
    }

    async fn complete(&self, parcel: Parcel, deadline: Duration) -> Result<(), VmError> {
        let coming = self.coming().ok_or_else(|| VmError::failed("nothing was prepared for it here"))?;
        let finished = match coming.finish(&parcel, deadline).await {
            Ok(domain) => {
                if !coming.disks().is_empty() {
                    check_closed(&self.meeting.disks()).await?;
                }
                if Handed::of(&parcel)?.is_suspended {
                    files::write_suspended(&self.directory)?;
                }
                self.note_coming(|known| known.is_complete = true)?;
                self.keep_paused(&domain, deadline).await
            }
            Err(error) => Err(error),
        };
        let status = if finished.is_ok() { MigrationStatus::Completed } else { MigrationStatus::Failed };
        // Nobody may listen.
        let happening = drainpipe_hypervisor::Happening::Migration(status);
        let _unheard = self.events.send(VmEvent { what: happening, at: None });
        finished
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
