//! Connections as QEMU sends them.

use super::{INITIAL_BYTES, PACKET_BYTES, PACKET_PAGES, PAGE_BYTES, PLACES_AT, RAM_BLOCK_AT};

/// The beginning of a connection, as QEMU 7.2 and 10.0 send it.
pub(crate) fn initial() -> Vec<u8> {
    let mut bytes = vec![0; INITIAL_BYTES];
    bytes[..8].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
    bytes
}

/// A packet with these pages, by their offsets: 128 at most.
pub(crate) fn packet(flags: u8, pages: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = vec![0; PACKET_BYTES];
    bytes[..8].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
    bytes[11] = flags;
    let number = |count: usize| u32::try_from(count).expect("128 pages are no 4 GiB").to_be_bytes();
    assert!(pages.len() <= PACKET_PAGES);
    bytes[16..20].copy_from_slice(&number(pages.len()));
    bytes[20..24].copy_from_slice(&number(pages.len() * PAGE_BYTES));
    bytes[RAM_BLOCK_AT..][..6].copy_from_slice(b"pc.ram");
    for (index, (offset, _)) in pages.iter().enumerate() {
        bytes[PLACES_AT + 8 * index..][..8].copy_from_slice(&offset.to_be_bytes());
    }
    for (_, page) in pages {
        bytes.extend_from_slice(page);
    }
    bytes
}
