//! What is under way: how far it is, and whether it is still wanted. Shared between who does it and who watches.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::DiskError;
use crate::method::Method;

/// One disk being made or copied.
#[derive(Debug, Default)]
pub struct Task {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    is_cancelled: AtomicBool,
    stage: Mutex<Stage>,
}

/// What is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stage {
    /// Nothing yet.
    #[default]
    Looking,
    /// By this method.
    Doing(Method),
    /// The storage is to have all of it for good.
    Flushing,
}

impl Task {
    /// Ends it soon, and leaves nothing of it.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// How many bytes are done, and of how many.
    pub fn progress(&self) -> (u64, u64) {
        (self.done_bytes.load(Ordering::Relaxed), self.total_bytes.load(Ordering::Relaxed))
    }

    /// What is being done.
    pub fn stage(&self) -> Stage {
        *self.stage.lock().expect("nothing panics with it")
    }

    /// Before each piece of work.
    pub(crate) fn go_on(&self) -> Result<(), DiskError> {
        if self.is_cancelled.load(Ordering::Relaxed) { Err(DiskError::Cancelled) } else { Ok(()) }
    }

    /// A method begins at the beginning.
    pub(crate) fn begin(&self, method: Method, total_bytes: u64) {
        for counter in [&self.done_bytes, &self.read_bytes, &self.written_bytes] {
            counter.store(0, Ordering::Relaxed);
        }
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
        self.enter(Stage::Doing(method));
    }

    pub(crate) fn enter(&self, stage: Stage) {
        *self.stage.lock().expect("nothing panics with it") = stage;
    }

    pub(crate) fn is_done(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// This program has read so many bytes.
    pub(crate) fn has_read(&self, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// This program has written so many bytes.
    pub(crate) fn has_written(&self, bytes: u64) {
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What this program itself has read and written.
    pub(crate) fn own_bytes(&self) -> (u64, u64) {
        (self.read_bytes.load(Ordering::Relaxed), self.written_bytes.load(Ordering::Relaxed))
    }
}
