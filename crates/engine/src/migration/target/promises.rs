//! Step 3: how much of a host's memory is promised to VMs that have not taken it yet, so that none is promised twice.

use crate::host::facts::{HugePages, MemoryNeeds};

/// The memory that a VM was promised, and how much of that it has taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Promise {
    /// The memory that the VM was promised.
    pub needs: MemoryNeeds,
    /// How much of that its hypervisor has taken: the kernel does not count it as free any more. `None` before there is
    /// a hypervisor.
    pub resident_bytes: Option<u64>,
}

impl Promise {
    fn outstanding_bytes(&self) -> u64 {
        self.needs.bytes.saturating_sub(self.resident_bytes.unwrap_or(0))
    }

    /// A hypervisor reserves all its huge pages when it starts.
    fn outstanding_huge_pages(&self) -> Option<HugePages> {
        self.needs.huge_pages.filter(|_| self.resident_bytes.is_none())
    }
}

/// Memory that nobody has taken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FreeMemory {
    /// Ordinary memory.
    pub bytes: u64,
    /// Free huge pages, for each size that the host has.
    pub huge_pages: Vec<HugePages>,
}

/// What a VM lacks on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// Ordinary memory is short.
    Memory {
        /// How much the VM needs.
        needed_bytes: u64,
        /// How much is free, and promised to nobody.
        free_bytes: u64,
    },
    /// Huge pages of one size are short.
    HugePages {
        /// How many the VM needs.
        needed: HugePages,
        /// How many are free, and promised to nobody.
        free: u64,
    },
}

impl FreeMemory {
    /// What is left without the promised memory that nobody has taken yet.
    #[must_use]
    pub fn beside(mut self, promises: &[Promise]) -> Self {
        let outstanding = promises.iter().map(Promise::outstanding_bytes).fold(0, u64::saturating_add);
        self.bytes = self.bytes.saturating_sub(outstanding);
        for free in &mut self.huge_pages {
            let of_size = promises.iter().filter_map(Promise::outstanding_huge_pages);
            let counts = of_size.filter(|pages| pages.size_mib == free.size_mib).map(|pages| pages.count);
            free.count = free.count.saturating_sub(counts.fold(0, u64::saturating_add));
        }
        self
    }

    /// Whether the VM's needs fit into it.
    pub fn check(&self, needs: MemoryNeeds) -> Result<(), Shortage> {
        if let Some(needed) = needs.huge_pages {
            let of_size = self.huge_pages.iter().find(|pages| pages.size_mib == needed.size_mib);
            let free = of_size.map_or(0, |pages| pages.count);
            if free < needed.count {
                return Err(Shortage::HugePages { needed, free });
            }
        }
        if self.bytes < needs.bytes {
            return Err(Shortage::Memory { needed_bytes: needs.bytes, free_bytes: self.bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE_MIB: u64 = 2;
    const HOST: (u64, u64) = (16, 16);

    fn pages(count: u64) -> HugePages {
        HugePages { size_mib: SIZE_MIB, count }
    }

    /// An event of a VM that comes.
    #[derive(Debug, Clone)]
    enum Happens {
        Asks(MemoryNeeds),
        Starts(usize),
        Touches(usize, u64),
        Goes(usize),
    }

    fn happens() -> impl Strategy<Value = Happens> {
        let needs = (0_u64..8, prop::option::of(1_u64..8));
        prop_oneof![
            needs.prop_map(|(bytes, count)| Happens::Asks(MemoryNeeds {
                bytes,
                huge_pages: count.map(pages)
            })),
            (0_usize..8).prop_map(Happens::Starts),
            (0_usize..8, 0_u64..8).prop_map(|(which, bytes)| Happens::Touches(which, bytes)),
            (0_usize..8).prop_map(Happens::Goes),
        ]
    }

    /// What the kernel counts as free.
    fn free(vms: &[Promise]) -> FreeMemory {
        let resident: u64 = vms.iter().filter_map(|vm| vm.resident_bytes).sum();
        let started = vms.iter().filter(|vm| vm.resident_bytes.is_some());
        let reserved: u64 = started.filter_map(|vm| vm.needs.huge_pages).map(|pages| pages.count).sum();
        FreeMemory { bytes: HOST.0 - resident, huge_pages: vec![pages(HOST.1 - reserved)] }
    }

    proptest! {
        #[test]
        fn nothing_is_promised_twice(events in prop::collection::vec(happens(), 0..40)) {
            let mut vms: Vec<Promise> = vec![];
            for event in events {
                match event {
                    Happens::Asks(needs) => {
                        if free(&vms).beside(&vms).check(needs).is_ok() {
                            vms.push(Promise { needs, resident_bytes: None });
                        }
                    }
                    Happens::Starts(which) => {
                        if let Some(vm) = vms.get_mut(which) {
                            vm.resident_bytes.get_or_insert(0);
                        }
                    }
                    Happens::Touches(which, bytes) => {
                        if let Some(vm) = vms.get_mut(which)
                            && let Some(resident) = &mut vm.resident_bytes
                        {
                            *resident = (*resident + bytes).min(vm.needs.bytes);
                        }
                    }
                    Happens::Goes(which) if which < vms.len() => drop(vms.remove(which)),
                    Happens::Goes(_) => {}
                }
                let bytes: u64 = vms.iter().map(|vm| vm.needs.bytes).sum();
                let count: u64 = vms.iter().filter_map(|vm| vm.needs.huge_pages).map(|pages| pages.count).sum();
                prop_assert!(bytes <= HOST.0 && count <= HOST.1);
            }
        }
    }

    #[test]
    fn what_is_short_is_told() {
        let host = FreeMemory { bytes: 4, huge_pages: vec![pages(3)] };
        let promised =
            Promise { needs: MemoryNeeds { bytes: 3, huge_pages: Some(pages(2)) }, ..Promise::default() };
        let left = host.clone().beside(&[promised]);
        let needs = MemoryNeeds { bytes: 2, huge_pages: None };
        assert_eq!(left.check(needs), Err(Shortage::Memory { needed_bytes: 2, free_bytes: 1 }));
        let in_pages = MemoryNeeds { bytes: 1, huge_pages: Some(pages(2)) };
        assert_eq!(left.check(in_pages), Err(Shortage::HugePages { needed: pages(2), free: 1 }));
        let other = MemoryNeeds { huge_pages: Some(HugePages { size_mib: 1024, count: 1 }), ..in_pages };
        assert!(matches!(left.check(other), Err(Shortage::HugePages { free: 0, .. })));
        assert_eq!(host.beside(&[Promise { resident_bytes: Some(3), ..promised }]).check(in_pages), Ok(()));
    }
}
