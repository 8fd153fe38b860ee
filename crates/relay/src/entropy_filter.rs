//! Keeps what does not shrink from the codecs. A guest's memory changes its kind from page to page, so a block
//! is looked at in chunks as long as a page: those that look random go as they are, and all others are packed
//! together.
//!
//! ```text
//! length of the first chunk (2 bytes), a bit for each chunk that goes as it is, the lowest first;
//! these chunks, and then all others, packed
//! ```
//!
//! Numbers are little-endian.

use std::ops::Range;

use crate::error::RelayError;
use crate::frame::UNPACKED_BYTES_MAX;
use crate::multifd::PAGE_BYTES;

/// A sample is made of so many pieces of a chunk, each of so many bytes.
const PIECES: usize = 4;
const PIECE_BYTES: usize = 64;

/// A sample that is worth compressing has at least so many pairs of equal bytes. Random bytes have
/// 256 × 255 / 2 / 256 = 127.5, and 11 more or less; text has some 2,000. Base64 has 510, and shrinks by a quarter.
const EQUAL_PAIRS_MIN: u32 = 192;

/// What is left for the codecs is worth their while from this length on, a page.
const REST_BYTES_MIN: usize = PAGE_BYTES;

/// Chunks of a block at most: the first and the last one may be short.
const CHUNKS_MAX: usize = UNPACKED_BYTES_MAX.div_ceil(PAGE_BYTES) + 1;

/// Parts blocks, one after the other.
#[derive(Debug)]
pub(crate) struct EntropyFilter {
    first_bytes: usize,
    goes_plain: Vec<bool>,
    plain_bytes: usize,
    rest: Vec<u8>,
}

impl EntropyFilter {
    /// One with room for any block.
    pub(crate) fn new() -> Self {
        Self {
            first_bytes: 0,
            goes_plain: Vec::with_capacity(CHUNKS_MAX),
            plain_bytes: 0,
            rest: Vec::with_capacity(UNPACKED_BYTES_MAX),
        }
    }

    /// Looks at a block, of which a page begins at `page_at`. Gives whether there is anything worth packing.
    pub(crate) fn look(&mut self, block: &[u8], page_at: usize) -> bool {
        self.first_bytes = match page_at % PAGE_BYTES {
            0 => PAGE_BYTES,
            bytes => bytes,
        };
        self.goes_plain.clear();
        self.rest.clear();
        self.plain_bytes = 0;
        for chunk in chunks(self.first_bytes, block.len()) {
            let is_plain = looks_random(&block[chunk.clone()]);
            self.plain_bytes += if is_plain { chunk.len() } else { 0 };
            self.goes_plain.push(is_plain);
        }
        if self.plain_bytes > 0 {
            for (chunk, is_plain) in chunks(self.first_bytes, block.len()).zip(&self.goes_plain) {
                if !is_plain {
                    self.rest.extend_from_slice(&block[chunk]);
                }
            }
        }
        block.len() - self.plain_bytes >= REST_BYTES_MIN
    }

    /// Whether some of the block goes as it is.
    pub(crate) fn parts(&self) -> bool {
        self.plain_bytes > 0
    }

    /// The part of the block that is to be compressed.
    pub(crate) fn rest<'a>(&'a self, block: &'a [u8]) -> &'a [u8] {
        if self.parts() { &self.rest } else { block }
    }

    /// The parts of the block, of `bytes`, that are sent as they are.
    pub(crate) fn plain_chunks(&self, bytes: usize) -> impl Iterator<Item = Range<usize>> {
        let chunks = chunks(self.first_bytes, bytes).zip(&self.goes_plain);
        chunks.filter_map(|(chunk, is_plain)| is_plain.then_some(chunk))
    }

    /// The block as it is sent, of which the rest was `packed`. It waits like this, so it has no room for more.
    pub(crate) fn written(&self, block: &[u8], packed: &[u8]) -> Vec<u8> {
        if !self.parts() {
            return packed.to_vec();
        }
        let map_bytes = self.goes_plain.len().div_ceil(8);
        let mut to = Vec::with_capacity(2 + map_bytes + self.plain_bytes + packed.len());
        to.extend_from_slice(&u16::try_from(self.first_bytes).unwrap_or(u16::MAX).to_le_bytes());
        for eight in self.goes_plain.chunks(8) {
            to.push(eight.iter().rev().fold(0, |bits, is_plain| bits << 1 | u8::from(*is_plain)));
        }
        self.plain_chunks(block.len()).for_each(|chunk| to.extend_from_slice(&block[chunk]));
        to.extend_from_slice(packed);
        to
    }
}

