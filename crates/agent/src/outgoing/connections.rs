//! What is set on the connections of the source's QEMU, which are there some time after it was told to send.

use std::io;
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

/// How long all of QEMU's connections are looked for.
const FOUND_WITHIN: Duration = Duration::from_secs(2);

/// One thing that is set on all connections.
#[derive(Debug)]
pub(super) struct Setting {
    /// What it is for the user that it is not set.
    otherwise: &'static str,
    state: State,
}

#[derive(Debug)]
enum State {
    NotTried,
    TriedSince(Instant),
    Over,
}

impl Setting {
    pub(super) fn new(otherwise: &'static str) -> Self {
        Self { otherwise, state: State::NotTried }
    }

    /// Whether it is set on all connections, or that was given up.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Has `set` set it on what there is, unless it is set on all of `connections`, or that was given up: a
    /// migration does without. `set` says on how many it did.
    pub(super) fn attempt(&mut self, connections: usize, set: impl FnOnce() -> io::Result<usize>) {
        let since = match self.state {
            State::Over => return,
            State::NotTried => Instant::now(),
            State::TriedSince(since) => since,
        };
        self.state = match set() {
            Ok(found) if found >= connections => State::Over,
            Ok(_) if since.elapsed() < FOUND_WITHIN => State::TriedSince(since),
            Ok(found) => {
                warn!("of {connections} connections of QEMU {found} were found: {}", self.otherwise);
                State::Over
            }
            Err(error) => {
                warn!(%error, "{}", self.otherwise);
                State::Over
            }
        };
    }
}
