//! The receiver's side of the sender's [`PageCache`](crate::page_cache::PageCache).

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::delta;
use crate::error::RelayError;
use crate::multifd::PAGE_BYTES;
use crate::sockets::lock;

/// How long the change before may take to come by another connection: longer than a path takes to be given up and
/// left. Past this it is not on its way.
const CHANGE_DEADLINE: Duration = Duration::from_mins(2);

/// Pages that the sender may refer to.
#[derive(Debug)]
pub(crate) struct PageSlots {
    slots_max: usize,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    // As far as the sender has used them.
    slots: Vec<Slot>,
    waiting: usize,
    is_closed: bool,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    changes: u32,
    // None until its first change.
    bytes: Option<Box<[u8]>>,
}

impl PageSlots {
    /// Slots for at most this many bytes.
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { slots_max: bytes_max / PAGE_BYTES, inner: Mutex::default(), changed: Condvar::new() }
    }

    /// Nobody waits any more.
    pub(crate) fn close(&self) {
        lock(&self.inner).is_closed = true;
        self.changed.notify_all();
    }

    /// Changes a slot once it has changed so often: to `page`, if that is a whole one, or by that delta. Appends
    /// what it holds then to `raw`.
    pub(crate) fn change(
        &self,
        slot: usize,
        changes: u32,
        page: &[u8],
        raw: &mut Vec<u8>,
    ) -> Result<(), RelayError> {
        if slot >= self.slots_max {
            return Err(RelayError::Malformed("a page beyond those that were agreed on"));
        }
        let mut inner = lock(&self.inner);
        if inner.slots.len() <= slot {
            inner.slots.resize(slot + 1, Slot::default());
        }
        // How many are still to come before it; the count begins again past its end.
        let ahead = changes.wrapping_sub(inner.slots[slot].changes);
        if ahead > u32::MAX / 2 {
            return Err(RelayError::Malformed("a change of a page that has changed since"));
        }
        if ahead > 0 {
            inner.waiting += 1;
            let is_due = |inner: &mut Inner| !inner.is_closed && inner.slots[slot].changes != changes;
            let waited = self.changed.wait_timeout_while(inner, CHANGE_DEADLINE, is_due);
            (inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
            inner.waiting -= 1;
        }
        let is_awaited = inner.waiting > 0;
        let slot = &mut inner.slots[slot];
        if slot.changes != changes {
            return Err(RelayError::Malformed("a change of a page, but none before it"));
        }
        if page.len() == PAGE_BYTES {
            match &mut slot.bytes {
                Some(bytes) => bytes.copy_from_slice(page),
                None => slot.bytes = Some(page.into()),
            }
        } else {
            let bytes = slot.bytes.as_mut().ok_or(RelayError::Malformed("a change of no page"))?;
            delta::apply(page, bytes)?;
        }
        slot.changes = changes.wrapping_add(1);
        if let Some(bytes) = &slot.bytes {
            raw.extend_from_slice(bytes);
        }
        drop(inner);
        if is_awaited {
            self.changed.notify_all();
        }
        Ok(())
    }
}
