//! What the two ends of a stream say to each other, after the [greeting](crate::greeting). Numbers are little-endian.
//!
//! ```text
//! question  kind 1, flags 1, zero 2, length 4, offset 8, handle 8; after a WRITE its data,
//!           after a COMPARE their digest, after a PACKED WRITE the length of its packed data 4, and these
//! answer    kind 1, zero 3, value 4, handle 8; after DATA as many bytes as its value says
//! ```

use crate::command::{Command, Operation};
use crate::error::Malformed;
use crate::limits::DATA_BYTES_MAX;
use crate::nbd::ErrorCode;

/// Which stream of a disk, counted from its first one. None is given twice.
pub(crate) type StreamNumber = u16;

pub(crate) const QUESTION_BYTES: usize = 24;
pub(crate) const ANSWER_BYTES: usize = 16;

/// Handles from here on are the target's own.
pub(crate) const HANDLE_MAX: u64 = (1 << 62) - 1;

const READ: u8 = 1;
const WRITE: u8 = 2;
const WRITE_ZEROES: u8 = 3;
const TRIM: u8 = 4;
const FLUSH: u8 = 5;
const FENCE: u8 = 6;
const ALIVE: u8 = 7;
const END: u8 = 8;
const COMPARE: u8 = 9;
const PACKED_WRITE: u8 = 10;

const DURABLE: u8 = 1;
const KEEPS_ALLOCATION: u8 = 2;

/// From the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Question {
    /// To be done by the disk.
    Command { handle: u64, command: Command },
    /// The same, of a WRITE whose data are packed.
    Packed { handle: u64, command: Command },
    /// Nothing more of this stream may reach the disk; to be answered when that is so.
    Fence(StreamNumber),
    /// Nothing: the source is there.
    Alive,
    /// Nothing more will come.
    End,
}

impl Question {
    pub(crate) fn encode(self) -> [u8; QUESTION_BYTES] {
        let (kind, flags, length, offset, handle) = match self {
            Self::Command { handle, command } => {
                (kind_of(command.operation), flags_of(command), command.length, command.offset, handle)
            }
            Self::Packed { handle, command } => {
                (PACKED_WRITE, flags_of(command), command.length, command.offset, handle)
            }
            Self::Fence(number) => (FENCE, 0, 0, u64::from(number), 0),
            Self::Alive => (ALIVE, 0, 0, 0, 0),
            Self::End => (END, 0, 0, 0, 0),
        };
        let mut bytes = [0; QUESTION_BYTES];
        bytes[0] = kind;
        bytes[1] = flags;
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        bytes[8..16].copy_from_slice(&offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&handle.to_le_bytes());
        bytes
    }

    /// Trusts nothing: what is decoded lies within a disk of this size.
    pub(crate) fn decode(bytes: &[u8; QUESTION_BYTES], disk_bytes: u64) -> Result<Self, Malformed> {
        let [kind, flags, zero, zeroes, l0, l1, l2, l3, o0, o1, o2, o3, o4, o5, o6, o7, handle @ ..] = *bytes;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let offset = u64::from_le_bytes([o0, o1, o2, o3, o4, o5, o6, o7]);
        let handle = u64::from_le_bytes(handle);
        if zero != 0 || zeroes != 0 {
            return Err(Malformed("a reserved byte is set"));
        }
        let operation = match kind {
            READ => Operation::Read,
            WRITE | PACKED_WRITE => Operation::Write,
            WRITE_ZEROES => Operation::WriteZeroes,
            TRIM => Operation::Trim,
            FLUSH => Operation::Flush,
            COMPARE => Operation::Compare,
            _ => return decode_other(kind, flags, length, offset, handle),
        };
        let command = Command {
            operation,
            is_durable: flags & DURABLE != 0,
            keeps_allocation: flags & KEEPS_ALLOCATION != 0,
            offset,
            length,
        };
        check(&command, flags, disk_bytes)?;
        if handle > HANDLE_MAX {
            return Err(Malformed("a handle that no source gives"));
        }
        Ok(if kind == PACKED_WRITE {
            Self::Packed { handle, command }
        } else {
            Self::Command { handle, command }
        })
    }
}

/// Length of the field with the length of compressed data.
pub(crate) const PACKED_LENGTH_BYTES: usize = 4;

/// The length of the compressed data that follow, which become `raw_bytes`. Trusts nothing: it is shorter than those.
pub(crate) fn packed_bytes(bytes: [u8; PACKED_LENGTH_BYTES], raw_bytes: u32) -> Result<usize, Malformed> {
    let length = u32::from_le_bytes(bytes);
    if length == 0 || length >= raw_bytes {
        return Err(Malformed("compressed data that are empty, or no shorter than what they become"));
    }
    Ok(length as usize)
}

