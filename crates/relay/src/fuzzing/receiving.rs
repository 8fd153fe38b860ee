//! A receiver of what a fuzzer makes, over one connection.

use std::cell::RefCell;

use crate::block::BLOCK_BYTES_MAX;
use crate::error::RelayError;
use crate::frame::{Frame, HEADER_BYTES, UNPACKED_BYTES_MAX};
use crate::multifd::PAGE_BYTES;
use crate::page_slots::PageSlots;
use crate::unpacking::Unpacking;

/// Few, so that the same ones are used again.
pub(super) const SLOTS: usize = 16;

/// What a receiver holds at most: of a connection a block as it came, and one for each way to unpack it; and the
/// pages, with their slots.
pub const STREAM_HOLDS_BYTES: usize = 4 * UNPACKED_BYTES_MAX + SLOTS * PAGE_BYTES + (16 << 10);

thread_local! {
    // zstd asks the processor what it can do for each context, and a virtual one takes its time to answer.
    static UNPACKING: RefCell<Unpacking> = RefCell::new(Unpacking::new().expect("there is memory"));
}

/// Nobody waits at these slots for what never comes.
pub(super) fn slots() -> PageSlots {
    let slots = PageSlots::new(SLOTS * PAGE_BYTES);
    slots.close();
    slots
}

/// Receives what one connection carries, block by block.
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
