//! Whether this host has let go of a VM that its journal calls handed over.
//!
//! A commit of the journal that failed, as on a full disk, may be found in the write-ahead log by the next life of the
//! agent. The life before took it for failed, and let the VM run on here: docs/decisions.md, 7.

use drainpipe_engine::migration::SourceState;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration::{self as qemu, MigrationStatus};
use drainpipe_hypervisor::{RunState, Vmm};

use crate::vms::QMP_DEADLINE;

/// What the VM's QEMU says, if it has one. Fails if it does not say.
pub(super) async fn source_state(vmm: Option<&Vmm>) -> Result<SourceState, Problem> {
    let Some(vmm) = vmm.filter(|vmm| vmm.alive()) else { return Ok(SourceState::LetGo) };
    // In this order: a QEMU that was told to cancel lets the VM run before it says that it has cancelled.
    let transfer = qemu::status(vmm, QMP_DEADLINE).await.map_err(Problem::failed)?.status;
    let state = vmm.run_state(QMP_DEADLINE).await.map_err(Problem::failed)?;
    judge(&transfer, &state)
}

fn judge(transfer: &MigrationStatus, state: &RunState) -> Result<SourceState, Problem> {
    match (transfer, state) {
        (MigrationStatus::Cancelling, RunState::FinishMigrate)
        | (_, RunState::Prelaunch | RunState::Inmigrate) => Err(Problem::failed(format!(
            "its QEMU at the source does not say whose the VM is: it is {state}, and its migration {transfer}"
        ))),
        (_, RunState::FinishMigrate | RunState::Postmigrate) => Ok(SourceState::LetGo),
        // Also one that has stopped: QEMU leaves those two states only to let the VM go on here.
        _ => Ok(SourceState::Kept),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_let_go_of_only_while_it_stands_as_it_was_sent() {
        for state in [RunState::FinishMigrate, RunState::Postmigrate] {
            assert_eq!(judge(&MigrationStatus::Completed, &state), Ok(SourceState::LetGo));
        }
        for state in [RunState::Running, RunState::Paused, RunState::Shutdown, RunState::IoError] {
            for transfer in [MigrationStatus::Completed, MigrationStatus::Cancelled] {
                assert_eq!(judge(&transfer, &state), Ok(SourceState::Kept));
            }
        }
    }

    #[test]
    fn one_that_may_run_on_in_a_moment_is_nobodys_yet() {
        assert!(judge(&MigrationStatus::Cancelling, &RunState::FinishMigrate).is_err());
        assert!(judge(&MigrationStatus::None, &RunState::Inmigrate).is_err());
    }
}
