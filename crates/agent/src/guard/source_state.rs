//! Whether this host has let go of a VM that its journal calls handed over.
//!
//! A commit of the journal that failed, for example on a full disk, may be found in the write-ahead log by the agent's
//! next run. The run before believed that it had failed, and let the VM run on here: docs/decisions/0007.

use std::time::{Duration, Instant};

use drainpipe_engine::migration::SourceState;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::{Hold, Machine, Vm};
use tokio::time::sleep;

use crate::vms::QMP_DEADLINE;

/// How long to wait for the end of a passing state, and how often to look.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What the VM's QEMU says, if it has one. Fails if it does not say.
pub(crate) async fn source_state(vmm: Option<&dyn Machine>) -> Result<SourceState, Problem> {
    let Some(vmm) = vmm.filter(|vmm| vmm.alive()) else { return Ok(SourceState::LetGo) };
    Ok(match vmm.hold(QMP_DEADLINE).await.map_err(Problem::failed)? {
        Hold::Kept => SourceState::Kept,
        Hold::LetGo => SourceState::LetGo,
        Hold::Astray => SourceState::Astray,
    })
}

/// As [`source_state`], once it is in a state to stay in.
pub(crate) async fn settled_source_state(vmm: Option<&dyn Machine>) -> Result<SourceState, Problem> {
    let end = Instant::now() + SETTLED_WITHIN;
    loop {
        match source_state(vmm).await {
            Err(_) if Instant::now() < end && vmm.is_some_and(Vm::alive) => sleep(LOOK_EVERY).await,
            said => return said,
        }
    }
}
