//! Zero pages of a guest, counted by reading a sample of its pages from outside.
//!
//! First `/proc/PID/pagemap` says which pages were ever touched: those that were not are zero. Then some
//! of the touched ones are read. Positions are spread evenly, with a jitter that is the same each time,
//! and visited in an order of which every beginning is spread evenly too: so the host being busy makes
//! the sample smaller and not wrong.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::SampleError;

const PAGE_BYTES: usize = 4096;

/// Pages whose state one reading of pagemap tells.
const BLOCK_PAGES: usize = 512;

/// Blocks that are looked at: all of up to 8 GiB.
const BLOCKS_MAX: usize = 4096;

/// Touched pages that are read: the share of zero ones is then known with a standard deviation of 0.011
/// or less.
const READS_MAX: usize = 2048;

/// With fewer, nothing is said.
const READS_MIN: usize = 1000;

/// How long all of it may take. A debug build on a host with four tasks a core took less than 90 ms.
const LIMIT: Duration = Duration::from_millis(200);

/// Bits of an entry of pagemap (`Documentation/admin-guide/mm/pagemap.rst`).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;

/// Where a guest's memory is in its QEMU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    address: u64,
    pages: usize,
}

/// Why pages could not be looked at.
#[derive(Debug)]
pub(super) enum PagesError {
    Io(&'static str, io::Error),
    TooSlow(usize),
}

impl PagesError {
    pub(super) fn of_process(self, pid: u32) -> SampleError {
        match self {
            Self::Io(file, source) => SampleError::Process { pid, file, source },
            Self::TooSlow(pages) => SampleError::TooSlow { pages, limit: LIMIT },
        }
    }
}

/// Finds the guest's memory in `/proc/PID/maps`: QEMU maps it in one piece of exactly its size, between
/// others of which none can be joined to it.
pub(super) fn region(maps: &str, bytes: u64) -> Option<Region> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (address, end) = (number(start)?, number(end)?);
        let is_ram = rest.starts_with("rw") && end.checked_sub(address)? == bytes;
        let pages = usize::try_from(bytes).ok()? / PAGE_BYTES;
        is_ram.then_some(Region { address, pages })
    })
}

/// Share of the pages that hold nothing but zeros, 0 to 1.
pub(super) fn zero_share(region: Region, pagemap: &File, memory: &File) -> Result<f64, PagesError> {
    let began = Instant::now();
    let touched = Touched::look(region, pagemap, began + LIMIT / 2)?;
    let zero_of_present = touched.zero_share(memory, began + LIMIT)?;
    let untouched = touched.looked_at - touched.present - touched.swapped;
    let zero = untouched as f64 + touched.present as f64 * zero_of_present;
    Ok(zero / touched.looked_at.max(1) as f64)
}

/// Which pages were touched, as far as was looked.
#[derive(Debug, Default)]
struct Touched {
    blocks: Vec<Block>,
    looked_at: usize,
    present: usize,
    // Not read, which would bring them back into memory; what the kernel swaps out is hardly zero.
    swapped: usize,
}

#[derive(Debug)]
struct Block {
    address: u64,
    /// Present pages of the blocks before it.
    present_before: usize,
    present: [u64; BLOCK_PAGES / 64],
}

impl Touched {
    fn look(region: Region, pagemap: &File, until: Instant) -> Result<Self, PagesError> {
        let mut touched = Self::default();
        let blocks = region.pages.div_ceil(BLOCK_PAGES);
        let chosen = blocks.min(BLOCKS_MAX);
        for number in spread(chosen) {
            let first_page = number * blocks / chosen * BLOCK_PAGES;
            let count = BLOCK_PAGES.min(region.pages - first_page);
            let address = region.address + (first_page * PAGE_BYTES) as u64;
            touched.look_at(pagemap, address, count).map_err(|error| PagesError::Io("pagemap", error))?;
            if Instant::now() > until {
                break;
            }
        }
        Ok(touched)
    }

    fn look_at(&mut self, pagemap: &File, address: u64, count: usize) -> io::Result<()> {
        let mut entries = [0; BLOCK_PAGES * 8];
        let entries = &mut entries[..count * 8];
        pagemap.read_exact_at(entries, address / PAGE_BYTES as u64 * 8)?;
        let mut block = Block { address, present_before: self.present, present: Default::default() };
        for (page, entry) in entries.as_chunks().0.iter().enumerate() {
            let entry = u64::from_ne_bytes(*entry);
            if entry & PRESENT != 0 {
                block.present[page / 64] |= 1 << (page % 64);
                self.present += 1;
            } else if entry & SWAPPED != 0 {
                self.swapped += 1;
            }
        }
        self.looked_at += count;
        self.blocks.push(block);
        Ok(())
    }

