//! What the threads of a sender share.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use drainpipe_engine::transfer::codec::{Codec, CodecTrial, Controller, Mix, Reading};
use tracing::warn;

use super::SenderSettings;
use super::rest::Rest;
use super::unsent::UNSENT_BYTES_MIN;
use crate::block::{BLOCK_BYTES_MAX, Block};
use crate::error::RelayError;
use crate::figures::{Counters, PackingTime};
use crate::frame::{Frame, HEADER_BYTES};
use crate::pace::{Pace, SendQuota};
use crate::pack::Trier;
use crate::page_cache::{PageCache, TakenSlot};
use crate::queue::{Content, Front, Outgoing, Packed, Streams, Work};
use crate::sockets::{Breaker, lock};

/// All blocks that wait to be sent, packed or not, in bytes before packing.
pub(super) const WAITING_BYTES_MAX: usize = 16 << 20;

/// What they may take more than that, by copies of pages that replace others: whose pages have come before, and
/// shrink by less than they are long. Past this, pages go without copies for a while.
pub(super) const EXTRA_BYTES_MAX: usize = 6 << 20;

/// Blocks that may wait in one stream at least: one to be packed while another goes out.
pub(super) const DEPTH_MIN: usize = 2;

/// At most: more work ahead brings nothing.
const DEPTH_MAX: usize = 8;

/// How long the wire waits for a block to be packed, in microseconds, until more is known.
const PATIENCE_US: u64 = 3_000;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: SenderSettings,
    pub(super) counters: Counters,
    /// The connections to the receiver.
    pub(super) wire: Breaker,
    /// Those to the program, and where it makes them. They outlast a failure: the owner has to have the program
    /// stop first, which may not bear to lose all of them at once.
    pub(super) program: Breaker,
    pub(super) rest: Rest,
    /// `TCP_NOTSENT_LOWAT` of each connection.
    pub(super) unsent_bytes: AtomicU32,
    /// How long a stream whose socket has little left to send may wait for a block to be packed, in microseconds.
    pub(super) patience_us: AtomicU64,
    inner: Mutex<Inner>,
    work: Condvar,
    steer: Condvar,
    // One of each for each stream.
    ready: Vec<Condvar>,
    room: Vec<Condvar>,
}

#[derive(Debug)]
struct Inner {
    streams: Streams,
    controller: Controller,
    pace: Pace,
    page_cache: PageCache,
    // Blocks that were sent, to be filled again.
    free_blocks: Vec<Block>,
    // None while somebody compares codecs.
    trier: Option<Trier>,
    // Blocks that may wait in a stream, unless little is to.
    depth: usize,
    is_short: bool,
    ended: usize,
    // The wire has waited, and nobody had a core for what it waited for.
    is_starved: bool,
    // Threads that may pack, and those that do.
    allowed: usize,
    // None where what they took would be missed by others.
    allowed_max: usize,
    packing_now: usize,
    is_closed: bool,
    error: Option<RelayError>,
    // Since the last look of those that steer.
    packing: PackingTime,
    wire_full: Duration,
    // Since when the wire has been full, if it is.
    wire_full_since: Option<Instant>,
}

impl Inner {
    fn set_waits_for_wire(&mut self, stream: usize, waits: bool) {
        self.streams.set_waits_for_wire(stream, waits);
        if self.streams.is_wire_full() {
            self.wire_full_since.get_or_insert_with(Instant::now);
        } else if let Some(since) = self.wire_full_since.take() {
            self.wire_full += since.elapsed();
        }
    }

    /// Whether no more blocks may wait in a stream.
    fn is_full(&self, stream: usize) -> bool {
        let depth = if self.is_short { DEPTH_MIN } else { self.depth };
        self.streams.depth(stream) >= depth
    }

    /// How many more threads would find work. Each one that is woken for nothing takes a moment from what else wants its
    /// core.
    fn find_work(&self) -> usize {
        self.streams.work_up_to(self.allowed.saturating_sub(self.packing_now))
    }

