//! A packed stream on the receiver: frame by frame, as the blocks that they were.

use crate::block::BLOCK_BYTES_MAX;
use crate::entropy_filter::Parted;
use crate::error::RelayError;
use crate::frame::{Frame, HEADER_BYTES, UNPACKED_BYTES_MAX};
use crate::pack::Unpacker;
use crate::page_slots::PageSlots;
use crate::paged;

/// Unpacks one connection's blocks, one after the other. Trusts nothing.
pub(crate) struct Unpacking {
    frames: Frames,
    block: Vec<u8>,
}

impl Unpacking {
    pub(crate) fn new() -> Result<Self, RelayError> {
        Ok(Self { frames: Frames::new()?, block: Vec::with_capacity(BLOCK_BYTES_MAX) })
    }

    /// The next block, of what `read_exact` reads; none at the stream's end.
    pub(crate) fn next(
        &mut self,
        read_exact: impl FnMut(&mut [u8]) -> Result<(), RelayError>,
        slots: &PageSlots,
    ) -> Result<Option<&[u8]>, RelayError> {
        match self.frames.next(read_exact)? {
            None => Ok(None),
            Some(Unframed { bytes, is_paged: false }) => Ok(Some(bytes)),
            Some(Unframed { bytes, is_paged: true }) => {
                paged::decode(bytes, slots, &mut self.block)?;
                Ok(Some(&self.block))
            }
        }
    }
}

/// A block as it was packed.
pub(crate) struct Unframed<'a> {
    pub(crate) bytes: &'a [u8],
    /// Whether only the changes of its pages are sent.
    pub(crate) is_paged: bool,
}

/// Unpacks frames, one after the other. Trusts nothing.
pub(crate) struct Frames {
    unpacker: Unpacker,
    packed: Vec<u8>,
    parts: Vec<u8>,
}

impl Frames {
    pub(crate) fn new() -> Result<Self, RelayError> {
        Ok(Self {
            unpacker: Unpacker::new()?,
            packed: vec![0; UNPACKED_BYTES_MAX],
            parts: Vec::with_capacity(UNPACKED_BYTES_MAX),
        })
    }

    /// The next one, of what `read_exact` reads; none at the end.
    pub(crate) fn next(
        &mut self,
        mut read_exact: impl FnMut(&mut [u8]) -> Result<(), RelayError>,
    ) -> Result<Option<Unframed<'_>>, RelayError> {
        let mut header = [0; HEADER_BYTES];
        read_exact(&mut header)?;
        let Frame::Block { packing, is_paged, is_parted, raw_bytes, wire_bytes } = Frame::decode(header)?
        else {
            return Ok(None);
        };
        let packed = self.packed.get_mut(..wire_bytes).ok_or(RelayError::Malformed("a block too long"))?;
        read_exact(packed)?;
        let bytes = if is_parted {
            let parted = Parted::decode(packed, raw_bytes)?;
            let rest = self.unpacker.unpack(packing, parted.packed, parted.rest_bytes)?;
            self.parts.clear();
            parted.write(rest, &mut self.parts);
            &self.parts
        } else {
            self.unpacker.unpack(packing, packed, raw_bytes)?
        };
        Ok(Some(Unframed { bytes, is_paged }))
    }
}