    /// Share of the present pages that hold nothing but zeros.
    fn zero_share(&self, memory: &File, until: Instant) -> Result<f64, PagesError> {
        let reads = self.present.min(READS_MAX);
        let (mut read, mut zero) = (0, 0);
        for number in spread(reads) {
            let address = self.address(jittered(number, reads, self.present));
            let mut page = [0; PAGE_BYTES];
            memory.read_exact_at(&mut page, address).map_err(|error| PagesError::Io("mem", error))?;
            zero += usize::from(page == [0; PAGE_BYTES]);
            read += 1;
            if Instant::now() > until && read < reads {
                break;
            }
        }
        if read < READS_MIN.min(reads) {
            return Err(PagesError::TooSlow(read));
        }
        Ok(if read == 0 { 0.0 } else { zero as f64 / read as f64 })
    }

    /// Address of a present page, by its rank among them.
    fn address(&self, rank: usize) -> u64 {
        let after = self.blocks.partition_point(|block| block.present_before <= rank);
        let block = &self.blocks[after - 1];
        let mut left = rank - block.present_before;
        let word = block.present.iter().position(|word| {
            let here = word.count_ones() as usize;
            let is_here = left < here;
            left -= if is_here { 0 } else { here };
            is_here
        });
        let word = word.expect("the block was counted by these bits");
        let mut bits = (0..64).filter(|bit| block.present[word] >> bit & 1 == 1);
        let page = word * 64 + bits.nth(left).expect("the word was counted by these bits");
        block.address + (page * PAGE_BYTES) as u64
    }
}

/// 0 to `count - 1`, each once, in steps of nearly the golden section, so that every beginning is spread
/// evenly (additive recurrence).
fn spread(count: usize) -> impl Iterator<Item = usize> {
    let golden = (count * 633 / 1024).max(1);
    let step = (golden..count).find(|step| greatest_common_divisor(*step, count) == 1).unwrap_or(1);
    (0..count).map(move |number| number * step % count)
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// A position in the `number`th of `strata` equal parts of `0..total`, of which there are not more than
/// that. The jitter keeps what guests lay out in regular patterns from being always, or never, hit.
fn jittered(number: usize, strata: usize, total: usize) -> usize {
    let start = number * total / strata;
    let width = ((number + 1) * total / strata - start).max(1);
    // Fibonacci hashing (Knuth, volume 3, 6.4).
    start + (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) % width
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const MAPS: &str = "\
7f559f600000-7f559fe00000 rw-p 00000000 00:00 0
7f559fe00000-7f55afe02000 rw-p 00000000 00:00 0
7f55afe02000-7f55afe03000 ---p 00000000 00:00 0
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    #[test]
    fn memory_is_found_by_its_size() {
        let bytes = (256 << 20) + 8192;
        let found = Region { address: 0x7f55_9fe0_0000, pages: 65_538 };
        assert_eq!(region(MAPS, bytes), Some(found));
        assert_eq!(region(MAPS, 256 << 20), None);
        assert_eq!(region(MAPS, 4096), None, "not readable");
    }

    #[test]
    fn untouched_and_cleared_pages_are_zero_and_written_ones_are_not() {
        const PAGES: usize = 16_384;
        let mut memory = vec![0_u8; (PAGES + 1) * PAGE_BYTES];
        let start = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES);
        let offset = start - memory.as_ptr().addr();
        let mut write = |page: usize, byte| memory[offset + page * PAGE_BYTES + 77] = byte;
        for page in 0..PAGES / 4 {
            write(page, 1);
            write(page + PAGES / 2, 1);
            write(page + PAGES / 2, 0);
        }
        let region = Region { address: start as u64, pages: PAGES };
        let open = |file: &str| File::open(format!("/proc/self/{file}")).unwrap();
        let share = zero_share(region, &open("pagemap"), &open("mem")).unwrap();
        assert!((share - 0.75).abs() < 0.03, "{share}");
        drop(memory);
    }

    proptest! {
        #[test]
        fn finding_memory_never_panics(maps in ".*", bytes in any::<u64>()) {
            let _ = region(&maps, bytes);
        }

        #[test]
        fn each_is_visited_once_and_every_beginning_is_spread(count in 1_usize..5_000) {
            let visited: Vec<usize> = spread(count).collect();
            prop_assert_eq!(visited.iter().copied().collect::<BTreeSet<_>>().len(), count);
            prop_assert!(visited.iter().all(|number| *number < count));
            let half = &visited[..visited.len() / 2];
            let below = half.iter().filter(|number| **number < count / 2).count();
            // True of every count in this range; the worst is 56.
            prop_assert!(below.abs_diff(half.len() / 2) <= 3 + half.len() / 16, "{} of {}", below, half.len());
        }

        #[test]
        fn jittered_positions_are_each_in_their_part(total in 1_usize..1 << 40, strata in 1_usize..2_048) {
            let strata = strata.min(total);
            for number in 0..strata {
                let at = jittered(number, strata, total);
                prop_assert!(number * total / strata <= at && at < (number + 1) * total / strata);
            }
        }
    }
}
