//! Takes over what an earlier run of this agent left, as the engine says.

use std::sync::Arc;

use drainpipe_engine::migration::target::start::{
    AT_START, ONCE_IT_ANSWERS, StartStep, Waiting, lacks_part, waiting,
};
use drainpipe_engine::migration::target::{Hypervisor, KnownMigration};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Machine;
use tracing::warn;

use super::arrived::resume_recorded;
use super::ending::clear_discarded;
use super::order::found;
use super::post_copy::{look_at_rest, ordered_hypervisor};
use super::vm::IncomingVm;
use super::{Incoming, insert, insert_unless_there};
use crate::store::journal::IncomingRecord;

/// When the agent starts.
pub(crate) async fn recover(incoming: &Arc<Incoming>) -> Result<(), Problem> {
    let unresponsive = incoming.vms.unresponsive();
    let answers = |vm: &str| !unresponsive.iter().any(|name| name == vm);
    for step in AT_START {
        take(incoming, step, answers).await?;
    }
    Ok(())
}

/// A VM of this host answers, which did not when the agent started.
pub(crate) async fn take_up_reached(incoming: &Arc<Incoming>, vm: &str) -> Result<(), Problem> {
    for step in ONCE_IT_ANSWERS {
        take(incoming, step, |name| name == vm).await?;
    }
    Ok(())
}

async fn take(
    incoming: &Arc<Incoming>,
    step: StartStep,
    is_meant: impl Fn(&str) -> bool,
) -> Result<(), Problem> {
    match step {
        StartStep::ClearDiscarded => clear_discarded(incoming).await,
        StartStep::TakeUpWaiting => take_up_waiting(incoming).await,
        StartStep::LetRun => resume_recorded(incoming, is_meant).await,
        StartStep::TakeUpParts => take_up_parts(incoming, is_meant).await,
    }
}

async fn take_up_waiting(incoming: &Arc<Incoming>) -> Result<(), Problem> {
    for record in incoming.journal.waiting_incoming()? {
        let (hypervisor, vmm) = hypervisor_of(incoming, &record).await;
        let was_let_run =
            incoming.vms.hypervisor().was_let_run(&record.spec.name).map_err(Problem::failed)?;
        match waiting(hypervisor, was_let_run) {
            Waiting::TakeUp => insert(incoming, IncomingVm::taken_up(record, vmm)),
            Waiting::GiveUp => {
                warn!(vm = record.vm, "its QEMU is gone; given up");
                incoming.journal.discard_incoming(&record.id)?;
                incoming.transfer.watches.leave(&record.id).await?;
            }
            Waiting::RecordRun => {
                warn!(
                    vm = record.vm,
                    "others have let it run here before its source's order, and its QEMU has ended since"
                );
                incoming.journal.run_incoming(&record.id)?;
                incoming.transfer.watches.leave(&record.id).await?;
            }
        }
    }
    Ok(())
}

async fn hypervisor_of(
    incoming: &Incoming,
    record: &IncomingRecord,
) -> (Hypervisor, Option<Arc<dyn Machine>>) {
    match incoming.vms.find_running(&record.spec).await {
        Ok(Some(vmm)) => (Hypervisor::There, Some(vmm)),
        Ok(None) => (Hypervisor::None, None),
        // It is tried again (`take_hold`), and the source says whether it is to be waited for. Seen with QEMU 7.2 after its
        // source broke off, and on slow links: its main thread waits for multifd's channels.
        Err(problem) => {
            warn!(vm = record.vm, %problem, "its QEMU does not answer");
            (Hypervisor::Unresponsive, None)
        }
    }
}

async fn take_up_parts(incoming: &Arc<Incoming>, is_meant: impl Fn(&str) -> bool) -> Result<(), Problem> {
    for record in incoming.journal.post_copy_incoming()?.into_iter().filter(|record| is_meant(&record.vm)) {
        let known = KnownMigration::of(found(incoming, &record, None)?, None);
        let Some(vmm) = ordered_hypervisor(incoming, &record).filter(|_| lacks_part(known, None)) else {
            continue;
        };
        if lacks_part(known, look_at_rest(&*vmm).await.ok()) {
            insert_unless_there(incoming, IncomingVm::in_parts(record, vmm));
        }
    }
    Ok(())
}
