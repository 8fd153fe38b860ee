//! The snapshots of an outgoing or incoming domain.

use std::time::Duration;

use drainpipe_hypervisor::{Vm, VmError};

use super::DomainVm;
use crate::errors::failed;
use crate::snapshots::{self, KnownSnapshot};

/// How long libvirt may take until it knows them again: the other host waits for the word that the domain runs. What libvirt
/// does not know by then, it is told later.
const TOLD_WITHIN: Duration = Duration::from_secs(2);

impl DomainVm {
    /// Has libvirt forget them, since it begins no migration otherwise. They are kept until it knows them again.
    pub(super) async fn take_snapshots(&self, deadline: Duration) -> Result<Vec<KnownSnapshot>, VmError> {
        // They are of an earlier migration, and nowhere else.
        self.try_return_snapshots(deadline).await?;
        let (connection, domain) = self.domain(deadline).await?;
        let known = snapshots::known(&connection, &domain, deadline).await?;
        if known.is_empty() {
            return Ok(known);
        }
        if let Some(why) = snapshots::refusal(&known, self.spec.spec()) {
            return Err(VmError::failed(why));
        }
        self.snapshot_file.write(&known)?;
        snapshots::forget(&connection, &domain, deadline).await?;
        Ok(known)
    }

    /// The domain stays here. What goes wrong keeps it from nothing, and is tried again.
    pub(super) async fn return_snapshots(&self) {
        if self.is_guards {
            return;
        }
        if let Err(error) = self.try_return_snapshots(TOLD_WITHIN).await {
            let vm = &self.spec.spec().name;
            tracing::warn!(%vm, %error, "libvirt does not know its snapshots yet; they are defined again");
        }
        self.daemon.leaving().await.remove(&self.spec.uuid());
    }

    async fn try_return_snapshots(&self, deadline: Duration) -> Result<(), VmError> {
        if !self.snapshot_file.exists() {
            return Ok(());
        }
        let kept = self.snapshot_file.read()?;
        if self.alive() {
            // libvirt would wait for it longer than anybody here.
            self.wait_without_job(deadline).await?;
        }
        let (connection, domain) = self.domain(deadline).await?;
        snapshots::tell(&connection, &domain, &kept, deadline).await.map_err(failed)?;
        self.snapshot_file.remove()
    }

    /// What comes from another host, which may send anything.
    pub(super) fn keep_snapshots_that_come(&self, snapshots: &[KnownSnapshot]) -> Result<(), VmError> {
        if snapshots.is_empty() {
            // Those that are kept here are of an earlier time.
            return self.snapshot_file.remove();
        }
        match snapshots::refusal(snapshots, self.spec.spec()) {
            Some(why) => Err(VmError::failed(why)),
            None => self.snapshot_file.write(snapshots),
        }
    }
}