    /// Keeps a block to be filled again, once nobody else holds it: one for each stream, to be there when its reader
    /// asks. While more are packed, more would only lie here.
    fn keep(&mut self, raw: Arc<Block>) {
        if self.free_blocks.len() < self.streams.count() {
            self.free_blocks.extend(Arc::try_unwrap(raw).ok());
        }
    }

    /// What it was since this was asked last.
    fn past(&mut self) -> Past {
        if let Some(since) = &mut self.wire_full_since {
            self.wire_full += std::mem::replace(since, Instant::now()).elapsed();
        }
        Past { packing: std::mem::take(&mut self.packing), wire_full: std::mem::take(&mut self.wire_full) }
    }
}

/// What became of some time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Past {
    /// What packing took.
    pub(super) packing: PackingTime,
    /// How long the wire was full.
    pub(super) wire_full: Duration,
}

/// What [`Shared::next`] gives a stream's writer.
#[derive(Debug)]
pub(super) enum Next {
    /// What goes, and the turn of its first part.
    Block(Frame, Outgoing, SendQuota),
    End,
    Closed,
}

/// A block to be packed, and how.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) work: Work,
    pub(super) codec: Codec,
    /// If it is to be packed with each codec first, to compare them.
    pub(super) trier: Option<Trier>,
    /// Those of its pages that the other end has a copy of, or will have one.
    pub(super) taken: Vec<TakenSlot>,
}

/// A block that was packed, or does not shrink.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) work: Work,
    pub(super) packed: Option<Packed>,
    pub(super) trier: Option<Trier>,
    pub(super) trials: Option<[CodecTrial; Codec::ALL.len()]>,
    pub(super) took: PackingTime,
}

