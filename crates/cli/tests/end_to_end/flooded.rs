//! Connections that are only meant to be in the way: some without a certificate, and idle ones from a host that has
//! one.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use drainpipe_engine::migration::result::Outcome;
use drainpipe_identity::Identity;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use rustls::{ClientConnection, StreamOwned};

use crate::Test;
use crate::bad_input::over_tls;
use crate::scene::{Scene, result_of};
use crate::support::{PATIENCE, TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("silent_connections_keep_nobody_out", silent_connections_keep_nobody_out),
    ("idle_connections_of_one_host_keep_nobody_out", idle_connections_of_one_host_keep_nobody_out),
];

/// More than an agent has places for, whoever connects.
const UNAUTHENTICATED: usize = 1_500;
const IDLE: usize = 300;

/// The rate at which the flood grows, and replaces connections that are closed. Silent ones are closed after 3 s, so
/// all of the agent's places stay taken.
const UNAUTHENTICATED_EVERY: Duration = Duration::from_millis(1);
const IDLE_EVERY: Duration = Duration::from_millis(10);

/// How many times the growth of a flood is waited for.
const PARTS: usize = 10;

/// Longer than a request takes on a busy machine, but shorter than the 3 s that a silent connection may wait.
const PROMPT: Duration = Duration::from_millis(2_500);

fn silent_connections_keep_nobody_out() {
    let scene = scene();
    let flood = Flood::silent(&scene.lab, UNAUTHENTICATED, UNAUTHENTICATED_EVERY);
    assert_unharmed(&scene, flood);
}

fn idle_connections_of_one_host_keep_nobody_out() {
    let scene = scene();
    let address = scene.lab.agent_address("a");
    let pki = scene.lab.directory("c").join("pki");
    let identity = Identity::load(&pki.join("host.pem"), &pki.join("host.key"), &pki.join("ca.pem")).unwrap();
    let config = Arc::new(identity.client_config());
    let flood = Flood::start(&scene.lab, IDLE, IDLE_EVERY, move || {
        let socket = TcpStream::connect(address).ok()?;
        socket.set_read_timeout(Some(PATIENCE)).ok()?;
        let client = ClientConnection::new(Arc::clone(&config), "a".try_into().ok()?).ok()?;
        let mut stream = StreamOwned::new(client, socket);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).ok()?;
        }
        Some(stream)
    });
    assert_unharmed(&scene, flood);
}

/// A scene in which the flood comes from `c`, and the VM moves from `a` to `b`.
pub(crate) fn scene() -> Scene {
    Scene::in_lab(TestLab::up(&["--hosts", "a,b,c", "--link", "60", "--link", "60"]))
}

/// An operator is answered as without the flood, and a VM moves.
#[track_caller]
fn assert_unharmed(scene: &Scene, flood: Flood) {
    let ann = operator(&scene.lab);
    let migrating = scene.migrate(&[]);
    let soonest = (0..5).map(|_| time_of_a_request(&scene.lab, &ann)).min().unwrap();
    assert!(soonest < PROMPT, "an operator waits for {soonest:?} at least");
    assert!(flood.is_on(), "the flood has ended before the requests");
    let output = migrating.wait();
    assert_eq!(result_of(&output).outcome, Outcome::Completed, "{output:#?}");
    flood.end();
    scene.lab.assert_runs_on("web", "b");
    scene.guest.assert_intact();
}

pub(crate) fn operator(lab: &TestLab) -> PathBuf {
    let authority = lab.directory("client").join("pki");
    lab.drainpipe(&["pki", "operator", "ann", "--directory", authority.to_str().unwrap()]).done();
    authority.join("operators/ann")
}

#[track_caller]
fn time_of_a_request(lab: &TestLab, operator: &Path) -> Duration {
    let begun = Instant::now();
    over_tls(lab, operator, &["limit", "a"]).done();
    begun.elapsed()
}

/// Silent connections from host `c`. The newest ones are kept; one that is closed is replaced.
pub(crate) struct Flood {
    going: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Flood {
    /// Begins this many silent connections to host `a`, and returns once they grow.
    #[track_caller]
    pub(crate) fn silent(lab: &TestLab, count: usize, every: Duration) -> Self {
        let address = lab.agent_address("a");
        Self::start(lab, count, every, move || TcpStream::connect(address).ok())
    }

    #[track_caller]
    fn start<S: Silent + 'static>(
        lab: &TestLab,
        count: usize,
        every: Duration,
        connect: impl Fn() -> Option<S> + Send + 'static,
    ) -> Self {
        let namespace = File::open(lab.namespace("c")).unwrap();
        let (going, tried) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
        let (keeps_going, counted) = (Arc::clone(&going), Arc::clone(&tried));
        let thread = thread::spawn(move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            let mut held = VecDeque::new();
            let mut made = 0;
            while keeps_going.load(Ordering::Relaxed) {
                held.extend(connect());
                thread::sleep(every);
                made += 1;
                counted.store(made, Ordering::Relaxed);
                if held.len() > count {
                    held.pop_front();
                }
                if made % count == 0 {
                    held.retain_mut(|one: &mut S| one.is_open());
                    thread::sleep(Duration::from_millis(100));
                }
            }
        });
        // Handshakes take time on a busy machine; it is enough that the flood grows.
        for part in 1..=PARTS {
            eventually("the flood grows", || tried.load(Ordering::Relaxed) >= count * part / PARTS);
        }
        Self { going, thread }
    }

    fn is_on(&self) -> bool {
        !self.thread.is_finished()
    }

    pub(crate) fn end(self) {
        self.going.store(false, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

trait Silent: Send {
    fn is_open(&mut self) -> bool;
}

impl Silent for TcpStream {
    fn is_open(&mut self) -> bool {
        self.set_nonblocking(true).unwrap();
        matches!(self.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    }
}

impl Silent for StreamOwned<ClientConnection, TcpStream> {
    fn is_open(&mut self) -> bool {
        self.sock.is_open()
    }
}
