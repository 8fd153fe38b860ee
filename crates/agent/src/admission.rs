//! What may come to run on this host: nothing while it is cordoned, and nothing that there is no memory
//! for.

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmSpec;

use crate::agent::Agent;
use crate::incoming;

/// Refuses what would bring a VM to a host that is to be empty, unless it comes from the one with which that changes
/// places.
pub(crate) fn check_cordon(agent: &Agent, source: Option<&str>) -> Result<(), Problem> {
    match agent.journal.cordon()? {
        None => return Ok(()),
        Some(cordon) if source.is_some() && cordon.swap_with.as_deref() == source => return Ok(()),
        Some(_) => {}
    }
    let host = agent.name();
    Err(Problem::refused(format!(
        "{host} is cordoned, because it is being drained or was: `drainpipe resume {host}` lets VMs run there \
         again"
    )))
}

/// Whether a VM may boot here. Asked once it is claimed: a drain that begins meanwhile finds the claim.
pub(crate) fn check_start(agent: &Agent, definition: &VmSpec) -> Result<(), Problem> {
    check_cordon(agent, None)?;
    incoming::check_memory(agent, definition)
}
