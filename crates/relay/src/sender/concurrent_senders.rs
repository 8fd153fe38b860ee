//! Senders of this process that pack. They look at the same idle cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sockets::lock;

/// By the order in which they began, and what packing takes of the cores for each.
static SENDERS: Mutex<Vec<(u64, f64)>> = Mutex::new(Vec::new());

static BEGUN: AtomicU64 = AtomicU64::new(0);

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct ConcurrentSender(u64);

/// How one stands among all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Standing {
    /// From 0.
    pub(super) rank: usize,
    pub(super) all: usize,
    /// Cores that packing takes for all.
    pub(super) packing: f64,
}

impl ConcurrentSender {
    pub(super) fn begin() -> Self {
        let id = BEGUN.fetch_add(1, Ordering::Relaxed);
        lock(&SENDERS).push((id, 0.0));
        Self(id)
    }

    /// Tells the others what packing takes for this one now.
    pub(super) fn takes(&self, packing: f64) -> Standing {
        let mut senders = lock(&SENDERS);
        let rank = senders.iter().position(|(id, _)| *id == self.0).unwrap_or_default();
        if let Some((_, own)) = senders.get_mut(rank) {
            *own = packing;
        }
        Standing { rank, all: senders.len(), packing: senders.iter().map(|(_, packing)| packing).sum() }
    }
}

impl Drop for ConcurrentSender {
    fn drop(&mut self) {
        lock(&SENDERS).retain(|(id, _)| *id != self.0);
    }
}
