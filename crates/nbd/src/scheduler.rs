//! Which request goes over which stream, and when. Pure: no I/O, no clock.
//!
//! ```text
//! submit ─► waits ──────────────► started: in pieces ─► each over the least loaded stream ─► answered
//!           for what it conflicts with      ▲                              │ stream lost
//!                                           └──── fenced at the target ◄───┘
//! ```
//!
//! Four rules keep the disk right:
//!
//! 1. If two requests share a byte, and one of them changes it, the later one waits until the earlier one is
//!    answered. So whatever is under way at the same time may reach the disk in any order, also twice.
//! 2. What was sent over a stream that is lost goes over another only when the target has said that nothing more of
//!    that stream will reach the disk (a fence). So no old write comes after a newer one.
//! 3. A flush starts when all changes before it are answered and no stream is lost without a fence. It then goes over
//!    every stream, as each may have an NBD connection with a cache of its own. A stream's fence stands for its flush:
//!    the target flushes before it answers a fence.
//! 4. A durable write (FUA) is answered when all changes before it are.
//!
//! A piece of a write may begin as a comparison with what is there, by its digest; its data is sent only if that
//! differs. Until then its request is under way in the sense of rules 1 and 2: so nothing changes what was found to be
//! the same. A durable write is not compared: data that is the same need not be durable before the next flush.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::command::{Command, Operation};
use crate::error::Malformed;
use crate::frame::{Question, StreamNumber};
use crate::limits::STREAMS_MAX;
use crate::nbd::ErrorCode;

/// What a request without data weighs when streams are compared.
const WEIGHT_BYTES_MIN: u64 = 4096;

/// A part of a request, done by itself. Those of one request do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece<P> {
    pub(crate) command: Command,
    /// The data of a WRITE, or of what is compared before it is written.
    pub(crate) payload: Option<P>,
}

/// For the client.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Done<P> {
    /// As it was submitted.
    pub(crate) cookie: u64,
    pub(crate) command: Command,
    pub(crate) error: Option<ErrorCode>,
    /// What a READ has read.
    pub(crate) data: Option<P>,
}

/// For one stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outgoing<P> {
    pub(crate) question: Question,
    pub(crate) payload: Option<P>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestState {
    /// For others.
    Waits,
    Started,
    /// All its pieces are answered.
    Answered,
}

#[derive(Debug)]
struct Request<P> {
    cookie: u64,
    command: Command,
    state: RequestState,
    /// Until it is started.
    pieces: Vec<Piece<P>>,
    unanswered_pieces: usize,
    error: Option<ErrorCode>,
    data: Option<P>,
}

/// A piece that is not answered yet.
#[derive(Debug)]
struct Started<P> {
    /// When its request arrived.
    arrival: u64,
    piece: Piece<P>,
}

#[derive(Debug, Clone, Copy)]
enum Queued {
    Piece(u64),
    Fence(StreamNumber),
}

#[derive(Debug, Default)]
struct Stream {
    queue: VecDeque<Queued>,
    sent: BTreeSet<u64>,
    load_bytes: u64,
}

/// A stream that is gone, as far as is known here.
#[derive(Debug)]
struct Lost {
    /// What was sent over it. The disk may have done it, or may yet.
    unanswered: BTreeSet<u64>,
    /// The stream that carries the fence.
    via: Option<StreamNumber>,
}

/// One disk's requests, and the streams they go over.
#[derive(Debug)]
pub(crate) struct Scheduler<P> {
    next_arrival: u64,
    next_handle: u64,
    // By arrival.
    requests: BTreeMap<u64, Request<P>>,
    // By handle.
    pieces: HashMap<u64, Started<P>>,
    // Without a stream.
    unassigned: BTreeSet<u64>,
    streams: BTreeMap<StreamNumber, Stream>,
    lost: BTreeMap<StreamNumber, Lost>,
    done: Vec<Done<P>>,
    woken: BTreeSet<StreamNumber>,
    resent_pieces: u64,
}

impl<P: Clone> Scheduler<P> {
    pub(crate) fn new() -> Self {
        Self {
            next_arrival: 0,
            next_handle: 0,
            requests: BTreeMap::new(),
            pieces: HashMap::new(),
            unassigned: BTreeSet::new(),
            streams: BTreeMap::new(),
            lost: BTreeMap::new(),
            done: vec![],
            woken: BTreeSet::new(),
            resent_pieces: 0,
        }
    }

    /// Takes a request of the client's; the caller bounds how many there are. Pieces of a flush are made here.
    pub(crate) fn submit(&mut self, cookie: u64, command: Command, pieces: Vec<Piece<P>>) {
        debug_assert!(pieces.is_empty() == (command.operation == Operation::Flush));
        let request = Request {
            cookie,
            command,
            state: RequestState::Waits,
            pieces,
            unanswered_pieces: 0,
            error: None,
            data: None,
        };
        self.requests.insert(self.next_arrival, request);
        self.next_arrival += 1;
        self.go_on();
    }

