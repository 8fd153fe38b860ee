//! What the client's and the streams' tasks share: the scheduler, and which tasks it wakes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::{Notify, Semaphore, mpsc, watch};

use super::patience::Sight;
use super::payload::Payload;
use super::wire_load::WireLoad;
use super::{Export, There};
use crate::buffers::Buffers;
use crate::command::{Command, Operation};
use crate::counters::{Counters, Counting};
use crate::coverage::Coverage;
use crate::error::{Malformed, SplitterError};
use crate::frame::StreamNumber;
use crate::limits::{COMPARED_BYTES_MIN, HELD_BYTES_MAX, PACKED_BYTES_MIN, REQUESTS_MAX};
use crate::nbd::ErrorCode;
use crate::scheduler::{Done, Outgoing, Piece, Scheduler};
use crate::zeroes::{Run, runs};

/// For the client.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) cookie: u64,
    pub(super) error: Option<ErrorCode>,
    pub(super) data: Option<Payload>,
    /// None where nothing was done.
    pub(super) command: Option<Command>,
}

/// Room for requests. Each takes some until its reply is written.
#[derive(Debug)]
struct Room {
    requests: Semaphore,
    bytes: Semaphore,
}

#[derive(Debug)]
struct SharedState {
    scheduler: Scheduler<Payload>,
    wakers: HashMap<StreamNumber, Arc<Notify>>,
    /// Where the target may have had something else before.
    coverage: Coverage,
}

/// What the tasks of one disk share.
#[derive(Debug)]
pub(super) struct Shared {
    export: Export,
    name: String,
    state: Mutex<SharedState>,
    replies: mpsc::Sender<Reply>,
    room: Room,
    live_streams: watch::Sender<usize>,
    is_ending: AtomicBool,
    advances: AtomicU64,
    compares: AtomicBool,
    pub(super) wire_load: WireLoad,
    pub(super) counting: Counting,
    pub(super) buffers: Buffers,
}

impl Shared {
    pub(super) fn new(export: Export) -> (Self, mpsc::Receiver<Reply>) {
        Self::named(uuid::Uuid::new_v4().simple().to_string(), export)
    }

    pub(super) fn named(name: String, export: Export) -> (Self, mpsc::Receiver<Reply>) {
        let (replies, done) = mpsc::channel(REQUESTS_MAX);
        let state = SharedState {
            scheduler: Scheduler::new(),
            wakers: HashMap::new(),
            coverage: Coverage::default(),
        };
        let room = Room { requests: Semaphore::new(REQUESTS_MAX), bytes: Semaphore::new(HELD_BYTES_MAX) };
        let shared = Self {
            compares: AtomicBool::new(export.there == There::Part),
            export,
            name,
            state: Mutex::new(state),
            replies,
            room,
            live_streams: watch::Sender::new(0),
            is_ending: AtomicBool::new(false),
            advances: AtomicU64::new(0),
            wire_load: WireLoad::new(),
            counting: Counting::default(),
            buffers: Buffers::default(),
        };
        (shared, done)
    }

