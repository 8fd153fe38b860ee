//! The operations of a move that both its course and its end need.

use std::sync::Arc;

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmSpec;
use drainpipe_hypervisor::{DiskMoves as HypervisorsMoves, MoveName};

use super::{DiskMove, DiskMoves};
use crate::vms::{Claimed, does_not_run};

/// What carries one out.
#[derive(Debug)]
pub(super) struct Mover {
    pub(super) moves: Arc<DiskMoves>,
    pub(super) one: Arc<DiskMove>,
    pub(super) claimed: Claimed,
}

impl Mover {
    /// As its owner would have written it with the disk there.
    pub(super) fn definition(&self, path: &str) -> VmSpec {
        let mut definition = self.claimed.definition.clone();
        definition.move_disks(&[(self.one.disk.index(), path.into())].into());
        definition
    }

    pub(super) fn name(&self) -> MoveName<'_> {
        MoveName { disk: self.one.disk.index(), id: &self.one.id }
    }

    pub(super) fn hypervisors(&self) -> Result<&dyn HypervisorsMoves, Problem> {
        let vmm = self.claimed.vmm.as_ref().ok_or_else(|| does_not_run(&self.claimed.definition))?;
        vmm.disk_moves().ok_or_else(|| Problem::refused("the VM's hypervisor cannot move disks"))
    }
}