/// Chunks of much data that are looked at before all others.
const LOOKED_AT: usize = 16;

/// This many chunks must not look random, or the whole block is sent as it is.
const WORTH_MIN: usize = 2;

/// Whether a look at a few of its chunks gives hope for much data.
pub(crate) fn is_worth_packing(data: &[u8]) -> bool {
    let step = (data.len() / PAGE_BYTES).div_ceil(LOOKED_AT).max(1);
    let looked_at = data.chunks_exact(PAGE_BYTES).step_by(step);
    looked_at.filter(|chunk| !looks_random(chunk)).count() >= WORTH_MIN
}

/// The chunks of a block; the first one ends where a page begins.
fn chunks(first_bytes: usize, bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let begins = std::iter::once(0).chain((first_bytes..).step_by(PAGE_BYTES));
    let ends = (first_bytes..).step_by(PAGE_BYTES);
    begins
        .zip(ends)
        .take_while(move |(begin, _)| *begin < bytes)
        .map(move |(begin, end)| begin..end.min(bytes))
}

/// Whether a codec that looks at bytes one by one would find nothing in a sample of it. A chunk that is shorter
/// than a sample is not worth the look.
fn looks_random(chunk: &[u8]) -> bool {
    if chunk.len() < PIECES * PIECE_BYTES {
        return true;
    }
    let step = (chunk.len() - PIECE_BYTES) / (PIECES - 1);
    let (mut seen, mut pairs) = ([0_u16; 256], 0);
    for piece in 0..PIECES {
        for byte in &chunk[piece * step..][..PIECE_BYTES] {
            let seen = &mut seen[usize::from(*byte)];
            pairs += u32::from(*seen);
            *seen += 1;
        }
    }
    pairs < EQUAL_PAIRS_MIN
}

/// A block that a peer has parted.
#[derive(Debug)]
pub(crate) struct Parted<'a> {
    bytes: usize,
    first_bytes: usize,
    map: &'a [u8],
    plain: &'a [u8],
    /// All but what goes as it is.
    pub(crate) packed: &'a [u8],
    /// Length of that before it was packed.
    pub(crate) rest_bytes: usize,
}

impl<'a> Parted<'a> {
    /// Decodes the chunks of a block of `bytes`, 1 to [`crate::frame::UNPACKED_BYTES_MAX`]. Trusts nothing.
    pub(crate) fn decode(sent: &'a [u8], bytes: usize) -> Result<Self, RelayError> {
        let malformed = || RelayError::Malformed("parts that no block has");
        let (first_bytes, sent) = sent.split_first_chunk().ok_or_else(malformed)?;
        let first_bytes = usize::from(u16::from_le_bytes(*first_bytes));
        if !(1..=PAGE_BYTES).contains(&first_bytes) {
            return Err(malformed());
        }
        let count = chunks(first_bytes, bytes).count();
        let (map, sent) = sent.split_at_checked(count.div_ceil(8)).ok_or_else(malformed)?;
        let mut parted = Self { bytes, first_bytes, map, plain: &[], packed: &[], rest_bytes: 0 };
        let plain_bytes =
            parted.chunks().filter(|(_, is_plain)| *is_plain).map(|(chunk, _)| chunk.len()).sum();
        (parted.plain, parted.packed) = sent.split_at_checked(plain_bytes).ok_or_else(malformed)?;
        parted.rest_bytes = bytes - plain_bytes;
        if parted.rest_bytes == 0 || parted.packed.is_empty() {
            return Err(malformed());
        }
        Ok(parted)
    }

