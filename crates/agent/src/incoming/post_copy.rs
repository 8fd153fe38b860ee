//! Post-copy: a VM that runs here before all its memory does.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drainpipe_engine::plan::{Plan, Spread};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration::{self, MigrationStatus, TransferStatus};
use drainpipe_hypervisor::qmp::QmpError;
use drainpipe_hypervisor::{RunState, Vmm};
use tokio::time::sleep;
use tracing::{info, warn};

use super::connect::{Listening, listen, own_address};
use super::{IncomingVm, insert_unless_there};
use crate::agent::Agent;
use crate::api::types::{ConnectionRequest, Endpoint, IncomingView};
use crate::journal::{IncomingRecord, IncomingState};
use crate::lock::lock;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};

/// How long the last bytes of a source that is gone may be on their way, and how often it is looked whether they are.
const LAST_BYTES_WITHIN: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long QEMU may take to say whether a part is to come. One that waits for a page says nothing, and its source, which
/// is to send that page, waits for this answer.
pub(super) const LOOK_WITHIN: Duration = Duration::from_secs(1);

/// Whether what a VM needs to run is here, and the rest is still to come. That it was is noted.
pub(super) async fn is_here_in_part(
    entry: &IncomingVm,
    status: &TransferStatus,
    vmm: &Vmm,
) -> Result<bool, Problem> {
    if !status.status.is_post_copy() {
        return Ok(false);
    }
    let state = vmm.run_state(entry.answers_within()).await.map_err(Problem::failed)?;
    // One that was mute when it was told to run may run since.
    let runs = entry.is_told() && matches!(state, RunState::Running | RunState::Suspended);
    let is_here = runs || status.status.lets_run(&state);
    entry.came_in_parts.fetch_or(is_here, Ordering::Relaxed);
    Ok(is_here)
}

/// Post-copy takes one connection, whose bytes only QEMU changes.
pub(super) fn check_one_connection(plan: &Plan) -> Result<(), Problem> {
    let is_one = plan.spread == Spread::InTurn && plan.multifd_channels.is_none() && !plan.is_compressed;
    if plan.post_copy && !is_one {
        return Err(Problem::bad_input("post-copy goes over one connection, and is not compressed"));
    }
    Ok(())
}

/// Of one that was told to run here. An error where its QEMU does not say.
pub(super) async fn how_it_runs(agent: &Agent, id: &str) -> Result<IncomingView, Problem> {
    let Some(record) = agent.journal.incoming_record(id)? else { return Ok(IncomingView::Running) };
    if !record.post_copy {
        // It came whole, whatever became of it.
        return Ok(IncomingView::Running);
    }
    if let Some(why) = agent.vms.out_of_reach_for(&record.vm) {
        return Err(Problem::failed(why));
    }
    let Some(vmm) = told_qemu(agent, &record) else { return Ok(IncomingView::Ended) };
    // It may have come again by another one since.
    if !agent.journal.is_last_incoming(&record)? {
        return Ok(IncomingView::Running);
    }
    let entry = agent.incoming.find(id);
    match is_running_in_part(&vmm).await {
        Ok(true) => Ok(IncomingView::RunningInPart),
        Ok(false) => Ok(IncomingView::Running),
        Err(_) if !vmm.alive() => Ok(IncomingView::Ended),
        // Its main thread may itself wait for a page.
        Err(QmpError::Deadline { .. }) if entry.as_ref().is_some_and(|entry| entry.is_known_in_part()) => {
            Ok(IncomingView::RunningInPart)
        }
        Err(error) => Err(Problem::failed(error)),
    }
}

/// That of a VM which was told to run here, whether or not it has said that the VM does. It may be about to join the VMs of
/// this host, so the one on its way is asked for whatever it says of that.
fn told_qemu(agent: &Agent, record: &IncomingRecord) -> Option<Arc<Vmm>> {
    let on_its_way = agent.incoming.get(&record.id).and_then(|entry| entry.vmm()).ok();
    agent.vms.running(&record.vm).or(on_its_way).filter(|vmm| vmm.alive())
}

/// Whether a VM that was told to run here, and of which nobody has said that it does, may do so in part. Its vCPU, or
/// QEMU's main thread, may wait for a page with the lock that every answer needs. Where the connection is broken the page
/// comes only if the source hears this and makes another one.
pub(super) async fn may_run_in_part(agent: &Agent, id: &str) -> bool {
    let Some(entry) = agent.incoming.get(id).ok().filter(|entry| entry.is_known_in_part()) else {
        return false;
    };
    let Ok(vmm) = entry.vmm() else { return false };
    matches!(migration::status(&vmm, LOOK_WITHIN).await, Err(QmpError::Deadline { .. }))
}

/// As its target: as its source, which it may be of a later migration, a QEMU is in `finish-migrate`.
async fn is_running_in_part(vmm: &Vmm) -> Result<bool, QmpError> {
    if !migration::status(vmm, LOOK_WITHIN).await?.status.is_post_copy() {
        return Ok(false);
    }
    let state = vmm.run_state(LOOK_WITHIN).await?;
    Ok(!matches!(state, RunState::FinishMigrate | RunState::Postmigrate))
}

