//! VMs on their way to this host: the target's side of steps 2 to 5 and 9. Because it depends on them, also what else
//! may run here, and which VMs and how much room there are.
//!
//! The source leads; this side answers, and keeps two promises that hold through crashes of either
//! agent. What it has said it discarded never runs here. What it was told to run is never discarded.

mod admission;
mod allowed_sources;
mod arrived;
mod connect;
mod disks;
mod ending;
mod facts;
mod free_port;
mod holding;
mod hooks;
mod listing;
mod memory;
mod order;
mod permit;
mod post_copy;
mod silence;
mod start;
#[cfg(test)]
mod tests;
mod tracked;
mod vm;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use drainpipe_engine::drain::inbound::Inbound;
use drainpipe_engine::migration::target::steps::{self, OnItsWay, OrderNeed, OrderRefusal};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmSpec;
use drainpipe_hypervisor::{Machine, Parcel, Role};

pub(crate) use self::connect::{connect, open_trials, watch_again};
pub(crate) use self::disks::{
    close as close_disks, keep_expiring, left as left_disks, make as make_disks, named as named_disks,
    promised_bytes as promised_disk_bytes, remove_left as remove_left_disks,
};
pub(crate) use self::ending::{close_unfinished, stop_ordered};
pub(crate) use self::holding::{check_nowhere_else, holding};
pub(crate) use self::hooks::tell_of_left;
pub(crate) use self::memory::reserve_memory;
pub(crate) use self::order::{connect_again, discard, end_part, finish, run_by_order, view, wait_received};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::permit::check_described;
pub(crate) use self::permit::permit;
pub(crate) use self::start::{recover, take_up_reached};
pub(crate) use self::tracked::take_tracked;
use self::vm::{IncomingVm, not_built};
use crate::host::Host;
use crate::peers::Peers;
use crate::peers::slots::Slots;
use crate::store::journal::Journal;
use crate::store::lock::lock;
use crate::transfer::Transfers;
use crate::vms::beside::{Beside, RecordedMigration};
use crate::vms::vm_end;
use crate::vms::vm_files::VmFiles;
use crate::vms::{QEMU_DEADLINE, Vms};

/// Migrations to this host.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// The host.
    pub(crate) host: Arc<Host>,
    /// Those from which they come.
    pub(crate) peers: Arc<Peers>,
    /// Where its promises stand.
    pub(crate) journal: Arc<Journal>,
    /// The VMs that are here.
    pub(crate) vms: Arc<Vms>,
    /// The files that VMs name.
    pub(crate) files: Arc<VmFiles>,
    /// What migrations in either direction share.
    pub(crate) transfer: Arc<Transfers>,
    /// The VMs on their way.
    pub(crate) entries: IncomingVms,
}

/// The VMs on their way to this host.
#[derive(Debug)]
pub(crate) struct IncomingVms {
    by_id: Mutex<BTreeMap<String, Arc<IncomingVm>>>,
    // The sources that wait until more VMs are taken, by a clock that begins with the agent.
    places: Mutex<Inbound>,
    clock: Instant,
    trials: Slots,
}

impl Default for IncomingVms {
    fn default() -> Self {
        Self {
            by_id: Mutex::default(),
            places: Mutex::default(),
            clock: Instant::now(),
            trials: connect::trials(),
        }
    }
}

impl IncomingVms {
    fn get(&self, id: &str) -> Result<Arc<IncomingVm>, Problem> {
        let entry = self.find(id);
        entry.ok_or_else(|| not_on_its_way(id))
    }

    fn remove(&self, id: &str) -> Option<Arc<IncomingVm>> {
        lock(&self.by_id).remove(id)
    }

    /// Whether it is still on its way, and not another one under its identifier.
    fn is_there(&self, entry: &Arc<IncomingVm>) -> bool {
        self.find(&entry.id).is_some_and(|there| Arc::ptr_eq(&there, entry))
    }

