//! Lifts what an earlier agent has throttled.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_hypervisor::Machine;
use tokio::task::block_in_place;
use tracing::warn;

use crate::vms::{QMP_DEADLINE, Vms};

/// How often, and how soon again, a QEMU gets the order to let its guest's writes go: for 10 minutes, if it answers at
/// once.
const ATTEMPTS_MAX: u32 = 120;
const AGAIN_AFTER: Duration = Duration::from_secs(5);

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
    for vmm in vms.all_running() {
        tokio::spawn(let_writes_go(vmm));
    }
}

/// What the VM writes to its disks is held back no more, once its QEMU answers.
pub(crate) async fn let_writes_go(vmm: Arc<dyn Machine>) {
    let Some(copies) = vmm.disk_copies() else { return };
    for _ in 0..ATTEMPTS_MAX {
        match copies.let_writes_go(QMP_DEADLINE).await {
            Err(error) if error.is_mute() => tokio::time::sleep(AGAIN_AFTER).await,
            Err(error) if vmm.alive() => {
                warn!(vm = %vmm.spec().spec().name, %error, "its writes may stay held back");
                return;
            }
            _ => return,
        }
    }
    warn!(vm = %vmm.spec().spec().name, "does not answer, and its writes may stay held back");
}
