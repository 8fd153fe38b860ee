//! Relays whose programs both write: each direction for itself, and a break for both.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_relay::{BLOCK_BYTES_MAX, RelayError, Sender, SenderSettings, ServerTls, Treatment};
use proptest::prelude::*;
use socket2::SockRef;

use crate::encryption::{Fleet, to_b};
use crate::support::{PATIENCE, Target, assert_waits_for_no_wire, eventually, start};

/// Within this both programs are to know of a break.
const PROMPTLY: Duration = Duration::from_secs(1);

/// Two hosts that know each other.
struct Hosts(Fleet);

impl Hosts {
    fn new() -> Self {
        Self(Fleet::new())
    }

    fn target(&self, connections: usize) -> Target {
        let tls = ServerTls::new(self.0.host("b").server_config_for("a"));
        Target::both_ways(Treatment::Encrypted(tls), connections)
    }

    fn settings(&self, target: &Target, connections: usize) -> SenderSettings {
        target.settings(Treatment::Encrypted(to_b(&self.0.host("a"))), connections)
    }

    /// A relay of one connection, by way of `destination` if it is given.
    fn relay(&self, destination: Option<SocketAddr>) -> Relay {
        let target = self.target(1);
        self.relay_to(target, destination)
    }

    fn relay_to(&self, target: Target, destination: Option<SocketAddr>) -> Relay {
        let settings = self.settings(&target, 1);
        let destination = destination.unwrap_or(settings.destination);
        let (sender, path) = start(SenderSettings { destination, ..settings });
        let source = UnixStream::connect(path).unwrap();
        let (program, _) = target.program.accept().unwrap();
        Relay { sender, target, source, program }
    }
}

/// A relay, with the programs at both ends.
struct Relay {
    sender: Sender,
    target: Target,
    source: UnixStream,
    program: UnixStream,
}

impl Relay {
    /// Both programs write and read, so that both directions are in use.
    fn talk(&self) {
        for (mut from, mut to) in [(&self.source, &self.program), (&self.program, &self.source)] {
            from.write_all(b"page").unwrap();
            let mut came = [0; 4];
            to.read_exact(&mut came).unwrap();
            assert_eq!(&came, b"page");
        }
    }

    fn assert_no_error(&self) {
        assert!(self.sender.error().is_none(), "{:?}", self.sender.error());
        assert!(self.target.receiver.error().is_none(), "{:?}", self.target.receiver.error());
    }
}

/// Fails the test unless a program's connection ends soon, in both directions.
fn assert_ends(mut program: &UnixStream, since: Instant) {
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    match program.read(&mut [0; 100]) {
        Ok(0) => {}
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
        other => panic!("it goes on: {other:?}"),
    }
    assert!(since.elapsed() < PROMPTLY, "{:?}", since.elapsed());
    assert!(program.write_all(b"more").is_err(), "nobody takes it");
}

/// A content that tells apart where each byte was.
fn content(bytes: usize, seed: u64) -> Vec<u8> {
    let words = (0..).map(|at: u64| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).take(bytes).collect()
}

/// Writes in pieces, each after a pause, and then says that this was all.
fn write_pieces(mut program: &UnixStream, content: &[u8], pieces: &[(usize, u64)]) {
    let mut rest = content;
    for (length, pause_us) in pieces {
        let piece = rest.split_off(..*length).unwrap();
        thread::sleep(Duration::from_micros(*pause_us));
        program.write_all(piece).unwrap();
    }
    program.shutdown(Shutdown::Write).unwrap();
}

fn read_all(mut program: &UnixStream) -> Vec<u8> {
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut all = vec![];
    program.read_to_end(&mut all).unwrap();
    all
}

