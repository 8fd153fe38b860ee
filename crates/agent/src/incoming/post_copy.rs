//! Post-copy: a VM that runs here before all its memory does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drainpipe_engine::migration::target::{IncomingState, Received};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::{Machine, MigrationStatus, RunState, VmError};
use tokio::time::sleep;
use tracing::{info, warn};

use super::connect::{Listening, listen};
use super::vm::{IncomingVm, LOOK_WITHIN};
use super::{Incoming, insert_unless_there};
use crate::store::journal::IncomingRecord;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};
use drainpipe_api_types::{ConnectionRequest, Endpoint};

/// How long the last bytes of a source that is gone may be on their way, and how often it is looked whether they are.
const LAST_BYTES_WITHIN: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// That of a VM which was told to run here, whether or not it has said that the VM does. It may be about to join the VMs of
/// this host, so the one on its way is asked for whatever it says of that.
pub(super) fn told_qemu(incoming: &Incoming, record: &IncomingRecord) -> Option<Arc<dyn Machine>> {
    let on_its_way = incoming.entries.find(&record.id).and_then(|entry| entry.built());
    incoming.vms.running(&record.vm).or(on_its_way).filter(|vmm| vmm.alive())
}

/// What the QEMU of a VM has that was told to run here; a part only where the rest is to come to this host. As the source,
/// which it may be of a later migration, a QEMU is in `finish-migrate`.
pub(super) async fn look_at_rest(vmm: &dyn Machine) -> Result<Received, VmError> {
    if !vmm.migration(LOOK_WITHIN).await?.status.is_post_copy() {
        return Ok(Received::Whole);
    }
    let is_source =
        matches!(vmm.run_state(LOOK_WITHIN).await?, RunState::FinishMigrate | RunState::Postmigrate);
    Ok(if is_source { Received::Whole } else { Received::InPart })
}

/// Takes up the VMs of which a part was still to come when an earlier life of this agent ended.
pub(crate) async fn take_up_parts(incoming: &Arc<Incoming>) -> Result<(), Problem> {
    for record in incoming.journal.post_copy_incoming()? {
        let is_last = incoming.journal.is_last_incoming(&record)?;
        let vmm = incoming.vms.running(&record.vm).filter(|vmm| is_last && vmm.alive());
        if let Some(vmm) = vmm
            // One that does not answer now has a part to come, for all that is known.
            && !matches!(look_at_rest(&*vmm).await, Ok(Received::Whole))
        {
            insert_unless_there(incoming, IncomingVm::in_parts(record, vmm));
        }
    }
    Ok(())
}

/// Of one whose QEMU does not answer this life of the agent, nobody knows whether it has ended.
fn must_be_within_reach(incoming: &Incoming, record: &IncomingRecord) -> Result<(), Problem> {
    incoming.vms.why_unresponsive(&record.vm).map_or(Ok(()), |why| Err(Problem::failed(why)))
}

/// The QEMU of a VM that runs here and waits for the rest of its memory.
async fn running_in_part(
    incoming: &Incoming,
    id: &str,
) -> Result<(IncomingRecord, Arc<dyn Machine>), Problem> {
    let nothing_to_come = || {
        Problem::conflict(format!("nothing more is to come to {} of migration {id}", incoming.host.name()))
    };
    let record = incoming.journal.incoming_record(id)?.ok_or_else(nothing_to_come)?;
    let is_here = matches!(record.state, IncomingState::Running | IncomingState::Finished);
    if !is_here || !incoming.journal.is_last_incoming(&record)? {
        return Err(nothing_to_come());
    }
    must_be_within_reach(incoming, &record)?;
    let vmm = told_qemu(incoming, &record).ok_or_else(nothing_to_come)?;
    let is_known_in_part = incoming.entries.find(id).is_some_and(|entry| entry.memory().came_in_parts());
    match look_at_rest(&*vmm).await {
        Ok(Received::InPart) => Ok((record, vmm)),
        // Its main thread may itself wait for a page.
        Err(error) if error.is_mute() && is_known_in_part => Ok((record, vmm)),
        Err(error) if vmm.alive() => Err(Problem::failed(error)),
        Ok(_) | Err(_) => Err(nothing_to_come()),
    }
}

/// Listens for the rest of the memory of a VM that runs here, whose connection is broken. What has begun encrypted goes on
/// so, with the key that both QEMUs have; one that has begun in the clear cannot go back, whatever was configured since.
pub(crate) async fn connect_again(
    incoming: &Arc<Incoming>,
    id: &str,
    request: ConnectionRequest,
) -> Result<Endpoint, Problem> {
    let (record, vmm) = running_in_part(incoming, id).await?;
    if !request.plan.post_copy() {
        return Err(Problem::bad_input("a connection anew is for post-copy"));
    }
    let address = request.plan.paths.first().address;
    let vm = record.vm.clone();
    let entry = insert_unless_there(incoming, IncomingVm::in_parts(record, Arc::clone(&vmm)));
    let _stepping = entry.stepping.lock().await;
    // A connection over which nothing comes any more may look whole from here.
    vmm.cut_migration(QMP_DEADLINE).await;
    info!(vm, source = entry.source, "listens for the rest of its memory");
    listen(incoming, &entry, &*vmm, &request, address, Listening::Again).await
}

fn says_nothing(incoming: &Incoming, IncomingRecord { vm, .. }: &IncomingRecord, error: &VmError) -> Problem {
    let own = incoming.host.name();
    Problem::failed(format!(
        "the VM's QEMU on {own} does not say whether all of the VM is there: {error}; if this goes on, `drainpipe vm stop \
         {vm} --force` ends it"
    ))
}

/// Whether its connection is broken and a part to come. One whose main thread waits for a page still takes what is out of
/// band, and that it is to listen again only then.
async fn is_interrupted(vmm: &dyn Machine) -> bool {
    match vmm.migration(LOOK_WITHIN).await {
        Ok(status) => status.status == MigrationStatus::PostcopyPaused,
        Err(_) => vmm.recover_listen(vmm.incoming_relay().of_hypervisor.into(), LOOK_WITHIN).await.is_ok(),
    }
}

/// Ends a VM that waits for memory which will never come.
pub(crate) async fn end_part(incoming: &Incoming, id: &str) -> Result<(), Problem> {
    if let Some(record) = incoming.journal.incoming_record(id)?.filter(|record| record.post_copy) {
        must_be_within_reach(incoming, &record)?;
        if told_qemu(incoming, &record).is_none() {
            return Ok(());
        }
    }
    let (record, vmm) = running_in_part(incoming, id).await?;
    let end = Instant::now() + LAST_BYTES_WITHIN;
    // All that its source has sent may be on its way still.
    while !is_interrupted(&*vmm).await {
        running_in_part(incoming, id).await?;
        if Instant::now() >= end {
            // One that says nothing may have got all of it.
            vmm.migration(LOOK_WITHIN).await.map_err(|error| says_nothing(incoming, &record, &error))?;
            break;
        }
        sleep(LOOK_EVERY).await;
    }
    warn!(vm = record.vm, source = record.source, "ended: a part of its memory was lost with its source");
    vmm.destroy(QEMU_DEADLINE).await.map_err(Problem::failed)
}
