//! Runs the hook `after` for VMs that have stayed here after `before_pause` ran.

use std::sync::Arc;

use drainpipe_engine::migration::result::MigrationResult;
use tracing::warn;

use super::Outgoing;
use crate::store::journal::{HookDue, JournalError};
use crate::vms::hooks::{self, Moment};

/// A migration from here is over: runs the hook for a VM that stays, if it is due.
pub(super) fn settle(outgoing: &Arc<Outgoing>, result: &MigrationResult) {
    if let Err(error) = try_settle(outgoing, result) {
        warn!(%error, migration = result.id, "the hook `after` does not run until the agent restarts");
    }
}

fn try_settle(outgoing: &Arc<Outgoing>, result: &MigrationResult) -> Result<(), JournalError> {
    let Some(due) = outgoing.journal.hook_due(&result.id)? else { return Ok(()) };
    if result.has_left() {
        return outgoing.journal.hook_is_done(&due.migration);
    }
    tokio::spawn(tell(Arc::clone(outgoing), due));
    Ok(())
}

async fn tell(outgoing: Arc<Outgoing>, due: HookDue) {
    hooks::run(&outgoing.host.config.hooks, Moment::Stayed, &due).await;
    if let Err(error) = outgoing.journal.hook_is_done(&due.migration) {
        warn!(%error, vm = due.vm, "the hook `after` has run, and runs again when the agent restarts");
    }
}

/// For migrations that were over when an earlier run of this agent ended.
pub(crate) fn settle_left(outgoing: &Arc<Outgoing>) -> Result<(), JournalError> {
    for due in outgoing.journal.hooks_due()? {
        if let Some(result) = outgoing.journal.result(&due.migration)? {
            settle(outgoing, &result);
        }
    }
    Ok(())
}
