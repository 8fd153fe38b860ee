//! Tasks whose end somebody awaits, and which an error in Drainpipe may end before they have reported it.

use tokio::task::AbortHandle;

/// Runs `work` in a task of its own; if it panics, does `crashed` then.
pub(crate) fn spawn(
    work: impl Future<Output = ()> + Send + 'static,
    crashed: impl Future<Output = ()> + Send + 'static,
) -> AbortHandle {
    let task = tokio::spawn(work);
    let handle = task.abort_handle();
    tokio::spawn(async move {
        if task.await.is_err_and(|error| error.is_panic()) {
            crashed.await;
        }
    });
    handle
}
