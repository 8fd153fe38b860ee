//! Whether QEMU has let go of a VM that its agent's journal calls handed over.

use std::time::Duration;

use drainpipe_hypervisor::{Hold, MigrationStatus, RunState, TransferStatus, VmError};

use crate::migration;
use crate::vmm::Vmm;

pub(crate) async fn of(vmm: &Vmm, deadline: Duration) -> Result<Hold, VmError> {
    // In this order: a QEMU that was told to cancel lets the VM run before it says that it has cancelled.
    let transfer = migration::status(vmm, deadline).await?;
    let state = vmm.run_state(deadline).await?;
    let allows_post_copy = migration::allows_post_copy(vmm, deadline).await?;
    judge(&transfer, &state, allows_post_copy)
}

fn judge(transfer: &TransferStatus, state: &RunState, allows_post_copy: bool) -> Result<Hold, VmError> {
    let status = &transfer.status;
    // After a failure, QEMU does not say any more how much of it followed.
    if allows_post_copy && matches!(status, MigrationStatus::Failed | MigrationStatus::Cancelled) {
        return Ok(Hold::Astray);
    }
    let unsettled = || {
        Err(VmError::failed(format!(
            "its QEMU at the source does not show which host the VM belongs to: it is {state}, and its \
            migration {status}"
        )))
    };
    match (status, state) {
        // With post-copy the record comes first, and nothing of what the target needs has been sent yet.
        (MigrationStatus::PreSwitchover, _) => Ok(Hold::Kept),
        (
            MigrationStatus::Cancelling
            | MigrationStatus::Device
            | MigrationStatus::PostcopyDevice
            | MigrationStatus::Failed,
            RunState::FinishMigrate,
        )
        | (_, RunState::Prelaunch | RunState::Inmigrate) => unsettled(),
        (MigrationStatus::PostcopyActive, _) if !transfer.has_let_go() => unsettled(),
        (_, RunState::FinishMigrate | RunState::Postmigrate) => Ok(Hold::LetGo),
        // Also one that has stopped: QEMU leaves those two states only to let the VM go on here.
        _ => Ok(Hold::Kept),
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_hypervisor::RamStatus;

    use super::*;

    fn transfer(status: MigrationStatus, post_copy_bytes: u64) -> TransferStatus {
        let ram = Some(RamStatus { post_copy_bytes, ..RamStatus::default() });
        TransferStatus { ram, ..TransferStatus::of(status) }
    }

    fn judge(status: MigrationStatus, state: &RunState, allows_post_copy: bool) -> Result<Hold, VmError> {
        super::judge(&transfer(status, 1), state, allows_post_copy)
    }

    #[test]
    fn a_vm_is_let_go_of_only_while_it_stands_as_it_was_sent() {
        for state in [RunState::FinishMigrate, RunState::Postmigrate] {
            assert_eq!(judge(MigrationStatus::Completed, &state, false), Ok(Hold::LetGo));
        }
        for state in [RunState::Running, RunState::Paused, RunState::Shutdown, RunState::IoError] {
            for status in [MigrationStatus::Completed, MigrationStatus::Cancelled] {
                assert_eq!(judge(status.clone(), &state, false), Ok(Hold::Kept));
            }
        }
    }

    #[test]
    fn with_post_copy_it_is_kept_until_it_is_sent_and_let_go_of_then() {
        let judge = |status| judge(status, &RunState::FinishMigrate, true);
        assert_eq!(judge(MigrationStatus::PreSwitchover), Ok(Hold::Kept));
        assert!(judge(MigrationStatus::Device).is_err());
        for sent in [MigrationStatus::PostcopyActive, MigrationStatus::PostcopyPaused] {
            assert_eq!(judge(sent), Ok(Hold::LetGo));
        }
        // Should its connection break now, it lets the VM run on.
        let no_page_yet = transfer(MigrationStatus::PostcopyActive, 0);
        assert!(super::judge(&no_page_yet, &RunState::FinishMigrate, true).is_err());
    }

    #[test]
    fn one_that_may_run_on_in_a_moment_is_nobodys_yet() {
        assert!(judge(MigrationStatus::Cancelling, &RunState::FinishMigrate, false).is_err());
        assert!(judge(MigrationStatus::None, &RunState::Inmigrate, false).is_err());
    }

    #[test]
    fn with_post_copy_one_that_has_failed_may_be_the_targets() {
        for state in [RunState::Running, RunState::Postmigrate, RunState::FinishMigrate] {
            assert_eq!(judge(MigrationStatus::Failed, &state, true), Ok(Hold::Astray));
            assert_ne!(judge(MigrationStatus::Failed, &state, false), Ok(Hold::Astray));
        }
    }
}
