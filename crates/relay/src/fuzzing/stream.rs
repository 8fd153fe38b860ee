//! The receiver, from the first frame to the last.

use std::cell::RefCell;

use super::blocks;
use crate::error::RelayError;
use crate::frame::{BLOCK_BYTES_MAX, Frame, HEADER_BYTES, UNPACKED_BYTES_MAX};
use crate::multifd::PAGE_BYTES;
use crate::page_slots::PageSlots;
use crate::unpacking::Unpacking;

/// Few, so that the same ones come again.
pub(super) const SLOTS: usize = 16;

/// What a receiver holds at most: of a connection a block as it came, and one for each way to unpack it; and the
/// pages, with their slots.
pub const STREAM_HOLDS_BYTES: usize = 4 * UNPACKED_BYTES_MAX + SLOTS * PAGE_BYTES + (16 << 10);

thread_local! {
    // zstd asks the processor what it can do for each context, and a virtual one takes its time to answer.
    static UNPACKING: RefCell<Unpacking> = RefCell::new(Unpacking::new().expect("there is memory"));
}

/// What two connections of a sender bring, one after the other: the first byte, times 64, says how long the first
/// one is.
///
/// Holds: a header that is understood is made of the same bytes. The program gets a block at a time at most. A
/// stream is whole only up to the frame that ends it.
pub fn stream(data: &[u8]) {
    let slots = slots();
    let (first, rest) = data.split_first().unwrap_or((&0, &[]));
    let (one, other) = rest.split_at((usize::from(*first) << 6).min(rest.len()));
    for wire in [one, other] {
        drop(receive(wire, &slots, |_| {}));
    }
}

/// A stream of each codec, with pages, parts and an end.
pub fn stream_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> =
        blocks::blocks_seeds().iter().map(|seed| [&[0], &blocks::wire_of(seed)[..]].concat()).collect();
    let end = Frame::End.encode();
    seeds.push([&[0], &end[..]].concat());
    seeds
}

/// Nobody waits at these for what never comes.
pub(super) fn slots() -> PageSlots {
    let slots = PageSlots::new(SLOTS * PAGE_BYTES);
    slots.close();
    slots
}

/// What comes over one connection, block by block.
pub(super) fn receive(wire: &[u8], slots: &PageSlots, take: impl FnMut(&[u8])) -> Result<(), RelayError> {
    check_header(wire);
    UNPACKING.with_borrow_mut(|unpacking| unpack(unpacking, wire, slots, take))
}

fn unpack(
    unpacking: &mut Unpacking,
    wire: &[u8],
    slots: &PageSlots,
    mut take: impl FnMut(&[u8]),
) -> Result<(), RelayError> {
    let mut rest = wire;
    loop {
        match unpacking.next(|bytes| read_exact(&mut rest, bytes), slots) {
            Ok(Some(block)) => {
                assert!(block.len() <= BLOCK_BYTES_MAX);
                take(block);
            }
            Ok(None) => {
                assert!(wire[..wire.len() - rest.len()].ends_with(&Frame::End.encode()));
                return Ok(());
            }
            Err(error @ (RelayError::Truncated | RelayError::Malformed(_) | RelayError::Unpack(_))) => {
                return Err(error);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn read_exact(rest: &mut &[u8], bytes: &mut [u8]) -> Result<(), RelayError> {
    let (read, left) = rest.split_at_checked(bytes.len()).ok_or(RelayError::Truncated)?;
    bytes.copy_from_slice(read);
    *rest = left;
    Ok(())
}

fn check_header(wire: &[u8]) {
    let Some(header) = wire.first_chunk::<HEADER_BYTES>() else { return };
    let Ok(frame) = Frame::decode(*header) else { return };
    assert_eq!(frame.encode(), *header);
    if let Frame::Block { is_paged, raw_bytes, wire_bytes, .. } = frame {
        assert!(raw_bytes <= if is_paged { UNPACKED_BYTES_MAX } else { BLOCK_BYTES_MAX });
        assert!((1..=raw_bytes).contains(&wire_bytes));
    }
}
