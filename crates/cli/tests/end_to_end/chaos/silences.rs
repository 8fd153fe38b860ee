//! Whether each VM answers, and since when it does not, as a client of all of them sees it.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use drainpipe_guest::protocol::{BEAT_BYTES, Beat};
use drainpipe_lab::{CLIENT, Lab};

/// Guests without KVM that answer more often have no time for anything else.
const BEAT_EVERY: Duration = Duration::from_millis(100);

/// Shorter silences come from the scheduling of a busy machine.
pub(super) const SILENCE_MIN: Duration = Duration::from_millis(500);

/// A client of all VMs. It stops when it is dropped.
pub(super) struct Silences {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    guests: Mutex<BTreeMap<SocketAddr, Listened>>,
}

struct Listened {
    vm: String,
    /// `None` while no answer is expected.
    heard_at: Option<Instant>,
    /// The silences that have ended since the last look.
    silences: Vec<Silence>,
}

/// A time during which a VM did not answer.
#[derive(Debug, Clone)]
pub(super) struct Silence {
    pub(super) vm: String,
    pub(super) since: Instant,
    pub(super) until: Instant,
    pub(super) is_over: bool,
}

impl Silences {
    pub(super) fn start(lab: &Lab) -> io::Result<Self> {
        let socket = lab
            .run_in(CLIENT, || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))
            .map_err(io::Error::other)??;
        socket.set_read_timeout(Some(BEAT_EVERY / 4))?;
        let shared = Arc::new(Shared::default());
        let listening = Arc::clone(&shared);
        let thread = thread::spawn(move || listen(&socket, &listening));
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Expects a VM to answer from now on.
    pub(super) fn expect(&self, vm: &str, address: SocketAddr) {
        let listened = Listened { vm: vm.into(), heard_at: Some(Instant::now()), silences: vec![] };
        self.shared.guests().insert(address, listened);
    }

    /// Expects no answers from a VM any more: its QEMU has been killed.
    pub(super) fn expect_nothing(&self, vm: &str) {
        for one in self.shared.guests().values_mut().filter(|one| one.vm == vm) {
            one.heard_at = None;
            one.silences.clear();
        }
    }

    /// The silences that have ended since the last look, and those that go on.
    pub(super) fn take(&self) -> Vec<Silence> {
        let now = Instant::now();
        let mut guests = self.shared.guests();
        let mut taken = Vec::new();
        for one in guests.values_mut() {
            taken.append(&mut one.silences);
            let going_on = one.heard_at.filter(|since| now - *since > SILENCE_MIN);
            taken.extend(going_on.map(|since| Silence {
                vm: one.vm.clone(),
                since,
                until: now,
                is_over: false,
            }));
        }
        taken
    }
}

impl Drop for Silences {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // If a thread has died, that shows as silences.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn guests(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Listened>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn listen(socket: &UdpSocket, shared: &Shared) {
    let mut sequence = 0;
    let mut due = Instant::now();
    while !shared.stop.load(Ordering::Relaxed) {
        if Instant::now() >= due {
            sequence += 1;
            let beat = Beat { session: 1, sequence }.encode();
            for address in shared.guests().keys() {
                // A beat that cannot be sent is not answered.
                let _ = socket.send_to(&beat, address);
            }
            due = Instant::now() + BEAT_EVERY;
        }
        let mut packet = [0; BEAT_BYTES];
        let Ok((length, sender)) = socket.recv_from(&mut packet) else { continue };
        if Beat::decode(&packet[..length]).is_some() {
            heard(&mut shared.guests(), sender);
        }
    }
}

fn heard(guests: &mut BTreeMap<SocketAddr, Listened>, sender: SocketAddr) {
    let now = Instant::now();
    let Some(one) = guests.get_mut(&sender) else { return };
    let Some(since) = one.heard_at else { return };
    if now - since > SILENCE_MIN {
        one.silences.push(Silence { vm: one.vm.clone(), since, until: now, is_over: true });
    }
    one.heard_at = Some(now);
}
