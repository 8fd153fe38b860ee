//! What one stream holds at the target: its window, and the requests that the disk has not answered. Pure.

use std::collections::HashMap;

use crate::command::Command;
use crate::digest::Digest;
use crate::error::Malformed;
use crate::limits::{HELD_BYTES_MAX, PIECES_PER_STREAM_MAX};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CommandState {
    /// Its data are not all here.
    Comes,
    AtDisk,
    Answered,
}

#[derive(Debug)]
struct Entry {
    command: Command,
    state: CommandState,
    /// With what it is compared.
    digest: Option<Digest>,
}

/// Requests of one stream, from when they come until their answers are gone.
#[derive(Debug, Default)]
pub(crate) struct RequestsInFlight {
    // By handle.
    entries: HashMap<u64, Entry>,
    bytes: usize,
    at_disk: usize,
}

impl RequestsInFlight {
    /// Takes a request, if a source that keeps its own bounds may send it.
    pub(crate) fn take(&mut self, handle: u64, command: Command) -> Result<(), Malformed> {
        if self.entries.len() >= PIECES_PER_STREAM_MAX || self.bytes + command.held_bytes() > HELD_BYTES_MAX {
            return Err(Malformed("more requests than may be in flight"));
        }
        if self.entries.contains_key(&handle) {
            return Err(Malformed("a handle that is in use"));
        }
        self.entries.insert(handle, Entry { command, state: CommandState::Comes, digest: None });
        self.bytes += command.held_bytes();
        Ok(())
    }

    /// What is asked for is compared with this.
    pub(crate) fn is_compared_with(&mut self, handle: u64, digest: Digest) {
        self.entries.get_mut(&handle).expect("it was taken").digest = Some(digest);
    }

    /// Whether what was read is what it is compared with.
    pub(crate) fn is_same(&self, handle: u64, digest: Digest) -> bool {
        self.entries.get(&handle).is_some_and(|entry| entry.digest == Some(digest))
    }

    /// The disk is asked.
    pub(crate) fn goes_to_disk(&mut self, handle: u64) {
        self.enter(handle, CommandState::AtDisk);
        self.at_disk += 1;
    }

    fn enter(&mut self, handle: u64, state: CommandState) {
        self.entries.get_mut(&handle).expect("it was taken").state = state;
    }

    /// What the disk answers, if it was asked.
    pub(crate) fn asked(&self, handle: u64) -> Result<Command, Malformed> {
        match self.entries.get(&handle) {
            Some(Entry { command, state: CommandState::AtDisk, .. }) => Ok(*command),
            Some(_) | None => Err(Malformed("a reply to what was not asked")),
        }
    }

    /// The disk has answered.
    pub(crate) fn is_answered(&mut self, handle: u64) {
        self.enter(handle, CommandState::Answered);
        self.at_disk -= 1;
    }

    /// The source has the answer, or never will.
    pub(crate) fn let_go(&mut self, handle: u64) {
        if let Some(entry) = self.entries.remove(&handle) {
            self.bytes -= entry.command.held_bytes();
        }
    }

    /// Requests that the disk has not answered.
    pub(crate) fn at_disk(&self) -> usize {
        self.at_disk
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Operation;
    use crate::limits::DATA_BYTES_MAX;

    fn write() -> Command {
        Command { operation: Operation::Write, length: DATA_BYTES_MAX, ..Command::FLUSH }
    }

    #[test]
    fn a_source_that_keeps_its_bounds_fits_and_another_does_not() {
        let mut requests = RequestsInFlight::default();
        let most = (HELD_BYTES_MAX / DATA_BYTES_MAX as usize) as u64;
        for handle in 0..most {
            requests.take(handle, write()).unwrap();
            assert!(requests.asked(handle).is_err(), "its data are not here");
            requests.goes_to_disk(handle);
        }
        assert!(requests.take(most, write()).is_err());
        assert!(requests.take(0, Command::FLUSH).is_err(), "a handle twice");
        requests.asked(0).unwrap();
        requests.is_answered(0);
        assert!(requests.asked(0).is_err() && requests.at_disk() == 31);
        assert!(requests.take(most, write()).is_err(), "the source does not have the answer yet");
        requests.let_go(0);
        requests.take(most, write()).unwrap();
        for handle in 100.. {
            if requests.take(handle, Command::FLUSH).is_err() {
                assert!(handle < 100 + PIECES_PER_STREAM_MAX as u64);
                break;
            }
        }
    }
}
