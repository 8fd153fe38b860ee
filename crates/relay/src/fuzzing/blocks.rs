//! Blocks that a malicious sender packs correctly: the error is behind a codec, where chance would not get.

use std::cell::RefCell;

use drainpipe_engine::transfer::codec::Codec;

use super::receiving::{SLOTS, STREAM_HOLDS_BYTES, receive, slots};
use crate::block::BLOCK_BYTES_MAX;
use crate::choices::Choices;
use crate::entropy_filter::EntropyFilter;
use crate::frame::{Frame, Packing, UNPACKED_BYTES_MAX};
use crate::multifd::PAGE_BYTES;
use crate::pack::Packer;

/// Keeps a single input from taking long.
const BLOCKS_MAX: usize = 8;

/// The memory of a receiver and a sender: each block raw, packed, and as a part of the stream.
pub const BLOCKS_HOLDS_BYTES: usize = STREAM_HOLDS_BYTES + 5 * (BLOCKS_MAX + 2) * UNPACKED_BYTES_MAX;

/// Blocks as some decisions make them.
#[derive(Debug, Default)]
struct GeneratedBlocks {
    wire: Vec<u8>,
    /// What the program is to receive; `None` once a block says something wrong.
    honest: Option<Vec<u8>>,
}

thread_local! {
    // It keeps what its codecs allocate.
    static PACKER: RefCell<Packer> = RefCell::new(Packer::new());
}

/// Blocks of one connection.
///
/// Holds, besides what holds for [`stream`](super::stream()): those that are as they say arrive as they were.
pub fn blocks(data: &[u8]) {
    let GeneratedBlocks { wire, honest } = generate(&mut Choices::new(data));
    let mut expected = honest.as_deref();
    let received = receive(&wire, &slots(), |block| {
        expected = expected.map(|expected| {
            expected.strip_prefix(block).expect("blocks that are as they say arrive as they were")
        });
    });
    if let Some(left) = expected {
        received.expect("they are as they say");
        assert!(left.is_empty());
    }
}

/// Blocks of each codec: whole, parted, with pages.
pub fn blocks_seeds() -> Vec<Vec<u8>> {
    let zeros = [0x41, 2];
    let words = [0x40 | 2, 3, 9, b'd', b'r', b'a', b'i', b'n', b'p', b'i', b'p', b'e'];
    let noise = [0x41, 1, 7];
    let mut seeds = vec![];
    for codec in 0..4 {
        seeds.push([&[codec, 1][..], &words].concat());
        seeds.push([&[codec, 3][..], &words, &noise, &words].concat());
        seeds.push([&[codec, 2][..], &zeros, &noise].concat());
        // Two pages that appear for the first time, and then one that has changed.
        let first = [&[codec | PAGED, 2, 0, 0, 0, 0][..], &[0, 1, 0, 0], &[0, 0]].concat();
        let again = [codec | PAGED, 1, 0, 0, 1, 2, 0, 0, 16, 0, 0, 9, 0, 0];
        seeds.push([&first[..], &again].concat());
        seeds.push([&[codec | LIES, 1][..], &words, &[1, 1]].concat());
        seeds.push([&[codec | PARTED, 1][..], &noise, &[0, 16, 2, 9, 9, 1], &words].concat());
    }
    seeds
}

/// What a seed becomes on the wire.
pub(super) fn wire_of(seed: &[u8]) -> Vec<u8> {
    generate(&mut Choices::new(seed)).wire
}

const PAGED: u8 = 4;
const PARTED: u8 = 8;
const LIES: u8 = 16;

fn generate(choices: &mut Choices<'_>) -> GeneratedBlocks {
    let mut generated = GeneratedBlocks { wire: vec![], honest: Some(vec![]) };
    for _ in 0..BLOCKS_MAX {
        if choices.are_used_up() {
            break;
        }
        generate_one(choices, &mut generated);
    }
    generated.wire.extend(Frame::End.encode());
    generated
}

