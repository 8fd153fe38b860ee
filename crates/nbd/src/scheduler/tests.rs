//! The rules, one by one.

use super::*;

type Tested = Scheduler<char>;

fn write(offset: u64, length: u32) -> Command {
    Command { operation: Operation::Write, offset, length, ..Command::FLUSH }
}

fn submit(scheduler: &mut Tested, cookie: u64, command: Command) {
    let pieces = match command.operation {
        Operation::Flush => vec![],
        _ => vec![Piece { command, payload: command.modifies().then_some('w') }],
    };
    scheduler.submit(cookie, command, pieces);
}

fn with_streams(count: StreamNumber) -> Tested {
    let mut scheduler = Scheduler::new();
    for number in 0..count {
        scheduler.join(number);
    }
    scheduler
}

/// Handles of what a stream sends now.
fn sent(scheduler: &mut Tested, number: StreamNumber) -> Vec<u64> {
    let mut handles = vec![];
    while let Some(Outgoing { question: Question::Command { handle, .. }, .. }) = scheduler.next(number) {
        handles.push(handle);
    }
    handles
}

fn cookies(scheduler: &mut Tested) -> Vec<u64> {
    scheduler.take_done().into_iter().map(|done| done.cookie).collect()
}

#[test]
fn the_least_loaded_stream_is_next() {
    let mut scheduler = with_streams(3);
    submit(&mut scheduler, 1, write(0, 1 << 20));
    submit(&mut scheduler, 2, write(1 << 20, 512));
    submit(&mut scheduler, 3, write(2 << 20, 512));
    submit(&mut scheduler, 4, write(3 << 20, 512));
    assert_eq!(sent(&mut scheduler, 0), [0]);
    assert_eq!(sent(&mut scheduler, 1), [1, 3]);
    assert_eq!(sent(&mut scheduler, 2), [2]);
    assert_eq!(scheduler.take_woken(), BTreeSet::from([0, 1, 2]));
}

#[test]
fn what_shares_a_byte_waits() {
    let mut scheduler = with_streams(2);
    submit(&mut scheduler, 1, write(0, 4096));
    submit(&mut scheduler, 2, write(4095, 4096));
    submit(&mut scheduler, 3, write(8190, 10));
    assert_eq!((sent(&mut scheduler, 0), sent(&mut scheduler, 1)), (vec![0], vec![]));
    scheduler.answered(0, 0, Ok(None)).unwrap();
    assert_eq!(cookies(&mut scheduler), [1]);
    assert_eq!(
        sent(&mut scheduler, 0).len() + sent(&mut scheduler, 1).len(),
        1,
        "the third waits for the second"
    );
}

#[test]
fn a_flush_waits_for_all_before_it_and_goes_over_all_streams() {
    let mut scheduler = with_streams(2);
    submit(&mut scheduler, 1, write(0, 4096));
    submit(&mut scheduler, 2, Command::FLUSH);
    submit(&mut scheduler, 3, write(4096, 4096));
    assert_eq!((sent(&mut scheduler, 0), sent(&mut scheduler, 1)), (vec![0], vec![1]));
    scheduler.answered(0, 0, Ok(None)).unwrap();
    let (one, other) = (sent(&mut scheduler, 0), sent(&mut scheduler, 1));
    assert_eq!((one.len(), other.len()), (1, 1), "the write behind it does not hold it up");
    scheduler.answered(0, one[0], Ok(None)).unwrap();
    assert_eq!(cookies(&mut scheduler), [1]);
    scheduler.answered(1, other[0], Ok(None)).unwrap();
    assert_eq!(cookies(&mut scheduler), [2]);
}

#[test]
fn a_durable_write_is_answered_after_all_before_it() {
    let mut scheduler = with_streams(2);
    submit(&mut scheduler, 1, write(0, 4096));
    submit(&mut scheduler, 2, Command { is_durable: true, ..write(4096, 4096) });
    assert_eq!((sent(&mut scheduler, 0), sent(&mut scheduler, 1)), (vec![0], vec![1]), "it is not held up");
    scheduler.answered(1, 1, Ok(None)).unwrap();
    assert_eq!(cookies(&mut scheduler), [0_u64; 0]);
    scheduler.answered(0, 0, Ok(None)).unwrap();
    assert_eq!(cookies(&mut scheduler), [1, 2]);
}

#[test]
fn what_a_lost_stream_carried_goes_elsewhere_once_it_is_fenced() {
    let mut scheduler = with_streams(2);
    submit(&mut scheduler, 1, write(0, 4096));
    assert_eq!(sent(&mut scheduler, 0), [0]);
    submit(&mut scheduler, 2, write(4096, 1 << 20));
    submit(&mut scheduler, 3, write(2 << 20, 4096));
    scheduler.lose(0);
    let fence = scheduler.next(1).unwrap();
    assert_eq!(fence.question, Question::Fence(0), "ahead of all else");
    assert_eq!(sent(&mut scheduler, 1), [1, 2], "what was not sent yet needs no fence");
    assert!(scheduler.answered(0, 0, Ok(None)).is_err(), "it is too late for an answer");
    assert!(scheduler.fenced(1, 1).is_err());
    scheduler.fenced(1, 0).unwrap();
    assert_eq!(sent(&mut scheduler, 1), [0]);
    assert_eq!(scheduler.resent_pieces(), 1);
}