impl Shared {
    pub(super) fn new(settings: SenderSettings) -> Self {
        let connections = settings.connections;
        let condvars = || std::iter::repeat_with(Condvar::new).take(connections).collect();
        Self {
            counters: Counters::default(),
            wire: Breaker::new(),
            program: Breaker::new(),
            rest: Rest::default(),
            unsent_bytes: AtomicU32::new(UNSENT_BYTES_MIN),
            patience_us: AtomicU64::new(PATIENCE_US),
            inner: Mutex::new(Inner {
                streams: Streams::new(connections),
                controller: Controller::default(),
                pace: Pace::new(Instant::now()),
                // The rest is for what is noted of pages.
                page_cache: PageCache::new(settings.page_cache_bytes / 16 * 15),
                free_blocks: vec![],
                trier: Some(Trier::new()),
                depth: depth_max(connections),
                is_short: false,
                ended: 0,
                is_starved: false,
                allowed: settings.allowance().allowed(),
                allowed_max: settings.cores,
                packing_now: 0,
                is_closed: false,
                error: None,
                packing: PackingTime::default(),
                wire_full: Duration::ZERO,
                wire_full_since: None,
            }),
            work: Condvar::new(),
            steer: Condvar::new(),
            ready: condvars(),
            room: condvars(),
            settings,
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    pub(super) fn error(&self) -> Option<RelayError> {
        self.inner().error.clone()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.inner().is_closed
    }

    /// Ends everything but the program's connections, with the first error.
    pub(super) fn fail(&self, error: RelayError) {
        let mut inner = self.inner();
        if !inner.is_closed {
            // At once, so that what follows from it is not taken for the cause.
            inner.is_closed = true;
            inner.error = Some(error);
        }
        drop(inner);
        self.stop();
    }

    /// Sends nothing more, and throws away what the program still gives.
    pub(super) fn stop_sending(&self) {
        self.stop();
        self.rest.throw_away();
    }

    /// Ends everything.
    pub(super) fn close(&self) {
        self.stop_sending();
        self.program.break_all();
    }

    fn stop(&self) {
        self.inner().is_closed = true;
        self.wire.break_all();
        self.work.notify_all();
        self.steer.notify_all();
        self.ready.iter().chain(&self.room).for_each(Condvar::notify_all);
    }

    /// From now on little may wait in the streams, or as much as the wire makes of it.
    pub(super) fn set_short(&self, is_short: bool) {
        self.inner().is_short = is_short;
        self.room.iter().for_each(Condvar::notify_one);
    }

    pub(super) fn set_limit(&self, bytes_per_second: Option<u64>) {
        self.inner().pace.set(bytes_per_second, Instant::now());
        self.ready.iter().for_each(Condvar::notify_all);
    }

    /// Waits until the limit lets a stream send.
    pub(super) fn wait_pace(&self, stream: usize) {
        drop(self.paced(stream, self.inner()));
    }

    /// The same, and takes what it may send of so many bytes: with its turn, or all streams that wait would have the same
    /// one. None once all is over.
    pub(super) fn take_quota(&self, stream: usize, bytes: usize) -> Option<SendQuota> {
        let mut inner = self.paced(stream, self.inner());
        // What follows the last part may be long in coming.
        inner.set_waits_for_wire(stream, false);
        (!inner.is_closed).then(|| inner.pace.quota(bytes, Instant::now()))
    }

    fn paced<'a>(&'a self, stream: usize, mut inner: MutexGuard<'a, Inner>) -> MutexGuard<'a, Inner> {
        let mut waits = false;
        while let Some(wait) = inner.pace.wait(Instant::now()).filter(|_| !inner.is_closed) {
            if !waits {
                waits = true;
                inner.set_waits_for_wire(stream, true);
                self.wake(inner.find_work());
            }
            (inner, _) = self.ready[stream].wait_timeout(inner, wait).unwrap_or_else(PoisonError::into_inner);
        }
        inner
    }

    /// Waits for room in a stream, and gives a block to be filled; none once all is over.
    pub(super) fn empty_block(&self, stream: usize) -> Option<Block> {
        let inner = self.inner();
        let is_full = |inner: &mut Inner| !inner.is_closed && inner.is_full(stream);
        // Closing wakes it.
        let mut inner = self.room[stream].wait_while(inner, is_full).unwrap_or_else(PoisonError::into_inner);
        let block = inner.free_blocks.pop().unwrap_or_else(Block::new);
        (!inner.is_closed).then_some(block)
    }

    /// A block came from the program.
    pub(super) fn push(&self, stream: usize, block: Block) {
        let mut inner = self.inner();
        inner.streams.push(stream, block);
        let find_work = inner.find_work();
        drop(inner);
        self.ready[stream].notify_one();
        // Whoever brought the others woke somebody for them.
        self.wake(find_work.min(1));
    }

    /// The program has closed a connection.
    pub(super) fn end(&self, stream: usize) {
        self.inner().streams.end(stream);
        self.ready[stream].notify_one();
    }

    /// Waits for something to send in a stream.
    pub(super) fn wait_front(&self, stream: usize) {
        let inner = self.inner();
        let is_empty = |inner: &mut Inner| !inner.is_closed && inner.streams.front(stream) == Front::Empty;
        // The program may be silent for as long as it likes; closing wakes it.
        drop(self.ready[stream].wait_while(inner, is_empty));
    }

    /// The wire takes nothing of this stream for now.
    pub(super) fn waits_for_wire(&self, stream: usize) {
        let mut inner = self.inner();
        inner.set_waits_for_wire(stream, true);
        let find_work = inner.find_work();
        drop(inner);
        self.wake(find_work);
    }

    /// Takes what is at the front of a stream, now that the wire wants it. Where the wire is the limit, it waits a
    /// little for the block to be packed: what its sockets hold lasts longer. Where it is not known yet whether it
    /// is, with the first block, it is taken to be.
    pub(super) fn next(&self, stream: usize, is_first: bool) -> Next {
        let mut inner = self.inner();
        let is_wire_the_limit = is_first || inner.streams.is_wire_full();
        // From here on it waits for those that pack.
        inner.set_waits_for_wire(stream, false);
        let is_starved = inner.is_starved || inner.allowed == 0;
        if is_wire_the_limit && !is_starved && inner.streams.front(stream) == Front::Waiting {
            inner.streams.set_wanted(stream, true);
            self.wake(inner.find_work().min(1));
        }
        let is_awaited = |inner: &mut Inner| match inner.streams.front(stream) {
            Front::InWork => !inner.is_closed && is_wire_the_limit,
            Front::Waiting => !inner.is_closed && inner.streams.is_wanted(stream),
            Front::Empty | Front::End | Front::Ready => false,
        };
        let patience = Duration::from_micros(self.patience_us.load(Ordering::Relaxed));
        let waited = self.ready[stream].wait_timeout_while(inner, patience, is_awaited);
        (inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        // Another stream may have had the turn meanwhile.
        inner = self.paced(stream, inner);
        inner.set_waits_for_wire(stream, false);
        if inner.is_closed {
            return Next::Closed;
        }
        inner.is_starved |= inner.streams.is_wanted(stream) && inner.streams.front(stream) == Front::Waiting;
        inner.streams.set_wanted(stream, false);
        let Some(mut block) = inner.streams.pop(stream) else { return Next::End };
        let quota = inner.pace.quota(HEADER_BYTES + block.bytes().len(), Instant::now());
        let frame = block.frame();
        if let Some(change) = block.take_change() {
            inner.page_cache.change(change);
        }
        drop(inner);
        self.room[stream].notify_one();
        Next::Block(frame, block, quota)
    }

    /// A block has been sent; what held it may be filled again.
    pub(super) fn sent(&self, block: Outgoing) {
        if let Content::Raw(raw) = block.content {
            self.inner().keep(raw);
        }
    }

    /// All of a stream was sent.
    pub(super) fn ended(&self) {
        self.inner().ended += 1;
        self.work.notify_all();
        self.steer.notify_all();
    }

    /// Waits for a block to pack; none once all is over.
    pub(super) fn take_work(&self) -> Option<Order> {
        let mut inner = self.inner();
        loop {
            if self.is_over(&inner) {
                return None;
            }
            let may_pack = inner.packing_now < inner.allowed;
            if let Some(work) = may_pack.then(|| inner.streams.take_work()).flatten() {
                inner.packing_now += 1;
                let Inner { controller, trier, streams, page_cache, .. } = &mut *inner;
                let trier = trier.take_if(|_| controller.wants_trial());
                let may_copy = streams.extra_bytes() <= EXTRA_BYTES_MAX;
                let pages = if may_copy { work.raw.pages() } else { &[] };
                let taken = page_cache.take(pages, work.raw.syncs());
                let Mix { cheaper, stronger } = controller.current();
                let codec = if work.is_urgent { cheaper } else { stronger };
                return Some(Order { work, codec, trier, taken });
            }
            // Whoever brings work wakes it if it may pack, and so do who lets more pack and the end. Who has done its
            // work looks for more in its place, so none is left lying by those that may not pack.
            inner = self.work.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A block was packed, or does not shrink.
    pub(super) fn finish(&self, done: Done) {
        let Done { work, packed, trier, trials, took } = done;
        let mut inner = self.inner();
        inner.trier = trier.or(inner.trier.take());
        if let Some(trials) = trials {
            inner.controller.record(trials);
        }
        inner.is_starved = false;
        inner.packing_now -= 1;
        inner.packing.cpu += took.cpu;
        inner.packing.wall += took.wall;
        let stream = inner.streams.finish(&work, packed);
        if let Err(Some(Packed { change: Some(change), .. })) = &stream {
            inner.page_cache.release(&change.taken);
        }
        inner.keep(work.raw);
        drop(inner);
        self.counters.packed(took.cpu);
        if let Ok(stream) = stream {
            self.ready[stream].notify_one();
        }
    }

    /// A thread cannot keep to idle time. Nothing is packed from now on, and the block goes as it is.
    pub(super) fn cannot_yield(&self, order: Order, error: &str) {
        let Order { work, trier, taken, .. } = order;
        self.stop_packing(error);
        self.inner().page_cache.release(&taken);
        self.finish(Done { work, packed: None, trier, trials: None, took: PackingTime::default() });
    }

    /// The kernel does not let threads take idle time only, or not take more again.
    pub(super) fn stop_packing(&self, error: &str) {
        let mut inner = self.inner();
        let was_allowed = std::mem::take(&mut inner.allowed_max) > 0;
        inner.allowed = 0;
        // A thread that gets no core must not hold a lock that the wire's threads wait for.
        drop(inner);
        if was_allowed {
            warn!(
                %error,
                "nothing more is compressed: threads of this process may not enter the kernel's SCHED_IDLE class, or \
                 may not leave it again, which needs LimitNICE=0 or CAP_SYS_NICE"
            );
        }
    }

    /// Waits until it is time to steer again. None once all is over.
    pub(super) fn wait_to_steer(&self, pause: Duration) -> Option<Past> {
        let goes_on = |inner: &mut Inner| !self.is_over(inner);
        let waited = self.steer.wait_timeout_while(self.inner(), pause, goes_on);
        let (mut inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
        (!self.is_over(&inner)).then(|| inner.past())
    }

    /// Lets so many threads compress from now on. Those that have begun with a block finish it, in idle time.
    pub(super) fn allow(&self, threads: usize) {
        let mut inner = self.inner();
        inner.allowed = threads.min(inner.allowed_max);
        let find_work = inner.find_work();
        drop(inner);
        self.wake(find_work);
    }

    /// Looks at the choice of codecs, and sets how many blocks may wait in a stream.
    pub(super) fn steer(&self, reading: Reading, depth: usize) {
        let mut inner = self.inner();
        inner.controller.choose(reading);
        inner.depth = depth.clamp(DEPTH_MIN, depth_max(self.settings.connections));
        drop(inner);
        self.room.iter().for_each(Condvar::notify_one);
    }

    /// Wakes so many of those that pack.
    fn wake(&self, threads: usize) {
        (0..threads).for_each(|_| self.work.notify_one());
    }

    fn is_over(&self, inner: &Inner) -> bool {
        inner.is_closed || inner.ended == self.settings.connections
    }
}

/// Blocks that may wait in each of so many streams at most, with the one that is being filled.
pub(super) fn depth_max(connections: usize) -> usize {
    (WAITING_BYTES_MAX / BLOCK_BYTES_MAX / connections).clamp(DEPTH_MIN, DEPTH_MAX)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;
    use crate::preamble::{TOKEN_BYTES, Token};
    use crate::sender::ConcurrentSenders;
    use crate::treatment::Treatment;

    fn shared(cores: usize) -> Arc<Shared> {
        with_connections(1, cores)
    }

    fn with_connections(connections: usize, cores: usize) -> Arc<Shared> {
        Arc::new(Shared::new(SenderSettings {
            path: "none".into(),
            users: vec![],
            destination: SocketAddr::from(([127, 0, 0, 1], 1)),
            connections,
            token: Token([0; TOKEN_BYTES]),
            treatment: Treatment::Packed,
            cores,
            cpus: vec![],
            gives_way: true,
            concurrent: ConcurrentSenders::default(),
            page_cache_bytes: 0,
        }))
    }

    #[test]
    fn nobody_packs_while_others_want_all_cores_and_the_wire_does_not_wait() {
        let shared = shared(2);
        shared.patience_us.store(60_000_000, Ordering::Relaxed);
        shared.allow(0);
        let packing = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.take_work().map(|order| order.work.raw[0]))
        };
        hold_up(&shared, [7, 8]);
        let Next::Block(_, block, _) = shared.next(0, true) else { panic!("there is a block") };
        assert!(matches!(&block.content, Content::Raw(raw) if raw[0] == 7));
        shared.waits_for_wire(0);
        shared.allow(1);
        assert_eq!(packing.join().unwrap(), Some(8));
    }

    #[test]
    fn what_is_urgent_is_packed_by_the_cheaper_codec() {
        let shared = shared(2);
        shared.allow(2);
        hold_up(&shared, [7, 8]);
        let Mix { cheaper, stronger } = Controller::default().current();
        assert_ne!(cheaper, stronger);
        let orders = [(); 2].map(|()| shared.take_work().unwrap());
        assert_eq!(
            orders.map(|order| (order.work.is_urgent, order.codec)),
            [(true, cheaper), (false, stronger)]
        );
    }

    #[test]
    fn who_cannot_keep_to_idle_time_packs_nothing_and_the_wire_does_not_wait() {
        let shared = shared(2);
        shared.patience_us.store(60_000_000, Ordering::Relaxed);
        hold_up(&shared, [7, 8]);
        let order = shared.take_work().unwrap();
        shared.cannot_yield(order, "not permitted");
        shared.allow(2);
        for expected in [7, 8] {
            let Next::Block(_, block, _) = shared.next(0, true) else { panic!("there is a block") };
            assert!(matches!(&block.content, Content::Raw(raw) if raw[0] == expected));
        }
        shared.push(0, Block::from(&[9][..]));
        let packing = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.take_work().is_none())
        };
        shared.ended();
        assert!(packing.join().unwrap(), "nobody packs, also where there is work");
    }

    #[test]
    fn no_more_pack_than_may_and_nothing_is_left_lying() {
        let shared = shared(2);
        shared.allow(1);
        hold_up(&shared, [1, 2]);
        let first = shared.take_work().unwrap();
        let is_done = Arc::new(AtomicBool::new(false));
        let other = {
            let (shared, is_done) = (Arc::clone(&shared), Arc::clone(&is_done));
            thread::spawn(move || shared.take_work().is_some() && is_done.load(Ordering::SeqCst))
        };
        is_done.store(true, Ordering::SeqCst);
        does_not_shrink(&shared, first);
        shared.work.notify_one();
        assert!(other.join().unwrap());
    }

    /// Blocks for the wire, which takes none now.
    fn hold_up(shared: &Shared, blocks: [u8; 2]) {
        shared.waits_for_wire(0);
        for block in blocks {
            shared.push(0, Block::from(&[block][..]));
        }
    }

    fn does_not_shrink(shared: &Shared, order: Order) {
        let Order { work, trier, .. } = order;
        shared.finish(Done { work, packed: None, trier, trials: None, took: PackingTime::default() });
    }

    #[test]
    fn little_waits_near_the_end_and_as_much_as_before_if_it_was_none() {
        let shared = shared(1);
        let fill = || {
            while !shared.inner().is_full(0) {
                shared.push(0, Block::from(&[7][..]));
            }
            shared.inner().streams.depth(0)
        };
        shared.set_short(true);
        assert_eq!(fill(), DEPTH_MIN);
        shared.steer(Reading { wire_bytes_per_second: 1e9, cores: 1.0 }, 5);
        assert_eq!(fill(), DEPTH_MIN);
        let filled = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.empty_block(0).is_some())
        };
        shared.set_short(false);
        assert!(filled.join().unwrap(), "who waited for room has it");
        assert_eq!(fill(), 5);
    }

