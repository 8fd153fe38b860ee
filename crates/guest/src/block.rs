//! What a disk's blocks hold: every block is known in advance, by its disk, its number, and how often it was written.

use crate::page::{PAGE_BYTES, Words};

/// As large as a page: what disks write at once.
pub const BLOCK_BYTES: usize = PAGE_BYTES;

/// Blocks that begin as a hole, or as data, side by side.
const BLOCKS_PER_MIB: usize = (1 << 20) / BLOCK_BYTES;

const MAGIC: u64 = u64::from_le_bytes(*b"DPBLOCK1");

/// Magic, disk, number and generation.
const HEADER_WORDS: usize = 4;

/// How a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteKind {
    /// Data that name their block and its generation.
    Data,
    /// Zeroes, which the disk may store as it likes.
    Zeroes,
    /// Zeroes, for which the disk may give room back.
    Hole,
}

/// One generation of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Number of the disk, from 0.
    pub disk: usize,
    /// Number of the block, from 0.
    pub number: usize,
    /// How often it was written; 0 is what a disk begins with.
    pub generation: u32,
}

impl Block {
    /// How this generation is written. Some are zeroes, so that these are tested beside data.
    pub fn write_kind(self) -> WriteKind {
        match self.generation {
            0 if (self.number / BLOCKS_PER_MIB).is_multiple_of(2) => WriteKind::Data,
            0 => WriteKind::Hole,
            generation if generation % 8 == 3 => WriteKind::Zeroes,
            generation if generation % 8 == 6 => WriteKind::Hole,
            _ => WriteKind::Data,
        }
    }

    /// What it holds.
    pub fn content(self) -> [u8; BLOCK_BYTES] {
        let mut bytes = [0; BLOCK_BYTES];
        if self.write_kind() == WriteKind::Data {
            for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.words()) {
                *bytes = word.to_le_bytes();
            }
        }
        bytes
    }

    fn words(self) -> impl Iterator<Item = u64> {
        let header = [MAGIC, self.disk as u64, self.number as u64, u64::from(self.generation)];
        let seed = header.iter().fold(0, |seed: u64, word| (seed ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        header.into_iter().chain(Words(seed))
    }

    /// The block that these data say they are, if all of them say so; `None` of zeroes.
    pub fn decode(bytes: &[u8; BLOCK_BYTES]) -> Option<Self> {
        let words = bytes.as_chunks::<8>().0;
        let word = |at: usize| u64::from_le_bytes(words[at]);
        let [_, disk, number, generation]: [u64; HEADER_WORDS] = [0, 1, 2, 3].map(word);
        let block = Self {
            disk: disk.try_into().ok()?,
            number: number.try_into().ok()?,
            generation: generation.try_into().ok()?,
        };
        (block.write_kind() == WriteKind::Data && block.content() == *bytes).then_some(block)
    }
}

/// What a disk of so many MiB holds before anything is written to it.
pub fn new_disk(disk: usize, mib: usize) -> Vec<u8> {
    let blocks = (0..mib * BLOCKS_PER_MIB).map(|number| Block { disk, number, generation: 0 });
    blocks.flat_map(Block::content).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_new_disk_has_data_and_holes() {
        let disk = new_disk(1, 2);
        let (blocks, rest) = disk.as_chunks::<BLOCK_BYTES>();
        assert_eq!((blocks.len(), rest.len()), (2 * BLOCKS_PER_MIB, 0));
        assert_eq!(Block::decode(&blocks[7]), Some(Block { disk: 1, number: 7, generation: 0 }));
        assert!(blocks[BLOCKS_PER_MIB..].iter().all(|block| *block == [0; BLOCK_BYTES]));
    }

    proptest! {
        #[test]
        fn a_block_says_which_it_is(disk in 0..4_usize, number: u32, generation: u32) {
            let block = Block { disk, number: number as usize, generation };
            let decoded = Block::decode(&block.content());
            prop_assert_eq!(decoded, (block.write_kind() == WriteKind::Data).then_some(block));
        }

        #[test]
        fn a_bit_that_is_wrong_is_seen(number: u32, bit in 0..BLOCK_BYTES * 8) {
            let block = Block { disk: 0, number: number as usize, generation: 1 };
            let mut bytes = block.content();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Block::decode(&bytes), None);
        }
    }
}
