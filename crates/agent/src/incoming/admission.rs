//! Which VMs may run on this host: none while it is cordoned, and none without memory for it.

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmSpec;

use super::Incoming;
use super::memory::check_memory;

impl Incoming {
    /// Refuses what would bring a VM to a host that is to be empty, unless it comes from the one with which that changes
    /// places.
    pub(crate) fn check_cordon(&self, source: Option<&str>) -> Result<(), Problem> {
        match self.journal.cordon()? {
            None => return Ok(()),
            Some(cordon) if source.is_some() && cordon.swap_with.as_deref() == source => return Ok(()),
            Some(_) => {}
        }
        let host = self.host.name();
        Err(Problem::refused(format!(
            "{host} is cordoned, because it is being drained or was: `drainpipe resume {host}` lets VMs run there \
             again"
        )))
    }

    /// Whether a VM may boot here. Asked once it is claimed: a drain that begins meanwhile finds the claim.
    pub(crate) fn check_start(&self, definition: &VmSpec) -> Result<(), Problem> {
        self.check_cordon(None)?;
        check_memory(self, definition)
    }
}