    fn chunks(&self) -> impl Iterator<Item = (Range<usize>, bool)> + use<'a> {
        let map = self.map;
        let bit = move |index: usize| map[index / 8] >> (index % 8) & 1 == 1;
        chunks(self.first_bytes, self.bytes).enumerate().map(move |(index, chunk)| (chunk, bit(index)))
    }

    /// Writes the block, of which the rest was packed from `rest`, of the length that was told.
    pub(crate) fn write(&self, rest: &[u8], to: &mut Vec<u8>) {
        let (mut plain, mut rest): (&[u8], &[u8]) = (self.plain, rest);
        for (chunk, is_plain) in self.chunks() {
            let from = if is_plain { &mut plain } else { &mut rest };
            let (bytes, left) = from.split_at(chunk.len().min(from.len()));
            to.extend_from_slice(bytes);
            *from = left;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    const OVERHEAD_BYTES_MAX: usize = 2 + CHUNKS_MAX.div_ceil(8);

    pub(crate) fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 88_172_645_463_325_252_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        std::iter::repeat_with(&mut next).flatten().take(bytes).collect()
    }

    #[test]
    fn noise_is_left_and_all_else_is_packed() {
        let mut entropy_filter = EntropyFilter::new();
        let noise = noise(1 << 20);
        for page in noise.chunks(PAGE_BYTES) {
            assert!(!entropy_filter.look(page, 0));
        }
        let base64 = noise.iter().map(|byte| b' ' + byte % 64).collect();
        // Addresses, of which three of eight bytes are random.
        let addresses = noise.chunks(3).flat_map(|low| [low, &[0x7f, 0x3a, 0, 0, 0]].concat()).collect();
        let half: Vec<u8> = noise.chunks(2048).flat_map(|half| [half, &[0; 2048]].concat()).collect();
        for worth in [base64, addresses, half, vec![0; 1 << 20], b"the and for was ".repeat(4096)] {
            for page in worth.chunks_exact(PAGE_BYTES) {
                assert!(entropy_filter.look(page, 0) && !entropy_filter.parts());
            }
        }
    }

    #[test]
    fn a_block_of_both_is_parted_where_pages_begin() {
        let (noise, words) = (noise(PAGE_BYTES), b"the and for was ".repeat(PAGE_BYTES / 16));
        let header = [7; 1344];
        let block = [&header[..], &noise, &words, &noise, &words, &words, &noise[..9]].concat();
        let mut entropy_filter = EntropyFilter::new();
        assert!(entropy_filter.look(&block, header.len()));
        assert_eq!(entropy_filter.rest(&block), [&header[..], &words, &words, &words].concat());
        let sent = entropy_filter.written(&block, b"packed");
        assert_eq!(sent, [&[0x40, 5, 0b100_1010][..], &noise, &noise, &noise[..9], b"packed"].concat());
        let parted = Parted::decode(&sent, block.len()).unwrap();
        assert_eq!((parted.packed, parted.rest_bytes), (&b"packed"[..], entropy_filter.rest(&block).len()));
    }

    proptest! {
        #[test]
        fn what_is_parted_comes_back(
            kinds in prop::collection::vec(any::<bool>(), 1..40),
            page_at in 0..10_000_usize,
            cut in 0..PAGE_BYTES,
        ) {
            let (noise, words) = (noise(PAGE_BYTES), b"the and for was ".repeat(PAGE_BYTES / 16));
            let kinds = kinds.iter().flat_map(|is_noise| if *is_noise { &noise } else { &words });
            let block: Vec<u8> = kinds.copied().skip(cut).take(UNPACKED_BYTES_MAX).collect();
            let mut entropy_filter = EntropyFilter::new();
            if entropy_filter.look(&block, page_at) && entropy_filter.parts() {
                let rest = entropy_filter.rest(&block);
                let sent = entropy_filter.written(&block, rest);
                prop_assert!(sent.len() <= block.len() + OVERHEAD_BYTES_MAX);
                let parted = Parted::decode(&sent, block.len()).unwrap();
                prop_assert_eq!(parted.rest_bytes, rest.len());
                let mut back = vec![];
                parted.write(parted.packed, &mut back);
                prop_assert!(back == block);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic_nor_grow(
            mut sent in prop::collection::vec(any::<u8>(), 0..9_000),
            first_bytes in 0..PAGE_BYTES + 2,
            bytes in 1..UNPACKED_BYTES_MAX + 1,
            rest_bytes in 0..9_000_usize,
        ) {
            let first_bytes = u16::try_from(first_bytes).unwrap().to_le_bytes();
            sent.iter_mut().zip(first_bytes).for_each(|(byte, first)| *byte = first);
            if let Ok(parted) = Parted::decode(&sent, bytes) {
                let mut block = vec![];
                parted.write(&vec![0; rest_bytes], &mut block);
                prop_assert!(block.len() <= bytes && parted.rest_bytes <= bytes);
            }
        }
    }
}
