//! Writes disks, remembers what was acknowledged, and checks them.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate, fdatasync};

use crate::block::{BLOCK_BYTES, Block, WriteKind};
use crate::page::Words;
use crate::protocol::{BadBlock, DiskStatus, DiskVerification, GENERATIONS_MAX, Generations};

/// Writers of each disk; each writes one block at a time.
pub const WRITERS_PER_DISK: usize = 4;

/// Read at once by a check.
const BLOCKS_READ: usize = 4;

/// A write that is in flight when a check begins may take this long; one that takes longer is reported as a hang.
const IN_FLIGHT_MAX: Duration = Duration::from_mins(1);

/// Why disks cannot be checked or written.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// None was asked for.
    #[error("this guest has no disks to write; start it with drainpipe.disks=1 or more")]
    None,
    /// Writes do not come back.
    #[error("{writing} writes have not come back for {} s; the VM's disks hang", IN_FLIGHT_MAX.as_secs())]
    Hangs {
        /// How many.
        writing: usize,
    },
    /// No such block.
    #[error("there is no block {block} of disk {disk}")]
    NoBlock {
        /// The disk asked for.
        disk: usize,
        /// The block asked for.
        block: usize,
    },
    /// The disk cannot be read.
    #[error("cannot read disk {disk}: {source}")]
    Read {
        /// Which.
        disk: usize,
        /// Why not.
        source: io::Error,
    },
}

/// Which generations of a block it may hold: from the first of them to the last.
#[derive(Default)]
struct GenerationRange {
    acknowledged: AtomicU32,
    tried: AtomicU32,
}

/// A disk that only this program writes to.
struct Disk {
    number: usize,
    file: File,
    blocks: Vec<GenerationRange>,
}

/// A buffer that direct I/O takes.
#[repr(align(4096))]
struct Aligned<const BYTES: usize>([u8; BYTES]);

impl Disk {
    fn new(number: usize, mut file: File) -> io::Result<Self> {
        let bytes = file.seek(SeekFrom::End(0))?;
        let blocks = usize::try_from(bytes / BLOCK_BYTES as u64).map_err(io::Error::other)?;
        Ok(Self { number, file, blocks: (0..blocks).map(|_| GenerationRange::default()).collect() })
    }

    /// Writes a block's next generation; back when the disk has said that it is safe.
    fn write(&self, number: usize) -> io::Result<()> {
        let held = &self.blocks[number];
        let generation = held.tried.load(Ordering::Relaxed) + 1;
        held.tried.store(generation, Ordering::Release);
        let block = Block { disk: self.number, number, generation };
        self.put(block)?;
        fdatasync(&self.file)?;
        held.acknowledged.store(generation, Ordering::Release);
        Ok(())
    }

    fn put(&self, block: Block) -> io::Result<()> {
        let offset = (block.number * BLOCK_BYTES) as u64;
        let zeroes = match block.write_kind() {
            WriteKind::Data => return self.file.write_all_at(&Aligned(block.content()).0, offset),
            WriteKind::Zeroes => FallocateFlags::ZERO_RANGE,
            WriteKind::Hole => FallocateFlags::PUNCH_HOLE,
        };
        let size = BLOCK_BYTES as u64;
        Ok(fallocate(&self.file, zeroes | FallocateFlags::KEEP_SIZE, offset, size)?)
    }

    /// The blocks that hold none of the generations that they may.
    fn verify(&self, found: &mut DiskVerification) -> io::Result<()> {
        let mut buffer = Aligned([0; BLOCKS_READ * BLOCK_BYTES]);
        for first in (0..self.blocks.len()).step_by(BLOCKS_READ) {
            let count = BLOCKS_READ.min(self.blocks.len() - first);
            let bytes = &mut buffer.0[..count * BLOCK_BYTES];
            self.file.read_exact_at(bytes, (first * BLOCK_BYTES) as u64)?;
            for (at, block) in bytes.as_chunks::<BLOCK_BYTES>().0.iter().enumerate() {
                found.blocks += 1;
                if let Some(bad) = self.bad(first + at, block) {
                    found.wrong += 1;
                    found.first_wrong.get_or_insert(bad);
                }
            }
        }
        Ok(())
    }

