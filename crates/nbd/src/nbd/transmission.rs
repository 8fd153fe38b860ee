//! Requests and simple replies.

use super::ErrorCode;
use crate::command::{Command, Operation};
use crate::error::Malformed;
use crate::limits::DATA_BYTES_MAX;

pub(crate) const REQUEST_BYTES: usize = 28;
pub(crate) const REPLY_BYTES: usize = 16;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

const READ: u16 = 0;
const WRITE: u16 = 1;
const DISC: u16 = 2;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;

const FUA: u16 = 1;
const NO_HOLE: u16 = 2;

/// What a client asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// To be done.
    Command { cookie: u64, command: Command },
    /// To be answered with an error.
    Unserved(Unserved),
    /// The client goes.
    Disconnect,
}

/// What cannot be done, while the client can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unserved {
    pub(crate) cookie: u64,
    pub(crate) error: ErrorCode,
    /// Data that follow it all the same.
    pub(crate) data_bytes: u32,
}

/// Trusts nothing: what is decoded lies within a disk of this size. What would hold too much ends the connection.
pub(crate) fn decode_request(bytes: &[u8; REQUEST_BYTES], disk_bytes: u64) -> Result<Request, Malformed> {
    let [m0, m1, m2, m3, f0, f1, t0, t1, c0, c1, c2, c3, c4, c5, c6, c7, rest @ ..] = *bytes;
    let [o0, o1, o2, o3, o4, o5, o6, o7, length @ ..] = rest;
    if u32::from_be_bytes([m0, m1, m2, m3]) != REQUEST_MAGIC {
        return Err(Malformed("no request"));
    }
    let (flags, kind) = (u16::from_be_bytes([f0, f1]), u16::from_be_bytes([t0, t1]));
    let cookie = u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]);
    let offset = u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7]);
    let length = u32::from_be_bytes(length);
    let operation = match kind {
        DISC => return Ok(Request::Disconnect),
        READ => Operation::Read,
        WRITE => Operation::Write,
        FLUSH => Operation::Flush,
        TRIM => Operation::Trim,
        WRITE_ZEROES => Operation::WriteZeroes,
        _ => return Ok(Request::Unserved(Unserved { cookie, error: ErrorCode::INVALID, data_bytes: 0 })),
    };
    if operation == Operation::Flush {
        return Ok(Request::Command { cookie, command: Command::FLUSH });
    }
    let command = Command { operation, is_durable: false, keeps_allocation: false, offset, length };
    if command.held_bytes() > DATA_BYTES_MAX as usize {
        return Err(Malformed("a request for more data than was said to be possible"));
    }
    Ok(with_flags(command, flags, disk_bytes).map_or_else(
        |error| Request::Unserved(Unserved { cookie, error, data_bytes: command.sent_bytes() }),
        |command| Request::Command { cookie, command },
    ))
}

fn with_flags(command: Command, flags: u16, disk_bytes: u64) -> Result<Command, ErrorCode> {
    let allowed = if command.operation == Operation::WriteZeroes { FUA | NO_HOLE } else { FUA };
    let is_within =
        command.offset.checked_add(u64::from(command.length)).is_some_and(|end| end <= disk_bytes);
    match command.operation {
        _ if flags & !allowed != 0 || command.length == 0 => Err(ErrorCode::INVALID),
        Operation::Write | Operation::WriteZeroes if !is_within => Err(ErrorCode::NO_SPACE),
        _ if !is_within => Err(ErrorCode::INVALID),
        _ => Ok(Command {
            is_durable: flags & FUA != 0 && command.modifies(),
            keeps_allocation: flags & NO_HOLE != 0,
            ..command
        }),
    }
}

/// As it is sent.
pub(crate) fn encode_request(cookie: u64, command: &Command) -> [u8; REQUEST_BYTES] {
    let kind = match command.operation {
        // What is compared is read for it.
        Operation::Read | Operation::Compare => READ,
        Operation::Write => WRITE,
        Operation::WriteZeroes => WRITE_ZEROES,
        Operation::Trim => TRIM,
        Operation::Flush => FLUSH,
    };
    let flags = u16::from(command.is_durable) * FUA + u16::from(command.keeps_allocation) * NO_HOLE;
    request(kind, flags, cookie, command.offset, command.length)
}

