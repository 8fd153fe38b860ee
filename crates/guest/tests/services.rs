//! The guest's services and their client, against each other over loopback.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_guest::client::{Control, ControlError, Heartbeat, HeartbeatError};
use drainpipe_guest::memory::Memory;
use drainpipe_guest::protocol::{Dirtying, Verification};
use drainpipe_guest::service::{Guest, serve_control, serve_heartbeat};

const DEADLINE: Duration = Duration::from_secs(20);

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !done() {
        assert!(Instant::now() < end, "{what} within {DEADLINE:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Serves a filled guest; its threads end with the test's process.
fn control_service(pages: usize) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let mix = "zero:20,text:30,random:40,shared:10".parse().unwrap();
    let guest = Arc::new(Guest::new(Memory::reserve(pages, mix, 3), Dirtying::IDLE));
    guest.memory.fill();
    let dirtied = Arc::clone(&guest);
    thread::spawn(move || dirtied.dirtier.run(&dirtied.memory, 3));
    thread::spawn(move || serve_control(&listener, &guest));
    address
}

/// A service that answers each request with the same bytes.
fn hostile_service(answer: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        while matches!(stream.read(&mut [0; 64]), Ok(1..)) && stream.write_all(answer).is_ok() {}
    });
    address
}

#[test]
fn a_guest_is_dirtied_checked_and_found_corrupted() {
    let mut control = Control::connect(control_service(1600), None, DEADLINE).unwrap();
    let status = control.status(DEADLINE).unwrap();
    assert!(status.is_ready());
    assert_eq!(
        [status.zero_pages, status.text_pages, status.random_pages, status.shared_pages],
        [320, 480, 640, 160]
    );
    let dirtying = Dirtying { mib_per_s: 20, locality_percent: 50 };
    assert_eq!(control.set_dirty(dirtying, DEADLINE).unwrap().dirtying(), dirtying);
    wait_until("pages are rewritten", || control.status(DEADLINE).unwrap().rewritten_pages > 100);
    let good = Verification { pages: 1600, bad: 0, first_bad: None };
    assert_eq!(control.verify(DEADLINE).unwrap(), good);
    control.corrupt(1599, DEADLINE).unwrap();
    let found = control.verify(DEADLINE).unwrap();
    assert_eq!((found.bad, found.first_bad.map(|bad| bad.page)), (1, Some(1599)));
    let refused = control.corrupt(1600, DEADLINE).unwrap_err();
    assert!(refused.to_string().contains("there is no page 1600"), "{refused}");
}

#[test]
fn hostile_answers_are_refused() {
    for answer in [
        &b"\xff\xfe\n"[..],
        b"pages=1\npages=2\n",
        b"pages=99999999999999999999 bad=0\n",
        b"pages=1 bad=2\n",
        b"\n",
        &[b'x'; 4096],
    ] {
        let mut control = Control::connect(hostile_service(answer), None, DEADLINE).unwrap();
        assert!(control.verify(DEADLINE).is_err(), "{answer:?}");
    }
}

#[test]
fn a_guest_that_does_not_answer_in_time_is_given_up() {
    let mut control = Control::connect(hostile_service(b""), None, DEADLINE).unwrap();
    let late = control.status(Duration::from_millis(50));
    assert!(matches!(late, Err(ControlError::Deadline { .. })), "{late:?}");
    let after = control.status(DEADLINE);
    assert!(matches!(after, Err(ControlError::Broken { .. })), "{after:?}");
}

#[test]
fn connections_beyond_the_limit_are_closed_and_those_within_served() {
    let address = control_service(16);
    let mut kept: Vec<_> = (0..16).map(|_| Control::connect(address, None, DEADLINE).unwrap()).collect();
    for control in &mut kept {
        control.status(DEADLINE).unwrap();
    }
    let mut refused = TcpStream::connect(address).unwrap();
    assert_eq!(refused.read(&mut [0; 1]).unwrap(), 0);
    kept[15].status(DEADLINE).unwrap();
}

#[test]
fn a_heartbeat_is_answered_and_its_silence_counted() {
    let service = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = service.local_addr().unwrap();
    let heartbeat = Heartbeat::start(address, None).unwrap();
    thread::sleep(Duration::from_millis(30));
    assert_eq!(heartbeat.statistics().answered, 0);
    assert!(heartbeat.longest_gap() >= Duration::from_millis(30));
    thread::spawn(move || serve_heartbeat(&service));
    wait_until("answers arrive", || heartbeat.statistics().answered > 10);
    heartbeat.reset();
    wait_until("answers arrive", || heartbeat.statistics().answered > 10);
    let statistics = heartbeat.stop();
    assert!(statistics.answered <= statistics.sent);
    assert!(statistics.longest_gap_ms > 0.0);
}

#[test]
fn a_namespace_that_is_missing_is_named() {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let missing = Path::new("/run/netns/drainpipe-missing");
    let error = Heartbeat::start(address, Some(missing)).err().unwrap();
    assert!(matches!(error, HeartbeatError::Namespace(_)));
    assert!(error.to_string().contains("drainpipe-missing"), "{error}");
    let error = Control::connect(address, Some(missing), DEADLINE).err().unwrap();
    assert!(error.to_string().contains("drainpipe-missing"), "{error}");
}
