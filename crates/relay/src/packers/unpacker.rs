//! Unpacks what [`Packers`](super::Packers) have packed, at the other end.

use crate::error::RelayError;
use crate::unpacking::{Frames, Unframed};

/// Unpacks one after the other. Trusts nothing.
pub struct BundleUnpacker(Frames);

impl BundleUnpacker {
    /// One that holds as much memory as it ever will.
    pub fn new() -> Result<Self, RelayError> {
        Ok(Self(Frames::new()?))
    }

    /// Fills all of `raw`.
    pub fn unpack(&mut self, mut frames: &[u8], mut raw: &mut [u8]) -> Result<(), RelayError> {
        let mut read_exact = |to: &mut [u8]| {
            let (from, rest) = frames.split_at_checked(to.len()).ok_or(RelayError::Truncated)?;
            to.copy_from_slice(from);
            frames = rest;
            Ok(())
        };
        while !raw.is_empty() {
            let Some(Unframed { bytes, is_paged: false }) = self.0.next(&mut read_exact)? else {
                return Err(RelayError::Malformed("less than belongs to it"));
            };
            let (room, rest) = raw.split_at_mut_checked(bytes.len()).ok_or(TOO_LONG)?;
            room.copy_from_slice(bytes);
            raw = rest;
        }
        if frames.is_empty() { Ok(()) } else { Err(TOO_LONG) }
    }
}

const TOO_LONG: RelayError = RelayError::Malformed("more than belongs to it");

impl std::fmt::Debug for BundleUnpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BundleUnpacker(..)")
    }
}
