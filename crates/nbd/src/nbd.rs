//! The part of NBD that is needed: fixed newstyle negotiation, simple replies. Numbers are big-endian.
//!
//! The protocol: <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>

mod ask;
mod offer;
mod transmission;

pub(crate) use ask::open;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use offer::answers;
pub(crate) use offer::{Offered, offer};
pub(crate) use transmission::{
    DISCONNECT, REPLY_BYTES, REQUEST_BYTES, Reply, Request, Unserved, decode_reply, decode_request,
    encode_reply, encode_request,
};

use crate::error::Malformed;

const MAGIC: [u8; 8] = *b"NBDMAGIC";
const OPTION_MAGIC: [u8; 8] = *b"IHAVEOPT";
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

// Flags of both sides, before the options.
const FIXED_NEWSTYLE: u16 = 1;
const NO_ZEROES: u16 = 2;

const OPTION_EXPORT_NAME: u32 = 1;
const OPTION_ABORT: u32 = 2;
const OPTION_INFO: u32 = 6;
const OPTION_GO: u32 = 7;

const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_ERROR: u32 = 1 << 31;
const REPLY_UNSUPPORTED: u32 = REPLY_ERROR + 1;
const REPLY_INVALID: u32 = REPLY_ERROR + 3;
const REPLY_UNKNOWN: u32 = REPLY_ERROR + 6;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

// What an export can do.
const HAS_FLAGS: u16 = 1;
const READ_ONLY: u16 = 1 << 1;
const SEND_FLUSH: u16 = 1 << 2;
const SEND_FUA: u16 = 1 << 3;
const SEND_TRIM: u16 = 1 << 5;
const SEND_WRITE_ZEROES: u16 = 1 << 6;

/// What a splitter's export can do, and what it asks of the disk's own.
const ABILITIES: u16 = HAS_FLAGS | SEND_FLUSH | SEND_FUA | SEND_TRIM | SEND_WRITE_ZEROES;

/// No option and no reply to one is longer: a name has 4,096 bytes at most.
const OPTION_BYTES_MAX: u32 = 16 << 10;

/// Options of one client, and replies to one option.
const OPTIONS_MAX: usize = 64;

/// How a request failed, as NBD numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ErrorCode(u32);

impl ErrorCode {
    pub(crate) const IO: Self = Self(5);
    pub(crate) const INVALID: Self = Self(22);
    pub(crate) const NO_SPACE: Self = Self(28);

    /// EPERM, EIO, ENOMEM, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP, ESHUTDOWN.
    const ALL: [u32; 8] = [1, 5, 12, 22, 28, 75, 95, 108];

    pub(crate) fn known(number: u32) -> Option<Self> {
        Self::ALL.contains(&number).then_some(Self(number))
    }

    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], Malformed> {
    let (first, rest) = bytes.split_first_chunk().ok_or(Malformed("an option that is too short"))?;
    *bytes = rest;
    Ok(*first)
}
