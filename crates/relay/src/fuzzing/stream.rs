//! The receiver, from the first frame to the last.

use super::blocks;
use super::receiving::{receive, slots};
use crate::frame::Frame;

pub use super::receiving::STREAM_HOLDS_BYTES;

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
