//! What an agent before this one has throttled is throttled no more.

use tokio::task::block_in_place;
use tracing::warn;

use crate::vms::Vms;

/// Whatever has become of that agent: QEMU's threads themselves say whether they are held back.
pub(crate) fn lift_all(vms: &Vms) {
    for vm in vms.names() {
        if let Err(error) = block_in_place(|| vms.hypervisor().lift_throttle(&vm)) {
            warn!(%vm, %error, "its CPUs may stay throttled");
        }
    }
    if let Err(error) = block_in_place(|| vms.hypervisor().sweep_throttles()) {
        warn!(%error, "control groups of QEMUs that have ended may be left");
    }
}
