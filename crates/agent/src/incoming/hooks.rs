//! Runs a hook for VMs that have come here and run.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::migration::target::IncomingState;
use drainpipe_hypervisor::RunState;
use tokio::time::sleep;
use tracing::warn;

use super::Incoming;
use super::vm::IncomingVm;
use crate::store::journal::{HookDue, JournalError};
use crate::vms::QMP_DEADLINE;
use crate::vms::hooks::{self, Moment};

/// How often it is looked whether the VM runs, after the agent has restarted, and how many times.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LOOKS: u32 = 60;

/// A VM is about to come: if it runs here, a hook is due. This is recorded early, because the VM waits later.
pub(super) fn note_due(incoming: &Incoming, entry: &IncomingVm) {
    if incoming.host.config.hooks.after.is_none() {
        return;
    }
    let due = HookDue {
        migration: entry.id.clone(),
        vm: entry.definition.name.to_string(),
        source: entry.source.clone(),
        target: incoming.host.name().into(),
    };
    if let Err(error) = incoming.journal.hook_is_due(&due) {
        warn!(vm = due.vm, %error, "the journal cannot record the hook, so `after` will not run for the VM");
    }
}

/// It runs here.
pub(super) fn tell_it_runs(incoming: &Incoming, id: &str) {
    match incoming.journal.hook_due(id) {
        Ok(Some(due)) => {
            tokio::spawn(tell(incoming.host.config.hooks.clone(), Arc::clone(&incoming.journal), due));
        }
        Ok(None) => {}
        Err(error) => {
            warn!(%error, migration = id, "the hook `after` does not run until the agent restarts");
        }
    }
}

/// It will not run here.
pub(super) fn not_due(incoming: &Incoming, id: &str) -> Result<(), JournalError> {
    incoming.journal.hook_is_done(id)
}

async fn tell(
    hooks: crate::store::config::Hooks,
    journal: Arc<crate::store::journal::Journal>,
    due: HookDue,
) {
    hooks::run(&hooks, Moment::Moved, &due).await;
    if let Err(error) = journal.hook_is_done(&due.migration) {
        warn!(%error, vm = due.vm, "the hook `after` has run, and runs again when the agent restarts");
    }
}

/// For VMs that were told to run here before an earlier run of this agent ended.
pub(crate) fn tell_of_left(incoming: &Arc<Incoming>) -> Result<(), JournalError> {
    for due in incoming.journal.hooks_due()? {
        match incoming.journal.incoming_state(&due.migration)? {
            Some((_, IncomingState::Running | IncomingState::Finished)) => {
                tokio::spawn(tell_once_it_runs(Arc::clone(incoming), due));
            }
            Some((_, IncomingState::Discarded)) => incoming.journal.hook_is_done(&due.migration)?,
            // It is on its way still, or from here.
            Some((_, IncomingState::Waiting)) | None => {}
        }
    }
    Ok(())
}

async fn tell_once_it_runs(incoming: Arc<Incoming>, due: HookDue) {
    for _ in 0..LOOKS {
        if runs(&incoming, &due.vm).await {
            break;
        }
        sleep(LOOK_EVERY).await;
    }
    tell(incoming.host.config.hooks.clone(), Arc::clone(&incoming.journal), due).await;
}

async fn runs(incoming: &Incoming, vm: &str) -> bool {
    let Some(vmm) = incoming.vms.running(vm) else { return false };
    vmm.run_state(QMP_DEADLINE).await.is_ok_and(|state| state == RunState::Running)
}
