//! Post-copy: a VM that runs here before all its memory does.

use std::sync::Arc;

use drainpipe_engine::migration::target::Received;
use drainpipe_engine::migration::target::order::OrderEvent;
use drainpipe_engine::migration::target::order::rest::Connection;
use drainpipe_hypervisor::{Machine, MigrationStatus, RunState, VmError};

use super::Incoming;
use super::vm::LOOK_WITHIN;
use crate::store::journal::IncomingRecord;

/// That of a VM which was ordered to run here, whether or not it has said that the VM does. It may be about to join the VMs of
/// this host, so the one on its way is asked for whatever it says of that.
pub(super) fn ordered_hypervisor(incoming: &Incoming, record: &IncomingRecord) -> Option<Arc<dyn Machine>> {
    let on_its_way = incoming.entries.find(&record.id).and_then(|entry| entry.built());
    incoming.vms.running(&record.vm).or(on_its_way).filter(|vmm| vmm.alive())
}

/// What the QEMU of a VM has that was ordered to run here; a part only where the rest is to come to this host. As the source,
/// which it may be of a later migration, a QEMU is in `finish-migrate`.
pub(super) async fn look_at_rest(vmm: &dyn Machine) -> Result<Received, VmError> {
    if !vmm.migration(LOOK_WITHIN).await?.status.is_post_copy() {
        return Ok(Received::Whole);
    }
    let is_source =
        matches!(vmm.run_state(LOOK_WITHIN).await?, RunState::FinishMigrate | RunState::Postmigrate);
    Ok(if is_source { Received::Whole } else { Received::InPart })
}

/// How the connection is by which the rest comes; and why the QEMU does not say that, if so. One whose main thread waits
/// for a page still takes what is out of band, and that it is to listen again only where the connection is broken.
pub(super) async fn look_at_connection(vmm: &dyn Machine) -> (OrderEvent, Option<VmError>) {
    let connection = match vmm.migration(LOOK_WITHIN).await {
        Ok(status) if !status.status.is_post_copy() => return (OrderEvent::Received(Received::Whole), None),
        Ok(status) if status.status == MigrationStatus::PostcopyPaused => Connection::Broken,
        Ok(_) => Connection::Whole,
        Err(error) => {
            let listens = vmm.recover_listen(vmm.incoming_relay().of_hypervisor.into(), LOOK_WITHIN);
            if listens.await.is_err() {
                return (OrderEvent::Connection(Connection::Unknown), Some(error));
            }
            Connection::Broken
        }
    };
    (OrderEvent::Connection(connection), None)
}
