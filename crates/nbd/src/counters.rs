//! The counters of a splitter, for progress and limits.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::command::{Command, Operation};
use crate::frame::StreamNumber;

/// What a splitter has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes that QEMU wrote as data, and that are acknowledged.
    pub written_bytes: u64,
    /// The part of `written_bytes` that was nothing but zeroes and was sent without data.
    pub found_zero_bytes: u64,
    /// The part of `written_bytes` that the target had already, and that was sent without data.
    pub found_same_bytes: u64,
    /// Bytes that idle cores would have packed, whether the wire left time for it or not.
    pub packable_bytes: u64,
    /// Bytes that were sent packed, as they were before.
    pub packed_bytes: u64,
    /// Bytes that QEMU itself asked to be made zeroes or trimmed.
    pub zeroed_bytes: u64,
    /// Bytes that QEMU read, or that were compared.
    pub read_bytes: u64,
    /// Flushes that reached the disk.
    pub flushes: u64,
    /// Requests that are not answered yet.
    pub requests_in_flight: u64,
    /// Requests, or pieces of such, that were sent again as their stream was lost.
    pub resent: u64,
    /// The streams that there are now, and those that there were.
    pub streams: BTreeMap<u16, StreamCounters>,
}

/// What went over one stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamCounters {
    /// Bytes towards the disk, with the splitter's own headers, without TCP's.
    pub sent_bytes: u64,
    /// Whether it carries requests now.
    pub is_live: bool,
}

impl Counters {
    /// Streams that carry requests now.
    pub fn live_streams(&self) -> usize {
        self.streams.values().filter(|stream| stream.is_live).count()
    }

    /// Bytes towards the disk over all streams.
    pub fn sent_bytes(&self) -> u64 {
        self.streams.values().map(|stream| stream.sent_bytes).sum()
    }
}

/// The same, while it goes on.
#[derive(Debug, Default)]
pub(crate) struct Counting {
    written_bytes: AtomicU64,
    found_zero_bytes: AtomicU64,
    found_same_bytes: AtomicU64,
    packable_bytes: AtomicU64,
    packed_bytes: AtomicU64,
    zeroed_bytes: AtomicU64,
    read_bytes: AtomicU64,
    flushes: AtomicU64,
    requests_in_flight: AtomicU64,
    streams: Mutex<BTreeMap<StreamNumber, StreamCounters>>,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Counting {
    pub(crate) fn has_begun(&self, found_zero_bytes: usize) {
        add(&self.requests_in_flight, 1);
        add(&self.found_zero_bytes, found_zero_bytes as u64);
    }

    pub(crate) fn is_same(&self, command: &Command) {
        add(&self.found_same_bytes, command.length.into());
    }

    pub(crate) fn is_packable(&self, command: &Command) {
        add(&self.packable_bytes, command.length.into());
    }

    pub(crate) fn is_packed(&self, command: &Command) {
        add(&self.packed_bytes, command.length.into());
    }

    pub(crate) fn is_done(&self, command: &Command) {
        self.requests_in_flight.fetch_sub(1, Ordering::Relaxed);
        match command.operation {
            Operation::Read | Operation::Compare => add(&self.read_bytes, command.length.into()),
            Operation::Write => add(&self.written_bytes, command.length.into()),
            Operation::WriteZeroes | Operation::Trim => add(&self.zeroed_bytes, command.length.into()),
            Operation::Flush => add(&self.flushes, 1),
        }
    }

    pub(crate) fn is_live(&self, number: StreamNumber, is_live: bool) {
        self.streams.lock().expect("nothing panics with it").entry(number).or_default().is_live = is_live;
    }

    pub(crate) fn has_sent(&self, number: StreamNumber, bytes: usize) {
        let mut streams = self.streams.lock().expect("nothing panics with it");
        streams.entry(number).or_default().sent_bytes += bytes as u64;
    }

    pub(crate) fn read(&self, resent: u64) -> Counters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            written_bytes: of(&self.written_bytes),
            found_zero_bytes: of(&self.found_zero_bytes),
            found_same_bytes: of(&self.found_same_bytes),
            packable_bytes: of(&self.packable_bytes),
            packed_bytes: of(&self.packed_bytes),
            zeroed_bytes: of(&self.zeroed_bytes),
            read_bytes: of(&self.read_bytes),
            flushes: of(&self.flushes),
            requests_in_flight: of(&self.requests_in_flight),
            resent,
            streams: self.streams.lock().expect("nothing panics with it").clone(),
        }
    }
}
