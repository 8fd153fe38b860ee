//! Versions, as libvirt says them.

use std::time::Duration;

use drainpipe_hypervisor::{Version, VmError};
use drainpipe_libvirt::Connection;

use crate::errors::failed;

/// The version of the QEMU that new domains get; libvirt does not say which one has started an older one.
pub(crate) async fn of_qemu(connection: &Connection, deadline: Duration) -> Result<Version, VmError> {
    Ok(version_of(connection.hypervisor_version(deadline).await.map_err(failed)?))
}

/// The version of libvirt itself.
pub(crate) async fn of_libvirt(connection: &Connection, deadline: Duration) -> Result<Version, VmError> {
    Ok(version_of(connection.library_version(deadline).await.map_err(failed)?))
}

fn version_of(version: drainpipe_libvirt::Version) -> Version {
    Version { major: version.major, minor: version.minor, micro: version.micro }
}
