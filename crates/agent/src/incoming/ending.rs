//! How a VM stops being on its way: it runs here, it left, it was given up, or somebody ended it.

use std::sync::Arc;

use drainpipe_engine::migration::target::IncomingState;
use drainpipe_engine::migration::target::start::{Remains, remains};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmSpec;
use tracing::warn;

use super::tracked::forget_loaded;
use super::vm::IncomingVm;
use super::{Incoming, insert_unless_there};
use super::{disks, hooks};
use crate::store::journal::IncomingRecord;
use crate::vms::{QEMU_DEADLINE, Vms};

/// Removes what is left of the VMs that were discarded, should the agent have stopped half-way. What cannot be removed now, as
/// by a manager that has ended too, is tried again with those that are on their way.
pub(super) async fn clear_discarded(incoming: &Arc<Incoming>) -> Result<(), Problem> {
    let coming = incoming.journal.waiting_incoming()?;
    for record in incoming.journal.discarded_incoming_vms()? {
        // The VM may have come back since, and then its files are no remains.
        let comes_again = coming.iter().any(|other| other.vm == record.vm);
        let remains = remains(incoming.vms.contains(&record.vm), comes_again);
        let cleared = match remains {
            Remains::Remove => clear_with_disks(incoming, &record).await,
            Remains::Leave => disks::leave(incoming, &record.id),
        };
        match cleared {
            Ok(()) => incoming.journal.forget_incoming_vm(&record.id)?,
            // A QEMU that nobody needs and that hangs must not keep the agent from all others.
            Err(problem) if remains == Remains::Remove => {
                warn!(vm = record.vm, %problem, "was given up, and its remains are not removed yet; tried again");
                insert_unless_there(incoming, IncomingVm::taken_up(record, None));
            }
            Err(problem) => {
                warn!(vm = record.vm, %problem, "it has not left its disks yet: that is done when the agent restarts");
            }
        }
    }
    Ok(())
}

async fn clear_with_disks(incoming: &Incoming, record: &IncomingRecord) -> Result<(), Problem> {
    clear(&incoming.vms, &record.spec).await?;
    disks::remove(incoming, &record.id).await
}

/// Ends the QEMU of a VM that was discarded, which was not taken hold of, and removes what is left.
async fn clear(vms: &Vms, definition: &VmSpec) -> Result<(), Problem> {
    vms.hypervisor().end_given_up(&definition.name, QEMU_DEADLINE).await.map_err(Problem::failed)
}

/// Ends its QEMU and puts the network back.
pub(super) async fn remove(incoming: &Incoming, id: &str, entry: Option<&IncomingVm>) -> Result<(), Problem> {
    if let Some(entry) = entry {
        entry.end_trials();
        match entry.built() {
            // It was never told to run: that is recorded first, and a VM so recorded is not discarded.
            Some(vmm) if !entry.memory().is_ordered_to_run() => {
                vmm.destroy_unrun(QEMU_DEADLINE).await.map_err(Problem::failed)?;
            }
            Some(vmm) => vmm.destroy(QEMU_DEADLINE).await.map_err(Problem::failed)?,
            // None was built, or it did not answer when the agent started.
            None if entry.is_adopted(&incoming.vms) => {}
            None => clear(&incoming.vms, &entry.definition).await?,
        }
    }
    if let Some(entry) = entry {
        forget_loaded(entry).await;
    }
    let put_back = incoming.transfer.watches.leave(id).await;
    let removed = disks::remove(incoming, id).await;
    incoming.entries.remove(id);
    put_back?;
    removed?;
    hooks::not_due(incoming, id)?;
    Ok(incoming.journal.forget_incoming_vm(id)?)
}

/// A VM has left this host, or was removed. What its migrations to this host still hold here goes, though whoever sent it
/// may not have heard yet that it ran here.
pub(crate) async fn close_unfinished(incoming: &Incoming, vm: &str) {
    for id in incoming.entries.ids_of(vm) {
        match incoming.journal.incoming_state(&id) {
            Ok(Some((_, IncomingState::Finished))) => {}
            Ok(_) => continue,
            Err(error) => {
                warn!(vm, migration = id, %error, "it is not known whether it still holds anything here; \
                    checked again soon");
                continue;
            }
        }
        if let Err(problem) = incoming.transfer.watches.leave(&id).await {
            warn!(vm, migration = id, %problem, "the network is put back when the agent restarts");
        }
        incoming.entries.remove(&id);
    }
}

/// Puts the network back and records that nothing is left to do.
pub(super) async fn finish_incoming(incoming: &Incoming, id: &str) -> Result<(), Problem> {
    incoming.transfer.watches.leave(id).await?;
    incoming.journal.finish_incoming(id)?;
    let entry = incoming.entries.remove(id);
    if let Some(vmm) = entry.and_then(|entry| entry.built())
        && let Err(error) = vmm.forget_key()
    {
        warn!(migration = id, %error, "the key with which its memory came stays until the VM ends or moves");
    }
    Ok(())
}

/// Ends, on request, the QEMU of a VM that was ordered to run here, and that nobody has confirmed to run. What
/// the VM had in memory is lost, here and on its source. False if there is no such VM.
pub(crate) async fn stop_ordered(incoming: &Arc<Incoming>, vm: &str, force: bool) -> Result<bool, Problem> {
    let Some(entry) = incoming.entries.ordered(vm) else { return Ok(false) };
    let Some(vmm) = entry.built() else { return Ok(false) };
    if !force {
        return Err(Problem::conflict(format!(
            "VM {vm} was handed over to {own} and may run there, but its QEMU does not say so yet (migration {id} from \
             {source}): wait, or `drainpipe vm stop {vm} --force`, with which all is lost that it has in memory",
            own = incoming.host.name(),
            id = entry.id,
            source = entry.source,
        )));
    }
    warn!(vm, migration = entry.id, "its QEMU, which does not answer, is ended on request");
    vmm.destroy(QEMU_DEADLINE).await.map_err(Problem::failed)?;
    let _stepping = entry.stepping.lock().await;
    // As any VM that has ended where it ran, unless it was given back meanwhile.
    if matches!(incoming.journal.incoming_state(&entry.id)?, Some((_, IncomingState::Running))) {
        entry.join(&incoming.vms, vmm);
    }
    Ok(true)
}
