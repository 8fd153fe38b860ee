//! One run: a client, the scheduler, streams that come and go, and the target.

use super::super::{Outgoing, Piece, Scheduler};
use super::disk::BLOCKS;
use super::planted::Planted;
use super::random::Random;
use super::rules::Rules;
use super::target::{Data, SimulatedAnswer, Target};
use crate::command::{Command, Operation};
use crate::frame::{Question, StreamNumber};

const REQUESTS: u64 = 40;
const IN_FLIGHT_MAX: usize = 8;
const STREAMS_LIVE_MAX: usize = 4;

/// First steps with faults, and then steps without. By then, everything must be answered.
const STEPS_WITH_FAULTS: u64 = 1_500;
const STEPS_MAX: u64 = 20_000;

/// What a run has met.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) resent: u64,
    pub(super) late: u64,
    pub(super) fenced: u64,
    pub(super) flushes: u64,
    /// How many comparisons found the same, and how many did not.
    pub(super) compared: [u64; 2],
}

struct World {
    random: Random,
    planted: Planted,
    scheduler: Scheduler<Data>,
    target: Target,
    rules: Rules,
    live: Vec<StreamNumber>,
    next_number: StreamNumber,
    submitted: u64,
    cut_percent: u64,
    run: Run,
}

/// The error is the rule that was broken.
pub(super) fn simulate(seed: u64, planted: Planted) -> Result<Run, String> {
    let mut random = Random(seed);
    let cut_percent = [0, 1, 3][random.index(3)];
    let mut world = World {
        random,
        planted,
        scheduler: Scheduler::new(),
        target: Target::new(planted),
        rules: Rules::default(),
        live: vec![],
        next_number: 0,
        submitted: 0,
        cut_percent,
        run: Run::default(),
    };
    for step in 0..STEPS_MAX {
        world.step(step < STEPS_WITH_FAULTS)?;
        if world.submitted == REQUESTS && world.rules.unanswered() == 0 {
            return world.end();
        }
    }
    Err(format!("{} requests are not answered in time: {:?}", world.rules.unanswered(), world.scheduler))
}

impl World {
    fn step(&mut self, has_faults: bool) -> Result<(), String> {
        match self.random.below(8) {
            0 => self.submit(),
            1 if self.live.is_empty() || (has_faults && self.random.chance(5)) => self.join(),
            1 if has_faults && self.random.chance(self.cut_percent * 4) => self.cut(),
            1 | 2 => self.send()?,
            3 | 4 => self.hear()?,
            _ => self.work(),
        }
        for done in self.scheduler.take_done() {
            self.run.flushes += u64::from(done.command.operation == Operation::Flush);
            self.rules.answered(&done, &self.target.disk)?;
        }
        self.rules.hold(&self.target.disk)
    }

    fn submit(&mut self) {
        if self.submitted == REQUESTS || self.rules.unanswered() >= IN_FLIGHT_MAX {
            return;
        }
        self.submitted += 1;
        let (version, command) = (self.submitted, self.command());
        self.rules.asked(version, command);
        let pieces = self.cut_up(version, command);
        self.scheduler.submit(version, self.as_submitted(command), pieces);
    }

    fn command(&mut self) -> Command {
        let operations =
            [Operation::Write, Operation::Write, Operation::WriteZeroes, Operation::Read, Operation::Flush];
        let operation = operations[self.random.index(operations.len())];
        if operation == Operation::Flush {
            return Command::FLUSH;
        }
        let begin = self.random.index(BLOCKS);
        let length = 1 + self.random.index((BLOCKS - begin).min(4));
        let is_durable = operation != Operation::Read && self.random.chance(20);
        let length = u32::try_from(length).expect("the disk is small");
        Command { operation, is_durable, keeps_allocation: false, offset: begin as u64, length }
    }

    /// The messages to the scheduler, which the planted bugs falsify.
    fn as_submitted(&self, command: Command) -> Command {
        let apart = Command { offset: self.submitted * 100, ..command };
        match self.planted {
            Planted::OverlapsAtOnce if command.operation != Operation::Flush => apart,
            Planted::FlushDoesNotWait if command.modifies() => {
                Command { operation: Operation::Read, ..command }
            }
            Planted::FuaReportedEarly => Command { is_durable: false, ..command },
            _ => command,
        }
    }