fn generate_one(choices: &mut Choices<'_>, generated: &mut GeneratedBlocks) {
    let kind = choices.byte();
    let is_paged = kind & PAGED != 0;
    let content = if is_paged { pages(choices) } else { contents(choices) };
    let codec =
        [None, Some(Codec::Lz4), Some(Codec::Zstd1), Some(Codec::ZstdLiterals)][usize::from(kind & 3)];
    let (packing, mut is_parted, mut bytes) = packed(codec, &content);
    let mut is_honest = !is_paged && (1..=BLOCK_BYTES_MAX).contains(&content.len());
    if kind & PARTED != 0 {
        // In place of the entropy filter's honest result.
        let mut parts = choices.content(2 * PAGE_BYTES);
        parts.extend(bytes);
        (bytes, is_parted, is_honest) = (parts, true, false);
    }
    let (mut raw_bytes, mut wire_bytes) = (content.len(), bytes.len());
    if kind & LIES != 0 {
        raw_bytes = raw_bytes.wrapping_add_signed(lie(choices));
        wire_bytes = wire_bytes.wrapping_add_signed(lie(choices));
        is_honest &= (raw_bytes, wire_bytes) == (content.len(), bytes.len());
    }
    generated.wire.extend(Frame::Block { packing, is_paged, is_parted, raw_bytes, wire_bytes }.encode());
    generated.wire.extend(bytes);
    match &mut generated.honest {
        Some(honest) if is_honest => honest.extend(content),
        honest => *honest = None,
    }
}

fn lie(choices: &mut Choices<'_>) -> isize {
    (isize::from(choices.byte().cast_signed()) / 2).min(64)
}

fn contents(choices: &mut Choices<'_>) -> Vec<u8> {
    let parts = choices.below(8);
    // A little more than is allowed.
    let mut content: Vec<u8> = (0..parts).flat_map(|_| choices.content(UNPACKED_BYTES_MAX)).collect();
    content.truncate(UNPACKED_BYTES_MAX + 1);
    content
}

/// Pages of a block; most of them have what they need.
fn pages(choices: &mut Choices<'_>) -> Vec<u8> {
    let count = choices.byte() % 40;
    let (mut entries, mut follows, mut at) = (vec![count], vec![], 0_u32);
    for _ in 0..count {
        let before = choices.content(PAGE_BYTES);
        let slot = choices.below(SLOTS + 2);
        let changes = choices.byte() % 4;
        let page = match choices.byte() {
            0 | 1 => vec![slot.to_le_bytes()[0]; PAGE_BYTES],
            length => {
                let delta = choices.bytes(usize::from(length));
                [&[choices.byte(), choices.byte() % 17, length, 0][..], delta].concat()
            }
        };
        at = at.wrapping_add(u32::try_from(before.len()).unwrap_or(u32::MAX));
        entries.extend(at.to_le_bytes());
        entries.extend(u32::try_from(slot).unwrap_or(u32::MAX).to_le_bytes());
        entries.extend(u32::from(changes).to_le_bytes());
        entries.extend(u16::try_from(page.len()).unwrap_or(u16::MAX).to_le_bytes());
        follows.extend(before);
        follows.extend(page);
        at = at.wrapping_add(4096);
    }
    entries.extend(follows);
    entries.extend(choices.content(PAGE_BYTES));
    entries.truncate(UNPACKED_BYTES_MAX + 1);
    entries
}

/// The content as the sender packs it: raw if it does not shrink.
fn packed(codec: Option<Codec>, content: &[u8]) -> (Packing, bool, Vec<u8>) {
    let raw = || (Packing::Raw, false, content.to_vec());
    let Some(codec) = codec.filter(|_| content.len() <= UNPACKED_BYTES_MAX) else { return raw() };
    let mut entropy_filter = EntropyFilter::new();
    if !entropy_filter.look(content, 0) {
        return raw();
    }
    PACKER.with_borrow_mut(|packer| {
        let packed =
            packer.pack(codec, entropy_filter.rest(content)).expect("there is room for what is packed");
        packed.map_or_else(raw, |packed| {
            (codec.into(), entropy_filter.parts(), entropy_filter.written(content, packed))
        })
    })
}