    fn bad(&self, number: usize, bytes: &[u8; BLOCK_BYTES]) -> Option<BadBlock> {
        let held = &self.blocks[number];
        let (acknowledged, tried) =
            (held.acknowledged.load(Ordering::Acquire), held.tried.load(Ordering::Acquire));
        let holds = |generation| Block { disk: self.number, number, generation }.content() == *bytes;
        (!(acknowledged..=tried).any(holds)).then(|| BadBlock {
            disk: self.number,
            block: number,
            acknowledged,
            tried,
            is_zero: bytes.iter().all(|byte| *byte == 0),
            found: Block::decode(bytes).map(|block| (block.disk, block.number, block.generation)),
        })
    }
}

struct Pace {
    writes_per_s: u32,
    writing: usize,
}

/// The disks, and what all writers share.
pub struct Writers {
    disks: Vec<Disk>,
    pace: Mutex<Pace>,
    changed: Condvar,
    acknowledged_writes: AtomicU64,
    failed_writes: AtomicU64,
    longest_write_ms: AtomicU64,
}

impl Writers {
    /// Writers of these disks, which hold what [`crate::block::new_disk`] gives; nothing is written yet.
    pub fn new(disks: Vec<File>) -> io::Result<Self> {
        let disks = disks.into_iter().enumerate().map(|(number, file)| Disk::new(number, file));
        Ok(Self {
            disks: disks.collect::<io::Result<_>>()?,
            pace: Mutex::new(Pace { writes_per_s: 0, writing: 0 }),
            changed: Condvar::new(),
            acknowledged_writes: AtomicU64::new(0),
            failed_writes: AtomicU64::new(0),
            longest_write_ms: AtomicU64::new(0),
        })
    }