    /// Data and zeroes, in random order.
    fn cut_up(&mut self, version: u64, command: Command) -> Vec<Piece<Data>> {
        if command.operation == Operation::Flush {
            return vec![];
        }
        let command = self.as_begun(command);
        let has_data = command.modifies() || command.operation == Operation::Compare;
        let payload = |length: u32| has_data.then(|| vec![version; length as usize]);
        let whole = Piece { command, payload: payload(command.length) };
        if !has_data || command.length < 2 || self.random.chance(50) {
            return vec![whole];
        }
        let (offset, rest) = (command.offset + 1, command.length - 1);
        let first = Command { length: 1, ..command };
        let second = Command { offset, length: rest, ..command };
        vec![Piece { command: first, payload: payload(1) }, Piece { command: second, payload: payload(rest) }]
    }

    /// Some writes are compared first.
    fn as_begun(&mut self, command: Command) -> Command {
        let may_be = command.operation == Operation::Write
            && (!command.is_durable || self.planted == Planted::DurableCompared);
        let is_compared = may_be && self.random.chance(50);
        Command { operation: if is_compared { Operation::Compare } else { command.operation }, ..command }
    }

    fn join(&mut self) {
        if self.live.len() < STREAMS_LIVE_MAX {
            self.target.open(self.next_number);
            self.scheduler.join(self.next_number);
            self.live.push(self.next_number);
            self.next_number += 1;
        }
    }

    /// The source gives a stream up. Some of what was sent is lost, and some may come at any time.
    fn cut(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let number = self.live.swap_remove(self.random.index(self.live.len()));
        let stream = self.target.streams.get_mut(&number).expect("it is one of them");
        stream.is_cut = true;
        stream.wire.truncate(self.random.index(stream.wire.len() + 1));
        stream.answers.clear();
        self.scheduler.lose(number);
    }

    fn one_alive(&mut self) -> Option<StreamNumber> {
        (!self.live.is_empty()).then(|| self.live[self.random.index(self.live.len())])
    }

    fn send(&mut self) -> Result<(), String> {
        let Some(number) = self.one_alive() else { return Ok(()) };
        let Some(outgoing) = self.scheduler.next(number) else { return Ok(()) };
        if let (Question::Fence(fenced), Planted::NoFence) = (outgoing.question, self.planted) {
            return self.scheduler.fenced(number, fenced).map_err(|error| error.to_string());
        }
        self.target.streams.get_mut(&number).expect("it is one of them").wire.push_back(outgoing);
        Ok(())
    }

    fn hear(&mut self) -> Result<(), String> {
        let Some(number) = self.one_alive() else { return Ok(()) };
        let stream = self.target.streams.get_mut(&number).expect("it is one of them");
        let heard = match stream.answers.pop_front() {
            Some(SimulatedAnswer::Done(handle, data)) => self.scheduler.answered(number, handle, Ok(data)),
            Some(SimulatedAnswer::Differs(handle)) => self.scheduler.differs(number, handle),
            Some(SimulatedAnswer::Fenced(fenced)) => {
                self.run.fenced += 1;
                self.scheduler.fenced(number, fenced)
            }
            None => Ok(()),
        };
        heard.map_err(|error| error.to_string())?;
        if self.planted == Planted::NotSentAgain {
            self.believe_all_done(number)?;
        }
        Ok(())
    }

    /// Answers, in the target's place, what was sent again.
    fn believe_all_done(&mut self, number: StreamNumber) -> Result<(), String> {
        if self.scheduler.resent_pieces() == self.run.resent {
            return Ok(());
        }
        self.run.resent = self.scheduler.resent_pieces();
        while let Some(Outgoing { question, payload }) = self.scheduler.next(number) {
            if let Question::Command { handle, command } = question
                && command.modifies()
            {
                self.scheduler.answered(number, handle, Ok(None)).map_err(|error| error.to_string())?;
            } else {
                let stream = self.target.streams.get_mut(&number).expect("it is one of them");
                stream.wire.push_back(Outgoing { question, payload });
            }
        }
        Ok(())
    }

    /// Does some work of any stream, even of one that the source has given up.
    fn work(&mut self) {
        let numbers = self.target.busy_streams();
        if !numbers.is_empty() {
            let number = numbers[self.random.index(numbers.len())];
            self.target.step(number, &mut self.random);
        }
    }

    fn end(mut self) -> Result<Run, String> {
        // A stream that was given up may still do something.
        for _ in 0..200 {
            self.work();
            self.rules.hold(&self.target.disk)?;
        }
        self.rules.hold_at_end(&self.target.disk)?;
        self.run.resent = self.scheduler.resent_pieces();
        self.run.late = self.target.late;
        self.run.compared = self.target.compared;
        Ok(self.run)
    }
}
