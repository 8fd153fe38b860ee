//! Where the pages of memory are in a connection of QEMU's multifd; see QEMU's `migration/multifd.h`.
//!
//! A connection begins with 64 bytes, and continues with packets: 1344 bytes that say which pages follow, and then the
//! pages. Anything that looks different is opaque from there on. Nothing depends on being right: bytes that are
//! mistaken for pages arrive unchanged.

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod samples;

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// Bytes of a page. QEMU has other sizes for other machines; those are opaque.
pub(crate) const PAGE_BYTES: usize = 4096;

const MAGIC: u32 = 0x1122_3344;
const VERSION: u32 = 1;

const INITIAL_BYTES: usize = 64;

/// Pages in a packet at most.
const PACKET_PAGES: usize = 128;

/// Up to the places of the pages, of 8 bytes each.
const PLACES_AT: usize = 320;
const PACKET_BYTES: usize = PLACES_AT + 8 * PACKET_PAGES;

const RAM_BLOCK_AT: usize = 64;

/// A packet with it ends what all connections send before it: the target waits for all of them there.
const FLAG_SYNC: u32 = 1;

/// Which page it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PageId {
    /// Hash of the name of the block of memory. Two that are taken for one cost a longer delta, no more.
    pub(crate) ram_block: u64,
    /// Place in it, in bytes.
    pub(crate) offset: u64,
}

/// A page in what was fed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageAt {
    /// Where it begins.
    pub(crate) at: usize,
    pub(crate) id: PageId,
}

/// Walks through one connection.
#[derive(Debug)]
pub(crate) struct Walker {
    state: ParserState,
    // What has come of a header.
    header: Vec<u8>,
    syncs: u64,
}

#[derive(Debug)]
enum ParserState {
    Initial,
    Packet,
    Pages(Pages),
    Opaque,
}

#[derive(Debug)]
struct Pages {
    ram_block: u64,
    // The pages that have not come yet, the next one last.
    offsets: Vec<u64>,
    // What has come of the next one.
    begun: usize,
    is_sync: bool,
}

impl Walker {
    /// At the beginning of a connection.
    pub(crate) fn new() -> Self {
        Self { state: ParserState::Initial, header: vec![], syncs: 0 }
    }

    /// How often all connections have waited for each other before what comes next.
    pub(crate) fn syncs(&self) -> u64 {
        self.syncs
    }

    /// How much of the connection to take next, of `room` bytes that there are at most: up to where a header ends,
    /// or as many whole pages as there is room for. 0 if there is none for a page.
    pub(crate) fn wants(&self, room: usize) -> usize {
        match &self.state {
            ParserState::Initial => room.min(INITIAL_BYTES - self.header.len()),
            ParserState::Packet => room.min(PACKET_BYTES - self.header.len()),
            ParserState::Pages(Pages { begun: 0, offsets, .. }) => {
                (room / PAGE_BYTES).min(offsets.len()) * PAGE_BYTES
            }
            ParserState::Pages(Pages { begun, .. }) => room.min(PAGE_BYTES - begun),
            ParserState::Opaque => room,
        }
    }

    /// Takes what came next. Gives the pages that are whole in it.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<PageAt> {
        let (mut at, mut pages) = (0, vec![]);
        while at < bytes.len() {
            let rest = &bytes[at..];
            at += match &mut self.state {
                ParserState::Opaque => rest.len(),
                ParserState::Initial => self.header(rest, INITIAL_BYTES),
                ParserState::Packet => self.header(rest, PACKET_BYTES),
                ParserState::Pages(coming) => {
                    let taken = rest.len().min(PAGE_BYTES - coming.begun);
                    if taken == PAGE_BYTES {
                        let offset = coming.offsets.last().copied().unwrap_or_default();
                        pages.push(PageAt { at, id: PageId { ram_block: coming.ram_block, offset } });
                    }
                    self.page(taken);
                    taken
                }
            };
        }
        pages
    }

    fn page(&mut self, taken: usize) {
        let ParserState::Pages(coming) = &mut self.state else { return };
        coming.begun += taken;
        if coming.begun == PAGE_BYTES {
            coming.begun = 0;
            coming.offsets.pop();
        }
        if coming.offsets.is_empty() {
            self.syncs += u64::from(coming.is_sync);
            self.state = ParserState::Packet;
        }
    }

    fn header(&mut self, bytes: &[u8], length: usize) -> usize {
        let taken = bytes.len().min(length - self.header.len());
        self.header.extend_from_slice(&bytes[..taken]);
        if self.header.len() == length {
            let next = match self.state {
                ParserState::Initial => initial(&self.header),
                _ => packet(&self.header),
            };
            self.header.clear();
            self.state = next.unwrap_or(ParserState::Opaque);
            self.page(0);
        }
        taken
    }
}

fn initial(header: &[u8]) -> Option<ParserState> {
    (number(header, 0)? == MAGIC && number(header, 4)? == VERSION).then_some(ParserState::Packet)
}

