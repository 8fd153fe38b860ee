//! A source that falls silent is asked; one that is gone is given up, as far as it may be.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration::MigrationStatus;
use tracing::{debug, warn};

use super::post_copy::how_it_runs;
use super::running::{Order, run, status_of};
use super::{IncomingVm, discard, finish_arrival, give_up};
use crate::agent::Agent;
use crate::api::types::{HandOverView, IncomingView};
use crate::journal::IncomingState;
use crate::lock::lock;

/// Without a word from the source for this long, the target asks it what has become of the VM.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A VM of which not all state is here is given up when its source has not been heard of for this
/// long. All of it being here, it is kept: it may be the only copy that can run.
pub(super) const GIVE_UP_AFTER: Duration = Duration::from_mins(2);

/// One of which it is not known whether all is here, since its QEMU lives and says nothing, is kept for so long without a
/// word from its source: a host may take that to boot.
const KEPT_MUTE_FOR: Duration = Duration::from_mins(30);

/// With post-copy the source may still be sending what the VM needs, which cannot run there any more: TCP gives a silent
/// connection up after a quarter of an hour (`net.ipv4.tcp_retries2`).
const KEPT_WITH_POST_COPY_FOR: Duration = Duration::from_mins(30);

/// How often the target looks after the VMs on their way.
pub(super) const WATCH_EVERY: Duration = Duration::from_secs(2);

/// Looks after one VM on its way for as long as it is: should its source fall silent, asks; should
/// the source be gone, gives up what it may give up.
pub(super) async fn watch(agent: Arc<Agent>, entry: Arc<IncomingVm>) {
    loop {
        tokio::time::sleep(WATCH_EVERY).await;
        if !lock(&agent.incoming.entries).contains_key(&entry.id) {
            return;
        }
        if let Err(problem) = take_hold(&agent, &entry).await {
            debug!(migration = entry.id, %problem, "the skeleton does not answer yet");
        }
        if entry.is_told() {
            // Its source had ordered it, and does not say so again where a part is still to come.
            if let Err(problem) = run(&agent, &entry.id, Order::Sources).await {
                debug!(migration = entry.id, %problem, "it does not run here yet");
            }
            continue;
        }
        let silence = lock(&entry.last_heard).elapsed();
        if silence < SILENCE_MAX {
            continue;
        }
        if let Err(problem) = settle(&agent, &entry, silence).await {
            warn!(migration = entry.id, %problem, "a VM on its way here cannot be settled; tried again soon");
        }
    }
}

impl IncomingVm {
    /// After so long without its source, it is given up while not all of its state is here.
    fn kept_for(&self) -> Duration {
        let allows_post_copy = self.allows_post_copy.load(Ordering::Relaxed);
        if allows_post_copy { KEPT_WITH_POST_COPY_FOR } else { GIVE_UP_AFTER }
    }
}

async fn settle(agent: &Agent, entry: &IncomingVm, silence: Duration) -> Result<(), Problem> {
    let state = agent.journal.incoming_state(&entry.id)?.map(|(_, state)| state);
    if let Some(IncomingState::Running | IncomingState::Finished) = state {
        let is_in_part = how_it_runs(agent, &entry.id).await? == IncomingView::RunningInPart;
        return if is_in_part { Ok(()) } else { finish_arrival(agent, &entry.id).await };
    }
    let source =
        agent.peer(&entry.source).ok_or_else(|| Problem::not_found("its source is no peer any more"))?;
    match source.get::<HandOverView>(&format!("/v1/handovers/{}", entry.id)).await {
        Ok(HandOverView::Pending) => entry.heard(),
        Ok(HandOverView::HandedOver) => {
            take_hold(agent, entry).await?;
            // What is here in part its source orders to run, or nobody does: nobody knows of one that has lost the rest
            // whether the VM ran on there for a while.
            run(agent, &entry.id, Order::Own).await?;
        }
        Ok(HandOverView::Refused) => discard(agent, &entry.id).await?,
        // It may have lost the record, so this is no more than silence.
        Ok(HandOverView::Unknown) => {
            let why = format!("{} has no record of this migration", entry.source);
            give_up_after(agent, entry, silence, Problem::failed(why)).await?;
        }
        Err(problem) => give_up_after(agent, entry, silence, problem).await?,
    }
    Ok(())
}

/// Of a source that does not say whose the VM is.
async fn give_up_after(
    agent: &Agent,
    entry: &IncomingVm,
    silence: Duration,
    problem: Problem,
) -> Result<(), Problem> {
    if silence <= entry.kept_for() || may_have_all_state(agent, entry, silence).await {
        return Err(problem);
    }
    warn!(migration = entry.id, %problem, "given up: its source is gone");
    give_up(agent, &entry.id).await
}

/// Takes hold of a skeleton that stood before this agent did, if it did not answer when the agent started.
pub(super) async fn take_hold(agent: &Agent, entry: &IncomingVm) -> Result<(), Problem> {
    let stood_before = entry.spec.is_none();
    let _taking_hold = entry.taking_hold.lock().await;
    // One that is among the VMs of this host may have another QEMU by now.
    if stood_before && lock(&entry.vmm).is_none() && !entry.is_adopted(agent) {
        let found = agent.vms.find_running(&entry.definition).await?;
        *lock(&entry.vmm) = found;
    }
    Ok(())
}

/// Whether this may be the only copy that can run.
async fn may_have_all_state(agent: &Agent, entry: &IncomingVm, silence: Duration) -> bool {
    let vmm = lock(&entry.vmm).clone();
    let is_known_soon = silence < KEPT_MUTE_FOR;
    match vmm {
        Some(vmm) if !vmm.alive() => false,
        Some(_) if entry.has_arrived() => true,
        Some(vmm) => match status_of(entry, &vmm).await {
            Ok(status) => status.status == MigrationStatus::Completed || status.status.is_post_copy(),
            Err(_) => is_known_soon,
        },
        // An error is of one that stood before this agent did, lives, and has not answered since.
        None => take_hold(agent, entry).await.is_err() && is_known_soon,
    }
}