fn kind_of(operation: Operation) -> u8 {
    match operation {
        Operation::Read => READ,
        Operation::Write => WRITE,
        Operation::Compare => COMPARE,
        Operation::WriteZeroes => WRITE_ZEROES,
        Operation::Trim => TRIM,
        Operation::Flush => FLUSH,
    }
}

fn flags_of(command: Command) -> u8 {
    u8::from(command.is_durable) * DURABLE + u8::from(command.keeps_allocation) * KEEPS_ALLOCATION
}

fn decode_other(kind: u8, flags: u8, length: u32, offset: u64, handle: u64) -> Result<Question, Malformed> {
    let is_bare = flags == 0 && length == 0 && handle == 0;
    match kind {
        FENCE if is_bare => StreamNumber::try_from(offset)
            .map(Question::Fence)
            .map_err(|_| Malformed("a fence for a stream that cannot be")),
        ALIVE if is_bare && offset == 0 => Ok(Question::Alive),
        END if is_bare && offset == 0 => Ok(Question::End),
        FENCE | ALIVE | END => Err(Malformed("a question with more than belongs to it")),
        _ => Err(Malformed("an unknown question")),
    }
}

fn check(command: &Command, flags: u8, disk_bytes: u64) -> Result<(), Malformed> {
    let allowed = match command.operation {
        Operation::Read | Operation::Compare | Operation::Flush => 0,
        Operation::Write | Operation::Trim => DURABLE,
        Operation::WriteZeroes => DURABLE | KEEPS_ALLOCATION,
    };
    if flags & !allowed != 0 {
        return Err(Malformed("a flag that the request cannot have"));
    }
    if command.operation == Operation::Flush {
        let is_bare = command.offset == 0 && command.length == 0;
        return if is_bare { Ok(()) } else { Err(Malformed("a flush of a part of the disk")) };
    }
    let is_within =
        command.offset.checked_add(u64::from(command.length)).is_some_and(|end| end <= disk_bytes);
    if command.length == 0 || !is_within {
        return Err(Malformed("a request beyond the end of the disk, or of nothing"));
    }
    if command.held_bytes() > DATA_BYTES_MAX as usize {
        return Err(Malformed("a request for more data than may be held"));
    }
    Ok(())
}

const DONE: u8 = 1;
const DATA: u8 = 2;
const FENCED: u8 = 3;
const PRESENT: u8 = 4;
const ENDED: u8 = 5;
const FAILED: u8 = 6;
const DIFFERS: u8 = 7;

/// From the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Answers a request that brings no data, or failed.
    Done { handle: u64, error: Option<ErrorCode> },
    /// Answers a READ: so many bytes follow.
    Data { handle: u64, length: u32 },
    /// Answers a COMPARE: something else is there, or it cannot be read.
    Differs { handle: u64 },
    /// Nothing more of this stream reaches the disk.
    Fenced(StreamNumber),
    /// Nothing: the target is there.
    Alive,
    /// All is done and flushed, as the answer to an end.
    Ended,
    /// The disk answers no more: nobody knows what of it was done.
    Failed,
}

impl Answer {
    pub(crate) fn encode(self) -> [u8; ANSWER_BYTES] {
        let (kind, value, handle) = match self {
            Self::Done { handle, error } => (DONE, error.map_or(0, ErrorCode::number), handle),
            Self::Data { handle, length } => (DATA, length, handle),
            Self::Differs { handle } => (DIFFERS, 0, handle),
            Self::Fenced(number) => (FENCED, u32::from(number), 0),
            Self::Alive => (PRESENT, 0, 0),
            Self::Ended => (ENDED, 0, 0),
            Self::Failed => (FAILED, 0, 0),
        };
        let mut bytes = [0; ANSWER_BYTES];
        bytes[0] = kind;
        bytes[4..8].copy_from_slice(&value.to_le_bytes());
        bytes[8..16].copy_from_slice(&handle.to_le_bytes());
        bytes
    }

