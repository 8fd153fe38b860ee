//! When the disk flushes while it is written to, so that not much is lost if its server ends without having done so,
//! for example because an image's tables wait in the server's memory. No promise depends on it.

use std::sync::Mutex;

use tokio::time::Instant;

use crate::limits::{DISK_ANSWERS, FLUSH_EVERY};

/// The last one, of whichever stream.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    state: Mutex<FlushState>,
}

#[derive(Debug, Default)]
struct FlushState {
    last: Option<Instant>,
    is_under_way: bool,
    has_unflushed: bool,
}

impl Flushes {
    /// Something was written.
    pub(super) fn has_written(&self) {
        self.state.lock().expect("nothing panics with it").has_unflushed = true;
    }

    /// Whether to ask for one. One at a time; of one whose connection is gone, nobody hears.
    pub(super) fn begin(&self, now: Instant) -> bool {
        let mut state = self.state.lock().expect("nothing panics with it");
        let every = if state.is_under_way { DISK_ANSWERS } else { FLUSH_EVERY };
        let is_late = state.last.is_none_or(|last| now.saturating_duration_since(last) >= every);
        let is_due = is_late && state.has_unflushed;
        if is_due {
            *state = FlushState { last: Some(now), is_under_way: true, has_unflushed: false };
        }
        is_due
    }

    /// It is answered. Whether one was asked for.
    pub(super) fn end(&self) -> bool {
        std::mem::take(&mut self.state.lock().expect("nothing panics with it").is_under_way)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_not_too_often() {
        let (flushes, begin) = (Flushes::default(), Instant::now());
        assert!(!flushes.end(), "none was asked for");
        assert!(!flushes.begin(begin), "nothing was written");
        flushes.has_written();
        assert!(flushes.begin(begin));
        flushes.has_written();
        assert!(!flushes.begin(begin + FLUSH_EVERY));
        assert!(flushes.end() && !flushes.begin(begin + FLUSH_EVERY / 2));
        assert!(flushes.begin(begin + FLUSH_EVERY));
        flushes.has_written();
        assert!(flushes.begin(begin + FLUSH_EVERY + DISK_ANSWERS), "its connection may be gone");
    }
}
