//! One packet each millisecond to the guest, and how long it was silent.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};

use super::gaps::{Statistics, Tracker};
use super::namespace::{NamespaceError, run_in};
use crate::protocol::{BEAT_BYTES, Beat};

const INTERVAL: Duration = Duration::from_millis(1);

/// A flood of answers does not keep the next packet from being sent.
const ANSWERS_PER_WAKE_MAX: usize = 64;

/// On a busy host the heartbeat must not measure its own wait for a CPU. `nice` would not do: it counts within the
/// session alone where the kernel groups tasks by it (`sched_autogroup_enabled`), and the VMs are in others.
const BEFORE_ALL_OTHERS: ThreadSchedulePolicy =
    ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::Fifo);

/// Why there is no heartbeat.
#[derive(Debug, thiserror::Error)]
pub enum HeartbeatError {
    /// The namespace cannot be entered.
    #[error("heartbeat: {0}")]
    Namespace(#[from] NamespaceError),
    /// There is no socket.
    #[error("heartbeat: cannot make a socket towards {address}: {source}")]
    Socket {
        /// The guest's address.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
}

/// A running heartbeat. It stops when it is dropped.
pub struct Heartbeat {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    tracker: Mutex<Tracker>,
}

impl Heartbeat {
    /// Sends one packet each millisecond to the guest's heartbeat service at `address`, from a
    /// thread of its own in `network_namespace`, such as `/run/netns/NAME`.
    ///
    /// Needs root to enter a namespace. A guest that is not there yet is no error: it is silent.
    pub fn start(address: SocketAddr, network_namespace: Option<&Path>) -> Result<Self, HeartbeatError> {
        Self::start_every(INTERVAL, address, network_namespace)
    }

    /// The same with a longer interval, where many guests' heartbeats at once would cost too much CPU. Silences are
    /// known to within that interval.
    pub fn start_every(
        interval: Duration,
        address: SocketAddr,
        network_namespace: Option<&Path>,
    ) -> Result<Self, HeartbeatError> {
        let socket = run_in(network_namespace, || {
            open(address).map_err(|source| HeartbeatError::Socket { address, source })
        })?;
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            tracker: Mutex::new(Tracker::new(Instant::now())),
        });
        let beating = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("heartbeat".into())
            .spawn(move || beat(interval, &socket, address, &beating))
            .map_err(NamespaceError::from)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The longest time between two consecutive answers since the start or the last
    /// [`Heartbeat::reset`], a silence that still goes on included.
    pub fn longest_gap(&self) -> Duration {
        Duration::from_secs_f64(self.statistics().longest_gap_ms / 1e3)
    }

    /// What was measured so far.
    pub fn statistics(&self) -> Statistics {
        self.shared.tracker().statistics(Instant::now())
    }

    /// Forgets what was measured and starts again, now.
    pub fn reset(&self) {
        *self.shared.tracker() = Tracker::new(Instant::now());
    }

    /// Stops sending and gives what was measured.
    pub fn stop(mut self) -> Statistics {
        let statistics = self.statistics();
        self.end();
        statistics
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A heartbeat that died of a defect shows as a silence.
            let _ = thread.join();
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn tracker(&self) -> MutexGuard<'_, Tracker> {
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Not connected: a connected socket needs a route at once, and gives errors of earlier packets
/// in place of answers.
fn open(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?,
        SocketAddr::V6(_) => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?,
    };
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn beat(interval: Duration, socket: &UdpSocket, address: SocketAddr, shared: &Shared) {
    // Refused without privileges; then `longest_stall_ms` tells what the host cost.
    let _ = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, BEFORE_ALL_OTHERS);
    let mut beat = Beat { session: RandomState::new().hash_one(address), sequence: 0 };
    let mut answers = Answers { address, session: beat.session, next: 0 };
    let mut due = Instant::now();
    while !shared.stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        if let Some(late_by) = now.checked_duration_since(due) {
            // Not sent is not answered, which is what the heartbeat is there to count.
            let _ = socket.send_to(&beat.encode(), address);
            shared.tracker().sent(beat.sequence, late_by);
            beat.sequence += 1;
            due = (due + interval).max(now);
        }
        wait(socket, due.saturating_duration_since(Instant::now()));
        answers.take(socket, beat.sequence, shared);
    }
}

fn wait(socket: &UdpSocket, patience: Duration) {
    let Ok(timeout) = Timespec::try_from(patience) else { return };
    // Interrupted or not: the caller looks for answers next.
    let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
}

/// Tells answers from other packets.
struct Answers {
    address: SocketAddr,
    session: u64,
    /// The least sequence number not yet answered. An answer that was overtaken, or came twice,
    /// is not counted.
    next: u64,
}

impl Answers {
    fn take(&mut self, socket: &UdpSocket, sent: u64, shared: &Shared) {
        let mut packet = [0; BEAT_BYTES + 1];
        for _ in 0..ANSWERS_PER_WAKE_MAX {
            let Ok((length, sender)) = socket.recv_from(&mut packet) else { return };
            if sender == self.address
                && let Some(sequence) = self.accept(&packet[..length], sent)
            {
                shared.tracker().arrived(sequence, Instant::now());
            }
        }
    }

    /// The sequence number of the packet that this is an answer to, if it is one that counts.
    fn accept(&mut self, packet: &[u8], sent: u64) -> Option<u64> {
        let beat = Beat::decode(packet)?;
        let counts = beat.session == self.session && (self.next..sent).contains(&beat.sequence);
        counts.then(|| {
            self.next = beat.sequence + 1;
            beat.sequence
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answers_to_what_was_sent_count_each_once() {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let mut answers = Answers { address, session: 7, next: 0 };
        let packet = |session, sequence| Beat { session, sequence }.encode();
        assert_eq!(answers.accept(&packet(7, 0), 3), Some(0));
        assert_eq!(answers.accept(&packet(7, 0), 3), None, "came twice");
        assert_eq!(answers.accept(&packet(7, 3), 3), None, "not sent yet");
        assert_eq!(answers.accept(&packet(8, 1), 3), None, "another session's");
        assert_eq!(answers.accept(&packet(7, 1)[1..], 3), None, "too short");
        assert_eq!(answers.accept(&packet(7, 2), 3), Some(2));
    }
}