fn packet(header: &[u8]) -> Option<ParserState> {
    let flags = number(header, 8)?;
    // Another flag is another content: compressed, or state of a device.
    if number(header, 0)? != MAGIC || number(header, 4)? != VERSION || flags & !FLAG_SYNC != 0 {
        return None;
    }
    let pages = usize::try_from(number(header, 16)?).ok()?;
    let places = header.get(PLACES_AT..)?.get(..pages.checked_mul(8)?)?;
    if pages > 0 && usize::try_from(number(header, 20)?).ok()? != pages * PAGE_BYTES {
        return None;
    }
    let (places, _) = places.as_chunks::<8>();
    let offsets = places.iter().rev().map(|place| u64::from_be_bytes(*place)).collect();
    let mut hasher = DefaultHasher::new();
    header.get(RAM_BLOCK_AT..PLACES_AT)?.hash(&mut hasher);
    Some(ParserState::Pages(Pages {
        ram_block: hasher.finish(),
        offsets,
        begun: 0,
        is_sync: flags & FLAG_SYNC != 0,
    }))
}

fn number(header: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*header.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::samples::{initial, packet};
    use super::*;

    fn pages(offsets: &[u64]) -> Vec<(u64, Vec<u8>)> {
        offsets.iter().map(|offset| (*offset, vec![7; PAGE_BYTES])).collect()
    }

    fn found(walker: &mut Walker, bytes: &[u8]) -> Vec<(usize, u64)> {
        walker.feed(bytes).into_iter().map(|page| (page.at, page.id.offset)).collect()
    }

    #[test]
    fn pages_and_syncs_are_found() {
        let stream =
            [initial(), packet(0, &pages(&[4096, 0])), packet(1, &[]), packet(0, &pages(&[8192]))].concat();
        let mut walker = Walker::new();
        let first = INITIAL_BYTES + PACKET_BYTES;
        let third = first + 2 * PAGE_BYTES + 2 * PACKET_BYTES;
        let expected = [(first, 4096), (first + PAGE_BYTES, 0), (third, 8192)];
        assert_eq!(found(&mut walker, &stream), expected);
        assert_eq!(walker.syncs(), 1);
    }

    #[test]
    fn what_looks_different_is_opaque() {
        let unknown_flag = packet(2, &pages(&[0]));
        let mut other_size = packet(0, &pages(&[0]));
        other_size[22] = 0x20;
        let mut too_many = packet(0, &pages(&[0]));
        too_many[18] = 1;
        for packet in [unknown_flag, other_size, too_many, vec![0; PACKET_BYTES + PAGE_BYTES]] {
            let mut walker = Walker::new();
            let stream = [initial(), packet, samples::packet(0, &pages(&[0]))].concat();
            assert_eq!(found(&mut walker, &stream), []);
            assert_eq!(walker.wants(1_000_000), 1_000_000);
        }
        let mut main = Walker::new();
        assert_eq!(found(&mut main, &[&b"QEVM"[..], &[0; 9000]].concat()), []);
    }

    proptest! {
        #[test]
        fn whoever_takes_what_is_wanted_finds_every_page(
            packets in prop::collection::vec(prop::collection::vec(0..1_u64 << 40, 0..12), 1..8),
            room in PAGE_BYTES..60_000_usize,
        ) {
            let mut stream = initial();
            for offsets in &packets {
                stream.extend(packet(0, &pages(offsets)));
            }
            let (mut walker, mut at, mut offsets) = (Walker::new(), 0, vec![]);
            while at < stream.len() {
                let taken = walker.wants(room.min(stream.len() - at));
                prop_assert!(taken > 0);
                offsets.extend(found(&mut walker, &stream[at..at + taken]).into_iter().map(|(_, offset)| offset));
                at += taken;
            }
            prop_assert_eq!(offsets, packets.concat());
        }

        #[test]
        fn however_it_is_cut_pages_are_where_they_are(
            offsets in prop::collection::vec(0..1_u64 << 40, 1..20),
            cuts in prop::collection::vec(1..9_000_usize, 1..40),
        ) {
            let stream = [initial(), packet(0, &pages(&offsets)), packet(1, &[])].concat();
            let (mut walker, mut at) = (Walker::new(), 0);
            for cut in cuts.into_iter().cycle() {
                let end = (at + cut).min(stream.len());
                for (page, offset) in found(&mut walker, &stream[at..end]) {
                    let number = (at + page - INITIAL_BYTES - PACKET_BYTES) / PAGE_BYTES;
                    prop_assert_eq!(offset, offsets[number]);
                }
                at = end;
                if at == stream.len() {
                    break;
                }
            }
            prop_assert_eq!(walker.syncs(), 1);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..6_000), is_begun: bool) {
            let mut walker = Walker::new();
            if is_begun {
                walker.feed(&initial());
            }
            for page in walker.feed(&bytes) {
                prop_assert!(page.at + PAGE_BYTES <= bytes.len());
            }
        }
    }
}
