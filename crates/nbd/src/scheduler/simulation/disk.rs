//! The target's disk. A block is one byte long, and holds the number of the request that wrote it.

/// Blocks of the disk: few, so that requests meet.
pub(super) const BLOCKS: usize = 12;

/// Which request; later ones have greater numbers.
pub(super) type Version = u64;

#[derive(Debug, Clone, Copy)]
struct Cached {
    block: usize,
    version: Version,
    order: u64,
}

/// One connection to the server has this in its cache.
#[derive(Debug, Default)]
pub(super) struct Cache {
    writes: Vec<Cached>,
}

/// What a reader sees, and what is left after a power cut.
#[derive(Debug, Default)]
pub(super) struct Disk {
    pub(super) seen: [Version; BLOCKS],
    pub(super) durable: [Version; BLOCKS],
    durable_order: [u64; BLOCKS],
    order: u64,
}

impl Disk {
    pub(super) fn write(&mut self, cache: &mut Cache, begin: usize, versions: &[Version]) {
        for (block, version) in (begin..).zip(versions) {
            self.order += 1;
            self.seen[block] = *version;
            cache.writes.push(Cached { block, version: *version, order: self.order });
        }
    }

    pub(super) fn read(&self, begin: usize, length: usize) -> Vec<Version> {
        self.seen[begin..begin + length].into()
    }

    /// Makes durable what this connection wrote, and nothing of others.
    pub(super) fn flush(&mut self, cache: &mut Cache) {
        for Cached { block, version, order } in cache.writes.drain(..) {
            if order > self.durable_order[block] {
                self.durable_order[block] = order;
                self.durable[block] = version;
            }
        }
    }
}
