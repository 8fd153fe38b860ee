//! A process that is not real: it lives until it is ended.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tokio::sync::watch;

use crate::end::Exit;

/// No process has such a number: Linux's largest is smaller (`PID_MAX_LIMIT`).
const PID_FIRST: u32 = 1 << 22;

#[derive(Debug)]
pub(super) struct FakeProcess {
    pub(super) pid: u32,
    pub(super) is_ending: AtomicBool,
    exit: watch::Sender<Option<Exit>>,
}

impl FakeProcess {
    pub(super) fn begin() -> Self {
        // One for the whole process, as in the kernel, so that two hypervisors in a test share no process number.
        static BEGUN: AtomicU32 = AtomicU32::new(0);
        let pid = PID_FIRST + BEGUN.fetch_add(1, Ordering::Relaxed);
        Self { pid, is_ending: AtomicBool::default(), exit: watch::Sender::new(None) }
    }

    pub(super) fn exit(&self) -> Option<Exit> {
        self.exit.borrow().clone()
    }

    /// The first end counts.
    pub(super) fn end(&self, exit: Exit) {
        self.exit.send_if_modified(|known| {
            let is_first = known.is_none();
            if is_first {
                *known = Some(exit);
            }
            is_first
        });
    }

    pub(super) fn exited(&self) -> impl Future<Output = Exit> + Send + use<> {
        let mut exit = self.exit.subscribe();
        async move {
            let ended = exit.wait_for(Option::is_some).await;
            ended.ok().and_then(|exit| exit.clone()).unwrap_or(Exit::Unknown)
        }
    }
}
