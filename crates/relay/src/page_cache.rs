//! Pages that the other end has, on the sender: the base for sending only what has changed.
//!
//! Both ends have the same numbered slots. Whatever is sent of a page names its slot and how often that slot has
//! changed before; the other end waits until it has changed as often, and then changes it too. So both hold the same
//! bytes at the same count, and nothing depends on hashes or on which connection is faster.
//!
//! The other end must never wait for something that waits for the other end. Connections wait for each other at each
//! of QEMU's syncs. So a slot changes again only after a later sync than its last change: that change is on its way
//! already, and needs nothing of what waits for it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::multifd::{PAGE_BYTES, PageAt, PageId};

/// Slots that are looked at for one that may be had.
const TRIES: usize = 8;

/// The sender's slots.
#[derive(Debug)]
pub(crate) struct PageCache {
    slots: Vec<Slot>,
    slots_max: usize,
    known: HashMap<PageId, usize>,
    seen: SeenPages,
    // Where the search for a slot goes on.
    hand: usize,
}

#[derive(Debug)]
struct Slot {
    id: PageId,
    changes: u32,
    syncs: u64,
    // It has come more than once, since it was last looked at for another page.
    is_rewritten: bool,
    // A block that is being packed is to change it.
    is_taken: bool,
    bytes: Option<Arc<[u8]>>,
}

/// A slot that is taken for a page of a block until it is changed or released.
#[derive(Debug, Clone)]
pub(crate) struct TakenSlot {
    pub(crate) page: PageAt,
    pub(crate) slot: u32,
    /// How often the slot has changed before.
    pub(crate) changes: u32,
    /// Whether there is a copy of a page in the slot: until the block goes out, there are two.
    pub(crate) replaces: bool,
    /// The same page as it is in the slot; none if the slot held another one.
    pub(crate) base: Option<Arc<[u8]>>,
}

/// What the other end learns by a block of its pages.
#[derive(Debug)]
pub(crate) struct PageChange {
    pub(crate) taken: Vec<TakenSlot>,
    /// What each of these slots holds then.
    pub(crate) contents: Vec<Arc<[u8]>>,
    /// How often all connections have waited for each other before it.
    pub(crate) syncs: u64,
}

impl PageCache {
    /// With so many bytes of pages at most.
    pub(crate) fn new(bytes_max: usize) -> Self {
        let slots_max = bytes_max / PAGE_BYTES;
        Self {
            slots: vec![],
            slots_max,
            known: HashMap::new(),
            seen: SeenPages::new(REGIONS_MIN + slots_max / 8),
            hand: 0,
        }
    }

    /// Takes a slot for each page of a block that comes after so many syncs, as far as there are any.
    pub(crate) fn take(&mut self, pages: &[PageAt], syncs: u64) -> Vec<TakenSlot> {
        if self.slots_max == 0 {
            return vec![];
        }
        pages.iter().filter_map(|page| self.take_one(*page, syncs)).collect()
    }

    fn take_one(&mut self, page: PageAt, syncs: u64) -> Option<TakenSlot> {
        let id = page.id;
        let comes_again = self.seen.see(id);
        let index = match self.known.get(&id) {
            Some(index) => *index,
            None if self.slots.len() < self.slots_max => self.new_slot(id),
            // A page that comes for the first time may be one that never changes.
            None if comes_again => self.evict(syncs)?,
            None => return None,
        };
        let slot = &mut self.slots[index];
        if slot.is_taken || (slot.bytes.is_some() && slot.syncs >= syncs) {
            return None;
        }
        slot.is_taken = true;
        let base = slot.bytes.clone().filter(|_| slot.id == id);
        let replaces = slot.bytes.is_some();
        Some(TakenSlot { page, slot: u32::try_from(index).ok()?, changes: slot.changes, replaces, base })
    }

    fn new_slot(&mut self, id: PageId) -> usize {
        if self.slots.is_empty() {
            // Growing by and by would take twice the room.
            self.slots.reserve_exact(self.slots_max);
        }
        self.slots.push(Slot { id, changes: 0, syncs: 0, is_rewritten: false, is_taken: false, bytes: None });
        self.known.insert(id, self.slots.len() - 1);
        self.slots.len() - 1
    }

