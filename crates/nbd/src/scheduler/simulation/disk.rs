//! The target's disk. A block is one byte long, and holds the number of the request that wrote it.
//!
//! What a request writes is one of few contents, by its number, so that what is compared is the same now and then. Then the
//! block has the later request's number from there on, wherever the content of the earlier one is. At first all blocks hold
//! what an earlier attempt has left, under the number 0; it is durable.

/// Blocks of the disk: few, so that requests meet.
pub(super) const BLOCKS: usize = 12;

/// Which request; later ones have greater numbers.
pub(super) type Version = u64;

/// Different contents that there are.
const CONTENTS: Version = 3;

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

    /// Whether this is there already.
    pub(super) fn has(&self, begin: usize, versions: &[Version]) -> bool {
        let there = &self.seen[begin..];
        versions.iter().zip(there).all(|(wanted, there)| wanted % CONTENTS == there % CONTENTS)
    }

    /// What is there is the same as what these write. `is_left_durable` says so of what an earlier attempt has left.
    pub(super) fn count_as<'cache>(
        &mut self,
        begin: usize,
        versions: &[Version],
        caches: impl Iterator<Item = &'cache mut Cache>,
        is_left_durable: bool,
    ) {
        let before = self.seen;
        let number = |block: usize, there: &mut Version| {
            let wanted = block.checked_sub(begin).and_then(|at| versions.get(at));
            if let Some(wanted) = wanted.filter(|_| *there == before[block]) {
                *there = *wanted;
            }
        };
        self.seen.iter_mut().enumerate().for_each(|(block, there)| number(block, there));
        for cached in caches.flat_map(|cache| &mut cache.writes) {
            number(cached.block, &mut cached.version);
        }
        for (block, there) in self.durable.iter_mut().enumerate() {
            if *there > 0 || is_left_durable {
                number(block, there);
            }
        }
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
