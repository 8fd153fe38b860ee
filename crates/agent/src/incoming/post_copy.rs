//! Post-copy: a VM that runs here before all its memory does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drainpipe_engine::migration::target::{IncomingState, Received};
use drainpipe_engine::plan::{Plan, Spread};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration::{self, MigrationStatus};
use drainpipe_hypervisor::qmp::QmpError;
use drainpipe_hypervisor::{RunState, Vmm};
use tokio::time::sleep;
use tracing::{info, warn};

use super::connect::{Listening, listen, own_address};
use super::insert_unless_there;
use super::vm::{IncomingVm, LOOK_WITHIN};
use crate::agent::Agent;
use crate::api::types::{ConnectionRequest, Endpoint};
use crate::journal::IncomingRecord;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};

/// How long the last bytes of a source that is gone may be on their way, and how often it is looked whether they are.
const LAST_BYTES_WITHIN: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Post-copy takes one connection, whose bytes only QEMU changes.
pub(super) fn check_one_connection(plan: &Plan) -> Result<(), Problem> {
    let is_one = plan.spread == Spread::InTurn && plan.multifd_channels.is_none() && !plan.is_compressed;
    if plan.post_copy && !is_one {
        return Err(Problem::bad_input("post-copy goes over one connection, and is not compressed"));
    }
    Ok(())
}

/// That of a VM which was told to run here, whether or not it has said that the VM does. It may be about to join the VMs of
/// this host, so the one on its way is asked for whatever it says of that.
pub(super) fn told_qemu(agent: &Agent, record: &IncomingRecord) -> Option<Arc<Vmm>> {
    let on_its_way = agent.incoming.find(&record.id).and_then(|entry| entry.built());
    agent.vms.running(&record.vm).or(on_its_way).filter(|vmm| vmm.alive())
}

/// What the QEMU of a VM has that was told to run here; a part only where the rest is to come to this host. As the source,
/// which it may be of a later migration, a QEMU is in `finish-migrate`.
pub(super) async fn look_at_rest(vmm: &Vmm) -> Result<Received, QmpError> {
    if !migration::status(vmm, LOOK_WITHIN).await?.status.is_post_copy() {
        return Ok(Received::Whole);
    }
    let is_source =
        matches!(vmm.run_state(LOOK_WITHIN).await?, RunState::FinishMigrate | RunState::Postmigrate);
    Ok(if is_source { Received::Whole } else { Received::InPart })
}

/// Takes up the VMs of which a part was still to come when an earlier life of this agent ended.
pub(crate) async fn take_up_parts(agent: &Arc<Agent>) -> Result<(), Problem> {
    for record in agent.journal.post_copy_arrivals()? {
        let is_last = agent.journal.is_last_incoming(&record)?;
        let vmm = agent.vms.running(&record.vm).filter(|vmm| is_last && vmm.alive());
        if let Some(vmm) = vmm
            // One that does not answer now has a part to come, for all that is known.
            && !matches!(look_at_rest(&vmm).await, Ok(Received::Whole))
        {
            insert_unless_there(agent, IncomingVm::in_parts(record, vmm));
        }
    }
    Ok(())
}

/// Of one whose QEMU does not answer this life of the agent, nobody knows whether it has ended.
fn must_be_within_reach(agent: &Agent, record: &IncomingRecord) -> Result<(), Problem> {
    agent.vms.why_unresponsive(&record.vm).map_or(Ok(()), |why| Err(Problem::failed(why)))
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
    must_be_within_reach(agent, &record)?;
    let vmm = told_qemu(agent, &record).ok_or_else(nothing_to_come)?;
    let is_known_in_part = agent.incoming.find(id).is_some_and(|entry| entry.memory().came_in_parts());
    match look_at_rest(&vmm).await {
        Ok(Received::InPart) => Ok((record, vmm)),
        // Its main thread may itself wait for a page.
        Err(QmpError::Deadline { .. }) if is_known_in_part => Ok((record, vmm)),
        Err(error) if vmm.alive() => Err(Problem::failed(error)),
        Ok(_) | Err(_) => Err(nothing_to_come()),
    }
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
    let entry = insert_unless_there(agent, IncomingVm::in_parts(record, Arc::clone(&vmm)));
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
    if let Some(record) = agent.journal.incoming_record(id)?.filter(|record| record.post_copy) {
        must_be_within_reach(agent, &record)?;
        if told_qemu(agent, &record).is_none() {
            return Ok(());
        }
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
