//! What libvirt still has of a domain after it has left, or has come.

use std::time::Duration;

use drainpipe_hypervisor::{Vm, VmError, VmErrorKind};
use drainpipe_libvirt::UndefineFlags;

use super::DomainVm;
use crate::errors::failed;
use crate::files;

impl DomainVm {
    /// Ends it here, and forgets its definition where it is not to stay.
    pub(super) async fn end_domain(&self, keeps_definition: bool, deadline: Duration) -> Result<(), VmError> {
        self.expect_end();
        let (connection, domain) = match self.domain(deadline).await {
            Err(error) if error.kind == VmErrorKind::NotRunning => return Ok(()),
            found => found?,
        };
        let is_persistent = connection.is_persistent(&domain, deadline).await.map_err(failed)?;
        match connection.destroy(&domain, false, deadline).await {
            // It is off already.
            Err(error) if error.is_operation_invalid() || error.is_no_domain() => {}
            ended => ended.map_err(failed)?,
        }
        if !is_persistent || keeps_definition {
            return Ok(());
        }
        let flags = UndefineFlags {
            managed_save: true,
            snapshots_metadata: true,
            checkpoints_metadata: true,
            // It may be the one that the domain uses where it runs now.
            keep_nvram: true,
            keep_tpm: true,
            nvram: false,
        };
        match connection.undefine(&domain, flags, deadline).await {
            // Before libvirt 8.9, which keeps it always.
            Err(error) if error.is_invalid_argument() => {
                let flags = UndefineFlags { keep_tpm: false, ..flags };
                connection.undefine(&domain, flags, deadline).await.map_err(failed)
            }
            Err(error) if error.is_no_domain() => Ok(()),
            undefined => undefined.map_err(failed),
        }
    }

    /// libvirt starts it no more when this host has booted: it is about to be another host's.
    pub(super) async fn end_autostart(&self, deadline: Duration) -> Result<(), VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        let is_persistent = connection.is_persistent(&domain, deadline).await.map_err(failed)?;
        if is_persistent && connection.autostart(&domain, deadline).await.map_err(failed)? {
            files::write_autostart(&self.directory)?;
            connection.set_autostart(&domain, false, deadline).await.map_err(failed)?;
        }
        Ok(())
    }

    /// It runs here, and stays: started when this host has booted, if it was so where it came from, or before it was to
    /// leave.
    pub(super) async fn begin_autostart(&self, deadline: Duration) -> Result<(), VmError> {
        let coming = files::read_coming(&self.directory)?;
        if files::is_to_autostart(&self.directory) || coming.is_some_and(|coming| coming.autostart) {
            let (connection, domain) = self.domain(deadline).await?;
            connection.set_autostart(&domain, true, deadline).await.map_err(failed)?;
        }
        files::has_autostart(&self.directory)?;
        files::has_come(&self.directory)
    }
}
