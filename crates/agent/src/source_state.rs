//! Whether this host has let go of a VM that its journal calls handed over.
//!
//! A commit of the journal that failed, as on a full disk, may be found in the write-ahead log by the next life of the
//! agent. The life before took it for failed, and let the VM run on here: docs/decisions/0007.

use std::time::{Duration, Instant};

use drainpipe_engine::migration::SourceState;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration::{self as qemu, MigrationStatus, TransferStatus};
use drainpipe_hypervisor::{RunState, Vmm};
use tokio::time::sleep;

use crate::vms::QMP_DEADLINE;

/// How long a state is waited for that is none to stay in, and how often it is looked at.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What the VM's QEMU says, if it has one. Fails if it does not say.
pub(crate) async fn source_state(vmm: Option<&Vmm>) -> Result<SourceState, Problem> {
    let Some(vmm) = vmm.filter(|vmm| vmm.alive()) else { return Ok(SourceState::LetGo) };
    // In this order: a QEMU that was told to cancel lets the VM run before it says that it has cancelled.
    let transfer = qemu::status(vmm, QMP_DEADLINE).await.map_err(Problem::failed)?;
    let state = vmm.run_state(QMP_DEADLINE).await.map_err(Problem::failed)?;
    let allows_post_copy = qemu::allows_post_copy(vmm, QMP_DEADLINE).await.map_err(Problem::failed)?;
    judge(&transfer, &state, allows_post_copy)
}

/// As [`source_state`], once it is in a state to stay in.
pub(crate) async fn settled_source_state(vmm: Option<&Vmm>) -> Result<SourceState, Problem> {
    let end = Instant::now() + SETTLED_WITHIN;
    loop {
        match source_state(vmm).await {
            Err(_) if Instant::now() < end && vmm.is_some_and(Vmm::alive) => sleep(LOOK_EVERY).await,
            said => return said,
        }
    }
}

fn judge(
    transfer: &TransferStatus,
    state: &RunState,
    allows_post_copy: bool,
) -> Result<SourceState, Problem> {
    let status = &transfer.status;
    // Of one that has failed QEMU does not say any more how much of it followed.
    if allows_post_copy && matches!(status, MigrationStatus::Failed | MigrationStatus::Cancelled) {
        return Ok(SourceState::Astray);
    }
    let unsettled = || {
        Err(Problem::failed(format!(
            "its QEMU at the source does not say whose the VM is: it is {state}, and its migration {status}"
        )))
    };
    match (status, state) {
        // With post-copy the record comes first, and nothing of what the target needs has been sent yet.
        (MigrationStatus::PreSwitchover, _) => Ok(SourceState::Kept),
        (
            MigrationStatus::Cancelling
            | MigrationStatus::Device
            | MigrationStatus::PostcopyDevice
            | MigrationStatus::Failed,
            RunState::FinishMigrate,
        )
        | (_, RunState::Prelaunch | RunState::Inmigrate) => unsettled(),
        (MigrationStatus::PostcopyActive, _) if !transfer.has_let_go() => unsettled(),
        (_, RunState::FinishMigrate | RunState::Postmigrate) => Ok(SourceState::LetGo),
        // Also one that has stopped: QEMU leaves those two states only to let the VM go on here.
        _ => Ok(SourceState::Kept),
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_hypervisor::migration::RamStatus;

    use super::*;

    fn transfer(status: MigrationStatus, post_copy_bytes: u64) -> TransferStatus {
        let mut transfer: TransferStatus = serde_json::from_value(serde_json::json!({})).unwrap();
        transfer.status = status;
        transfer.ram = Some(RamStatus { post_copy_bytes, ..RamStatus::default() });
        transfer
    }

    fn judge(
        status: MigrationStatus,
        state: &RunState,
        allows_post_copy: bool,
    ) -> Result<SourceState, Problem> {
        super::judge(&transfer(status, 1), state, allows_post_copy)
    }

    #[test]
    fn a_vm_is_let_go_of_only_while_it_stands_as_it_was_sent() {
        for state in [RunState::FinishMigrate, RunState::Postmigrate] {
            assert_eq!(judge(MigrationStatus::Completed, &state, false), Ok(SourceState::LetGo));
        }
        for state in [RunState::Running, RunState::Paused, RunState::Shutdown, RunState::IoError] {
            for status in [MigrationStatus::Completed, MigrationStatus::Cancelled] {
                assert_eq!(judge(status.clone(), &state, false), Ok(SourceState::Kept));
            }
        }
    }

    #[test]
    fn with_post_copy_it_is_kept_until_it_is_sent_and_let_go_of_then() {
        let judge = |status| judge(status, &RunState::FinishMigrate, true);
        assert_eq!(judge(MigrationStatus::PreSwitchover), Ok(SourceState::Kept));
        assert!(judge(MigrationStatus::Device).is_err());
        for sent in [MigrationStatus::PostcopyActive, MigrationStatus::PostcopyPaused] {
            assert_eq!(judge(sent), Ok(SourceState::LetGo));
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
            assert_eq!(judge(MigrationStatus::Failed, &state, true), Ok(SourceState::Astray));
            assert_ne!(judge(MigrationStatus::Failed, &state, false), Ok(SourceState::Astray));
        }
    }
}
