//! Zero pages of a guest, and pages that change, counted by reading a sample of its pages from outside.
//!
//! First `/proc/PID/pagemap` says which pages were ever touched: those that were not are zero. Then some
//! of the touched ones are read. Positions are spread evenly, with a jitter that is the same each time,
//! and visited in an order of which every beginning is spread evenly too: so the host being busy makes
//! the sample smaller and not wrong. The same pages are then read twice more: what is another than at first
//! has changed since.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use super::SampleError;

const PAGE_BYTES: usize = 4096;

/// Pages whose state one reading of pagemap tells.
const BLOCK_PAGES: usize = 512;

/// Blocks that are looked at: all of up to 8 GiB.
const BLOCKS_MAX: usize = 4096;

/// One in so many touched pages is read. A large guest needs more of them than a small one: a page that is
/// seen to change stands for all those that were not read.
const TOUCHED_PER_READ: usize = 64;

/// Touched pages that are read: with 2048 the share of zero ones is known with a standard deviation of 0.011
/// or less.
const READS_MAX: std::ops::RangeInclusive<usize> = 2048..=16_384;

/// With fewer, nothing is said.
const READS_MIN: usize = 1000;

/// Contents that are kept: in 2 MiB a part of them is known with a standard deviation of 0.022 or less.
const KEPT_BYTES_MAX: usize = 2 << 20;

/// The parts of a page that are watched for changes: in a page that is rewritten in a few places, few change.
const PARTS: usize = 16;

/// How long reading the sample once may take, and finding which pages were touched. On a host that is not busy
/// each takes some ms.
const LIMIT: Duration = Duration::from_millis(200);

/// From one reading of the sample to the next.
const READ_AGAIN_AFTER: Duration = Duration::from_millis(75);

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
/// others that cannot be joined to it.
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

/// What has been seen of a guest's pages.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Seen {
    /// Share of them that hold nothing but zeros, 0 to 1.
    pub(super) zero_share: f64,
    /// Some of those that hold something else, one after the other.
    pub(super) contents: Vec<u8>,
    /// How many bytes one page of the sample stands for.
    pub(super) bytes_per_read: f64,
    /// Pages of the sample that were not as at first, after so long.
    pub(super) changed: [(Duration, usize); 2],
    /// Share of the bytes of those pages that were not as at first in the end, in sixteenths of each; 1 if no page has
    /// changed.
    pub(super) changed_share: f64,
}

/// Looks at what share of a guest's pages is zero, and at what some of them hold that are not.
pub(super) fn contents(region: Region, pagemap: &File, memory: &File) -> Result<(f64, Vec<u8>), PagesError> {
    let touched = Touched::look(region, pagemap, Instant::now() + LIMIT)?;
    let sample = touched.read(memory, Instant::now() + LIMIT, Sample::has_all_contents)?;
    Ok((touched.zero_share(&sample), sample.contents))
}

/// Looks at a guest's pages, and whether they change.
pub(super) fn look(region: Region, pagemap: &File, memory: &File) -> Result<Seen, PagesError> {
    let touched = Touched::look(region, pagemap, Instant::now() + LIMIT)?;
    let began = Instant::now();
    let sample = touched.read(memory, began + LIMIT, |_| false)?;
    let looked_at = touched.looked_at.max(1) as f64;
    let present = touched.present as f64 / looked_at * region.pages as f64;
    let (mut changed, mut changed_share) = ([(Duration::ZERO, 0); 2], 1.0);
    for (number, changed) in (1..).zip(&mut changed) {
        thread::sleep((READ_AGAIN_AFTER * number).saturating_sub(began.elapsed()));
        let began_again = Instant::now();
        let pages;
        (pages, changed_share) = sample.changed(memory, began_again + LIMIT)?;
        *changed = (began_again - began, pages);
    }
    Ok(Seen {
        zero_share: touched.zero_share(&sample),
        bytes_per_read: present * PAGE_BYTES as f64 / sample.pages.len().max(1) as f64,
        changed,
        changed_share,
        contents: sample.contents,
    })
}