#[test]
fn what_either_program_writes_comes_out_at_the_other_however_they_take_turns() {
    let hosts = Hosts::new();
    let length = prop_oneof![4 => 1..200_usize, 2 => 1..10_000_usize, 1 => 1..4 * BLOCK_BYTES_MAX];
    let pause_us = prop_oneof![3 => Just(0), 1 => 1..2_000_u64];
    let pieces = prop::collection::vec((length, pause_us), 0..30);
    let directions = prop::collection::vec((pieces.clone(), pieces), 1..4);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) };
    proptest!(config, |(directions in directions)| {
        let count = directions.len();
        let target = hosts.target(count);
        let (sender, path) = start(hosts.settings(&target, count));
        thread::scope(|scope| {
            for (seed, (there, back)) in (0..).zip(&directions) {
                // One after the other: so it is known which is which.
                let source = Arc::new(UnixStream::connect(&path).unwrap());
                let program = Arc::new(target.program.accept().unwrap().0);
                for (from, to, pieces, seed) in
                    [(&source, &program, there, 2 * seed), (&program, &source, back, 2 * seed + 1)]
                {
                    let (from, to) = (Arc::clone(from), Arc::clone(to));
                    let content = content(pieces.iter().map(|(length, _)| length).sum(), seed);
                    let expected = content.clone();
                    scope.spawn(move || write_pieces(&from, &content, pieces));
                    scope.spawn(move || assert!(read_all(&to) == expected, "what goes in comes out"));
                }
            }
        });
        prop_assert!(sender.error().is_none() && target.receiver.error().is_none());
    });
}

#[test]
fn one_direction_ends_and_the_other_goes_on() {
    let hosts = Hosts::new();
    for source_is_first in [true, false] {
        let relay = hosts.relay(None);
        let (mut first, mut last) = (&relay.source, &relay.program);
        if !source_is_first {
            (first, last) = (last, first);
        }
        first.write_all(b"the last word").unwrap();
        first.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(last), b"the last word");
        let more = content(3 << 20, 1);
        for _ in 0..2 {
            thread::scope(|scope| {
                scope.spawn(|| last.write_all(&more).unwrap());
                let mut came = vec![0; more.len()];
                first.read_exact(&mut came).unwrap();
                assert!(came == more);
            });
            thread::sleep(Duration::from_millis(20));
        }
        relay.assert_no_error();
        last.shutdown(Shutdown::Write).unwrap();
        assert_eq!(read_all(first), b"");
        relay.assert_no_error();
    }
}

/// As QEMU does it: the target says its last word, the source reads it and closes.
#[test]
fn a_program_that_has_read_the_last_word_may_close() {
    let hosts = Hosts::new();
    let Relay { sender, target, mut source, mut program } = hosts.relay(None);
    let mut memory = vec![0; (1 << 20) + 3];
    thread::scope(|scope| {
        // What nobody reads may wait in full sockets.
        scope.spawn(|| (&source).write_all(&[&content(1 << 20, 3)[..], b"all"].concat()).unwrap());
        program.read_exact(&mut memory).unwrap();
    });
    program.write_all(b"shut").unwrap();
    let mut last = [0; 4];
    source.read_exact(&mut last).unwrap();
    drop(source);
    assert_eq!(read_all(&program), b"", "it ends, and does not break");
    drop(program);
    thread::sleep(Duration::from_millis(50));
    assert!(sender.error().is_none() && target.receiver.error().is_none());
}

/// What stands between two hosts until it is cut.
struct Link {
    address: SocketAddr,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
}

impl Link {
    fn to(destination: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let sockets = Arc::new(Mutex::new(vec![]));
        let cutting = Arc::clone(&sockets);
        thread::spawn(move || {
            let sender = listener.accept().unwrap().0;
            let receiver = TcpStream::connect(destination).unwrap();
            for (from, to) in [(&sender, &receiver), (&receiver, &sender)] {
                cutting.lock().unwrap().push(from.try_clone().unwrap());
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || io::copy(&mut from, &mut to));
            }
        });
        Self { address, sockets }
    }

    /// Cuts it: both hosts see an end, or a reset.
    fn cut(&self, with_reset: bool) {
        for socket in self.sockets.lock().unwrap().drain(..) {
            if with_reset {
                SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap();
            }
            drop(socket.shutdown(if with_reset { Shutdown::Read } else { Shutdown::Both }));
        }
    }
}

#[test]
fn a_broken_connection_is_seen_by_both_programs_at_once() {
    let hosts = Hosts::new();
    for with_reset in [false, true] {
        let target = hosts.target(1);
        let link = Link::to(target.address);
        let relay = hosts.relay_to(target, Some(link.address));
        relay.talk();
        let since = Instant::now();
        link.cut(with_reset);
        assert_ends(&relay.source, since);
        assert_ends(&relay.program, since);
        let errors = [relay.sender.error(), relay.target.receiver.error()];
        let is_expected =
            |error: &Option<RelayError>| matches!(error, Some(RelayError::Truncated | RelayError::Wire(_)));
        assert!(errors.iter().all(is_expected), "an end that nobody has said is none: {errors:?}");
    }
}