    pub(super) fn export(&self) -> &Export {
        &self.export
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Waits until so much may be held, and holds it.
    pub(super) async fn make_room(&self, bytes: usize) {
        let bytes = u32::try_from(bytes).expect("a request's length was checked");
        let error = "nobody closes it";
        self.room.requests.acquire().await.expect(error).forget();
        self.room.bytes.acquire_many(bytes).await.expect(error).forget();
    }

    /// A reply is written, and what its request held is free.
    pub(super) fn has_replied(&self, reply: &Reply) {
        let bytes = reply.command.map_or(0, |command| command.held_bytes());
        self.room.bytes.add_permits(bytes);
        self.room.requests.add_permits(1);
        if let Some(command) = &reply.command {
            self.counting.is_done(command);
        }
    }

    /// Waits until all requests are replied to.
    pub(super) async fn all_replied(&self) {
        let all = u32::try_from(REQUESTS_MAX).expect("they are few");
        let _all = self.room.requests.acquire_many(all).await.expect("nobody closes it");
    }

    /// Queues a reply, for which there is room.
    pub(super) fn reply(&self, reply: Reply) {
        self.replies.try_send(reply).ok();
    }

    /// Takes a request of the client's, for which there is room.
    pub(super) fn submit(&self, cookie: u64, mut command: Command, data: Option<Payload>) {
        command.keeps_allocation &= !self.export.is_thin;
        let pieces = match data {
            Some(data) => self.cut(&command, &data),
            None if command.operation == Operation::Flush => vec![],
            None => vec![Piece { command, payload: None }],
        };
        let is_found = |piece: &&Piece<Payload>| {
            command.operation == Operation::Write && piece.command.operation == Operation::WriteZeroes
        };
        let found = pieces.iter().filter(is_found).map(|piece| piece.command.length as usize).sum();
        self.counting.has_begun(found);
        self.with(|scheduler| scheduler.submit(cookie, command, pieces));
    }

    /// Data and zeroes apart.
    fn cut(&self, command: &Command, data: &Payload) -> Vec<Piece<Payload>> {
        if !self.export.finds_zeroes {
            return vec![self.of_data(*command, data.clone())];
        }
        let piece = |Run { range, is_zero }: Run| {
            let offset = command.offset + range.start as u64;
            let length = u32::try_from(range.len()).expect("it is a part of a request");
            let part = Command { offset, length, ..*command };
            if is_zero {
                let (operation, keeps_allocation) = (Operation::WriteZeroes, !self.export.is_thin);
                Piece { command: Command { operation, keeps_allocation, ..part }, payload: None }
            } else {
                self.of_data(part, data.part(range))
            }
        };
        runs(data.bytes(), command.offset).into_iter().map(piece).collect()
    }

    /// How a part with data begins.
    fn of_data(&self, part: Command, data: Payload) -> Piece<Payload> {
        let is_compared =
            self.compares.load(Ordering::Relaxed) && !part.is_durable && part.length >= COMPARED_BYTES_MIN;
        if !is_compared {
            self.offer(&part, &data);
        }
        let operation = if is_compared { Operation::Compare } else { part.operation };
        Piece { command: Command { operation, ..part }, payload: Some(data) }
    }

    /// Has data packed while they wait for the wire, as they will. For durable ones somebody else may wait.
    fn offer(&self, part: &Command, data: &Payload) {
        let Some(packers) = &self.export.packers else { return };
        if part.is_durable || data.bytes().len() < PACKED_BYTES_MIN || !packers.would_pack(data.bytes()) {
            return;
        }
        self.counting.is_packable(part);
        if self.wire_load.is_full() || self.export.pace.is_limited() {
            data.offer(packers);
        }
    }

    /// What comes from now on is sent.
    pub(super) fn end_comparing(&self) {
        self.compares.store(false, Ordering::Relaxed);
    }

    pub(super) fn join(&self, number: StreamNumber, waker: Arc<Notify>) {
        self.state.lock().expect("nothing panics with it").wakers.insert(number, waker);
        self.with(|scheduler| scheduler.join(number));
        self.counting.is_live(number, true);
    }

    pub(super) fn lose(&self, number: StreamNumber) {
        self.state.lock().expect("nothing panics with it").wakers.remove(&number);
        self.with(|scheduler| scheduler.lose(number));
        self.counting.is_live(number, false);
    }

    pub(super) fn next(&self, number: StreamNumber) -> Option<Outgoing<Payload>> {
        self.with(|scheduler| scheduler.next(number))
    }

    pub(super) fn asked(&self, number: StreamNumber, handle: u64) -> Result<Command, Malformed> {
        self.with(|scheduler| scheduler.asked(number, handle))
    }

    pub(super) fn answered(
        &self,
        number: StreamNumber,
        handle: u64,
        result: Result<Option<Payload>, ErrorCode>,
    ) -> Result<(), SplitterError> {
        self.advances();
        let compared = self.asked(number, handle)?;
        if compared.operation == Operation::Compare && result.is_ok() {
            self.counting.is_same(&compared);
        }
        Ok(self.with(|scheduler| scheduler.answered(number, handle, result))?)
    }

    pub(super) fn differs(&self, number: StreamNumber, handle: u64) -> Result<(), SplitterError> {
        self.advances();
        let Piece { command, payload } =
            self.with(|scheduler| scheduler.compared(number, handle).cloned())?;
        if let Some(data) = payload {
            self.offer(&command, &data);
        }
        Ok(self.with(|scheduler| scheduler.differs(number, handle))?)
    }

    pub(super) fn fenced(&self, via: StreamNumber, number: StreamNumber) -> Result<(), SplitterError> {
        self.advances();
        Ok(self.with(|scheduler| scheduler.fenced(via, number))?)
    }

    /// Lets the scheduler decide something, and wakes those that it concerns.
    fn with<T>(&self, decide: impl FnOnce(&mut Scheduler<Payload>) -> T) -> T {
        let mut state = self.state.lock().expect("nothing panics with it");
        let decided = decide(&mut state.scheduler);
        for Done { cookie, command, error, data } in state.scheduler.take_done() {
            // What is trimmed may hold anything.
            let is_written = matches!(command.operation, Operation::Write | Operation::WriteZeroes);
            let is_counted = self.export.there != There::Zeroes;
            if is_counted && is_written && error.is_none() {
                state.coverage.add(command.offset, command.end());
            }
            self.reply(Reply { cookie, error, data, command: Some(command) });
        }
        for number in state.scheduler.take_woken() {
            if let Some(waker) = state.wakers.get(&number) {
                waker.notify_one();
            }
        }
        let live_streams = state.scheduler.live_streams();
        self.live_streams.send_if_modified(|before| std::mem::replace(before, live_streams) != live_streams);
        decided
    }

    /// All is answered, and nothing more will come.
    pub(super) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        for waker in self.state.lock().expect("nothing panics with it").wakers.values() {
            waker.notify_one();
        }
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Something is answered, or goes on within a limit: the disk is not to blame for what is not.
    pub(super) fn advances(&self) {
        self.advances.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn sight(&self) -> Sight {
        self.with(|scheduler| Sight {
            is_idle: scheduler.is_idle(),
            live_streams: scheduler.live_streams(),
            advances: self.advances.load(Ordering::Relaxed),
            awaits_fence: scheduler.awaits_fence(),
        })
    }

    pub(super) fn counters(&self) -> Counters {
        self.counting.read(self.with(|scheduler| scheduler.resent_pieces()))
    }

    /// Whether all of the disk was written, or found to be what would be written.
    pub(super) fn is_all_written(&self) -> bool {
        let state = self.state.lock().expect("nothing panics with it");
        state.coverage.is_all(self.export.size_bytes)
    }

    pub(super) fn live_streams(&self) -> watch::Receiver<usize> {
        self.live_streams.subscribe()
    }
}
