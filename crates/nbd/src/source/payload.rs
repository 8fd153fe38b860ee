//! Data on its way, and what was packed of it.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drainpipe_relay::{Bundle, Packers};
use tokio::time::timeout;

use crate::buffers::Buffer;

/// Data on their way; pieces of one request share them.
#[derive(Debug, Clone)]
pub(super) struct Payload {
    part: Part,
    // Once somebody may pack it.
    bundle: Arc<OnceLock<Bundle>>,
}

#[derive(Debug, Clone)]
struct Part {
    buffer: Arc<Buffer>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}

impl Payload {
    pub(super) fn whole(buffer: Buffer) -> Self {
        let range = 0..buffer.len();
        Self::of(Arc::new(buffer), range)
    }

    fn of(buffer: Arc<Buffer>, range: Range<usize>) -> Self {
        Self { part: Part { buffer, range }, bundle: Arc::default() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.part.as_ref()
    }

    pub(super) fn part(&self, range: Range<usize>) -> Self {
        Self::of(Arc::clone(&self.part.buffer), range)
    }

    /// Has it packed, if that may bring anything.
    pub(super) fn offer(&self, packers: &Packers) {
        if let Some(bundle) = packers.offer(Arc::new(self.part.clone())) {
            // One that was offered already is packed as it was.
            self.bundle.set(bundle).ok();
        }
    }

    /// As far as it is packed once so much time is over, or before if nothing more will be; none if it goes as it is.
    pub(super) async fn packed(&self, patience: Option<Duration>) -> Option<Arc<Vec<u8>>> {
        let bundle = self.bundle.get()?;
        if let Some(patience) = patience {
            timeout(patience, bundle.done()).await.ok();
        }
        bundle.take()
    }
}
