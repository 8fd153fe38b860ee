//! Relays that neither encrypt nor pack: what goes in comes out, and whoever must know of a break does.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use drainpipe_relay::{BLOCK_BYTES_MAX, RelayError, Sender, SenderSettings, ServerTls, Treatment};
use proptest::prelude::*;
use socket2::SockRef;

use crate::encryption::{Fleet, to_b};
use crate::support::{PATIENCE, Target, eventually, start};

/// Two hosts that know each other.
struct Hosts(Fleet);

impl Hosts {
    fn new() -> Self {
        Self(Fleet::new())
    }

    fn target(&self, connections: usize) -> Target {
        let tls = ServerTls::new(self.0.host("b").server_config_for("a"));
        Target::new(Treatment::Encrypted(tls), connections)
    }

    fn settings(&self, target: &Target, connections: usize) -> SenderSettings {
        target.settings(Treatment::Encrypted(to_b(&self.0.host("a"))), connections)
    }

    /// A relay of one connection, in use.
    fn relay(&self) -> Relay {
        let target = self.target(1);
        let destination = target.address;
        self.relay_to(target, destination)
    }

    /// A relay of one connection that goes through `destination`.
    fn relay_to(&self, target: Target, destination: SocketAddr) -> Relay {
        let (sender, path) = start(SenderSettings { destination, ..self.settings(&target, 1) });
        let mut source = UnixStream::connect(path).unwrap();
        let mut program = target.program.accept().unwrap().0;
        source.write_all(b"page").unwrap();
        let mut came = [0; 4];
        program.read_exact(&mut came).unwrap();
        assert_eq!(&came, b"page");
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

/// A link between two hosts that can be cut.
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

/// Content in which each byte shows its position.
fn content(bytes: usize, seed: u64) -> Vec<u8> {
    let words = (0..).map(|at: u64| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).take(bytes).collect()
}

/// Writes in pieces, each after a pause, and then ends the stream.
fn write_pieces(mut program: UnixStream, content: &[u8], pieces: &[(usize, u64)]) {
    let mut rest = content;
    for (length, pause_us) in pieces {
        let piece = rest.split_off(..*length).unwrap();
        thread::sleep(Duration::from_micros(*pause_us));
        program.write_all(piece).unwrap();
    }
}

fn read_all(mut program: UnixStream) -> Vec<u8> {
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut all = vec![];
    program.read_to_end(&mut all).unwrap();
    all
}

#[test]
fn what_a_program_writes_comes_out_whatever_its_pieces_and_its_pauses() {
    let hosts = Hosts::new();
    let length = prop_oneof![4 => 1..200_usize, 2 => 1..10_000_usize, 1 => 1..4 * BLOCK_BYTES_MAX];
    let pause_us = prop_oneof![3 => Just(0), 1 => 1..2_000_u64];
    let pieces = prop::collection::vec((length, pause_us), 0..30);
    let connections = prop::collection::vec(pieces, 1..4);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) };
    proptest!(config, |(connections in connections)| {
        let count = connections.len();
        let target = hosts.target(count);
        let (sender, path) = start(hosts.settings(&target, count));
        thread::scope(|scope| {
            for (seed, pieces) in (0..).zip(&connections) {
                // One after the other, so that it is known which is which.
                let source = UnixStream::connect(&path).unwrap();
                let program = target.program.accept().unwrap().0;
                let content = content(pieces.iter().map(|(length, _)| length).sum(), seed);
                let expected = content.clone();
                scope.spawn(move || write_pieces(source, &content, pieces));
                scope.spawn(move || assert!(read_all(program) == expected, "what goes in comes out"));
            }
        });
        prop_assert!(sender.error().is_none() && target.receiver.error().is_none());
    });
}

/// Fails the test unless the target knows that this was not everything, and its program hears that nothing follows.
fn assert_truncated(target: &Target, program: UnixStream) {
    assert_eq!(read_all(program), b"");
    eventually("the target knows", || target.receiver.error().is_some());
    let error = target.receiver.error();
    assert!(matches!(error, Some(RelayError::Truncated | RelayError::Wire(_))), "{error:?}");
}

/// Fails the test unless the sender notices the break when its program writes on, and that program is held up until its
/// sender ends.
fn assert_held_up(sender: Sender, source: &UnixStream) {
    source.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
    let more = content(BLOCK_BYTES_MAX, 1);
    eventually("the sender knows", || {
        drop({ source }.write_all(&more));
        sender.error().is_some()
    });
    assert!(matches!(sender.error(), Some(RelayError::Wire(_))), "{:?}", sender.error());
    let held_up = (0..100).find_map(|_| { source }.write_all(&more).err()).unwrap();
    assert_eq!(held_up.kind(), io::ErrorKind::WouldBlock, "the program is held up, not cut off");
    drop(sender);
    assert!({ source }.write_all(&more).is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe));
}

#[test]
fn a_broken_connection_is_no_end_at_the_target_and_holds_up_the_source() {
    let hosts = Hosts::new();
    for with_reset in [false, true] {
        let target = hosts.target(1);
        let link = Link::to(target.address);
        let Relay { sender, target, source, program } = hosts.relay_to(target, link.address);
        link.cut(with_reset);
        assert_truncated(&target, program);
        assert_held_up(sender, &source);
    }
}

#[test]
fn a_sender_that_goes_away_is_no_end_at_the_target() {
    let Relay { sender, target, mut source, program } = Hosts::new().relay();
    drop(sender);
    assert_truncated(&target, program);
    assert!(source.write_all(b"more").is_err(), "nobody takes it");
}

#[test]
fn a_receiver_that_goes_away_holds_up_the_source() {
    let Relay { sender, target, source, program } = Hosts::new().relay();
    drop(target.receiver);
    assert_eq!(read_all(program), b"");
    assert_held_up(sender, &source);
}

#[test]
fn a_program_that_is_gone_at_the_target_holds_up_the_source() {
    let Relay { sender, target, source, program } = Hosts::new().relay();
    drop(program);
    assert_held_up(sender, &source);
    assert!(matches!(target.receiver.error(), Some(RelayError::Local(_))), "{:?}", target.receiver.error());
}

#[test]
fn nobody_at_the_other_end_holds_up_the_source() {
    let hosts = Hosts::new();
    let target = hosts.target(1);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (sender, path) = start(SenderSettings { destination: nobody, ..hosts.settings(&target, 1) });
    let mut source = UnixStream::connect(path).unwrap();
    eventually("it fails", || sender.error().is_some());
    assert!(matches!(sender.error(), Some(RelayError::Connect { .. })), "{:?}", sender.error());
    source.write_all(b"page").expect("its connection is open");
    drop(sender);
    assert!(source.write_all(b"more").is_err(), "nobody takes it");
}
