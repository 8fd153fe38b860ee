//! Keeps others from letting a domain run that stands still: by a migration that is begun, and goes no further.
//!
//! libvirt refuses what changes the domain meanwhile, as `virsh resume`, and not `virsh destroy`. It forgets such a migration
//! with its connection, and with its own end, and lets nothing run then.

use std::time::Duration;

use drainpipe_hypervisor::VmError;
use drainpipe_libvirt::{Connection, Domain, migrate_flags as flags};

use crate::errors::failed;

/// The hold of a domain. It ends with its connection.
#[derive(Debug)]
pub(crate) struct Protection {
    connection: Connection,
}

impl Protection {
    /// Protects a domain that has no other job, by a connection of its own. Ask only afterwards whether it stands still.
    pub(crate) async fn begin(
        connection: Connection,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<Self, VmError> {
        // Nothing is ever sent, so disks that are this host's alone, such as those whose copies went along, are in no danger.
        let flags = flags::LIVE | flags::CHANGE_PROTECTION | flags::UNSAFE;
        connection.migrate_begin(domain, &[], flags, deadline).await.map_err(failed)?;
        Ok(Self { connection })
    }

    /// Others may change it from now on.
    pub(crate) async fn end(self, deadline: Duration) {
        self.connection.close(deadline).await;
    }
}