/// Which pages were touched, among those that were sampled.
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
    /// The share of all pages that is zero, by those that were read.
    fn zero_share(&self, sample: &Sample) -> f64 {
        let untouched = self.looked_at - self.present - self.swapped;
        let zero = untouched as f64 + self.present as f64 * sample.zero_share();
        zero / self.looked_at.max(1) as f64
    }

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

    /// Reads some of the present pages, or as many as are enough.
    fn read(
        &self,
        memory: &File,
        until: Instant,
        is_enough: fn(&Sample) -> bool,
    ) -> Result<Sample, PagesError> {
        let most = (self.present / TOUCHED_PER_READ).clamp(*READS_MAX.start(), *READS_MAX.end());
        let reads = self.present.min(most);
        let mut sample = Sample { pages: Vec::with_capacity(reads), zero: 0, contents: vec![] };
        for number in spread(reads) {
            let address = self.address(jittered(number, reads, self.present));
            let page = read_page(memory, address)?;
            let is_zero = page == [0; PAGE_BYTES];
            sample.zero += usize::from(is_zero);
            if !is_zero && !sample.has_all_contents() {
                sample.contents.extend_from_slice(&page);
            }
            sample.pages.push((address, fingerprints(&page)));
            if is_enough(&sample) {
                return Ok(sample);
            }
            if Instant::now() > until && sample.pages.len() < reads {
                break;
            }
        }
        if sample.pages.len() < READS_MIN.min(reads) {
            return Err(PagesError::TooSlow(sample.pages.len()));
        }
        Ok(sample)
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

/// Some of a guest's present pages, by their addresses, with what they held.
#[derive(Debug)]
struct Sample {
    pages: Vec<(u64, [u32; PARTS])>,
    zero: usize,
    // The contents of the first ones that are not zero, which are spread evenly too.
    contents: Vec<u8>,
}

impl Sample {
    fn has_all_contents(&self) -> bool {
        self.contents.len() >= KEPT_BYTES_MAX
    }

    fn zero_share(&self) -> f64 {
        self.zero as f64 / self.pages.len().max(1) as f64
    }

    /// How many of them hold something else now, and what share of these does; as far as was read by then, and in
    /// proportion.
    fn changed(&self, memory: &File, until: Instant) -> Result<(usize, f64), PagesError> {
        let (mut read, mut changed, mut changed_parts) = (0, 0, 0);
        for (address, before) in &self.pages {
            let now = fingerprints(&read_page(memory, *address)?);
            let parts = now.iter().zip(before).filter(|(now, before)| now != before).count();
            changed += usize::from(parts > 0);
            changed_parts += parts;
            read += 1;
            if Instant::now() > until {
                break;
            }
        }
        let share = if changed == 0 { 1.0 } else { changed_parts as f64 / (changed * PARTS) as f64 };
        Ok((changed * self.pages.len() / read.max(1), share))
    }
}

fn read_page(memory: &File, address: u64) -> Result<[u8; PAGE_BYTES], PagesError> {
    let mut page = [0; PAGE_BYTES];
    memory.read_exact_at(&mut page, address).map_err(|error| PagesError::Io("mem", error))?;
    Ok(page)
}

/// One for each part.
fn fingerprints(page: &[u8; PAGE_BYTES]) -> [u32; PARTS] {
    let (parts, _) = page.as_chunks::<{ PAGE_BYTES / PARTS }>();
    std::array::from_fn(|part| {
        let mut hasher = DefaultHasher::new();
        parts[part].hash(&mut hasher);
        // Half of the bits tell parts apart as well.
        (hasher.finish() >> 32) as u32
    })
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
    use std::sync::atomic::{AtomicBool, Ordering};

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

    /// Looks at this process's own memory until it sees what is expected: on a busy host a look may be too slow, or whoever
    /// writes may not run between two looks.
    #[track_caller]
    fn look_at_own(region: Region, is_expected: impl Fn(&Seen) -> bool) -> Seen {
        let open = |file: &str| File::open(format!("/proc/self/{file}")).unwrap();
        let end = Instant::now() + Duration::from_mins(1);
        loop {
            let seen = look(region, &open("pagemap"), &open("mem"));
            match seen {
                Ok(seen) if is_expected(&seen) => return seen,
                seen => assert!(Instant::now() < end, "{seen:?}"),
            }
        }
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
        let seen = look_at_own(region, |seen| (seen.zero_share - 0.75).abs() < 0.03);
        assert_eq!(seen.changed.map(|(_, pages)| pages), [0, 0]);
        assert!(seen.changed_share >= 1.0, "{seen:?}");
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for page in 0..PAGES / 4 {
                        let byte = &mut memory[offset + page * PAGE_BYTES + 77];
                        *byte = byte.wrapping_add(1);
                    }
                }
            });
            // One page in 256 happens to have the same byte again.
            let seen = look_at_own(region, |seen| {
                let changed = |pages: usize| pages as f64 * seen.bytes_per_read / (PAGES * PAGE_BYTES) as f64;
                seen.changed.iter().all(|(_, pages)| (changed(*pages) - 0.25).abs() < 0.04)
            });
            stop.store(true, Ordering::Relaxed);
            assert!((seen.changed_share - 1.0 / PARTS as f64).abs() < 1e-9, "one byte of each: {seen:?}");
        });
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
