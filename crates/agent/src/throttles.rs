//! What an agent before this one has throttled is throttled no more.

use drainpipe_hypervisor::{lift_throttle, sweep_throttles};
use tokio::task::block_in_place;
use tracing::warn;

use crate::vms::Vms;

/// Whatever has become of that agent: QEMU's threads themselves say whether they are held back.
pub(crate) fn lift_all(vms: &Vms) {
    for paths in vms.runtime_paths() {
        if let Err(error) = block_in_place(|| lift_throttle(&paths)) {
            warn!(directory = %paths.directory().display(), %error, "its CPUs may stay throttled");
        }
    }
    if let Err(error) = block_in_place(sweep_throttles) {
        warn!(%error, "control groups of QEMUs that have ended may be left");
    }
}
