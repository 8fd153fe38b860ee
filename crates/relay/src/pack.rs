//! Blocks packed and unpacked, by LZ4 and zstd.

use drainpipe_engine::codec::Codec;
use lz4_flex::block;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch};

use crate::error::RelayError;
use crate::frame::{BLOCK_BYTES_MAX, Packing, UNPACKED_BYTES_MAX};

/// What may be left of a block, in thousandths: less is not worth the unpacking.
const BLOCK_PERMILLE_MAX: usize = 950;

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

/// Packs blocks, one after the other. Holds what the codecs keep between two of them.
pub(crate) struct Packer {
    // Of those that are zstd's: parameters are costly to change.
    compressors: Vec<(Codec, Compressor<'static>)>,
    scratch: Vec<u8>,
}

impl Packer {
    pub(crate) fn new() -> Self {
        // A block that does not shrink does not fit, which ends the attempt.
        let longest = block::get_maximum_output_size(UNPACKED_BYTES_MAX);
        Self { compressors: vec![], scratch: vec![0; longest] }
    }

    /// Has every codec allocate what it needs, so that the first trial does not count it.
    pub(crate) fn warm_up(&mut self) -> Result<(), RelayError> {
        let zeros = vec![0; BLOCK_BYTES_MAX];
        Codec::ALL.into_iter().try_for_each(|codec| self.pack(codec, &zeros).map(drop))
    }

    /// The block, packed; none if it does not shrink.
    pub(crate) fn pack(&mut self, codec: Codec, raw: &[u8]) -> Result<Option<&[u8]>, RelayError> {
        let most = raw.len() * BLOCK_PERMILLE_MAX / 1000;
        let bytes = match codec {
            Codec::Lz4 => block::compress_into(raw, &mut self.scratch)
                .map_err(|error| RelayError::Pack(error.to_string()))?,
            Codec::ZstdLiterals => self.zstd(codec, 1, &LITERALS, raw)?,
            Codec::Zstd1 => self.zstd(codec, 1, &[CParameter::HashLog(HASH_LOG)], raw)?,
            Codec::Zstd3 => self.zstd(codec, 3, &[CParameter::HashLog(HASH_LOG)], raw)?,
        };
        Ok((bytes <= most).then(|| &self.scratch[..bytes]))
    }

    fn zstd(
        &mut self,
        codec: Codec,
        level: i32,
        parameters: &[CParameter],
        raw: &[u8],
    ) -> Result<usize, RelayError> {
        let failed = |error: std::io::Error| RelayError::Pack(error.to_string());
        let known = self.compressors.iter().position(|(of, _)| *of == codec);
        let index = if let Some(index) = known {
            index
        } else {
            let mut compressor = Compressor::new(level).map_err(failed)?;
            for parameter in parameters {
                compressor.set_parameter(*parameter).map_err(failed)?;
            }
            self.compressors.push((codec, compressor));
            self.compressors.len() - 1
        };
        let (_, compressor) = &mut self.compressors[index];
        compressor.compress_to_buffer(raw, &mut self.scratch[..]).map_err(failed)
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
    use crate::sieve::tests::noise;

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