    /// Trusts nothing.
    pub(crate) fn decode(bytes: &[u8; ANSWER_BYTES]) -> Result<Self, Malformed> {
        let [kind, z0, z1, z2, v0, v1, v2, v3, handle @ ..] = *bytes;
        let value = u32::from_le_bytes([v0, v1, v2, v3]);
        let handle = u64::from_le_bytes(handle);
        if [z0, z1, z2] != [0; 3] {
            return Err(Malformed("a reserved byte is set"));
        }
        if handle > HANDLE_MAX {
            return Err(Malformed("a handle that no source gives"));
        }
        match kind {
            DONE if value == 0 => Ok(Self::Done { handle, error: None }),
            DONE => match ErrorCode::known(value) {
                Some(error) => Ok(Self::Done { handle, error: Some(error) }),
                None => Err(Malformed("an error that NBD does not have")),
            },
            DATA if (1..=DATA_BYTES_MAX).contains(&value) => Ok(Self::Data { handle, length: value }),
            DATA => Err(Malformed("more data than may be held, or none")),
            DIFFERS if value == 0 => Ok(Self::Differs { handle }),
            FENCED if handle == 0 => StreamNumber::try_from(value)
                .map(Self::Fenced)
                .map_err(|_| Malformed("a fence for a stream that cannot be")),
            PRESENT if handle == 0 && value == 0 => Ok(Self::Alive),
            ENDED if handle == 0 && value == 0 => Ok(Self::Ended),
            FAILED if handle == 0 && value == 0 => Ok(Self::Failed),
            _ => Err(Malformed("an unknown answer")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DISK_BYTES: u64 = 1 << 30;

    proptest! {
        #[test]
        fn whatever_is_decoded_lies_within_the_disk_and_encodes_to_the_same(
            mut bytes: [u8; QUESTION_BYTES], kind in 0..12_u8, is_small: bool,
        ) {
            bytes[0] = kind;
            if is_small {
                // Chance alone seldom meets what is allowed.
                for at in [2, 3, 6, 7, 12, 13, 14, 15, 23] {
                    bytes[at] = 0;
                }
                bytes[1] &= 3;
            }
            if let Ok(question) = Question::decode(&bytes, DISK_BYTES) {
                prop_assert_eq!(question.encode(), bytes);
                if let Question::Command { command, .. } | Question::Packed { command, .. } = question {
                    prop_assert!(command.end() <= DISK_BYTES);
                    prop_assert!(command.held_bytes() <= DATA_BYTES_MAX as usize);
                }
            }
        }

        #[test]
        fn whatever_answer_is_decoded_encodes_to_the_same(mut bytes: [u8; ANSWER_BYTES], kind in 0..9_u8) {
            bytes[..4].copy_from_slice(&[kind, 0, 0, 0]);
            if let Ok(answer) = Answer::decode(&bytes) {
                prop_assert_eq!(answer.encode(), bytes);
            }
        }

        #[test]
        fn what_is_asked_is_understood(offset in 0..DISK_BYTES - u64::from(DATA_BYTES_MAX), length in 1..=DATA_BYTES_MAX, handle in 0..=HANDLE_MAX, is_durable: bool) {
            for operation in [Operation::Write, Operation::WriteZeroes, Operation::Trim] {
                let command = Command { operation, is_durable, keeps_allocation: false, offset, length };
                let question = Question::Command { handle, command };
                prop_assert_eq!(Question::decode(&question.encode(), DISK_BYTES).unwrap(), question);
            }
            let command = Command { operation: Operation::Write, is_durable, keeps_allocation: false, offset, length };
            let packed = Question::Packed { handle, command };
            prop_assert_eq!(Question::decode(&packed.encode(), DISK_BYTES).unwrap(), packed);
        }

        #[test]
        fn packed_data_are_shorter_than_what_they_become(said: u32, raw_bytes in 0..=DATA_BYTES_MAX, is_near: bool) {
            let said = if is_near { said % (raw_bytes + 2) } else { said };
            let bytes = packed_bytes(said.to_le_bytes(), raw_bytes);
            prop_assert_eq!(bytes.ok(), (1..raw_bytes).contains(&said).then_some(said as usize));
        }
    }

    #[test]
    fn what_is_not_about_the_disk_is_understood() {
        for question in [Question::Fence(65_535), Question::Alive, Question::End] {
            assert_eq!(Question::decode(&question.encode(), DISK_BYTES).unwrap(), question);
        }
        let answers = [
            Answer::Done { handle: 7, error: None },
            Answer::Done { handle: 7, error: ErrorCode::known(28) },
            Answer::Data { handle: 9, length: DATA_BYTES_MAX },
            Answer::Differs { handle: 11 },
            Answer::Fenced(3),
            Answer::Alive,
            Answer::Ended,
            Answer::Failed,
        ];
        for answer in answers {
            assert_eq!(Answer::decode(&answer.encode()).unwrap(), answer);
        }
    }

    #[test]
    fn what_reaches_beyond_the_disk_is_refused() {
        let command = |operation, offset, length| Command { operation, offset, length, ..Command::FLUSH };
        for command in [
            command(Operation::Write, DISK_BYTES, 1),
            command(Operation::Write, u64::MAX, 2),
            command(Operation::Read, 0, 0),
            command(Operation::Read, 0, DATA_BYTES_MAX + 1),
            command(Operation::Compare, 0, DATA_BYTES_MAX + 1),
            command(Operation::Compare, DISK_BYTES - 1, 2),
            command(Operation::Flush, 0, 1),
            command(Operation::WriteZeroes, 1, 1 << 30),
            Command { is_durable: true, ..command(Operation::Read, 0, 1) },
        ] {
            let bytes = Question::Command { handle: 0, command }.encode();
            assert!(Question::decode(&bytes, DISK_BYTES).is_err(), "{command:?}");
        }
    }
}