/// Takes up the VMs of which a part was still to come when an earlier life of this agent ended.
pub(crate) async fn take_up_parts(agent: &Arc<Agent>) -> Result<(), Problem> {
    for record in agent.journal.post_copy_arrivals()? {
        let is_last = agent.journal.is_last_incoming(&record)?;
        let vmm = agent.vms.running(&record.vm).filter(|vmm| is_last && vmm.alive());
        if let Some(vmm) = vmm
            // One that does not answer now has a part to come, for all that is known.
            && is_running_in_part(&vmm).await.unwrap_or(true)
        {
            insert_unless_there(agent, coming_in_parts(record, vmm));
        }
    }
    Ok(())
}

fn coming_in_parts(record: IncomingRecord, vmm: Arc<Vmm>) -> IncomingVm {
    let entry = IncomingVm::new(record.id, record.source, record.spec);
    *lock(&entry.vmm) = Some(vmm);
    entry.allows_post_copy.store(true, Ordering::Relaxed);
    entry.came_in_parts.store(true, Ordering::Relaxed);
    entry
}

impl IncomingVm {
    /// Whether a part of it was missing when its QEMU last said so.
    fn is_known_in_part(&self) -> bool {
        self.came_in_parts.load(Ordering::Relaxed)
    }
}

/// The QEMU of a VM that runs here and waits for the rest of its memory.
async fn running_in_part(agent: &Agent, id: &str) -> Result<(IncomingRecord, Arc<Vmm>), Problem> {
    let nothing_to_come =
        || Problem::conflict(format!("nothing more is to come to {} of migration {id}", agent.name()));
    let record = agent.journal.incoming_record(id)?.ok_or_else(nothing_to_come)?;
    let is_here = matches!(record.state, IncomingState::Running | IncomingState::Finished);
    if !is_here || !agent.journal.is_last_incoming(&record)? {
        return Err(nothing_to_come());
    }
    let vmm = told_qemu(agent, &record).ok_or_else(nothing_to_come)?;
    if how_it_runs(agent, id).await? != IncomingView::RunningInPart {
        return Err(nothing_to_come());
    }
    Ok((record, vmm))
}

/// Listens for the rest of the memory of a VM that runs here, whose connection is broken. What has begun encrypted goes on
/// so, with the key that both QEMUs have; one that has begun in the clear cannot go back, whatever was configured since.
pub(crate) async fn connect_again(
    agent: &Arc<Agent>,
    id: &str,
    request: ConnectionRequest,
) -> Result<Endpoint, Problem> {
    let (record, vmm) = running_in_part(agent, id).await?;
    check_one_connection(&request.plan)?;
    if !request.plan.post_copy {
        return Err(Problem::bad_input("a connection anew is for post-copy"));
    }
    let address = own_address(&request)?;
    let vm = record.vm.clone();
    let entry = insert_unless_there(agent, coming_in_parts(record, Arc::clone(&vmm)));
    let _stepping = entry.stepping.lock().await;
    // A connection over which nothing comes any more may look whole from here.
    migration::cut(&vmm, QMP_DEADLINE).await;
    info!(vm, source = entry.source, "listens for the rest of its memory");
    listen(agent, &entry, &vmm, &request, address, Listening::Again).await
}

fn says_nothing(agent: &Agent, IncomingRecord { vm, .. }: &IncomingRecord, error: &QmpError) -> Problem {
    let own = agent.name();
    Problem::failed(format!(
        "the VM's QEMU on {own} does not say whether all of the VM is there: {error}; if this goes on, `drainpipe vm stop \
         {vm} --force` ends it"
    ))
}

/// Whether its connection is broken and a part to come. One whose main thread waits for a page still takes what is out of
/// band, and that it is to listen again only then.
async fn is_interrupted(vmm: &Vmm) -> bool {
    match migration::status(vmm, LOOK_WITHIN).await {
        Ok(status) => status.status == MigrationStatus::PostcopyPaused,
        Err(_) => {
            migration::recover_listen(vmm, vmm.paths().incoming_relay().of_qemu, LOOK_WITHIN).await.is_ok()
        }
    }
}

/// Ends a VM that waits for memory which will never come.
pub(crate) async fn end_part(agent: &Agent, id: &str) -> Result<(), Problem> {
    if how_it_runs(agent, id).await? == IncomingView::Ended {
        return Ok(());
    }
    let (record, vmm) = running_in_part(agent, id).await?;
    let end = Instant::now() + LAST_BYTES_WITHIN;
    // All that its source has sent may be on its way still.
    while !is_interrupted(&vmm).await {
        running_in_part(agent, id).await?;
        if Instant::now() >= end {
            // One that says nothing may have got all of it.
            migration::status(&vmm, LOOK_WITHIN)
                .await
                .map_err(|error| says_nothing(agent, &record, &error))?;
            break;
        }
        sleep(LOOK_EVERY).await;
    }
    warn!(vm = record.vm, source = record.source, "ended: a part of its memory was lost with its source");
    vmm.destroy(QEMU_DEADLINE).await.map_err(Problem::failed)
}