    #[test]
    fn as_many_are_woken_as_find_work_and_may_pack() {
        let shared = with_connections(2, 16);
        shared.allow(1);
        let find_work = || shared.inner().find_work();
        shared.waits_for_wire(0);
        assert_eq!(find_work(), 0, "there is no work");
        for (stream, block) in [(0, 1), (0, 2), (1, 3)] {
            shared.push(stream, Block::from(&[block][..]));
        }
        assert_eq!(find_work(), 1, "of sixteen");
        let order = shared.take_work().unwrap();
        shared.waits_for_wire(1);
        assert_eq!(find_work(), 0, "all that may pack do");
        shared.allow(16);
        assert_eq!(find_work(), 2, "two blocks are left");
        shared.allow(0);
        assert_eq!(find_work(), 0);
        does_not_shrink(&shared, order);
        assert_eq!(find_work(), 0, "nobody may pack");
        shared.allow(1);
        assert_eq!(find_work(), 1);
        shared.inner().set_waits_for_wire(0, false);
        shared.inner().set_waits_for_wire(1, false);
        assert_eq!(find_work(), 0, "the wire takes all");
        shared.inner().streams.set_wanted(1, true);
        assert_eq!(find_work(), 1);
    }

    #[test]
    fn whoever_brings_work_wakes_somebody_for_it() {
        let push = |shared: &Shared| shared.push(0, Block::from(&[7][..]));
        // Until all workers without work are asleep.
        let pause = || thread::sleep(Duration::from_millis(20));
        let is_packed_after = |what: &str, bring: &dyn Fn(&Shared)| {
            let shared = shared(16);
            thread::scope(|scope| {
                let packing =
                    scope.spawn(|| shared.take_work().map(|order| does_not_shrink(&shared, order)).is_some());
                pause();
                bring(&shared);
                let end = Instant::now() + Duration::from_secs(5);
                while !packing.is_finished() && Instant::now() < end {
                    thread::sleep(Duration::from_millis(1));
                }
                shared.ended();
                assert!(packing.join().unwrap(), "{what}");
            });
        };
        is_packed_after("a block", &|shared| {
            shared.waits_for_wire(0);
            push(shared);
        });
        is_packed_after("a wait for the wire", &|shared| {
            push(shared);
            shared.waits_for_wire(0);
        });
        is_packed_after("a limit", &|shared| {
            push(shared);
            shared.set_limit(Some(1_000_000));
            shared.take_quota(0, 20_000);
            shared.wait_pace(0);
        });
        is_packed_after("a wire that wants it", &|shared| {
            push(shared);
            shared.patience_us.store(2_000_000, Ordering::Relaxed);
            drop(shared.next(0, true));
        });
        is_packed_after("more that may pack", &|shared| {
            shared.allow(0);
            shared.waits_for_wire(0);
            push(shared);
            pause();
            shared.allow(1);
        });
    }

