//! A VM that is paused, or has just arrived, has its host's cores first for a moment.
//!
//! Its guest is silent and has to catch up; the others are not. On a busy host its last bytes and its vCPUs would
//! wait for them, and for transfers that go on: docs/decisions.md, 48.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_hypervisor::Vmm;
use tokio::time::sleep;
use tracing::debug;

use crate::agent::Agent;

/// Without KVM a guest takes 0.1 s of CPU until it answers again.
const CATCHES_UP_FOR: Duration = Duration::from_secs(1);

/// Lets a VM go first. What cannot be had is done without.
pub(crate) fn begin(vmm: &Vmm) {
    if let Err(error) = vmm.go_first() {
        debug!(vm = %vmm.spec().spec().name, %error, "does not go first");
    }
}

/// Ends that as soon as its guest, which runs again, has caught up.
pub(crate) fn end_soon(vmm: &Arc<Vmm>) {
    let vmm = Arc::clone(vmm);
    tokio::spawn(async move {
        sleep(CATCHES_UP_FOR).await;
        end(&vmm);
    });
}

/// Ends what an agent before this one has begun and not ended.
pub(crate) fn end_all(agent: &Agent) {
    for vmm in agent.vms.all_running() {
        end(&vmm);
    }
}

/// Ends that.
pub(crate) fn end(vmm: &Vmm) {
    if let Err(error) = vmm.take_turns() {
        debug!(vm = %vmm.spec().spec().name, %error, "may still go first");
    }
}