#[test]
fn an_end_that_goes_away_is_seen_by_both_programs_at_once() {
    let hosts = Hosts::new();
    for sender_goes in [true, false] {
        let relay = hosts.relay(None);
        relay.talk();
        let Relay { sender, target, source, program } = relay;
        let since = Instant::now();
        if sender_goes {
            drop(sender);
        } else {
            drop(target.receiver);
        }
        assert_ends(&source, since);
        assert_ends(&program, since);
    }
}

#[test]
fn a_program_that_goes_away_with_something_unread_is_seen_by_the_other_at_once() {
    let hosts = Hosts::new();
    for source_goes in [true, false] {
        let relay = hosts.relay(None);
        relay.talk();
        let Relay { sender, target, source, program } = relay;
        let (goes, mut stays) = if source_goes { (source, program) } else { (program, source) };
        stays.write_all(b"please").unwrap();
        thread::sleep(Duration::from_millis(50));
        let since = Instant::now();
        drop(goes);
        assert_ends(&stays, since);
        let error = if source_goes { sender.error() } else { target.receiver.error() };
        assert!(matches!(error, Some(RelayError::Local(_))), "{error:?}");
    }
}

#[test]
fn a_program_that_is_gone_breaks_what_is_still_sent_to_it() {
    let hosts = Hosts::new();
    for source_goes in [true, false] {
        let relay = hosts.relay(None);
        relay.talk();
        let Relay { sender: _sender, target: _target, source, program } = relay;
        let (goes, mut stays) = if source_goes { (source, program) } else { (program, source) };
        drop(goes);
        assert_eq!(read_all(&stays), b"");
        // It need not end in this write, but soon.
        let since = Instant::now();
        while stays.write_all(b"page").is_ok() {
            assert!(since.elapsed() < PROMPTLY);
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_question_and_its_answer_are_kept_by_nothing() {
    let Relay { sender: _sender, target: _target, mut source, mut program } = Hosts::new().relay(None);
    let begin = Instant::now();
    let answering = thread::spawn(move || {
        let mut question = [0; 12];
        while source.read_exact(&mut question).is_ok() {
            // In two parts, the second of which Nagle's algorithm would keep for an acknowledgement that is delayed.
            source.write_all(&question[..5]).unwrap();
            thread::sleep(Duration::from_micros(200));
            source.write_all(&question[5..]).unwrap();
        }
    });
    for round in 0..1_000_u32 {
        let question = [round.to_le_bytes(); 3].concat();
        program.write_all(&question[..5]).unwrap();
        thread::sleep(Duration::from_micros(200));
        program.write_all(&question[5..]).unwrap();
        let mut answer = [0; 12];
        program.read_exact(&mut answer).unwrap();
        assert_eq!(&answer[..], question);
    }
    // About 2 s on a busy host; with 40 ms for each acknowledgement it would be more than 40.
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    drop(program);
    answering.join().unwrap();
}

#[test]
fn who_is_to_stop_waits_for_no_wire_and_keeps_its_connection() {
    let hosts = Hosts::new();
    let target = hosts.target(1);
    let (sender, path) = start(hosts.settings(&target, 1));
    assert_waits_for_no_wire(sender, path, &target);
}

#[test]
fn nobody_at_the_other_end_ends_the_programs_connection_too() {
    let hosts = Hosts::new();
    let target = hosts.target(1);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (sender, path) = start(SenderSettings { destination: nobody, ..hosts.settings(&target, 1) });
    let program = UnixStream::connect(&path).unwrap();
    assert_ends(&program, Instant::now());
    assert!(matches!(sender.error(), Some(RelayError::Connect { .. })), "{:?}", sender.error());
    eventually("nobody listens", || UnixStream::connect(&path).is_err());
}

#[test]
fn what_is_packed_goes_one_way() {
    let target = Target::new(Treatment::Packed, 1);
    let settings = SenderSettings { both_ways: true, ..target.settings(Treatment::Packed, 1) };
    let refused = Sender::start(settings, |_| Ok(()));
    assert!(matches!(refused, Err(RelayError::PackedBothWays)));
}
