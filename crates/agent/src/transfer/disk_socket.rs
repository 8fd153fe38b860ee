//! A connection for a disk. If disks are packed, the kernel holds no more unsent data than the wire needs: what the
//! agent still has can be packed.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use drainpipe_nbd::Counters;
use drainpipe_relay::{UNSENT_BYTES_MAX, unsent_bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tracing::debug;

/// Where less than this part of what is sent could be packed, nothing is gained by holding it back: random data took 1.05
/// times as long on a busy host (bench/decisions/0093.md).
const PACKABLE_SHARE_MIN: f64 = 0.125;

/// For `TCP_NOTSENT_LOWAT`: as much as there is.
const UNLIMITED: u32 = u32::MAX;

/// What each connection of a disk may hold unsent. Clones follow it.
#[derive(Debug, Clone)]
pub(crate) struct UnsentBytes {
    bytes: Arc<AtomicU32>,
    // When it was looked at, what was sent by then, and what could be packed.
    last: Option<(Instant, u64, u64)>,
}

impl Default for UnsentBytes {
    /// While nothing is known of the wire.
    fn default() -> Self {
        Self { bytes: Arc::new(AtomicU32::new(UNSENT_BYTES_MAX / 4)), last: None }
    }
}

impl UnsentBytes {
    /// So much was done by now, over so many connections.
    pub(crate) fn follow(&mut self, done: &Counters, connections: usize) {
        let (now, sent_bytes) = (Instant::now(), done.sent_bytes());
        let last = self.last.replace((now, sent_bytes, done.packable_bytes));
        let Some((then, sent_before, packable_before)) = last else { return };
        let sent = sent_bytes.saturating_sub(sent_before) as f64;
        let packable = done.packable_bytes.saturating_sub(packable_before) as f64;
        if sent > 0.0 {
            let bytes_per_s = sent / now.duration_since(then).as_secs_f64().max(0.001);
            let pays = packable >= sent * PACKABLE_SHARE_MIN;
            let bytes = if pays { unsent_bytes(bytes_per_s, connections as f64) } else { UNLIMITED };
            self.bytes.store(bytes, Ordering::Relaxed);
        }
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct DiskSocket {
    socket: TcpStream,
    // None where nothing is packed.
    unsent: Option<UnsentBytes>,
    // The kernel's last setting.
    unsent_bytes_set: u32,
}

impl DiskSocket {
    pub(crate) fn new(socket: TcpStream, unsent: Option<UnsentBytes>) -> Self {
        Self { socket, unsent, unsent_bytes_set: 0 }
    }

    /// What the kernel does not take changes only how much can be packed.
    fn tell(&mut self) {
        let Some(unsent) = &self.unsent else { return };
        let bytes = unsent.bytes.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.unsent_bytes_set, bytes) == bytes {
            return;
        }
        if let Err(error) = SockRef::from(&self.socket).set_tcp_notsent_lowat(bytes) {
            debug!(%error, "a connection for a disk may hold more unsent data");
        }
    }
}

impl AsyncRead for DiskSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for DiskSocket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.tell();
        Pin::new(&mut this.socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.tell();
        Pin::new(&mut this.socket).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_nbd::StreamCounters;

    use super::*;

    #[test]
    fn what_cannot_be_packed_is_not_held_back() {
        let mut unsent = UnsentBytes::default();
        let mut follow = |sent_bytes, packable_bytes| {
            let stream = StreamCounters { sent_bytes, is_live: true };
            let streams = [(0, stream)].into();
            unsent.follow(&Counters { packable_bytes, streams, ..Counters::default() }, 8);
            unsent.bytes.load(Ordering::Relaxed)
        };
        let at_first = follow(0, 0);
        assert_eq!(follow(1_000, 100), UNLIMITED);
        assert!(at_first <= UNSENT_BYTES_MAX && follow(2_000, 1_100) <= UNSENT_BYTES_MAX);
        assert!(follow(2_000, 2_100) <= UNSENT_BYTES_MAX, "nothing was sent");
        assert_eq!(follow(3_000, 2_100), UNLIMITED);
    }
}
