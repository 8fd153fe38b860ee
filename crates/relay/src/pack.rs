//! Blocks packed and unpacked, by LZ4 and zstd.

use std::fmt;

use drainpipe_engine::transfer::codec::Codec;
use lz4_flex::block::{self, CompressTable};
use zstd::bulk::Decompressor;
use zstd::zstd_safe::{CCtx, CParameter, ParamSwitch, ResetDirective, get_error_name};

use crate::error::RelayError;
use crate::frame::{Packing, UNPACKED_BYTES_MAX};

/// What may be left of a block, in thousandths: less is not worth the unpacking.
const BLOCK_PERMILLE_MAX: usize = 950;

/// Whether `raw_bytes` have shrunk by enough.
pub(crate) fn is_worth_unpacking(packed_bytes: usize, raw_bytes: usize) -> bool {
    packed_bytes <= raw_bytes * BLOCK_PERMILLE_MAX / 1000
}

/// Entries of zstd's table of what it has seen, as a power of two. For blocks this short it takes 13 by itself,
/// and so packs text 5 % worse than a stream would be, in no less time.
const HASH_LOG: u32 = 16;

/// For [`Codec::ZstdLiterals`]: a small table, at which it looks the more rarely the longer nothing repeats, for seven
/// bytes or more. Nearly all that is left to it is Huffman's code, the fastest part of zstd.
const LITERALS: [CParameter; 4] = [
    CParameter::HashLog(8),
    CParameter::MinMatch(7),
    CParameter::TargetLength(16),
    CParameter::LiteralCompressionMode(ParamSwitch::Enable),
];

/// For [`Codec::Zstd3`]: by itself zstd takes a second table twice as long for a paged block, which is a little longer
/// than the others, and packs it no better.
const LEVEL_3: [CParameter; 2] = [CParameter::HashLog(HASH_LOG), CParameter::ChainLog(15)];

/// What LZ4 keeps of what it has seen.
#[cfg(test)]
const LZ4_TABLE_BYTES: usize = 4096 * size_of::<u32>();

/// Packs blocks, one after the other. Holds what one codec of zstd keeps between two of them: for another one its
/// context is set up again, which takes half of the memory of all of them.
pub(crate) struct Packer {
    context: CCtx<'static>,
    // What the context is set up for.
    codec: Option<Codec>,
    // What it has grown for, and to.
    has_grown_for: [bool; Codec::ALL.len()],
    grown_bytes: usize,
    // LZ4's table, once it is used.
    table: Option<CompressTable>,
    // A block that does not shrink fits.
    scratch: Vec<u8>,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").field("codec", &self.codec).finish_non_exhaustive()
    }
}

impl Packer {
    pub(crate) fn new() -> Self {
        let longest = block::get_maximum_output_size(UNPACKED_BYTES_MAX);
        Self {
            context: CCtx::create(),
            codec: None,
            has_grown_for: [false; Codec::ALL.len()],
            grown_bytes: 0,
            table: None,
            scratch: vec![0; longest],
        }
    }

    /// Sets it up for a codec and blocks of any length: packing by it takes nothing more from the allocator.
    pub(crate) fn set_up(&mut self, codec: Codec) -> Result<(), RelayError> {
        // zstd gives back what was far too much 128 times in a row, as for short blocks
        // (`ZSTD_WORKSPACETOOLARGE_MAXDURATION`).
        if self.context.sizeof() < self.grown_bytes {
            self.has_grown_for = [false; Codec::ALL.len()];
        }
        if !std::mem::replace(&mut self.has_grown_for[codec as usize], true) {
            self.pack(codec, &vec![0; UNPACKED_BYTES_MAX])?;
            self.grown_bytes = self.context.sizeof();
        }
        Ok(())
    }

    /// The block, packed; none if it does not shrink.
    pub(crate) fn pack(&mut self, codec: Codec, raw: &[u8]) -> Result<Option<&[u8]>, RelayError> {
        let bytes = match codec {
            Codec::Lz4 => {
                let table = self.table.get_or_insert_with(CompressTable::large);
                block::compress_into_with_table(raw, &mut self.scratch, table)
                    .map_err(|error| RelayError::Pack(error.to_string()))?
            }
            Codec::ZstdLiterals => self.zstd(codec, 1, &LITERALS, raw)?,
            Codec::Zstd1 => self.zstd(codec, 1, &[CParameter::HashLog(HASH_LOG)], raw)?,
            Codec::Zstd3 => self.zstd(codec, 3, &LEVEL_3, raw)?,
        };
        Ok(is_worth_unpacking(bytes, raw.len()).then(|| &self.scratch[..bytes]))
    }