#[test]
fn a_fence_outlives_the_stream_that_carries_it() {
    let mut scheduler = with_streams(2);
    submit(&mut scheduler, 1, write(0, 4096));
    assert_eq!(sent(&mut scheduler, 0), [0]);
    scheduler.lose(0);
    assert_eq!(scheduler.next(1).unwrap().question, Question::Fence(0));
    scheduler.lose(1);
    assert!(scheduler.awaits_fence() == Some(0) && scheduler.live_streams() == 0);
    scheduler.join(2);
    let mut fenced =
        [scheduler.next(2).unwrap(), scheduler.next(2).unwrap()].map(|sent| match sent.question {
            Question::Fence(number) => number,
            other => panic!("{other:?}"),
        });
    fenced.sort_unstable();
    assert_eq!(fenced, [0, 1]);
    scheduler.fenced(2, 1).unwrap();
    assert_eq!(sent(&mut scheduler, 2), [0_u64; 0]);
    scheduler.fenced(2, 0).unwrap();
    assert_eq!(sent(&mut scheduler, 2), [0]);
}

#[test]
fn no_flush_starts_while_a_lost_stream_may_hold_what_is_not_flushed() {
    let mut scheduler = with_streams(2);
    scheduler.lose(0);
    submit(&mut scheduler, 1, Command::FLUSH);
    assert_eq!(scheduler.next(1).unwrap().question, Question::Fence(0));
    assert_eq!(sent(&mut scheduler, 1), [0_u64; 0]);
    scheduler.fenced(1, 0).unwrap();
    assert_eq!(sent(&mut scheduler, 1).len(), 1);
    scheduler.lose(1);
    scheduler.join(2);
    assert_eq!(scheduler.next(2).unwrap().question, Question::Fence(1));
    scheduler.fenced(2, 1).unwrap();
    assert_eq!(cookies(&mut scheduler), [1], "the fence stands for the flush");
}

#[test]
fn a_request_in_pieces_is_answered_once_and_an_error_of_one_is_its_own() {
    let mut scheduler = with_streams(1);
    let pieces = [write(0, 4096), write(4096, 4096)].map(|command| Piece { command, payload: Some('w') });
    scheduler.submit(1, write(0, 8192), pieces.into());
    assert_eq!(sent(&mut scheduler, 0), [0, 1]);
    scheduler.answered(0, 1, Err(ErrorCode::NO_SPACE)).unwrap();
    assert_eq!(cookies(&mut scheduler), [0_u64; 0]);
    scheduler.answered(0, 0, Ok(None)).unwrap();
    let done = scheduler.take_done();
    assert_eq!((done.len(), done[0].error), (1, Some(ErrorCode::NO_SPACE)));
    assert!(scheduler.is_idle());
}

#[test]
fn answers_that_fit_no_question_are_refused() {
    let mut scheduler = with_streams(2);
    let read = Command { operation: Operation::Read, ..write(0, 512) };
    submit(&mut scheduler, 1, read);
    assert!(scheduler.answered(0, 0, Ok(Some('r'))).is_err(), "it was not sent yet");
    assert_eq!(sent(&mut scheduler, 0), [0]);
    assert!(scheduler.answered(1, 0, Ok(Some('r'))).is_err(), "it was sent over another");
    assert!(scheduler.answered(0, 0, Ok(None)).is_err(), "it was to bring data");
    assert!(scheduler.answered(0, 9, Ok(None)).is_err());
    scheduler.answered(0, 0, Ok(Some('r'))).unwrap();
    assert!(scheduler.answered(0, 0, Ok(Some('r'))).is_err(), "once is enough");
    assert_eq!(scheduler.take_done()[0].data, Some('r'));
}

#[test]
fn what_differs_is_sent_and_later_requests_wait_for_it() {
    let mut scheduler = with_streams(1);
    let piece = Command { operation: Operation::Compare, ..write(0, 4096) };
    scheduler.submit(1, write(0, 4096), vec![Piece { command: piece, payload: Some('w') }]);
    submit(&mut scheduler, 2, write(0, 512));
    let asked = scheduler.next(0).unwrap().question;
    assert_eq!(asked, Question::Command { handle: 0, command: piece });
    scheduler.differs(0, 0).unwrap();
    assert!(scheduler.differs(0, 0).is_err(), "it is not asked any more");
    let sent = scheduler.next(0).unwrap();
    assert_eq!(
        (sent.question, sent.payload),
        (Question::Command { handle: 0, command: write(0, 4096) }, Some('w'))
    );
    assert_eq!(scheduler.next(0), None, "the later one shares a byte");
    assert!(scheduler.differs(0, 0).is_err(), "it is not compared any more");
    scheduler.answered(0, 0, Ok(None)).unwrap();
    assert_eq!(cookies(&mut scheduler), [1]);
    assert!(scheduler.next(0).is_some());
}

#[test]
fn what_is_the_same_is_done() {
    let mut scheduler = with_streams(2);
    let piece = Command { operation: Operation::Compare, ..write(0, 4096) };
    scheduler.submit(1, write(0, 4096), vec![Piece { command: piece, payload: Some('w') }]);
    submit(&mut scheduler, 2, Command::FLUSH);
    assert_eq!((sent(&mut scheduler, 0), sent(&mut scheduler, 1)), (vec![0], vec![]));
    scheduler.answered(0, 0, Ok(None)).unwrap();
    assert_eq!(cookies(&mut scheduler), [1]);
    assert_eq!((sent(&mut scheduler, 0), sent(&mut scheduler, 1)), (vec![1], vec![2]), "the flush");
}