    /// A stream that the target has welcomed.
    pub(crate) fn join(&mut self, number: StreamNumber) {
        let before = self.streams.insert(number, Stream::default());
        assert!(before.is_none() && !self.lost.contains_key(&number), "no number is given twice");
        self.go_on();
    }

    /// A stream that broke: nothing more is said or heard on it.
    pub(crate) fn lose(&mut self, number: StreamNumber) {
        let Some(stream) = self.streams.remove(&number) else { return };
        self.woken.remove(&number);
        let mut unanswered = stream.sent;
        for queued in stream.queue {
            match queued {
                // The fence at the target stands for it.
                Queued::Piece(handle) if self.is_flush(handle) => _ = unanswered.insert(handle),
                Queued::Piece(handle) => _ = self.unassigned.insert(handle),
                Queued::Fence(_) => {}
            }
        }
        for lost in self.lost.values_mut().filter(|lost| lost.via == Some(number)) {
            lost.via = None;
        }
        self.lost.insert(number, Lost { unanswered, via: None });
        self.go_on();
    }

    /// What the stream sends next.
    pub(crate) fn next(&mut self, number: StreamNumber) -> Option<Outgoing<P>> {
        let stream = self.streams.get_mut(&number)?;
        match stream.queue.pop_front()? {
            Queued::Fence(fenced) => Some(Outgoing { question: Question::Fence(fenced), payload: None }),
            Queued::Piece(handle) => {
                stream.sent.insert(handle);
                let Piece { command, payload } = self.pieces[&handle].piece.clone();
                Some(Outgoing { question: Question::Command { handle, command }, payload })
            }
        }
    }

    /// What was asked by this handle over this stream, if it was.
    pub(crate) fn asked(&self, number: StreamNumber, handle: u64) -> Result<Command, Malformed> {
        let is_asked = self.streams.get(&number).is_some_and(|stream| stream.sent.contains(&handle));
        let started = self.pieces.get(&handle).filter(|_| is_asked);
        started.map(|started| started.piece.command).ok_or(Malformed("an answer to what was not asked"))
    }

    /// The target's answer to one piece, with what was read.
    pub(crate) fn answered(
        &mut self,
        number: StreamNumber,
        handle: u64,
        result: Result<Option<P>, ErrorCode>,
    ) -> Result<(), Malformed> {
        let command = self.asked(number, handle)?;
        if result.as_ref().is_ok_and(|data| data.is_some() != (command.operation == Operation::Read)) {
            return Err(Malformed("data that were not asked for, or none that were"));
        }
        let stream = self.streams.get_mut(&number).expect("it was asked over this stream");
        stream.sent.remove(&handle);
        stream.load_bytes -= weight(&command);
        self.finish(handle, result);
        self.go_on();
        Ok(())
    }

    /// What is compared by this handle over this stream.
    pub(crate) fn compared(&self, number: StreamNumber, handle: u64) -> Result<&Piece<P>, Malformed> {
        if self.asked(number, handle)?.operation != Operation::Compare {
            return Err(Malformed("a difference in what was not compared"));
        }
        Ok(&self.pieces[&handle].piece)
    }

    /// The target has something else there than what was to be written: that is sent now.
    pub(crate) fn differs(&mut self, number: StreamNumber, handle: u64) -> Result<(), Malformed> {
        let command = self.compared(number, handle)?.command;
        let stream = self.streams.get_mut(&number).expect("it was asked over this stream");
        stream.sent.remove(&handle);
        stream.load_bytes -= weight(&command);
        let started = self.pieces.get_mut(&handle).expect("it is not answered yet");
        started.piece.command.operation = Operation::Write;
        self.unassigned.insert(handle);
        self.go_on();
        Ok(())
    }

    /// The target says that nothing more of `number` reaches the disk, and what did is flushed.
    pub(crate) fn fenced(&mut self, via: StreamNumber, number: StreamNumber) -> Result<(), Malformed> {
        if self.lost.get(&number).is_none_or(|lost| lost.via != Some(via)) {
            return Err(Malformed("a fence that was not asked for"));
        }
        let lost = self.lost.remove(&number).expect("it was just found");
        for handle in lost.unanswered {
            if self.is_flush(handle) {
                self.finish(handle, Ok(None));
            } else {
                self.unassigned.insert(handle);
                self.resent_pieces += 1;
            }
        }
        self.go_on();
        Ok(())
    }

    /// What is answered since it was last asked.
    pub(crate) fn take_done(&mut self) -> Vec<Done<P>> {
        std::mem::take(&mut self.done)
    }

    /// Streams that have something to send since it was last asked.
    pub(crate) fn take_woken(&mut self) -> BTreeSet<StreamNumber> {
        std::mem::take(&mut self.woken)
    }

    /// Streams that are not lost.
    pub(crate) fn live_streams(&self) -> usize {
        self.streams.len()
    }

    /// The first of the lost streams whose end is not confirmed yet.
    pub(crate) fn awaits_fence(&self) -> Option<StreamNumber> {
        self.lost.keys().next().copied()
    }

