//! The target's memory, and a VM of another host that wants some of it too: what is promised, as the engine counts it,
//! and what is taken.

use drainpipe_engine::host::facts::MemoryNeeds;
use drainpipe_engine::migration::target::promises::{FreeMemory, Promise};
use drainpipe_engine::problem::ProblemKind;

use crate::planted::Planted;
use crate::qemu::IncomingStage;
use crate::world::{Sight, World};

/// Enough for the VM or for its neighbour, not for both.
const HOST_BYTES: u64 = 3;
pub(crate) const NEEDS: MemoryNeeds = MemoryNeeds { bytes: 2, huge_pages: None };

impl World {
    /// How much memory the VM's QEMU has taken.
    fn resident_bytes(&self) -> Option<u64> {
        let qemu = self.target.qemu.as_ref()?;
        let has_all =
            !matches!(qemu.stage, IncomingStage::Built | IncomingStage::Listening | IncomingStage::Broken);
        Some(if has_all { NEEDS.bytes } else { 0 })
    }

    fn promises(&self) -> Vec<Promise> {
        let coming = self.target.entries.values().map(|entry| entry.reserved);
        // A VM that has become this host's own counts once, among the host's VMs.
        let needs = coming.filter(|_| !self.target.has_vm).chain(self.target.has_vm.then_some(NEEDS));
        let own = needs.map(|needs| Promise { needs, resident_bytes: self.resident_bytes() });
        own.chain(self.neighbour).collect()
    }

    fn taken_bytes(&self) -> u64 {
        let by_neighbour = self.neighbour.and_then(|neighbour| neighbour.resident_bytes);
        self.resident_bytes().unwrap_or(0) + by_neighbour.unwrap_or(0)
    }

    fn has_room(&self) -> bool {
        let free = FreeMemory { bytes: HOST_BYTES.saturating_sub(self.taken_bytes()), huge_pages: vec![] };
        free.beside(&self.promises()).check(NEEDS).is_ok()
    }

    /// Step 3 of a migration.
    pub(crate) fn reserve_memory(&mut self, migration: usize) -> Result<(), ProblemKind> {
        if !self.has_room() {
            self.saw(Sight::NoRoom);
            return Err(ProblemKind::Refused);
        }
        let reserved = if self.planted == Planted::Unreserved { MemoryNeeds::default() } else { NEEDS };
        self.target.entries.get_mut(&migration).ok_or(ProblemKind::NotFound)?.reserved = reserved;
        Ok(())
    }

    /// Another host's VM asks for memory, takes what it was promised, or gives it up.
    pub(crate) fn neighbour_goes_on(&mut self) {
        self.neighbour = match self.neighbour {
            None => self.has_room().then_some(Promise { needs: NEEDS, resident_bytes: None }),
            Some(neighbour) if neighbour.resident_bytes.is_none() => {
                Some(Promise { resident_bytes: Some(NEEDS.bytes), ..neighbour })
            }
            Some(_) => None,
        };
    }

    /// Checks the rule about memory that holds at any time.
    pub(crate) fn check_memory(&mut self) {
        if self.taken_bytes() > HOST_BYTES {
            self.breach("memory is promised twice".into());
        }
    }
}
