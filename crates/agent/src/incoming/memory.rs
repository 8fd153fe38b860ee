//! Step 3: is there enough memory, besides all that is promised?

use std::collections::BTreeMap;
use std::sync::Arc;

use drainpipe_engine::format::{mib, mib_free, mib_needed};
use drainpipe_engine::host::facts::HugePages;
use drainpipe_engine::migration::target::promises::{FreeMemory, Promise, Shortage};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::{VmName, VmSpec};

use super::{Incoming, IncomingVm};
use crate::host::hardware;
use crate::store::lock::lock;
use crate::vms::needs;

/// Step 3: is there the memory?
pub(crate) fn reserve_memory(incoming: &Incoming, id: &str) -> Result<(), Problem> {
    let entry = incoming.entries.get(id)?;
    // Held while it is decided, so that two VMs cannot both be promised the last of it.
    let entries = lock(&incoming.entries.by_id);
    check_room(incoming, &entries, &entry.definition)?;
    entry.reserve(needs(&entry.definition));
    Ok(())
}

/// Memory that is free here and promised to nobody: neither to VMs on their way nor to those that are here and
/// have not touched all of theirs yet.
pub(crate) fn memory_free(incoming: &Incoming) -> Result<FreeMemory, Problem> {
    free_memory(incoming, &lock(&incoming.entries.by_id), None)
}

/// Whether there is the memory for a VM that is not on its way, beside what is promised to those that are.
pub(crate) fn check_memory(incoming: &Incoming, definition: &VmSpec) -> Result<(), Problem> {
    check_room(incoming, &lock(&incoming.entries.by_id), definition)
}

fn check_room(
    incoming: &Incoming,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    definition: &VmSpec,
) -> Result<(), Problem> {
    let free = free_memory(incoming, entries, Some(&definition.name))?;
    free.check(needs(definition)).map_err(|shortage| is_short(incoming, definition, shortage))
}

fn is_short(incoming: &Incoming, definition: &VmSpec, shortage: Shortage) -> Problem {
    let (host, vm) = (incoming.host.name(), &definition.name);
    Problem::refused(match shortage {
        Shortage::Memory { needed_bytes, free_bytes } => format!(
            "{host} is short of memory for VM {vm}: {} needed, {} available; stop or move VMs there first",
            mib_needed(needed_bytes),
            mib_free(free_bytes)
        ),
        Shortage::HugePages { needed: HugePages { size_mib, count }, free } => format!(
            "{host} is short of huge pages for VM {vm}: {count} of {} needed, {free} free; set more aside in \
             /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
            mib(size_mib),
            size_mib << 10
        ),
    })
}

fn free_memory(
    incoming: &Incoming,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    but: Option<&VmName>,
) -> Result<FreeMemory, Problem> {
    // Before what is free: what is taken meanwhile counts twice, and not as free.
    let mut promises: Vec<Promise> =
        entries.values().filter_map(|entry| entry.promise(&incoming.vms)).collect();
    promises.extend(incoming.vms.promises(but));
    let (bytes, huge_pages) = (hardware::memory_available_bytes()?, hardware::huge_pages_free());
    Ok(FreeMemory { bytes, huge_pages }.beside(&promises))
}
