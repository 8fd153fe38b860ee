//! That what a sender holds is bounded, whatever is sent and however many threads pack. What it holds beside the copies
//! of pages, by its parts, each as full as it can be; `tests/memory.rs` measures it.

use std::sync::Arc;

use drainpipe_engine::transfer::codec::Codec;

use super::shared::{EXTRA_BYTES_MAX, WAITING_BYTES_MAX, depth_max};
use crate::block::BLOCK_BYTES_MAX;
use crate::frame::UNPACKED_BYTES_MAX;
use crate::multifd::PAGE_BYTES;
use crate::pack::{Packer, Trier};
use crate::page_cache::{TakenSlot, notes_bytes_max};
use crate::paged::PAGES_MAX;
use crate::{CONNECTIONS_MAX, PACKING_THREADS_MAX};

const MIB: usize = 1 << 20;

/// What is promised.
const PROMISED_BYTES: usize = 64 * MIB;

/// Those of QEMU's multifd, and its first one.
const CONNECTIONS: usize = 17;

/// What a thread touches of its stack, and what the allocator adds; measured 20 KiB.
const THREAD_BYTES: usize = 32 << 10;

/// Bytes of which every second one is close to the one before: they shrink by little, and the entropy filter stops nothing.
fn hardly_shrinks() -> Vec<u8> {
    let noise = crate::entropy_filter::tests::noise(UNPACKED_BYTES_MAX + 1);
    noise
        .chunks_exact(2)
        .flat_map(|pair| [pair[0], pair[0] ^ (pair[1] & 31)])
        .take(UNPACKED_BYTES_MAX)
        .collect()
}

/// One that has packed with each codec, a block and a paged one by turns.
fn used_packer(block: &[u8]) -> Packer {
    let mut packer = Packer::new();
    for codec in Codec::ALL.into_iter().chain(Codec::ALL) {
        for block in [block, &block[..BLOCK_BYTES_MAX]] {
            packer.pack(codec, block).unwrap();
        }
    }
    packer
}

fn used_trier(block: &[u8]) -> Trier {
    let mut trier = Trier::new();
    for block in [block, &block[..BLOCK_BYTES_MAX]] {
        trier.compare(|packer, codec| packer.pack(codec, block).map(drop)).unwrap();
    }
    trier
}

/// What `connections` hold: blocks that wait, and what is noted of their pages; and for each one block on its way, the
/// same sealed, and one to be filled again. A block that is being filled is one of those that wait: its reader has it
/// only where there is room for one more.
fn of_connections(connections: usize) -> usize {
    let notes_bytes = PAGES_MAX * (size_of::<TakenSlot>() + size_of::<Arc<[u8]>>());
    let waiting_bytes = WAITING_BYTES_MAX + WAITING_BYTES_MAX / BLOCK_BYTES_MAX * notes_bytes;
    waiting_bytes + EXTRA_BYTES_MAX + connections * (3 * BLOCK_BYTES_MAX + 2 * THREAD_BYTES)
}

/// What a thread holds at most: a block that has gone out before it was packed, as it is told by its pages, the copies
/// of these, what the entropy filter left of it, and what it became. Zeros to set a packer up are gone before that.
fn of_packing_thread(packer: &Packer) -> usize {
    packer.holds_bytes() + 2 * BLOCK_BYTES_MAX + 3 * (UNPACKED_BYTES_MAX + PAGE_BYTES) + THREAD_BYTES
}

#[test]
fn sixteen_threads_that_pack_hold_no_more_than_was_promised() {
    let block = hardly_shrinks();
    let packers: Vec<Packer> = (0..PACKING_THREADS_MAX).map(|_| used_packer(&block)).collect();
    let packing: usize = packers.iter().map(of_packing_thread).sum();
    let parts = [of_connections(CONNECTIONS), packing, used_trier(&block).holds_bytes(), notes_bytes_max(0)];
    let all: usize = parts.iter().sum();
    println!("{all} bytes: connections, packing, comparing, notes of pages {parts:?}");
    assert!(all <= PROMISED_BYTES, "{all} bytes: {parts:?}");
}

#[test]
fn as_much_waits_as_is_reckoned_however_many_connections_there_are() {
    for connections in 1..=CONNECTIONS_MAX {
        assert!(connections * depth_max(connections) * BLOCK_BYTES_MAX <= WAITING_BYTES_MAX, "{connections}");
    }
}

#[test]
fn all_connections_that_there_may_be_hold_less_than_that_beside_what_packs() {
    assert!(of_connections(CONNECTIONS_MAX) <= PROMISED_BYTES);
}

#[test]
fn what_is_noted_of_pages_is_a_part_of_what_was_set_aside_for_their_copies() {
    for mib in [1, 64, 1024] {
        let cache_bytes = mib * MIB;
        let slots = cache_bytes / 16 * 15 / PAGE_BYTES;
        // An `Arc` has two counts before its bytes, and the allocator one and what it rounds up by.
        let copies_bytes = slots * (PAGE_BYTES + 32);
        assert!(copies_bytes + notes_bytes_max(slots) - notes_bytes_max(0) <= cache_bytes, "{mib} MiB");
    }
}