    /// A slot whose page has not come again for long, if a short search finds one.
    fn evict(&mut self, syncs: u64) -> Option<usize> {
        for _ in 0..TRIES.min(self.slots.len()) {
            self.hand = (self.hand + 1) % self.slots.len();
            let slot = &mut self.slots[self.hand];
            let may_go = !slot.is_taken && slot.syncs < syncs;
            if may_go && !std::mem::take(&mut slot.is_rewritten) {
                return Some(self.hand);
            }
        }
        None
    }

    /// The block goes out: from now on the other end has its pages.
    pub(crate) fn change(&mut self, change: PageChange) {
        let PageChange { taken, contents, syncs } = change;
        for (TakenSlot { page, slot, base, .. }, bytes) in taken.into_iter().zip(contents) {
            let index = slot as usize;
            let slot = &mut self.slots[index];
            if slot.id != page.id {
                self.known.remove(&slot.id);
                self.known.insert(page.id, index);
            }
            *slot = Slot {
                id: page.id,
                changes: slot.changes.wrapping_add(1),
                syncs,
                is_rewritten: base.is_some(),
                is_taken: false,
                bytes: Some(bytes),
            };
        }
    }

    /// The block has gone out as it was: the other end learns of no page.
    pub(crate) fn release(&mut self, taken: &[TakenSlot]) {
        for TakenSlot { slot, .. } in taken {
            self.slots[*slot as usize].is_taken = false;
        }
    }
}

/// Pages of a region of memory.
const REGION_PAGES: usize = 4096;

/// Regions that are known of whatever the number of slots: 64 GiB of a VM, in 2.3 MiB.
const REGIONS_MIN: usize = 1 << 12;

/// What is noted of pages at most, beside their copies, with so many slots.
#[cfg(test)]
pub(crate) fn notes_bytes_max(slots: usize) -> usize {
    // As the library's tables are: twice as long each time that they are filled to seven eighths.
    let table = |entries: usize, bytes: usize| {
        if entries == 0 { 0 } else { (entries * 8 / 7).next_power_of_two() * (bytes + 1) }
    };
    let regions = REGIONS_MIN + slots / 8;
    let region = size_of::<(PageId, Box<()>)>();
    slots * size_of::<Slot>()
        + table(slots, size_of::<(PageId, usize)>())
        + table(regions, region)
        + regions * (REGION_PAGES / 8 + 16)
}

/// Which pages have come, as far as there is room to note it: those beyond are taken to have come. Takes room by what
/// has come, and not by where it is.
#[derive(Debug)]
struct SeenPages {
    regions: HashMap<PageId, Box<[u64; REGION_PAGES / 64]>>,
    regions_max: usize,
}

impl SeenPages {
    fn new(regions_max: usize) -> Self {
        Self { regions: HashMap::new(), regions_max }
    }

    /// Whether it has come before.
    fn see(&mut self, PageId { ram_block, offset }: PageId) -> bool {
        const REGION_BYTES: u64 = (REGION_PAGES * PAGE_BYTES) as u64;
        let region = PageId { ram_block, offset: offset / REGION_BYTES };
        let is_full = self.regions.len() >= self.regions_max;
        let words = match self.regions.entry(region) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if is_full => return true,
            Entry::Vacant(new) => new.insert(Box::new([0; REGION_PAGES / 64])),
        };
        // Below the size of a region, which is no 4 GiB.
        let number = (offset % REGION_BYTES) as usize / PAGE_BYTES;
        let (word, bit) = (&mut words[number / 64], 1 << (number % 64));
        let was = *word & bit != 0;
        *word |= bit;
        was
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_far_apart_take_no_more_room_than_others() {
        let mut seen = SeenPages::new(6);
        let far = [0, 4096, 1 << 43, (1 << 44) - 4096, 1 << 44, u64::MAX];
        let ids = far.map(|offset| PageId { ram_block: 1, offset });
        assert!(ids.iter().all(|id| !seen.see(*id)));
        assert!(ids.iter().all(|id| seen.see(*id)));
        assert!(!seen.see(PageId { ram_block: 2, offset: 0 }));
        assert!(seen.see(PageId { ram_block: 3, offset: 0 }), "there is no more room");
        assert_eq!(seen.regions.len(), 6);
    }
}
