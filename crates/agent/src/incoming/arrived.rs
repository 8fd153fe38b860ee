//! VMs that were told to run here and whose source has not heard that they do, when the agent starts: carries out what
//! the engine decides about each.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::migration::target::IncomingState;
use drainpipe_engine::migration::target::resume::{
    AGAIN_AFTER_MS, Resumption, ResumptionAction, ResumptionEvent,
};
use drainpipe_engine::problem::Problem;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::silence::ask_source;
use super::{Incoming, disks};
use crate::store::journal::UnfinishedIncoming;
use crate::vms::{Claim, QMP_DEADLINE};

/// How often what failed is tried again.
const AGAIN_AFTER: Duration = Duration::from_millis(AGAIN_AFTER_MS);

/// Lets run what the journal says runs here, but whose agent stopped between the record and the deed; of the VMs with
/// such names. Where its QEMU is gone, its source is asked whether it still belongs here. What is to be waited for goes on
/// beside.
pub(super) async fn resume_recorded(
    incoming: &Arc<Incoming>,
    is_meant: impl Fn(&str) -> bool,
) -> Result<(), Problem> {
    for unfinished in incoming.journal.unfinished_incoming()? {
        if !is_meant(&unfinished.vm) {
            continue;
        }
        let (mut resumption, mut action) = Resumption::begin();
        while !matches!(
            action,
            ResumptionAction::Pause | ResumptionAction::AskSource | ResumptionAction::Leave
        ) {
            action = resumption.handle(perform(incoming, &unfinished, action).await);
        }
        tokio::spawn(go_on(Arc::clone(incoming), unfinished, resumption, action));
    }
    Ok(())
}

async fn go_on(
    incoming: Arc<Incoming>,
    unfinished: UnfinishedIncoming,
    mut resumption: Resumption,
    mut action: ResumptionAction,
) {
    while action != ResumptionAction::Leave {
        action = resumption.handle(perform(&incoming, &unfinished, action).await);
    }
}

async fn perform(
    incoming: &Incoming,
    unfinished: &UnfinishedIncoming,
    action: ResumptionAction,
) -> ResumptionEvent {
    try_perform(incoming, unfinished, action).await.unwrap_or_else(|problem| {
        not_settled(unfinished, &problem);
        ResumptionEvent::Failed
    })
}

fn not_settled(unfinished: &UnfinishedIncoming, problem: &Problem) {
    debug!(vm = unfinished.vm, %problem, "it is not settled yet whether it runs here and still belongs to this host");
}

async fn try_perform(
    incoming: &Incoming,
    unfinished: &UnfinishedIncoming,
    action: ResumptionAction,
) -> Result<ResumptionEvent, Problem> {
    match action {
        ResumptionAction::Recall => return recall(incoming, unfinished),
        ResumptionAction::LetRun => return Ok(let_run(incoming, unfinished).await),
        ResumptionAction::AskSource => {
            let (said, problem) = ask_source(incoming, &unfinished.source, &unfinished.id).await;
            if let Some(problem) = problem {
                not_settled(unfinished, &problem);
            }
            return Ok(ResumptionEvent::SourceSays(said));
        }
        ResumptionAction::Finish => incoming.journal.finish_incoming(&unfinished.id)?,
        ResumptionAction::Forget => forget(incoming, unfinished)?,
        ResumptionAction::Pause => sleep(AGAIN_AFTER).await,
        ResumptionAction::Leave => {}
    }
    Ok(ResumptionEvent::Done)
}

fn recall(
    incoming: &Incoming,
    UnfinishedIncoming { id, vm, .. }: &UnfinishedIncoming,
) -> Result<ResumptionEvent, Problem> {
    let state = incoming.journal.incoming_state(id)?.map(|(_, state)| state);
    let is_open = state == Some(IncomingState::Running);
    // An older Drainpipe left it open when the VM moved on.
    let is_here = incoming.vms.contains(vm);
    // Then only that migration says where it may run.
    let moves_on = incoming.journal.open_migrations()?.iter().any(|open| open.vm == *vm);
    Ok(match incoming.vms.running(vm) {
        _ if !is_open || !is_here || moves_on => ResumptionEvent::Left,
        Some(vmm) if vmm.alive() => ResumptionEvent::Here,
        _ => ResumptionEvent::Gone,
    })
}

async fn let_run(
    incoming: &Incoming,
    UnfinishedIncoming { id, vm, .. }: &UnfinishedIncoming,
) -> ResumptionEvent {
    let Some(vmm) = incoming.vms.running(vm) else { return ResumptionEvent::Failed };
    if let Err(problem) = disks::close_left_open(incoming, id, &*vmm).await {
        warn!(vm, %problem, "was handed over to this host, but does not run, because others may still write \
            to its disks");
        return ResumptionEvent::Failed;
    }
    match vmm.run(QMP_DEADLINE).await {
        Ok(()) => {
            info!(vm, "runs here, because its source has handed it over");
            ResumptionEvent::Done
        }
        Err(error) => {
            warn!(vm, %error, "was handed over to this host, but does not run yet");
            ResumptionEvent::Failed
        }
    }
}

/// It was given back to its source, which took this host for lost.
fn forget(incoming: &Incoming, unfinished: &UnfinishedIncoming) -> Result<(), Problem> {
    let UnfinishedIncoming { id, vm, source } = unfinished;
    let claimed = incoming.vms.claim(vm, Claim::Changing)?;
    let is_here = claimed.vmm.is_some();
    if !is_here {
        // First: as disks of a VM that was given up they would be removed.
        disks::keep_given_back(incoming, unfinished)?;
    }
    if is_here || !incoming.journal.take_back_run(id)? {
        warn!(
            vm,
            source, "was given back to its source, and has been started here since: it may run on both hosts"
        );
        return Ok(());
    }
    incoming.vms.forget(vm);
    warn!(vm, source, "no longer belongs to this host: it was given back to its source");
    incoming.vms.hypervisor().clear(&claimed.definition.name).map_err(Problem::failed)
}