    /// Starts the threads that write, once a rate is set. They never end.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        for disk in 0..self.disks.len() {
            for writer in 0..WRITERS_PER_DISK {
                let writers = Arc::clone(self);
                thread::Builder::new().name("writer".into()).spawn(move || writers.run(disk, writer))?;
            }
        }
        Ok(())
    }

    /// All writers together write as often as that, at most; 0 is not at all.
    pub fn set(&self, writes_per_s: u32) -> Result<DiskStatus, DiskError> {
        self.pace().writes_per_s = writes_per_s;
        self.changed.notify_all();
        self.status()
    }

    /// What was written so far.
    pub fn status(&self) -> Result<DiskStatus, DiskError> {
        if self.disks.is_empty() {
            return Err(DiskError::None);
        }
        Ok(DiskStatus {
            blocks: self.disks.iter().map(|disk| disk.blocks.len() as u64).sum(),
            acknowledged_writes: self.acknowledged_writes.load(Ordering::Acquire),
            failed_writes: self.failed_writes.load(Ordering::Acquire),
            longest_write_ms: self.longest_write_ms.load(Ordering::Acquire),
        })
    }

    /// Stops writing and reads every block, past every cache of this guest.
    pub fn verify(&self) -> Result<DiskVerification, DiskError> {
        let status = self.stop()?;
        let mut found =
            DiskVerification { blocks: 0, wrong: 0, failed_writes: status.failed_writes, first_wrong: None };
        for disk in &self.disks {
            disk.verify(&mut found).map_err(|source| DiskError::Read { disk: disk.number, source })?;
        }
        Ok(found)
    }

    /// The last generation of some blocks of a disk that was acknowledged.
    pub fn generations(&self, disk: usize, block: usize) -> Result<Generations, DiskError> {
        let blocks = self.disks.get(disk).and_then(|disk| disk.blocks.get(block..));
        let blocks = blocks.ok_or(DiskError::NoBlock { disk, block })?;
        let held = blocks.iter().take(GENERATIONS_MAX);
        Ok(Generations(held.map(|held| held.acknowledged.load(Ordering::Acquire)).collect()))
    }

    /// Back when nothing is in flight.
    fn stop(&self) -> Result<DiskStatus, DiskError> {
        let mut pace = self.pace();
        pace.writes_per_s = 0;
        let waited = self.changed.wait_timeout_while(pace, IN_FLIGHT_MAX, |pace| pace.writing > 0);
        let (pace, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match pace.writing {
            0 => self.status(),
            writing => Err(DiskError::Hangs { writing }),
        }
    }

    /// Writes blocks of its own, so that no two writes of a block overtake each other.
    fn run(&self, disk: usize, writer: usize) {
        let disk = &self.disks[disk];
        let own = disk.blocks.len() / WRITERS_PER_DISK;
        let writers = u32::try_from(self.disks.len() * WRITERS_PER_DISK).expect("they are few");
        let random = Words((disk.number * WRITERS_PER_DISK + writer) as u64);
        for random in random.filter(|_| own > 0) {
            let writes_per_s = self.begin();
            let number = usize::try_from(random >> 32).expect("it fits") % own * WRITERS_PER_DISK + writer;
            let began = Instant::now();
            let written = disk.write(number);
            self.end(began.elapsed(), &written);
            thread::sleep(Duration::from_secs(1) * writers / writes_per_s);
        }
    }

    fn begin(&self) -> u32 {
        let idle = |pace: &mut Pace| pace.writes_per_s == 0;
        let mut pace = self.changed.wait_while(self.pace(), idle).unwrap_or_else(PoisonError::into_inner);
        pace.writing += 1;
        pace.writes_per_s
    }

    fn end(&self, took: Duration, written: &io::Result<()>) {
        let count = if written.is_ok() { &self.acknowledged_writes } else { &self.failed_writes };
        count.fetch_add(1, Ordering::Release);
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        self.longest_write_ms.fetch_max(took_ms, Ordering::Release);
        self.pace().writing -= 1;
        self.changed.notify_all();
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::new_disk;
    use crate::protocol::WRITES_PER_S_MAX;

    /// Writers at work. A file serves as well as a disk.
    fn writers() -> (Arc<Writers>, File) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&new_disk(0, 2), 0).unwrap();
        let writers = Arc::new(Writers::new(vec![file.try_clone().unwrap()]).unwrap());
        writers.start().unwrap();
        (writers, file)
    }

    fn write(writers: &Writers, more: u64) {
        let wanted = writers.set(WRITES_PER_S_MAX).unwrap().acknowledged_writes + more;
        let end = Instant::now() + Duration::from_mins(1);
        while writers.status().unwrap().acknowledged_writes < wanted {
            assert!(Instant::now() < end, "{wanted} writes are acknowledged");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn what_was_written_is_there() {
        let (writers, _) = writers();
        assert_eq!(writers.verify().unwrap().to_string(), "blocks=512 wrong=0 failed_writes=0");
        write(&writers, 1000);
        assert_eq!(writers.verify().unwrap().to_string(), "blocks=512 wrong=0 failed_writes=0");
        let written: u32 = (0..512)
            .step_by(GENERATIONS_MAX)
            .flat_map(|block| writers.generations(0, block).unwrap().0)
            .sum();
        assert_eq!(u64::from(written), writers.status().unwrap().acknowledged_writes);
        assert!(writers.generations(1, 0).is_err() && writers.generations(0, 513).is_err());
    }

    #[test]
    fn a_lost_write_is_found() {
        let (writers, file) = writers();
        write(&writers, 1000);
        writers.verify().unwrap();
        let generations = writers.generations(0, 0).unwrap().0;
        let is_data = |at: &usize| {
            let block = |generation| Block { disk: 0, number: *at, generation }.write_kind();
            generations[*at] > 0
                && block(generations[*at]) == WriteKind::Data
                && block(generations[*at] - 1) == WriteKind::Data
        };
        let number = (0..generations.len()).find(is_data).unwrap();
        let before = Block { disk: 0, number, generation: generations[number] - 1 };
        file.write_all_at(&before.content(), (number * BLOCK_BYTES) as u64).unwrap();
        let found = writers.verify().unwrap();
        let first = found.first_wrong.unwrap();
        assert_eq!((found.wrong, first.block), (1, number));
        assert_eq!(first.found, Some((0, number, before.generation)));
    }

    #[test]
    fn a_guest_without_disks_says_so() {
        let writers = Writers::new(vec![]).unwrap();
        assert!(writers.verify().unwrap_err().to_string().contains("drainpipe.disks=1"));
    }
}
