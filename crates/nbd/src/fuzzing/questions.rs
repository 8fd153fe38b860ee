//! What a hostile source sends.

use std::collections::VecDeque;

use super::DISK_BYTES;
use crate::command::{Command, Operation};
use crate::fences::Fences;
use crate::frame::{QUESTION_BYTES, Question};
use crate::held::Held;
use crate::limits::{DATA_BYTES_MAX, HELD_BYTES_MAX, PIECES_PER_STREAM_MAX};

/// What is held of each request, and each fence: as many as fit into the longest input.
pub const QUESTIONS_HOLDS_BYTES: usize = 1 << 20;

/// One stream, as the target takes it. Every third question, the disk answers the oldest.
///
/// Holds: what reaches the disk lies within it and is said again as it was; what is held stays within its bounds.
pub fn questions(mut data: &[u8]) {
    let (mut held, mut fences) = (Held::default(), Fences::default());
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
                if held.take(handle, command).is_err() {
                    return;
                }
                let Some(rest) = data.get(command.sent_bytes() as usize..) else { return };
                data = rest;
                held.goes_to_disk(handle);
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
            assert_eq!(held.asked(handle), Ok(command));
            held.is_answered(handle);
            held.let_go(handle);
            held_bytes -= command.held_bytes();
        }
        assert_eq!(held.at_disk(), at_disk.len());
    }
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
    seeds.push(seeds.concat());
    let others = [Question::Alive, Question::Fence(3), Question::Fence(3), Question::End];
    seeds.push(others.map(Question::encode).concat());
    seeds
}