    /// The last output of [`Self::pack`], with this many bytes.
    pub(crate) fn packed(&self, bytes: usize) -> &[u8] {
        &self.scratch[..bytes]
    }

    fn zstd(
        &mut self,
        codec: Codec,
        level: i32,
        parameters: &[CParameter],
        raw: &[u8],
    ) -> Result<usize, RelayError> {
        let failed = |code| RelayError::Pack(get_error_name(code).into());
        if self.codec != Some(codec) {
            self.codec = None;
            self.context.reset(ResetDirective::SessionAndParameters).map_err(failed)?;
            self.context.set_parameter(CParameter::CompressionLevel(level)).map_err(failed)?;
            for parameter in parameters {
                self.context.set_parameter(*parameter).map_err(failed)?;
            }
            self.codec = Some(codec);
        }
        self.context.compress2(&mut self.scratch[..], raw).map_err(failed)
    }

    /// What it holds, in bytes.
    #[cfg(test)]
    pub(crate) fn holds_bytes(&self) -> usize {
        let table_bytes = if self.table.is_some() { LZ4_TABLE_BYTES } else { 0 };
        self.context.sizeof() + table_bytes + self.scratch.capacity()
    }
}

/// One for each codec, to compare them: each set up already, so that this is not counted.
#[derive(Debug)]
pub(crate) struct Trier(Vec<Packer>);

impl Trier {
    /// One that holds nothing until it is used.
    pub(crate) fn new() -> Self {
        Self(vec![])
    }

    /// Sets all of them up.
    pub(crate) fn set_up(&mut self) -> Result<(), RelayError> {
        if self.0.is_empty() {
            self.0.resize_with(Codec::ALL.len(), Packer::new);
        }
        self.0.iter_mut().zip(Codec::ALL).try_for_each(|(packer, codec)| packer.set_up(codec))
    }

    /// What `measure` says of each codec, in the order of [`Codec::ALL`].
    pub(crate) fn compare<T: Copy + Default>(
        &mut self,
        mut measure: impl FnMut(&mut Packer, Codec) -> Result<T, RelayError>,
    ) -> Result<[T; Codec::ALL.len()], RelayError> {
        self.set_up()?;
        let mut measured = [T::default(); Codec::ALL.len()];
        for ((packer, codec), measured) in self.0.iter_mut().zip(Codec::ALL).zip(&mut measured) {
            *measured = measure(packer, codec)?;
        }
        Ok(measured)
    }

    /// What it holds, in bytes.
    #[cfg(test)]
    pub(crate) fn holds_bytes(&self) -> usize {
        self.0.iter().map(Packer::holds_bytes).sum()
    }
}

/// Unpacks what a peer has sent.
pub(crate) struct Unpacker {
    decompressor: Decompressor<'static>,
    // Never longer than the longest that is packed, so nothing that a peer sends can take more.
    unpacked: Vec<u8>,
}

impl Unpacker {
    pub(crate) fn new() -> Result<Self, RelayError> {
        let decompressor = Decompressor::new().map_err(|error| RelayError::Unpack(error.to_string()))?;
        Ok(Self { decompressor, unpacked: vec![0; UNPACKED_BYTES_MAX] })
    }

