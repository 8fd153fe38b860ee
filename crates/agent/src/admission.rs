//! What may come to run on this host: nothing while it is cordoned, and nothing that there is no memory
//! for.

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmSpec;

use crate::agent::Agent;
use crate::incoming;

/// Refuses what would bring a VM to a host that is to be empty.
pub(crate) fn check_cordon(agent: &Agent) -> Result<(), Problem> {
    if !agent.journal.is_cordoned()? {
        return Ok(());
    }
    let host = agent.name();
    Err(Problem::refused(format!(
        "{host} is cordoned, because it is being drained or was: `drainpipe resume {host}` lets VMs run there \
         again"
    )))
}

/// Whether a VM may boot here. Asked once it is claimed: a drain that begins meanwhile finds the claim.
pub(crate) fn check_start(agent: &Agent, definition: &VmSpec) -> Result<(), Problem> {
    check_cordon(agent)?;
    incoming::check_memory(agent, definition)
}
