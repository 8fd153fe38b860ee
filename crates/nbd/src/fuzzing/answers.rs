//! Answers of a hostile target.

use std::collections::BTreeMap;

use crate::command::{Command, Operation};
use crate::error::Malformed;
use crate::frame::{ANSWER_BYTES, Answer, StreamNumber};
use crate::greeting::{WELCOME_BYTES, decode_welcome, encode_welcome};
use crate::scheduler::{Piece, Scheduler};

/// A few requests and streams.
pub const ANSWERS_HOLDS_BYTES: usize = 1 << 20;

const REQUESTS: u64 = 24;

/// Answers over two streams in turn, after a third was lost, to requests of each kind. Data are told by their length only.
///
/// Holds: what is decoded is said again as it was; each request is answered at most once, and a READ with as many bytes
/// as it asked for.
pub fn answers(data: &[u8]) {
    let (welcome, data) = data.split_at(data.len().min(WELCOME_BYTES));
    if let Ok(welcome) = welcome.try_into()
        && let Ok(refusal) = decode_welcome(welcome)
    {
        assert_eq!(encode_welcome(refusal), *welcome);
    }
    let mut scheduler = begun();
    let mut asked: BTreeMap<u64, Command> = (0..REQUESTS).map(|cookie| (cookie, command(cookie))).collect();
    for (turn, bytes) in data.as_chunks::<ANSWER_BYTES>().0.iter().enumerate() {
        let Ok(answer) = Answer::decode(bytes) else { return };
        assert_eq!(answer.encode(), *bytes);
        if hear(&mut scheduler, if turn % 2 == 0 { 1 } else { 2 }, answer).is_err() {
            return;
        }
        for done in scheduler.take_done() {
            let command = asked.remove(&done.cookie).expect("each is answered once");
            let is_read = command.operation == Operation::Read && done.error.is_none();
            assert_eq!(done.data, is_read.then_some(command.length));
        }
        send_all(&mut scheduler);
    }
}

fn hear(scheduler: &mut Scheduler<u32>, number: StreamNumber, answer: Answer) -> Result<(), Malformed> {
    match answer {
        Answer::Done { handle, error } => scheduler.answered(number, handle, error.map_or(Ok(None), Err)),
        Answer::Data { handle, length } => {
            let command = scheduler.asked(number, handle)?;
            if command.operation != Operation::Read || command.length != length {
                return Err(Malformed("data that were not asked for"));
            }
            scheduler.answered(number, handle, Ok(Some(length)))
        }
        Answer::Differs { handle } => scheduler.differs(number, handle),
        Answer::Fenced(fenced) => scheduler.fenced(number, fenced),
        Answer::Alive => Ok(()),
        Answer::Ended | Answer::Failed => Err(Malformed("the end")),
    }
}

fn command(cookie: u64) -> Command {
    let command =
        |operation| Command { operation, offset: cookie % 7 * 4096, length: 4096, ..Command::FLUSH };
    match cookie % 5 {
        0 => command(Operation::Read),
        1 | 2 => command(Operation::Write),
        3 => Command { is_durable: true, ..command(Operation::WriteZeroes) },
        _ => Command::FLUSH,
    }
}

fn begun() -> Scheduler<u32> {
    let mut scheduler = Scheduler::new();
    for number in 0..3 {
        scheduler.join(number);
    }
    for cookie in 0..REQUESTS {
        let command = command(cookie);
        let is_compared = command.operation == Operation::Write && cookie % 2 == 0;
        let operation = if is_compared { Operation::Compare } else { command.operation };
        let piece = || Piece { command: Command { operation, ..command }, payload: None };
        let pieces = (command.operation != Operation::Flush).then(piece).into_iter().collect();
        scheduler.submit(cookie, command, pieces);
    }
    send_all(&mut scheduler);
    scheduler.lose(0);
    send_all(&mut scheduler);
    scheduler
}

fn send_all(scheduler: &mut Scheduler<u32>) {
    for number in 0..3 {
        while scheduler.next(number).is_some() {}
    }
}

/// A welcome, and answers to what the first requests are.
pub fn answers_seeds() -> Vec<Vec<u8>> {
    let said = |answers: &[Answer]| {
        let answers: Vec<u8> = answers.iter().flat_map(|answer| answer.encode()).collect();
        [&encode_welcome(None)[..], &answers].concat()
    };
    let done = |handle| Answer::Done { handle, error: None };
    let data = |handle| Answer::Data { handle, length: 4096 };
    vec![
        said(&[done(1), done(2), Answer::Alive, done(3)]),
        said(&[Answer::Fenced(0), Answer::Alive, Answer::Fenced(0)]),
        said(&[Answer::Alive, Answer::Fenced(0), data(0), data(0)]),
        said(&[Answer::Differs { handle: 2 }, Answer::Differs { handle: 2 }, done(2)]),
        said(&[Answer::Failed]),
        said(&[Answer::Ended]),
    ]
}
