//! Post-copy: a VM that runs here before all its memory does.

use std::sync::Arc;

use drainpipe_engine::migration::target::Received;
use drainpipe_engine::migration::target::order::rest::Connection;
use drainpipe_engine::migration::target::order::{Event, Order};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::{Machine, MigrationStatus, RunState, VmError};

use super::order::{carry_out, listen_again};
use super::vm::{IncomingVm, LOOK_WITHIN};
use super::{Incoming, insert_unless_there};
use crate::store::journal::IncomingRecord;
use drainpipe_api_types::{ConnectionRequest, Endpoint};

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

/// Listens for the rest of the memory of a VM that runs here, whose connection is broken. What has begun encrypted goes on
/// so, with the key that both QEMUs have; one that has begun in the clear cannot go back, whatever was configured since.
pub(crate) async fn connect_again(
    incoming: &Arc<Incoming>,
    id: &str,
    request: ConnectionRequest,
) -> Result<Endpoint, Problem> {
    if !request.plan.post_copy() {
        return Err(Problem::bad_input("a connection anew is for post-copy"));
    }
    listen_again(incoming, id, request).await
}

/// How the connection is by which the rest comes; and why the QEMU does not say that, if so. One whose main thread waits
/// for a page still takes what is out of band, and that it is to listen again only where the connection is broken.
pub(super) async fn look_at_connection(vmm: &dyn Machine) -> (Event, Option<VmError>) {
    let connection = match vmm.migration(LOOK_WITHIN).await {
        Ok(status) if !status.status.is_post_copy() => return (Event::Received(Received::Whole), None),
        Ok(status) if status.status == MigrationStatus::PostcopyPaused => Connection::Broken,
        Ok(_) => Connection::Whole,
        Err(error) => {
            let listens = vmm.recover_listen(vmm.incoming_relay().of_hypervisor.into(), LOOK_WITHIN);
            if listens.await.is_err() {
                return (Event::Connection(Connection::Unknown), Some(error));
            }
            Connection::Broken
        }
    };
    (Event::Connection(connection), None)
}

/// Ends a VM that waits for memory which will never come.
pub(crate) async fn end_part(incoming: &Arc<Incoming>, id: &str) -> Result<(), Problem> {
    carry_out(incoming, id, Order::End).await.map(drop)
}