    /// Whether all requests are answered.
    pub(crate) fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Pieces that were sent again.
    pub(crate) fn resent_pieces(&self) -> u64 {
        self.resent_pieces
    }

    fn is_flush(&self, handle: u64) -> bool {
        self.pieces[&handle].piece.command.operation == Operation::Flush
    }

    fn finish(&mut self, handle: u64, result: Result<Option<P>, ErrorCode>) {
        let started = self.pieces.remove(&handle).expect("it is not answered yet");
        let request = self.requests.get_mut(&started.arrival).expect("a piece is not answered yet");
        match result {
            Ok(data) => request.data = data,
            Err(error) => request.error = request.error.or(Some(error)),
        }
        request.unanswered_pieces -= 1;
        if request.unanswered_pieces == 0 {
            request.state = RequestState::Answered;
        }
    }

    /// After any event: what can be answered is, what can be started is, and all that has no stream gets one.
    fn go_on(&mut self) {
        self.settle();
        self.assign_fences();
        self.assign_pieces();
    }

    /// Goes through the requests in the order in which they came.
    fn settle(&mut self) {
        let mut earlier: Vec<Command> = vec![];
        let arrivals: Vec<u64> = self.requests.keys().copied().collect();
        for arrival in arrivals {
            let request = &self.requests[&arrival];
            let command = request.command;
            match request.state {
                RequestState::Waits if self.may_start(&command, &earlier) => self.start(arrival),
                RequestState::Answered if may_be_answered(&command, &earlier) => {
                    self.tell(arrival);
                    continue;
                }
                RequestState::Waits | RequestState::Started | RequestState::Answered => {}
            }
            earlier.push(command);
        }
    }

    fn may_start(&self, command: &Command, earlier: &[Command]) -> bool {
        if command.operation == Operation::Flush {
            return !earlier.iter().any(Command::modifies)
                && self.lost.is_empty()
                && !self.streams.is_empty();
        }
        !earlier.iter().any(|other| command.conflicts_with(other))
    }

    fn start(&mut self, arrival: u64) {
        let request = self.requests.get_mut(&arrival).expect("it waits");
        request.state = RequestState::Started;
        let pieces = std::mem::take(&mut request.pieces);
        if request.command.operation == Operation::Flush {
            request.unanswered_pieces = self.streams.len();
            let numbers: Vec<StreamNumber> = self.streams.keys().copied().collect();
            for number in numbers {
                let handle = self.handle(arrival, Piece { command: Command::FLUSH, payload: None });
                self.queue(number, handle);
            }
            return;
        }
        request.unanswered_pieces = pieces.len();
        for piece in pieces {
            let handle = self.handle(arrival, piece);
            self.unassigned.insert(handle);
        }
    }

    fn handle(&mut self, arrival: u64, piece: Piece<P>) -> u64 {
        let handle = self.next_handle;
        self.next_handle += 1;
        self.pieces.insert(handle, Started { arrival, piece });
        handle
    }

    fn tell(&mut self, arrival: u64) {
        let Request { cookie, command, error, data, .. } =
            self.requests.remove(&arrival).expect("it is answered");
        self.done.push(Done { cookie, command, error, data });
    }

    /// Ahead of all else, as others wait for it.
    fn assign_fences(&mut self) {
        let mut load: BTreeMap<StreamNumber, usize> =
            self.streams.keys().map(|number| (*number, 0)).collect();
        for via in self.lost.values().filter_map(|lost| lost.via) {
            *load.get_mut(&via).expect("a fence's stream is not lost") += 1;
        }
        for (fenced, lost) in self.lost.iter_mut().filter(|(_, lost)| lost.via.is_none()) {
            let least = load.iter_mut().min_by_key(|(_, fences)| **fences);
            let Some((via, fences)) = least.filter(|(_, fences)| **fences < STREAMS_MAX) else { return };
            *fences += 1;
            lost.via = Some(*via);
            let stream = self.streams.get_mut(via).expect("it is one of them");
            stream.queue.push_front(Queued::Fence(*fenced));
            self.woken.insert(*via);
        }
    }

    fn assign_pieces(&mut self) {
        while let Some(number) = self.least_loaded() {
            let Some(handle) = self.unassigned.pop_first() else { return };
            self.queue(number, handle);
        }
    }

    fn least_loaded(&self) -> Option<StreamNumber> {
        let least = self.streams.iter().min_by_key(|(_, stream)| stream.load_bytes);
        least.map(|(number, _)| *number)
    }

    fn queue(&mut self, number: StreamNumber, handle: u64) {
        let stream = self.streams.get_mut(&number).expect("it was just found");
        stream.queue.push_back(Queued::Piece(handle));
        stream.load_bytes += weight(&self.pieces[&handle].piece.command);
        self.woken.insert(number);
    }
}

/// Whether the client may hear that it is done.
fn may_be_answered(command: &Command, earlier: &[Command]) -> bool {
    !command.is_durable || !earlier.iter().any(Command::modifies)
}

fn weight(command: &Command) -> u64 {
    WEIGHT_BYTES_MIN + command.held_bytes() as u64
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
