//! Messages of a hostile source.

use std::collections::VecDeque;

use drainpipe_relay::BundleUnpacker;

use super::DISK_BYTES;
use crate::command::{Command, Operation};
use crate::fences::Fences;
use crate::frame::{PACKED_LENGTH_BYTES, QUESTION_BYTES, Question, packed_bytes};
use crate::limits::{DATA_BYTES_MAX, HELD_BYTES_MAX, PIECES_PER_STREAM_MAX};
use crate::requests::RequestsInFlight;

/// What is held of each request, and each fence, as many as fit into the longest input; what unpacks, and what it fills.
pub const QUESTIONS_HOLDS_BYTES: usize = 4 << 20;

/// One stream, as the target takes it. Every third question, the disk answers the oldest.
///
/// Holds: what reaches the disk lies within it and is said again as it was; what is held stays within its bounds; what
/// came packed fills as much as it says, or ends the stream.
pub fn questions(mut data: &[u8]) {
    let (mut requests, mut fences) = (RequestsInFlight::default(), Fences::default());
    let mut at_disk = VecDeque::new();
    let mut held_bytes = 0;
    fences.open(0);
    for turn in 1.. {
        let Some((header, rest)) = data.split_first_chunk::<QUESTION_BYTES>() else { return };
        let Ok(question) = Question::decode(header, DISK_BYTES) else { return };
        assert_eq!(question.encode(), *header);
        data = rest;
        match question {
            Question::Command { handle, command } => {
                assert_within_the_disk(&command);
                if requests.take(handle, command).is_err() {
                    return;
                }
                let Some(rest) = data.get(command.sent_bytes() as usize..) else { return };
                data = rest;
                requests.goes_to_disk(handle);
                held_bytes += command.held_bytes();
                at_disk.push_back((handle, command));
            }
            Question::Packed { handle, command } => {
                assert_within_the_disk(&command);
                assert_eq!(command.operation, Operation::Write);
                if requests.take(handle, command).is_err() {
                    return;
                }
                let Some(rest) = unpack(&command, data) else { return };
                data = rest;
                requests.goes_to_disk(handle);
                held_bytes += command.held_bytes();
                at_disk.push_back((handle, command));
            }
            Question::Fence(0) | Question::End => return,
            Question::Fence(number) => {
                fences.fence(number);
                assert!(fences.has_ended(number) && !fences.open(number) && fences.open_streams() == 1);
            }
            Question::Alive => {}
        }
        assert!(held_bytes <= HELD_BYTES_MAX && at_disk.len() <= PIECES_PER_STREAM_MAX);
        if turn % 3 == 0
            && let Some((handle, command)) = at_disk.pop_front()
        {
            assert_eq!(requests.asked(handle), Ok(command));
            requests.is_answered(handle);
            requests.let_go(handle);
            held_bytes -= command.held_bytes();
        }
        assert_eq!(requests.at_disk(), at_disk.len());
    }
}

/// What follows it; none where the stream ends.
fn unpack<'data>(command: &Command, data: &'data [u8]) -> Option<&'data [u8]> {
    let (length, rest) = data.split_first_chunk::<PACKED_LENGTH_BYTES>()?;
    let bytes = packed_bytes(*length, command.length).ok()?;
    let (packed, rest) = rest.split_at_checked(bytes)?;
    let mut raw = vec![0; command.length as usize];
    BundleUnpacker::new().ok()?.unpack(packed, &mut raw).ok()?;
    Some(rest)
}

fn assert_within_the_disk(command: &Command) {
    assert!(command.end() <= DISK_BYTES && command.held_bytes() <= DATA_BYTES_MAX as usize);
    assert!(command.length > 0 || command.operation == Operation::Flush);
}

/// Requests of each kind, with data where they belong.
pub fn questions_seeds() -> Vec<Vec<u8>> {
    let command = |operation, offset, length| Command { operation, offset, length, ..Command::FLUSH };
    let commands = [
        command(Operation::Write, 4096, 512),
        command(Operation::Read, DISK_BYTES - 4096, 4096),
        command(Operation::Compare, 4096, 1 << 20),
        Command { is_durable: true, ..command(Operation::Write, 0, 100) },
        Command { keeps_allocation: true, ..command(Operation::WriteZeroes, 0, 1 << 29) },
        command(Operation::Trim, 1 << 20, 1 << 20),
        Command::FLUSH,
    ];
    let said = |(handle, command): (u64, Command)| {
        let data = vec![7; command.sent_bytes() as usize];
        [&Question::Command { handle, command }.encode()[..], &data].concat()
    };
    let mut seeds: Vec<Vec<u8>> = (0..).zip(commands).map(said).collect();
    let write = command(Operation::Write, 8192, 4096);
    let packed = packed_zeroes();
    let length = u32::try_from(packed.len()).expect("it is short").to_le_bytes();
    seeds.push([&Question::Packed { handle: 77, command: write }.encode()[..], &length, &packed].concat());
    seeds.push(seeds.concat());
    let others = [Question::Alive, Question::Fence(3), Question::Fence(3), Question::End];
    seeds.push(others.map(Question::encode).concat());
    seeds
}

/// 4 KiB of them by LZ4: one, again and again, and the five that each block ends with, behind the header of a block.
fn packed_zeroes() -> Vec<u8> {
    let header = [1, 0, 16, 0, 0, 26, 0, 0];
    [&header[..], &[0x1f, 0, 1, 0], &[255; 15], &[246, 0x50], &[0; 5]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_in_a_seed_is_understood() {
        let packed = packed_zeroes();
        let mut raw = [7; 4096];
        BundleUnpacker::new().unwrap().unpack(&packed, &mut raw).unwrap();
        assert!(raw.iter().all(|byte| *byte == 0));
    }
}
