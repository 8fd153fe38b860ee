//! What is set on the connections of the source's QEMU, which are there some time after it was told to send.

use std::io;

use tracing::warn;

/// How often all of QEMU's connections are looked for.
const ATTEMPTS: u8 = 20;

/// One thing that is set on all connections.
#[derive(Debug)]
pub(super) struct Setting {
    /// What it is for the user that it is not set.
    otherwise: &'static str,
    attempts_left: u8,
}

impl Setting {
    pub(super) fn new(otherwise: &'static str) -> Self {
        Self { otherwise, attempts_left: ATTEMPTS }
    }

    /// Has `set` set it on what there is, unless it is set on all of `connections`, or that was given up: a
    /// migration does without. `set` says on how many it did.
    pub(super) fn attempt(&mut self, connections: usize, set: impl FnOnce() -> io::Result<usize>) {
        if self.attempts_left == 0 {
            return;
        }
        self.attempts_left = match set() {
            Ok(found) if found >= connections => 0,
            Ok(found) => {
                if self.attempts_left == 1 {
                    warn!("of {connections} connections of QEMU {found} were found: {}", self.otherwise);
                }
                self.attempts_left - 1
            }
            Err(error) => {
                warn!(%error, "{}", self.otherwise);
                0
            }
        };
    }
}