    fn find(&self, id: &str) -> Option<Arc<IncomingVm>> {
        lock(&self.by_id).get(id).cloned()
    }

    /// A host has said something about a migration. Nobody but its source shows by that that the source is there.
    pub(crate) fn heard(&self, id: &str, host: &str) {
        if let Some(entry) = self.find(id).filter(|entry| entry.source == host) {
            entry.hear();
        }
    }

    /// Whether memory of one of them may still come.
    pub(crate) fn are_receiving(&self) -> bool {
        lock(&self.by_id).values().any(|entry| entry.is_receiving())
    }

    /// The QEMUs that wait for the VMs on their way, and those that were told to run them.
    pub(crate) fn machines(&self) -> Vec<Arc<dyn Machine>> {
        lock(&self.by_id).values().filter_map(|entry| entry.built()).collect()
    }

    /// Whether a VM is on its way from this host.
    pub(crate) fn are_from(&self, host: &str) -> bool {
        lock(&self.by_id).values().any(|entry| entry.source == host)
    }

    /// Whether a VM of this name is on its way.
    pub(crate) fn has(&self, vm: &str) -> bool {
        lock(&self.by_id).values().any(|entry| entry.definition.name.as_str() == vm)
    }

    /// The entry of a VM that has its order to run here, and that nobody has reported to run yet.
    fn ordered(&self, vm: &str) -> Option<Arc<IncomingVm>> {
        let entries = lock(&self.by_id);
        entries.values().find(|entry| entry.definition.name.as_str() == vm && entry.awaits_run()).cloned()
    }

    /// Whether a VM was ordered to run here, and nobody has said yet that it does.
    pub(crate) fn awaits_run(&self, vm: &str) -> bool {
        self.ordered(vm).is_some()
    }

    /// The VMs on their way.
    pub(crate) fn definitions(&self) -> Vec<VmSpec> {
        self.definitions_but_from(None)
    }

    /// The VMs on their way from other hosts than this one, where one is named.
    pub(crate) fn definitions_but_from(&self, source: Option<&str>) -> Vec<VmSpec> {
        let entries = lock(&self.by_id);
        let others = entries.values().filter(|entry| Some(entry.source.as_str()) != source);
        others.map(|entry| entry.definition.clone()).collect()
    }

    /// The names of those that come from this host.
    pub(crate) fn names_from(&self, source: &str) -> Vec<String> {
        let entries = lock(&self.by_id);
        let of_source = entries.values().filter(|entry| entry.source == source);
        of_source.map(|entry| entry.definition.name.to_string()).collect()
    }

    fn ids_of(&self, vm: &str) -> Vec<String> {
        let entries = lock(&self.by_id);
        let of_vm = entries.values().filter(|entry| entry.definition.name.as_str() == vm);
        of_vm.map(|entry| entry.id.clone()).collect()
    }

    /// The source from which a migration comes, if it is under way.
    pub(crate) fn source_of(&self, id: &str) -> Option<String> {
        lock(&self.by_id).get(id).map(|entry| entry.source.clone())
    }
}

fn insert(incoming: &Arc<Incoming>, entry: IncomingVm) {
    let mut entries = lock(&incoming.entries.by_id);
    insert_locked(incoming, &mut entries, entry);
}

/// The one that is there, if one is.
fn insert_unless_there(incoming: &Arc<Incoming>, entry: IncomingVm) -> Arc<IncomingVm> {
    let id = entry.id.clone();
    let mut entries = lock(&incoming.entries.by_id);
    if !entries.contains_key(&id) {
        insert_locked(incoming, &mut entries, entry);
    }
    Arc::clone(&entries[&id])
}

fn insert_locked(
    incoming: &Arc<Incoming>,
    entries: &mut BTreeMap<String, Arc<IncomingVm>>,
    entry: IncomingVm,
) {
    let entry = Arc::new(entry);
    entries.insert(entry.id.clone(), Arc::clone(&entry));
    tokio::spawn(silence::watch(Arc::clone(incoming), entry));
}

