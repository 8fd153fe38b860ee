//! The target, built like `target/`: streams, and the disk's work for each.

use std::collections::{BTreeMap, VecDeque};

use super::super::Outgoing;
use super::disk::{Cache, Disk, Version};
use super::planted::Planted;
use super::random::Random;
use crate::command::{Command, Operation};
use crate::fences::Fences;
use crate::frame::{Question, StreamNumber};

/// What requests carry.
pub(super) type Data = Vec<Version>;

/// An answer.
#[derive(Debug)]
pub(super) enum SimulatedAnswer {
    Done(u64, Option<Data>),
    Differs(u64),
    Fenced(StreamNumber),
}

#[derive(Debug)]
struct Task {
    handle: u64,
    command: Command,
    data: Option<Data>,
    is_answered: bool,
}

#[derive(Debug, Default)]
pub(super) struct Stream {
    /// What was sent, and what the target has not taken.
    pub(super) wire: VecDeque<Outgoing<Data>>,
    /// The source sends nothing more, though what it has sent may still arrive.
    pub(super) is_cut: bool,
    tasks: Vec<Task>,
    cache: Cache,
    pub(super) answers: VecDeque<SimulatedAnswer>,
    awaited: Vec<StreamNumber>,
}

/// All streams that ever existed, and the disk.
pub(super) struct Target {
    planted: Planted,
    pub(super) disk: Disk,
    fences: Fences,
    pub(super) streams: BTreeMap<StreamNumber, Stream>,
    /// How many requests arrived over a stream that the source had given up.
    pub(super) late: u64,
    /// How many comparisons found the same, and how many did not.
    pub(super) compared: [u64; 2],
}

impl Target {
    pub(super) fn new(planted: Planted) -> Self {
        Self {
            planted,
            disk: Disk::default(),
            fences: Fences::default(),
            streams: BTreeMap::new(),
            late: 0,
            compared: [0; 2],
        }
    }

    pub(super) fn open(&mut self, number: StreamNumber) {
        assert!(self.fences.open(number), "no number is given twice");
        self.streams.insert(number, Stream::default());
    }

    /// Streams that may still deliver something.
    pub(super) fn busy_streams(&self) -> Vec<StreamNumber> {
        let may_act = |(number, stream): &(&StreamNumber, &Stream)| {
            !stream.tasks.is_empty() || self.may_take(**number) || !self.fences.has_ended(**number)
        };
        self.streams.iter().filter(may_act).map(|(number, _)| *number).collect()
    }

    fn may_take(&self, number: StreamNumber) -> bool {
        let is_heeded = self.planted != Planted::FenceNotHeeded || self.streams[&number].wire.is_empty();
        self.fences.is_open(number) || !is_heeded
    }

    /// Does one thing for one stream, if there is any.
    pub(super) fn step(&mut self, number: StreamNumber, random: &mut Random) {
        match random.below(4) {
            0 => self.take(number),
            1 => self.work(number, random),
            2 => self.close(number),
            _ => self.tell_fences(number),
        }
    }

    fn take(&mut self, number: StreamNumber) {
        if !self.may_take(number) {
            return;
        }
        let stream = self.streams.get_mut(&number).expect("it is one of them");
        let Some(Outgoing { question, payload }) = stream.wire.pop_front() else {
            // A stream that is cut ends where what has arrived of it ends.
            if stream.is_cut {
                self.fences.fence(number);
            }
            return;
        };
        self.late += u64::from(stream.is_cut);
        match question {
            Question::Fence(fenced) => {
                stream.awaited.push(fenced);
                self.fences.fence(fenced);
            }
            Question::Command { handle, command } => {
                let is_answered = self.planted == Planted::EarlyReply && command.modifies();
                if is_answered {
                    stream.answers.push_back(SimulatedAnswer::Done(handle, None));
                }
                stream.tasks.push(Task { handle, command, data: payload, is_answered });
            }
            Question::Packed { .. } | Question::Alive | Question::End => unreachable!("no scheduler says so"),
        }
    }

    /// The disk does some of its work.
    fn work(&mut self, number: StreamNumber, random: &mut Random) {
        let first = self.streams.keys().next().copied();
        let stream = self.streams.get_mut(&number).expect("it is one of them");
        if stream.tasks.is_empty() {
            return;
        }
        let Task { handle, command, data, is_answered } =
            stream.tasks.swap_remove(random.index(stream.tasks.len()));
        let begin = usize::try_from(command.offset).expect("the disk is small");
        if command.operation == Operation::Compare {
            return self.compare(number, handle, begin, &data.expect("it has a version"));
        }
        let read = match command.operation {
            Operation::Read => Some(self.disk.read(begin, command.length as usize)),
            Operation::Flush => {
                let is_lost = self.planted == Planted::LostFlush
                    || (self.planted == Planted::FlushOfOneStream && first != Some(number));
                if !is_lost {
                    self.disk.flush(&mut stream.cache);
                }
                None
            }
            Operation::Compare => unreachable!("it was compared"),
            Operation::Write | Operation::WriteZeroes | Operation::Trim => {
                self.disk.write(&mut stream.cache, begin, &data.expect("it has a version"));
                if command.is_durable && self.planted != Planted::FuaForgotten {
                    self.disk.flush(&mut stream.cache);
                }
                None
            }
        };
        if !is_answered {
            stream.answers.push_back(SimulatedAnswer::Done(handle, read));
        }
    }

    fn compare(&mut self, number: StreamNumber, handle: u64, begin: usize, versions: &[Version]) {
        let is_same = self.disk.has(begin, versions);
        self.compared[usize::from(!is_same)] += 1;
        if is_same {
            let caches = self.streams.values_mut().map(|stream| &mut stream.cache);
            self.disk.count_as(begin, versions, caches, self.planted != Planted::LeftNotDurable);
        }
        let stream = self.streams.get_mut(&number).expect("it is one of them");
        stream.answers.push_back(if is_same || self.planted == Planted::DifferenceMissed {
            SimulatedAnswer::Done(handle, None)
        } else {
            SimulatedAnswer::Differs(handle)
        });
    }

    /// Ends a stream that takes nothing more, once the disk has done all of its work.
    fn close(&mut self, number: StreamNumber) {
        let stream = self.streams.get_mut(&number).expect("it is one of them");
        let is_closing = !self.fences.is_open(number) && !self.fences.has_ended(number);
        let waits = !stream.tasks.is_empty() && self.planted != Planted::FenceDoesNotWait;
        if !is_closing || waits {
            return;
        }
        if self.planted != Planted::FenceDoesNotFlush {
            self.disk.flush(&mut stream.cache);
        }
        self.fences.end(number);
    }

    fn tell_fences(&mut self, number: StreamNumber) {
        let stream = self.streams.get_mut(&number).expect("it is one of them");
        let ended = stream.awaited.iter().position(|awaited| self.fences.has_ended(*awaited));
        if let Some(ended) = ended {
            let fenced = stream.awaited.swap_remove(ended);
            stream.answers.push_back(SimulatedAnswer::Fenced(fenced));
        }
    }
}
