//! Whether the wire is what delays a disk's streams: only then is there time to pack.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{io, io::IoSlice};

use tokio::io::AsyncWrite;
use tokio::time::Instant;

/// After the last stream that had to wait for it, the wire counts as full for so long.
const FULL_FOR: Duration = Duration::from_millis(100);

/// This much of a stream's data counts as unsent in the kernel, which takes more only once little is left.
const UNSENT_BYTES: f64 = (64 << 10) as f64;

/// How long a stream may wait for cores at most, and from when on it is worth it.
pub(super) const PATIENCE_MAX: Duration = Duration::from_millis(8);
const PATIENCE_MIN: Duration = Duration::from_millis(1);

/// The load of all streams of a disk.
#[derive(Debug)]
pub(super) struct WireLoad {
    begun: Instant,
    waiting: AtomicUsize,
    // In ms from the begin; 0 for never.
    last_waited_ms: AtomicU64,
}

impl WireLoad {
    pub(super) fn new() -> Self {
        Self { begun: Instant::now(), waiting: AtomicUsize::new(0), last_waited_ms: AtomicU64::new(0) }
    }

    /// Whether some stream waits, or did a moment ago.
    pub(super) fn is_full(&self) -> bool {
        let last = self.last_waited_ms.load(Ordering::Relaxed);
        let full_for_ms = u64::try_from(FULL_FOR.as_millis()).expect("it is short");
        self.waiting.load(Ordering::Relaxed) > 0 || (last > 0 && self.now_ms() < last + full_for_ms)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX).max(1)
    }

    fn begin(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    fn end(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.last_waited_ms.store(self.now_ms(), Ordering::Relaxed);
    }
}

/// A stream's writer, which sees whether the wire lets it wait.
#[derive(Debug)]
pub(super) struct WatchedWriter<'load, W> {
    writer: W,
    load: &'load WireLoad,
    waits: bool,
    patience: Option<Duration>,
}

impl<'load, W> WatchedWriter<'load, W> {
    pub(super) fn new(writer: W, load: &'load WireLoad) -> Self {
        Self { writer, load, waits: false, patience: None }
    }

    /// So much was written since then.
    pub(super) fn has_written(&mut self, bytes: usize, since: Instant) {
        let has_waited = self.end_of_wait();
        self.patience = has_waited.then(|| patience(bytes, since.elapsed()));
    }

    /// How long it may wait for cores before it sends the next data, so that the wire has enough to do; none if it had to
    /// wait for no wire with the last ones.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.patience
    }

    fn end_of_wait(&mut self) -> bool {
        let waited = std::mem::take(&mut self.waits);
        if waited {
            self.load.end();
        }
        waited
    }

    fn watched<T>(&mut self, poll: Poll<T>) -> Poll<T> {
        if poll.is_pending() && !std::mem::replace(&mut self.waits, true) {
            self.load.begin();
        }
        poll
    }
}

/// Half of the time that the wire needs for what the kernel has of this stream.
fn patience(bytes: usize, took: Duration) -> Duration {
    let part = UNSENT_BYTES / 2.0 / bytes.max(1) as f64;
    took.mul_f64(part).clamp(PATIENCE_MIN, PATIENCE_MAX)
}

impl<W> Drop for WatchedWriter<'_, W> {
    fn drop(&mut self) {
        self.end_of_wait();
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for WatchedWriter<'_, W> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let poll = Pin::new(&mut this.writer).poll_write(context, bytes);
        this.watched(poll)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let poll = Pin::new(&mut this.writer).poll_write_vectored(context, slices);
        this.watched(poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.writer.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let poll = Pin::new(&mut this.writer).poll_flush(context);
        this.watched(poll)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().writer).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_wire_is_full_while_a_stream_waits_and_for_a_moment_after_that() {
        let (near, mut far) = duplex(1000);
        let load = WireLoad::new();
        let mut writer = WatchedWriter::new(near, &load);
        let begun = Instant::now();
        writer.write_all(&[7; 1000]).await.unwrap();
        writer.has_written(1000, begun);
        assert!(!load.is_full() && writer.patience().is_none());
        let late = tokio::time::timeout(Duration::from_secs(1), writer.write_all(&[7; 1000])).await;
        assert!(late.is_err() && load.is_full());
        far.read_exact(&mut [0; 1000]).await.unwrap();
        writer.write_all(&[7; 1000]).await.unwrap();
        writer.has_written(1000, begun);
        assert_eq!(writer.patience(), Some(PATIENCE_MAX));
        assert!(load.is_full());
        tokio::time::advance(2 * FULL_FOR).await;
        assert!(!load.is_full());
        drop(tokio::time::timeout(Duration::from_secs(1), writer.write_all(&[7; 1000])).await);
        drop(writer);
        tokio::time::advance(2 * FULL_FOR).await;
        assert!(!load.is_full(), "a stream that is lost waits for nothing");
    }

    #[test]
    fn a_stream_waits_no_longer_than_its_wire_has_something_to_do() {
        assert_eq!(patience(1 << 20, Duration::from_millis(64)), Duration::from_millis(2));
        assert_eq!(patience(1 << 20, Duration::from_millis(1)), PATIENCE_MIN);
        assert_eq!(patience(1, Duration::from_secs(10)), PATIENCE_MAX);
    }
}