    #[test]
    fn every_block_is_packed_though_few_are_woken_and_how_many_may_pack_changes() {
        const STREAMS: usize = 4;
        let shared = with_connections(STREAMS, 16);
        // A block for which nobody was woken would be waited for so long, and go as it is.
        shared.patience_us.store(5_000_000, Ordering::Relaxed);
        let send = |stream: usize| {
            let mut overtaken = 0;
            for number in 0..500 {
                let blocks = 1 + (number + stream) % 3;
                (0..blocks).for_each(|_| shared.push(stream, Block::from(&[7][..])));
                for _ in 0..blocks {
                    if number % 5 > 0 {
                        shared.waits_for_wire(stream);
                    }
                    let next = shared.next(stream, true);
                    overtaken +=
                        usize::from(!matches!(next, Next::Block(_, block, _) if !block.is_overtaken));
                }
            }
            shared.ended();
            overtaken
        };
        let pack = || {
            while let Some(order) = shared.take_work() {
                thread::yield_now();
                does_not_shrink(&shared, order);
            }
        };
        let overtaken: Vec<usize> = thread::scope(|scope| {
            (0..16).for_each(|_| drop(scope.spawn(pack)));
            let streams = [0, 1, 2, 3].map(|stream| scope.spawn(move || send(stream)));
            for threads in [1, 3, 1, 16, 2].into_iter().cycle() {
                shared.allow(threads);
                if shared.wait_to_steer(Duration::from_micros(200)).is_none() {
                    break;
                }
            }
            streams.into_iter().map(|stream| stream.join().unwrap()).collect()
        });
        assert_eq!(overtaken, [0; STREAMS]);
    }
}
