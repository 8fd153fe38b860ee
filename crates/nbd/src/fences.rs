//! Which streams may reach the disk, at the target. Pure.

use std::collections::BTreeMap;

use crate::frame::StreamNumber;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamState {
    /// Its requests go to the disk.
    Open,
    /// It takes nothing more, but what it took may not be done yet.
    Closing,
    /// All of it is done and flushed.
    Ended,
}

/// The streams of one disk. Numbers are 16 bits long, which bounds it.
#[derive(Debug, Default)]
pub(crate) struct Fences {
    streams: BTreeMap<StreamNumber, StreamState>,
}

impl Fences {
    /// Whether a stream with this number may begin: none did before, and none was fenced before it came.
    pub(crate) fn open(&mut self, number: StreamNumber) -> bool {
        let is_new = !self.streams.contains_key(&number);
        if is_new {
            self.streams.insert(number, StreamState::Open);
        }
        is_new
    }

    /// Whether the stream may take another request to the disk.
    pub(crate) fn is_open(&self, number: StreamNumber) -> bool {
        self.streams.get(&number) == Some(&StreamState::Open)
    }

    /// From now on it takes nothing more. One that never came never will.
    pub(crate) fn fence(&mut self, number: StreamNumber) {
        let state = self.streams.entry(number).or_insert(StreamState::Ended);
        if *state == StreamState::Open {
            *state = StreamState::Closing;
        }
    }

    /// All that it took is done and flushed.
    pub(crate) fn end(&mut self, number: StreamNumber) {
        self.streams.insert(number, StreamState::Ended);
    }

    /// Whether nothing more of it will reach the disk.
    pub(crate) fn has_ended(&self, number: StreamNumber) -> bool {
        self.streams.get(&number) == Some(&StreamState::Ended)
    }

    /// Whether that is so of all.
    pub(crate) fn have_all_ended(&self) -> bool {
        self.streams.values().all(|state| *state == StreamState::Ended)
    }

    /// How many may reach the disk, or still do.
    pub(crate) fn open_streams(&self) -> usize {
        self.streams.values().filter(|state| **state != StreamState::Ended).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fenced_stream_has_ended_when_the_disk_has_done_all_of_it() {
        let mut fences = Fences::default();
        assert!(fences.open(1) && !fences.open(1));
        fences.fence(1);
        assert!(!fences.is_open(1) && !fences.has_ended(1) && fences.open_streams() == 1);
        fences.end(1);
        assert!(fences.has_ended(1) && fences.have_all_ended());
        assert!(!fences.open(1));
    }

    #[test]
    fn one_that_was_fenced_before_it_came_does_not_come() {
        let mut fences = Fences::default();
        fences.fence(7);
        assert!(fences.has_ended(7) && !fences.open(7));
    }
}
