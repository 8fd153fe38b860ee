//! Step 3: is there enough memory, besides all that is promised?

use std::collections::BTreeMap;
use std::sync::Arc;

use drainpipe_engine::format::{mib, mib_free, mib_needed};
use drainpipe_engine::host::facts::{HugePages, MemoryNeeds};
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
pub(crate) fn memory_free_bytes(incoming: &Incoming) -> Result<u64, Problem> {
    free_bytes(incoming, &lock(&incoming.entries.by_id), None)
}

/// Huge pages that are free here and promised to nobody.
pub(crate) fn huge_pages_free(incoming: &Incoming) -> Vec<HugePages> {
    free_huge_pages(incoming, &lock(&incoming.entries.by_id), None)
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
    let MemoryNeeds { bytes: needed, huge_pages } = needs(definition);
    if let Some(pages) = huge_pages {
        check_huge_pages(incoming, entries, definition, pages)?;
    }
    let available = free_bytes(incoming, entries, Some(&definition.name))?;
    if available >= needed {
        return Ok(());
    }
    Err(Problem::refused(format!(
        "{} is short of memory for VM {}: {} needed, {} available; stop or move VMs there first",
        incoming.host.name(),
        definition.name,
        mib_needed(needed),
        mib_free(available)
    )))
}

fn check_huge_pages(
    incoming: &Incoming,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    definition: &VmSpec,
    needed: HugePages,
) -> Result<(), Problem> {
    let HugePages { size_mib, count } = needed;
    let free = free_huge_pages(incoming, entries, Some(&definition.name));
    let free = free.iter().find(|pages| pages.size_mib == size_mib).map_or(0, |pages| pages.count);
    if free >= count {
        return Ok(());
    }
    Err(Problem::refused(format!(
        "{} is short of huge pages for VM {}: {count} of {} needed, {free} free; set more aside in \
         /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
        incoming.host.name(),
        definition.name,
        mib(size_mib),
        size_mib << 10
    )))
}

fn free_bytes(
    incoming: &Incoming,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    but: Option<&VmName>,
) -> Result<u64, Problem> {
    let promised: u64 = entries.values().map(|entry| entry.outstanding_bytes(&incoming.vms)).sum();
    let taken = promised.saturating_add(incoming.vms.outstanding_bytes(but));
    Ok(hardware::memory_available_bytes()?.saturating_sub(taken))
}

/// What QEMUs have, they have reserved: the kernel knows of it.
fn free_huge_pages(
    incoming: &Incoming,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    but: Option<&VmName>,
) -> Vec<HugePages> {
    let mut promised = incoming.vms.outstanding_huge_pages(but);
    promised.extend(entries.values().filter_map(|entry| entry.outstanding_huge_pages()));
    let left = |free: HugePages| {
        let of_size = promised.iter().filter(|pages| pages.size_mib == free.size_mib);
        let taken: u64 = of_size.map(|pages| pages.count).sum();
        HugePages { count: free.count.saturating_sub(taken), ..free }
    };
    hardware::huge_pages_free().into_iter().map(left).collect()
}
