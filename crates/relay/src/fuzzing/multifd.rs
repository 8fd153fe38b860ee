//! The recognition of multifd's packets.

use crate::block::{BLOCK_BYTES_MAX, Block};
use crate::choices::Choices;
use crate::multifd::samples::{initial, packet};
use crate::multifd::{PAGE_BYTES, Walker};

/// The memory for a block, and for what is known about the pages in it and in a packet.
pub const MULTIFD_HOLDS_BYTES: usize = BLOCK_BYTES_MAX + (64 << 10);

/// What a program sends over one connection, after a byte that says how it is cut.
///
/// Holds: each page lies in what was sent, none over another. Wherever it is cut, pages are where they are and syncs
/// are as many. Who takes what is wanted cuts no page, and always takes something.
pub fn multifd(data: &[u8]) {
    let (cuts, stream) = data.split_at(data.len().min(4));
    let mut whole = Walker::new();
    let pages = whole.feed(stream);
    let mut end = 0;
    for page in &pages {
        assert!(page.at >= end && page.at + PAGE_BYTES <= stream.len());
        end = page.at + PAGE_BYTES;
    }
    let mut cut = Walker::new();
    let (mut at, mut found) = (0, pages.iter());
    for size in cuts.iter().map(|size| 1 + usize::from(*size) * 37).cycle() {
        if at >= stream.len() {
            break;
        }
        let end = (at + size).min(stream.len());
        for page in cut.feed(&stream[at..end]) {
            let known = found.find(|known| known.at == at + page.at).expect("it is found in the whole");
            assert_eq!(known.id, page.id);
        }
        at = end;
    }
    if !cuts.is_empty() {
        assert_eq!(cut.syncs(), whole.syncs());
    }
    let mut choices = Choices::new(cuts);
    let blocks = in_blocks(stream, &mut choices);
    assert_eq!(blocks, (pages.len(), whole.syncs()));
}

/// The pages and syncs that a sender finds while it fills blocks.
fn in_blocks(stream: &[u8], choices: &mut Choices<'_>) -> (usize, u64) {
    let (mut walker, mut block, mut rest, mut pages) = (Walker::new(), Block::new(), stream, 0);
    while !rest.is_empty() {
        block.begin(&walker);
        // A block may be given up before it is full.
        let wanted_max = 1 + choices.below(1 << 16);
        while block.len() < wanted_max && !rest.is_empty() {
            let room = block.rest(&walker);
            if room.is_empty() {
                assert!(block.len() + PAGE_BYTES > BLOCK_BYTES_MAX, "an empty block has room");
                break;
            }
            let came = room.len().min(rest.len());
            room[..came].copy_from_slice(&rest[..came]);
            rest = &rest[came..];
            block.came(came, &mut walker);
        }
        pages += block.pages().len();
    }
    (pages, walker.syncs())
}

/// Connections of QEMU, and one of something else.
pub fn multifd_seeds() -> Vec<Vec<u8>> {
    let page = |offset: u64, byte: u8| (offset, vec![byte; PAGE_BYTES]);
    let packets = [packet(0, &[page(0, 1), page(4096, 2)]), packet(1, &[]), packet(1, &[page(1 << 40, 3)])];
    let multifd = [&[7, 0, 255, 3][..], &initial(), &packets.concat()].concat();
    let strange = [&[0, 0, 0, 0][..], &initial(), &packet(2, &[page(0, 1)])].concat();
    let main = [&[1, 1, 1, 1][..], b"QEVM", &[0; 300]].concat();
    vec![multifd, strange, main]
}
