//! A lab for one test, and traffic in it.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::ops::Deref;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_lab::{Lab, LabSpec, LinkSpec};

/// Long enough for anything that should happen at once, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Prints why, and returns `true`, if labs cannot be made here.
#[expect(clippy::explicit_write, reason = "the test harness hides what a passing test prints by macro")]
pub(crate) fn skipped() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        writeln!(io::stderr(), "SKIPPED: labs are made of network namespaces, which need root").unwrap();
    }
    !root
}

/// A name that no other test, and no other run, uses.
pub(crate) fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("test-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

pub(crate) fn link(rate_mbps: Option<u64>) -> LinkSpec {
    LinkSpec { rate_mbps, ..LinkSpec::default() }
}

/// A lab that goes down with the test.
pub(crate) struct TestLab(Lab);

impl TestLab {
    pub(crate) fn of_two_hosts(links: Vec<LinkSpec>) -> Self {
        Self::of(LabSpec::of_two_hosts(unique_name(), links))
    }

    pub(crate) fn of(spec: LabSpec) -> Self {
        Self(Lab::up(spec).expect("the lab comes up"))
    }

    /// The address of `host` on `link`.
    pub(crate) fn address(&self, host: &str, link: &str) -> Ipv4Addr {
        self.spec().link_address(host, link).expect("the link exists")
    }

    /// Whether a datagram of `bytes` from `node` comes back from `address` on `peer`.
    ///
    /// Tries again until it does or `limit` has passed, as the first one may wait for ARP.
    pub(crate) fn echoes(
        &self,
        node: &str,
        peer: &str,
        address: Ipv4Addr,
        bytes: usize,
        limit: Duration,
    ) -> bool {
        let server = self.run_in(peer, || UdpSocket::bind((address, 0))).unwrap().unwrap();
        let target = server.local_addr().unwrap();
        server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let client = self.run_in(node, || UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
        client.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let deadline = Instant::now() + limit;
        let mut buffer = vec![0; 65_536];
        while Instant::now() < deadline {
            if client.send_to(&vec![7; bytes], target).is_err() {
                thread::sleep(Duration::from_millis(50));
                continue;
            }
            let Ok((length, from)) = server.recv_from(&mut buffer) else { continue };
            server.send_to(&buffer[..length], from).ok();
            if client.recv(&mut buffer).is_ok_and(|length| length == bytes) {
                return true;
            }
        }
        false
    }

    /// Whether datagrams from `node` arrive at `peer` over `e0`, whatever comes back.
    ///
    /// Both ends must know each other's MAC address already: ARP needs both ways.
    pub(crate) fn one_way(&self, node: &str, peer: &str) -> bool {
        let server = self.run_in(peer, || UdpSocket::bind((self.address(peer, "e0"), 0)));
        let server = server.unwrap().unwrap();
        server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let client = self.run_in(node, || UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
        (0..5).any(|_| {
            client.send_to(b"one way", server.local_addr().unwrap()).unwrap();
            server.recv(&mut [0; 16]).is_ok()
        })
    }

    /// Sends over one TCP stream for `duration`; returns what arrived, in megabits per second.
    pub(crate) fn stream_mbps(&self, from: &str, to: &str, address: Ipv4Addr, duration: Duration) -> f64 {
        let listener = self.run_in(to, || TcpListener::bind((address, 0))).unwrap().unwrap();
        let target = listener.local_addr().unwrap();
        let connect = || TcpStream::connect_timeout(&target, PATIENCE);
        let mut sender = self.run_in(from, connect).unwrap().expect("the stream is opened");
        sender.set_write_timeout(Some(PATIENCE)).unwrap();
        thread::scope(|scope| {
            let chunk = vec![7; 256 << 10];
            let start = Instant::now();
            // Sends until the receiver has seen enough and hangs up.
            scope.spawn(move || while sender.write_all(&chunk).is_ok() {});
            let bytes = receive(&listener, duration).expect("the stream is received");
            bytes as f64 * 8.0 / 1e6 / start.elapsed().as_secs_f64()
        })
    }
}

fn receive(listener: &TcpListener, duration: Duration) -> io::Result<usize> {
    let (mut stream, _) = listener.accept()?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let end = Instant::now() + duration;
    let mut buffer = vec![0; 256 << 10];
    let mut bytes = 0;
    while Instant::now() < end {
        bytes += stream.read(&mut buffer)?;
    }
    Ok(bytes)
}

impl Deref for TestLab {
    type Target = Lab;

    fn deref(&self) -> &Lab {
        &self.0
    }
}

impl Drop for TestLab {
    fn drop(&mut self) {
        Lab::down(&self.spec().name).expect("the lab goes down");
    }
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(5));
    }
}