fn not_on_its_way(id: &str) -> Problem {
    Problem::not_found(format!("no migration {id} on its way here"))
}

pub(crate) fn no_migration(incoming: &Incoming, id: &str) -> Problem {
    Problem::not_found(format!("{} has no record of a migration {id} to it", incoming.host.name()))
}

fn name_taken(incoming: &Incoming, name: &str) -> Problem {
    Problem::conflict(format!(
        "{} has a VM {name} already; rename or remove one of the two",
        incoming.host.name()
    ))
}

fn refused_here(incoming: &Incoming, error: &dyn std::fmt::Display) -> Problem {
    Problem::refused(format!("{} cannot run this VM: {error}", incoming.host.name()))
}

/// Step 4: the incoming VM.
pub(crate) async fn build_incoming_vm(incoming: &Incoming, id: &str) -> Result<(), Problem> {
    let entry = incoming.entries.get(id)?;
    let _stepping = entry.stepping.lock().await;
    may_go_on(incoming, &entry, OrderNeed::Build)?;
    incoming.transfer.first_sessions.begin_step(None);
    incoming.vms.clear_remains(&entry.definition).await?;
    let spec = entry.spec.clone().ok_or_else(|| started_anew(incoming, id))?;
    let migration = RecordedMigration { id: id.into(), host: entry.source.clone() };
    let beside = Beside { incoming: Some(migration), ..Beside::of(entry.definition.clone()) };
    hooks::note_due(incoming, &entry);
    let launched = incoming.vms.launch(spec, &beside, Role::Incoming).await;
    let vmm = launched.map_err(|error| refused_here(incoming, &error))?;
    vm_end::watch(entry.definition.name.as_str(), &vmm);
    entry.set_vmm(Some(vmm));
    Ok(())
}

/// Step 8: keeps the last that the source's hypervisor hands over, for the order to run.
pub(crate) async fn complete(incoming: &Incoming, id: &str, parcel: Parcel) -> Result<(), Problem> {
    parcel.check().map_err(Problem::bad_input)?;
    let entry = incoming.entries.get(id)?;
    let _stepping = entry.stepping.lock().await;
    may_go_on(incoming, &entry, OrderNeed::UseHypervisor)?;
    let completed = entry.vmm()?.complete(parcel, QEMU_DEADLINE).await;
    completed.map_err(|error| {
        Problem::failed(format!("{} could not take the state: {error}", incoming.host.name()))
    })
}

fn may_go_on(incoming: &Incoming, entry: &IncomingVm, need: OrderNeed) -> Result<(), Problem> {
    let on_its_way = OnItsWay {
        state: incoming.journal.incoming_state(&entry.id)?.map(|(_, state)| state),
        is_name_taken: entry.is_adopted(&incoming.vms),
        is_built: entry.built().is_some(),
        is_from_before: entry.spec.is_none(),
    };
    steps::may_go_on(need, Some(on_its_way)).map_err(|why| refusal(incoming, entry, why))
}

fn refusal(incoming: &Incoming, entry: &IncomingVm, why: OrderRefusal) -> Problem {
    let id = &entry.id;
    match why {
        OrderRefusal::NotOnItsWay => not_on_its_way(id),
        OrderRefusal::Decided => Problem::new(why.kind(), format!("migration {id} was given up here")),
        OrderRefusal::NameTaken => name_taken(incoming, entry.definition.name.as_str()),
        OrderRefusal::IsBuilt => {
            Problem::new(why.kind(), format!("migration {id} has an incoming VM here already"))
        }
        OrderRefusal::StartedAnew => started_anew(incoming, id),
        OrderRefusal::NotBuilt => not_built(id),
    }
}

fn started_anew(incoming: &Incoming, id: &str) -> Problem {
    let own = incoming.host.name();
    Problem::conflict(format!("the agent of {own} has restarted since migration {id} began"))
}