    /// The block of exactly `raw_bytes`, of 1 to [`UNPACKED_BYTES_MAX`].
    pub(crate) fn unpack<'a>(
        &'a mut self,
        packing: Packing,
        packed: &'a [u8],
        raw_bytes: usize,
    ) -> Result<&'a [u8], RelayError> {
        let room = self.unpacked.get_mut(..raw_bytes).ok_or(RelayError::Malformed("a block too long"))?;
        let bytes = match packing {
            Packing::Raw => return Ok(packed),
            Packing::Lz4 => {
                block::decompress_into(packed, room).map_err(|error| RelayError::Unpack(error.to_string()))?
            }
            Packing::Zstd => self
                .decompressor
                .decompress_to_buffer(packed, room)
                .map_err(|error| RelayError::Unpack(error.to_string()))?,
        };
        if bytes != raw_bytes {
            return Err(RelayError::Unpack(format!("{bytes} bytes instead of {raw_bytes}")));
        }
        Ok(&self.unpacked[..raw_bytes])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block::BLOCK_BYTES_MAX;
    use crate::entropy_filter::tests::noise;

    #[test]
    fn what_does_not_shrink_is_left() {
        let mut packer = Packer::new();
        let (noise, words) = (noise(BLOCK_BYTES_MAX), b"the and for was ".repeat(BLOCK_BYTES_MAX / 16));
        for codec in Codec::ALL {
            assert_eq!(packer.pack(codec, &noise).unwrap(), None, "{codec}");
            assert!(packer.pack(codec, &words).unwrap().unwrap().len() < words.len() / 10, "{codec}");
        }
    }

    #[test]
    fn one_that_is_set_up_does_not_grow() {
        let (noise, words) = (noise(UNPACKED_BYTES_MAX), b"the and for was ".repeat(UNPACKED_BYTES_MAX / 16));
        let mut packer = Packer::new();
        for codec in [Codec::ALL, Codec::ALL].concat() {
            packer.set_up(codec).unwrap();
            let before = packer.holds_bytes();
            for raw in [&noise[..], &words, &words[..BLOCK_BYTES_MAX], &words[..5000]] {
                packer.pack(codec, raw).unwrap();
                assert_eq!(packer.holds_bytes(), before, "{codec}");
            }
        }
        for codec in [Codec::ZstdLiterals, Codec::Zstd1, Codec::Lz4].repeat(200) {
            let before = packer.holds_bytes();
            packer.set_up(codec).unwrap();
            packer.pack(codec, &noise).unwrap();
            assert_eq!(packer.holds_bytes(), before, "{codec}");
        }
    }

    #[test]
    fn one_that_has_shrunk_is_set_up_anew() {
        let words = b"the and for was ".repeat(UNPACKED_BYTES_MAX / 16);
        let mut packer = Packer::new();
        packer.set_up(Codec::Zstd1).unwrap();
        let before = packer.holds_bytes();
        for _ in 0..200 {
            packer.pack(Codec::Zstd1, &words[..5000]).unwrap();
        }
        assert!(packer.holds_bytes() < before);
        packer.set_up(Codec::Zstd1).unwrap();
        assert_eq!(packer.holds_bytes(), before);
    }

    #[test]
    fn a_block_that_becomes_longer_than_it_says_is_refused() {
        let mut packer = Packer::new();
        let bomb = vec![0; BLOCK_BYTES_MAX];
        let mut unpacker = Unpacker::new().unwrap();
        for codec in Codec::ALL {
            let small = packer.pack(codec, &bomb).unwrap().unwrap().to_vec();
            for says in [1, 4096, BLOCK_BYTES_MAX - 1] {
                assert!(unpacker.unpack(codec.into(), &small, says).is_err(), "{codec} {says}");
            }
            assert!(unpacker.unpack(codec.into(), &small, UNPACKED_BYTES_MAX + 1).is_err());
            assert_eq!(unpacker.unpack(codec.into(), &small, bomb.len()).unwrap(), bomb);
        }
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_back(
            words in prop::collection::vec(prop::sample::select(vec![&b"drain"[..], b"pipe", b"\0\0\0"]), 1..9_000),
            tail in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let raw = [words.concat(), tail].concat();
            let (mut packer, mut unpacker) = (Packer::new(), Unpacker::new().unwrap());
            for codec in Codec::ALL {
                if let Some(packed) = packer.pack(codec, &raw).unwrap() {
                    prop_assert_eq!(unpacker.unpack(codec.into(), packed, raw.len()).unwrap(), &raw);
                }
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..600),
            raw_bytes in 1..UNPACKED_BYTES_MAX + 2,
            is_zstd: bool,
        ) {
            let mut unpacker = Unpacker::new().unwrap();
            if is_zstd && bytes.len() > 4 {
                // Past the magic number, where there is more to get wrong.
                bytes[..4].copy_from_slice(&0xFD2F_B528_u32.to_le_bytes());
            }
            for packing in [Packing::Lz4, Packing::Zstd] {
                if let Ok(unpacked) = unpacker.unpack(packing, &bytes, raw_bytes) {
                    prop_assert_eq!(unpacked.len(), raw_bytes);
                }
            }
        }
    }
}
