//! The header before each block: one byte that says how it is packed, three for its length before
//! packing, one that says whether it is [paged](crate::paged) (1) and [parted](crate::entropy_filter) (2), three for its
//! length as it follows. Numbers are little-endian.

use drainpipe_engine::transfer::codec::Codec;

use crate::block::BLOCK_BYTES_MAX;
use crate::error::RelayError;
use crate::paged::OVERHEAD_BYTES_MAX;

/// The longest input of packing: a block, or a paged one's changes.
pub(crate) const UNPACKED_BYTES_MAX: usize = BLOCK_BYTES_MAX + OVERHEAD_BYTES_MAX;

/// Length of a header.
pub(crate) const HEADER_BYTES: usize = 8;

const RAW: u8 = 0;
const LZ4: u8 = 1;
const ZSTD: u8 = 2;
const END: u8 = 0xff;

const PAGED: u8 = 1;
const PARTED: u8 = 2;

/// How to unpack a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Raw,
    Lz4,
    Zstd,
}

impl From<Codec> for Packing {
    fn from(codec: Codec) -> Self {
        match codec {
            Codec::Lz4 => Self::Lz4,
            Codec::ZstdLiterals | Codec::Zstd1 | Codec::Zstd3 => Self::Zstd,
        }
    }
}

/// What follows in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame {
    /// A block of `wire_bytes`, which becomes `raw_bytes`. Both are 1 to [`BLOCK_BYTES_MAX`], or to
    /// [`UNPACKED_BYTES_MAX`] for one that is paged.
    Block { packing: Packing, is_paged: bool, is_parted: bool, raw_bytes: usize, wire_bytes: usize },
    /// Nothing: the stream has ended.
    End,
}

impl Frame {
    /// As it is sent.
    pub(crate) fn encode(self) -> [u8; HEADER_BYTES] {
        let (kind, flags, raw_bytes, wire_bytes) = match self {
            Self::Block { packing, is_paged, is_parted, raw_bytes, wire_bytes } => {
                let kind = match packing {
                    Packing::Raw => RAW,
                    Packing::Lz4 => LZ4,
                    Packing::Zstd => ZSTD,
                };
                (kind, u8::from(is_paged) * PAGED + u8::from(is_parted) * PARTED, raw_bytes, wire_bytes)
            }
            Self::End => (END, 0, 0, 0),
        };
        let [r0, r1, r2, ..] = raw_bytes.to_le_bytes();
        let [w0, w1, w2, ..] = wire_bytes.to_le_bytes();
        [kind, r0, r1, r2, flags, w0, w1, w2]
    }

    /// Trusts nothing.
    pub(crate) fn decode(header: [u8; HEADER_BYTES]) -> Result<Self, RelayError> {
        let [kind, r0, r1, r2, flags, w0, w1, w2] = header;
        let raw_bytes = u32::from_le_bytes([r0, r1, r2, 0]) as usize;
        let wire_bytes = u32::from_le_bytes([w0, w1, w2, 0]) as usize;
        if flags & !(PAGED | PARTED) != 0 {
            return Err(RelayError::Malformed("a reserved bit is set"));
        }
        let (is_paged, is_parted) = (flags & PAGED != 0, flags & PARTED != 0);
        let bytes_max = if is_paged { UNPACKED_BYTES_MAX } else { BLOCK_BYTES_MAX };
        let packing = match kind {
            RAW => Packing::Raw,
            LZ4 => Packing::Lz4,
            ZSTD => Packing::Zstd,
            END if raw_bytes == 0 && wire_bytes == 0 && flags == 0 => return Ok(Self::End),
            END => return Err(RelayError::Malformed("an end with a length")),
            _ => return Err(RelayError::Malformed("an unknown codec")),
        };
        let is_whole = match packing {
            Packing::Raw => wire_bytes == raw_bytes && !is_parted,
            Packing::Lz4 | Packing::Zstd => wire_bytes < raw_bytes,
        };
        if raw_bytes == 0 || wire_bytes == 0 || raw_bytes > bytes_max || !is_whole {
            return Err(RelayError::Malformed("lengths that no block has"));
        }
        Ok(Self::Block { packing, is_paged, is_parted, raw_bytes, wire_bytes })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn whatever_is_decoded_is_bounded_and_encodes_to_the_same(header: [u8; HEADER_BYTES]) {
            if let Ok(frame) = Frame::decode(header) {
                prop_assert_eq!(frame.encode(), header);
                if let Frame::Block { is_paged, raw_bytes, wire_bytes, .. } = frame {
                    let most = if is_paged { UNPACKED_BYTES_MAX } else { BLOCK_BYTES_MAX };
                    prop_assert!((1..=most).contains(&raw_bytes));
                    prop_assert!((1..=raw_bytes).contains(&wire_bytes));
                }
            }
        }

        #[test]
        fn what_is_sent_is_understood(raw_bytes in 2..=BLOCK_BYTES_MAX, saved in 1..BLOCK_BYTES_MAX, is_paged: bool, is_parted: bool) {
            let less = raw_bytes - saved.min(raw_bytes - 1);
            for (packing, wire_bytes) in
                [(Packing::Raw, raw_bytes), (Packing::Lz4, less), (Packing::Zstd, less)]
            {
                let is_parted = is_parted && packing != Packing::Raw;
                let frame = Frame::Block { packing, is_paged, is_parted, raw_bytes, wire_bytes };
                prop_assert_eq!(Frame::decode(frame.encode()).unwrap(), frame);
            }
        }
    }

    #[test]
    fn what_no_relay_sends_is_refused() {
        for header in [
            [3, 1, 0, 0, 0, 1, 0, 0],
            [0, 1, 0, 0, 2, 1, 0, 0],
            [1, 8, 0, 0, 4, 1, 0, 0],
            [255, 0, 0, 0, 2, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [0, 2, 0, 0, 0, 1, 0, 0],
            [0, 1, 0, 2, 0, 1, 0, 2],
            [1, 8, 0, 0, 0, 8, 0, 0],
            [2, 255, 255, 255, 0, 1, 0, 0],
            [2, 8, 0, 0, 0, 0, 0, 0],
            [255, 0, 0, 0, 0, 1, 0, 0],
        ] {
            assert!(Frame::decode(header).is_err(), "{header:?}");
        }
        assert_eq!(Frame::decode(Frame::End.encode()).unwrap(), Frame::End);
    }
}