/// What a client says last.
pub(crate) const DISCONNECT: [u8; REQUEST_BYTES] = {
    let [m0, m1, m2, m3] = REQUEST_MAGIC.to_be_bytes();
    let [t0, t1] = DISC.to_be_bytes();
    let mut bytes = [0; REQUEST_BYTES];
    (bytes[0], bytes[1], bytes[2], bytes[3], bytes[6], bytes[7]) = (m0, m1, m2, m3, t0, t1);
    bytes
};

fn request(kind: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// What a server answers, without the data of a READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    pub(crate) error: Option<ErrorCode>,
}

/// As it is sent.
pub(crate) fn encode_reply(reply: Reply) -> [u8; REPLY_BYTES] {
    let mut bytes = [0; REPLY_BYTES];
    bytes[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&reply.error.map_or(0, ErrorCode::number).to_be_bytes());
    bytes[8..].copy_from_slice(&reply.cookie.to_be_bytes());
    bytes
}

/// Trusts nothing. An error that NBD does not have is taken for EIO.
pub(crate) fn decode_reply(bytes: &[u8; REPLY_BYTES]) -> Result<Reply, Malformed> {
    let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = *bytes;
    if u32::from_be_bytes([m0, m1, m2, m3]) != REPLY_MAGIC {
        return Err(Malformed("no simple reply"));
    }
    let error = match u32::from_be_bytes([e0, e1, e2, e3]) {
        0 => None,
        number => Some(ErrorCode::known(number).unwrap_or(ErrorCode::IO)),
    };
    Ok(Reply { cookie: u64::from_be_bytes(cookie), error })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DISK_BYTES: u64 = 1 << 30;

    proptest! {
        #[test]
        fn whatever_is_decoded_lies_within_the_disk(
            flags in 0..4_u16, kind in 0..8_u16, cookie: u64, offset in 0..2 * DISK_BYTES, length in 0..2 * DATA_BYTES_MAX,
        ) {
            match decode_request(&request(kind, flags, cookie, offset, length), DISK_BYTES) {
                Ok(Request::Command { cookie: same, command }) => {
                    prop_assert_eq!(same, cookie);
                    prop_assert!(command.end() <= DISK_BYTES);
                    prop_assert!(command.held_bytes() <= DATA_BYTES_MAX as usize);
                    let again = decode_request(&encode_request(cookie, &command), DISK_BYTES).unwrap();
                    prop_assert_eq!(again, Request::Command { cookie, command });
                }
                Ok(Request::Unserved(unserved)) => prop_assert!(unserved.data_bytes <= DATA_BYTES_MAX),
                Ok(Request::Disconnect) => prop_assert_eq!(kind, DISC),
                Err(_) => prop_assert!(length > DATA_BYTES_MAX),
            }
        }

        #[test]
        fn whatever_reply_is_decoded_has_an_error_of_nbds(error: u32, cookie: u64) {
            let mut bytes = encode_reply(Reply { cookie, error: None });
            bytes[4..8].copy_from_slice(&error.to_be_bytes());
            let reply = decode_reply(&bytes).unwrap();
            prop_assert_eq!(reply.cookie, cookie);
            prop_assert_eq!(reply.error.is_some(), error != 0);
            prop_assert_eq!(decode_reply(&encode_reply(reply)).unwrap(), reply);
        }
    }

    #[test]
    fn what_cannot_be_served_is_answered() {
        let unserved = |kind, flags, offset, length| match decode_request(
            &request(kind, flags, 1, offset, length),
            DISK_BYTES,
        ) {
            Ok(Request::Unserved(unserved)) => (unserved.error, unserved.data_bytes),
            other => panic!("{other:?}"),
        };
        assert_eq!(unserved(7, 0, 0, 1), (ErrorCode::INVALID, 0), "BLOCK_STATUS");
        assert_eq!(unserved(WRITE_ZEROES, 16, 0, 1), (ErrorCode::INVALID, 0), "FAST_ZERO");
        assert_eq!(unserved(WRITE, 0, DISK_BYTES, 512), (ErrorCode::NO_SPACE, 512));
        assert_eq!(unserved(READ, 0, u64::MAX, 512), (ErrorCode::INVALID, 0));
        assert_eq!(decode_request(&DISCONNECT, DISK_BYTES), Ok(Request::Disconnect));
        assert!(decode_request(&[0; REQUEST_BYTES], DISK_BYTES).is_err());
    }
}
