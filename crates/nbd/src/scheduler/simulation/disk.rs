//! The target's disk. A block is one byte long, and holds the number of the request that wrote it.
//!
//! A request writes one of a few contents, by its number, so that a comparison sometimes finds the same. Then the block
//! has the later request's number wherever it has the earlier one's content. At first, all blocks hold what an earlier
//! attempt left, under the number 0; it is durable.

/// Blocks of the disk: few, so that requests meet.
pub(super) const BLOCKS: usize = 12;

/// The number of a request; later ones have greater numbers.
pub(super) type Version = u64;

/// How many different contents there are.
const CONTENTS: Version = 3;

#[derive(Debug, Clone, Copy)]
struct Cached {
    block: usize,
    version: Version,
    order: u64,
}

/// The cache of one connection to the server.
#[derive(Debug, Default)]
pub(super) struct Cache {
    writes: Vec<Cached>,
}

/// What a reader sees, and what a power cut leaves.
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

    /// Whether these contents are there already.
    pub(super) fn has(&self, begin: usize, versions: &[Version]) -> bool {
        let there = &self.seen[begin..];
        versions.iter().zip(there).all(|(wanted, there)| wanted % CONTENTS == there % CONTENTS)
    }

    /// Counts the present contents as these, which are the same. `is_left_durable` says whether what an earlier attempt
    /// left is durable.
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

    /// Makes durable what this connection wrote, and nothing else.
    pub(super) fn flush(&mut self, cache: &mut Cache) {
        for Cached { block, version, order } in cache.writes.drain(..) {
            if order > self.durable_order[block] {
                self.durable_order[block] = order;
                self.durable[block] = version;
            }
        }
    }
}
