//! Datagrams of every size on one path, which must not be fragmented, counted where they arrive.
//!
//! Both ends send and count, so that a one-way path can be distinguished from a silent one. The counts travel over the
//! management network, which needs no path.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::check::sizes::{Arrived, SMALL_BYTES};
use tokio::net::UdpSocket;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::paths::link_socket::{HEADERS_V6_BYTES, headers_bytes, keep_whole};
use crate::store::lock::lock;

/// How often each size is sent: one lost by chance is not taken for one that does not pass.
pub(super) const COPIES: u32 = 3;

/// Between copies, so that a short burst of loss does not take all three.
const COPY_PAUSE: Duration = Duration::from_millis(20);

/// How often the round trip is measured, and for how long at most. The least counts: a busy agent makes
/// some of them seem longer, hardly all.
const ROUND_TRIPS: usize = 20;
const ROUND_TRIPS_DEADLINE: Duration = Duration::from_millis(500);
const ROUND_TRIP_DEADLINE: Duration = Duration::from_millis(200);

const TOKEN_BYTES: usize = 16;
/// The token, and what kind of datagram it is.
const HEADER_BYTES: usize = TOKEN_BYTES + 1;
const SIZED: u8 = 0;
const PING: u8 = 1;
const PONG: u8 = 2;

/// One end of a path. Ends with its drop.
#[derive(Debug)]
pub(super) struct PacketEnd {
    socket: Arc<UdpSocket>,
    peer: SocketAddr,
    token: Uuid,
    counters: Arc<PacketCounters>,
    counting: JoinHandle<()>,
}

/// What has arrived so far. A size is 16 bits, so there are bounded many.
#[derive(Debug, Default)]
struct PacketCounters {
    counts: Mutex<Arrived>,
    pong: Notify,
}

impl PacketEnd {
    /// Begins to count what comes from `peer` with this token.
    pub(super) fn begin(socket: UdpSocket, peer: SocketAddr, token: Uuid) -> io::Result<Self> {
        keep_whole(&socket, peer.ip())?;
        let socket = Arc::new(socket);
        let counters = Arc::new(PacketCounters::default());
        let counting = tokio::spawn(count(Arc::clone(&socket), peer, token, Arc::clone(&counters)));
        Ok(Self { socket, peer, token, counters, counting })
    }

    /// Sends packets of these sizes. What the link refuses as too large does not arrive, which says
    /// enough.
    pub(super) async fn send(&self, sizes: &[u16]) {
        for _ in 0..COPIES {
            for size in sizes {
                let bytes = usize::from(size.saturating_sub(headers_bytes(self.peer)));
                let _refused = self.say(SIZED, bytes).await;
            }
            sleep(COPY_PAUSE).await;
        }
    }

    /// What has arrived so far.
    pub(super) fn arrived(&self) -> Arrived {
        lock(&self.counters.counts).clone()
    }

    /// The least time to the other end and back.
    pub(super) async fn round_trip(&self) -> Option<Duration> {
        let mut least: Option<Duration> = None;
        let end = Instant::now() + ROUND_TRIPS_DEADLINE;
        for _ in 0..ROUND_TRIPS {
            let began = Instant::now();
            if began > end {
                break;
            }
            let pong = self.counters.pong.notified();
            self.say(PING, HEADER_BYTES).await.ok()?;
            if timeout(ROUND_TRIP_DEADLINE, pong).await.is_err() {
                // A path that does not answer once is not asked on.
                break;
            }
            let took = began.elapsed();
            least = Some(least.map_or(took, |least| least.min(took)));
        }
        least
    }

    async fn say(&self, kind: u8, bytes: usize) -> io::Result<()> {
        let mut datagram = vec![0; bytes.max(HEADER_BYTES)];
        datagram[..TOKEN_BYTES].copy_from_slice(self.token.as_bytes());
        datagram[TOKEN_BYTES] = kind;
        self.socket.send_to(&datagram, self.peer).await.map(drop)
    }
}

impl Drop for PacketEnd {
    fn drop(&mut self) {
        self.counting.abort();
    }
}

/// Unauthenticated peers may send too; only what knows the token and comes from the other end counts. An answer is
/// as long as what it answers, so nobody is flooded by way of this host.
async fn count(socket: Arc<UdpSocket>, peer: SocketAddr, token: Uuid, counters: Arc<PacketCounters>) {
    let mut datagram = vec![0; usize::from(u16::MAX)];
    loop {
        let Ok((bytes, from)) = socket.recv_from(&mut datagram).await else {
            // An ICMP error of an earlier packet; the next read waits again.
            sleep(Duration::from_millis(1)).await;
            continue;
        };
        match kind_of(&datagram[..bytes], token).filter(|_| from == peer) {
            Some(SIZED) => count_one(&counters, bytes, peer),
            Some(PING) => {
                datagram[TOKEN_BYTES] = PONG;
                let _lost = socket.send_to(&datagram[..bytes], peer).await;
            }
            Some(PONG) => counters.pong.notify_waiters(),
            _ => {}
        }
    }
}

/// What kind of datagram it is, if it carries the token.
pub(crate) fn kind_of(datagram: &[u8], token: Uuid) -> Option<u8> {
    let (said, rest) = datagram.split_first_chunk::<TOKEN_BYTES>()?;
    rest.first().copied().filter(|_| said == token.as_bytes())
}

fn count_one(counters: &PacketCounters, bytes: usize, peer: SocketAddr) {
    let Ok(bytes) = u16::try_from(bytes) else { return };
    let size = bytes.saturating_add(headers_bytes(peer));
    let mut counts = lock(&counters.counts);
    let count = counts.entry(size).or_default();
    *count = count.saturating_add(1);
}

const _: () = assert!(SMALL_BYTES as usize >= HEADERS_V6_BYTES as usize + HEADER_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    async fn pair(tokens: [Uuid; 2]) -> [PacketEnd; 2] {
        let sockets =
            [UdpSocket::bind("127.0.0.1:0").await.unwrap(), UdpSocket::bind("127.0.0.1:0").await.unwrap()];
        let [one, other] = sockets;
        let addresses = [one.local_addr().unwrap(), other.local_addr().unwrap()];
        [
            PacketEnd::begin(one, addresses[1], tokens[0]).unwrap(),
            PacketEnd::begin(other, addresses[0], tokens[1]).unwrap(),
        ]
    }

    #[tokio::test]
    async fn every_size_arrives_as_often_as_it_was_sent() {
        let [one, other] = pair([Uuid::nil(); 2]).await;
        one.send(&[128, 1500, 65_535]).await;
        assert_eq!(other.arrived(), Arrived::from([(128, COPIES), (1500, COPIES), (65_535, COPIES)]));
        assert!(one.arrived().is_empty());
        assert!(one.round_trip().await.is_some());
    }

    #[tokio::test]
    async fn who_does_not_know_the_token_is_not_heard() {
        let [one, other] = pair([Uuid::nil(), Uuid::max()]).await;
        one.send(&[128]).await;
        assert!(one.round_trip().await.is_none());
        assert!(other.arrived().is_empty());
    }
}
