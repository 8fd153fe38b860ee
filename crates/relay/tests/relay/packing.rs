//! Packed streams: what goes in comes out, and whatever goes wrong ends it cleanly.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use drainpipe_relay::{BLOCK_BYTES_MAX, RelayError, Sender, SenderSettings, TOKEN_BYTES, Treatment};
use proptest::prelude::*;

use crate::support::{PATIENCE, TOKEN, Target, assert_waits_for_no_wire, eventually, start};

fn packed(connections: usize) -> Target {
    Target::new(Treatment::Packed, connections)
}

fn sender_to(target: &Target, connections: usize) -> (Sender, PathBuf) {
    start(target.settings(Treatment::Packed, connections))
}

/// Connects as a sender would, for whatever comes next.
fn connect(target: &Target, index: u8) -> TcpStream {
    let mut wire = TcpStream::connect(target.address).unwrap();
    wire.write_all(&[&b"DRPRELAY\x03"[..], &TOKEN.0, &[index]].concat()).unwrap();
    wire
}

fn assert_closed(socket: &mut TcpStream) {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    match socket.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
        other => panic!("it is open: {other:?}"),
    }
}

/// Pages of words and pages of noise, no two alike.
fn content(pages: u64, seed: u64) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15 ^ seed;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let words = [&b"the and "[..], b"for was ", b"one our ", b"out day "];
    let mut bytes = vec![];
    for page in 0..pages {
        for _ in 0..512 {
            match page % 3 {
                0 => bytes.extend_from_slice(&next().to_le_bytes()),
                _ => bytes.extend_from_slice(words[(next() % 4) as usize]),
            }
        }
    }
    bytes
}

fn write_in_background(path: PathBuf, bytes: Vec<u8>) -> JoinHandle<()> {
    let mut socket = UnixStream::connect(path).unwrap();
    thread::spawn(move || {
        for piece in bytes.chunks(300_001) {
            socket.write_all(piece).unwrap();
        }
    })
}

fn read_slowly(mut socket: UnixStream, pause: Duration) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let (mut all, mut piece) = (vec![], vec![0; 100_000]);
        loop {
            match socket.read(&mut piece).unwrap() {
                0 => return all,
                count => all.extend_from_slice(&piece[..count]),
            }
            thread::sleep(pause);
        }
    })
}

/// Sends through both ends, and returns the contents in the order of the connections.
fn relay(contents: &[Vec<u8>], pause: Duration) -> (Sender, Target) {
    let target = packed(contents.len());
    let (sender, path) = sender_to(&target, contents.len());
    let mut writers = vec![];
    let mut readers = vec![];
    for content in contents {
        writers.push(write_in_background(path.clone(), content.clone()));
        readers.push(read_slowly(target.program.accept().unwrap().0, pause));
    }
    for writer in writers {
        writer.join().unwrap();
    }
    let mut arrived: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
    assert!(arrived[0] == contents[0], "the first connection is the first one");
    arrived.sort();
    let mut sent = contents.to_vec();
    sent.sort();
    assert!(arrived == sent, "what goes in comes out");
    (sender, target)
}

#[test]
fn what_goes_in_comes_out_however_fast_the_wire_is() {
    for pause in [Duration::ZERO, Duration::from_millis(2)] {
        let contents: Vec<_> = (1..=5).map(|seed| content(500 * seed, seed)).collect();
        let (sender, target) = relay(&contents, pause);
        let figures = sender.figures();
        assert_eq!(figures.raw_bytes, contents.iter().map(|content| content.len() as u64).sum::<u64>());
        assert_eq!((sender.error().map(drop), target.receiver.error().map(drop)), (None, None));
    }
}

#[test]
fn packs_while_the_wire_is_slow_and_counts_it() {
    let contents = [content(4000, 1)];
    let (sender, _target) = relay(&contents, Duration::from_millis(3));
    let figures = sender.figures();
    assert!(figures.wire_bytes < figures.raw_bytes * 9 / 10, "{figures:?}");
    assert!(figures.packed.lz4 + figures.packed.zstd > 0 && figures.packing_cpu_seconds > 0.0, "{figures:?}");
}

/// The streams of QEMU's multifd: rounds over the same pages, of which a little has changed since the round before.
/// Each page uses another connection each time.
fn multifd(connections: usize, rounds: usize, pages: usize) -> Vec<Vec<u8>> {
    let header = |flags: u8, offsets: &[usize]| {
        let mut header = vec![0; 1344];
        header[..8].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
        (header[11], header[19]) = (flags, offsets.len().try_into().unwrap());
        header[20..24].copy_from_slice(&u32::try_from(offsets.len() * 4096).unwrap().to_be_bytes());
        for (place, offset) in header[320..].chunks_mut(8).zip(offsets) {
            place.copy_from_slice(&(*offset as u64).to_be_bytes());
        }
        header
    };
    let mut initial = vec![0; 64];
    initial[..8].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
    let mut streams = vec![initial; connections];
    let mut memory: Vec<Vec<u8>> = (1..=pages as u64).map(|seed| content(1, seed * 77)).collect();
    for round in 0..rounds {
        for packet in 0..pages.div_ceil(20) {
            let numbers: Vec<usize> = (packet * 20..pages.min(packet * 20 + 20)).collect();
            let stream = &mut streams[(packet + round) % connections];
            stream.extend(header(0, &numbers.iter().map(|number| number * 4096).collect::<Vec<_>>()));
            for number in numbers {
                stream.extend_from_slice(&memory[number]);
            }
        }
        for stream in &mut streams {
            stream.extend(header(1, &[]));
        }
        for page in &mut memory {
            page[round * 16] ^= 1;
        }
    }
    streams
}

#[test]
fn a_page_that_comes_again_is_told_by_what_has_changed_whichever_connection_it_takes() {
    let contents = multifd(3, 12, 400);
    let (sender, target) = relay(&contents, Duration::from_millis(4));
    let figures = sender.figures();
    assert_eq!((sender.error().map(drop), target.receiver.error().map(drop)), (None, None));
    // The pages are noise: no codec makes them shorter.
    assert!(figures.wire_bytes < figures.raw_bytes * 9 / 10, "{figures:?}");
    let not_as_it_was = figures.packed.lz4 + figures.packed.zstd + figures.delta_bytes;
    assert!(
        figures.raw_bytes - figures.wire_bytes <= not_as_it_was,
        "what went as it was saved nothing: {figures:?}"
    );
}

#[test]
fn an_empty_stream_ends() {
    relay(&[vec![], content(1, 1), vec![]], Duration::ZERO);
}

#[test]
fn a_program_that_is_not_read_from_is_held_up_within_bounds() {
    let target = packed(1);
    let (sender, path) = sender_to(&target, 1);
    let mut program = UnixStream::connect(path).unwrap();
    program.set_write_timeout(Some(Duration::from_millis(700))).unwrap();
    let _reads_nothing = target.program.accept().unwrap();
    let noise = content(1, 0);
    let mut taken = 0;
    let stopped = loop {
        match program.write(&noise) {
            Ok(count) => taken += count,
            Err(error) => break error,
        }
    };
    assert_eq!(stopped.kind(), io::ErrorKind::WouldBlock);
    // Besides eight blocks, what the kernel's sockets hold: 4 MiB sent, 6 MiB received, and two of the programs.
    assert!(taken < 24 << 20, "{taken} bytes were taken");
    drop(sender);
    assert!(program.write(&noise).is_err(), "it is told");
}

#[test]
fn a_program_that_is_to_stop_waits_for_no_wire() {
    let target = packed(1);
    let (sender, path) = sender_to(&target, 1);
    assert_waits_for_no_wire(sender, path, &target);
}

#[test]
fn a_sender_that_breaks_off_sends_nothing_more() {
    let target = packed(1);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let destination = listener.local_addr().unwrap();
    let settings = SenderSettings { destination, ..target.settings(Treatment::Packed, 1) };
    let (sender, path) = start(settings);
    let mut program = UnixStream::connect(path).unwrap();
    program.set_write_timeout(Some(Duration::from_millis(700))).unwrap();
    let wire = listener.accept().unwrap().0;
    let noise = content(1, 0);
    while program.write_all(&noise).is_ok() {}
    drop(sender);
    // Nothing was read, so not everything could be sent.
    eventually("the connection is reset", || wire.take_error().unwrap().is_some());
}

type Expected = fn(&RelayError) -> bool;

#[test]
fn malformed_frames_end_all_connections_with_an_error() {
    let frames: [(&[u8], Expected); 6] = [
        (&[9; 8], |error| matches!(error, RelayError::Malformed(_))),
        (&[1, 0, 1, 0, 0, 4, 0, 0, 0xf0, 1, 2, 3], |error| matches!(error, RelayError::Unpack(_))),
        (&[2, 0, 1, 0, 0, 4, 0, 0, 1, 2, 3, 4], |error| matches!(error, RelayError::Unpack(_))),
        (&[0, 1, 0, 0, 1, 1, 0, 0, 1], |error| matches!(error, RelayError::Malformed(_))),
        // Slot 2^24, beyond what was agreed on.
        (&[0, 15, 0, 0, 1, 15, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0], |error| {
            matches!(error, RelayError::Malformed(_))
        }),
        (&[0, 9, 0, 0, 0, 9, 0, 0, 1], |error| matches!(error, RelayError::Truncated)),
    ];
    for (frame, is_expected) in frames {
        let target = packed(2);
        let (mut first, mut second) = (connect(&target, 0), connect(&target, 1));
        let mut programs = [target.program.accept().unwrap().0, target.program.accept().unwrap().0];
        second.write_all(frame).unwrap();
        second.shutdown(Shutdown::Write).unwrap();
        for program in &mut programs {
            program.set_read_timeout(Some(PATIENCE)).unwrap();
            assert_eq!(program.read(&mut [0; 9]).unwrap(), 0, "nothing of it reaches the program");
        }
        let error = target.receiver.error().expect("it says why");
        assert!(is_expected(&error), "{error:?}");
        assert_closed(&mut first);
    }
}

#[test]
fn unauthenticated_peers_get_nowhere_and_disturb_nobody() {
    let target = packed(1);
    let mut wrong_token = TcpStream::connect(target.address).unwrap();
    wrong_token.write_all(&[&b"DRPRELAY\x03"[..], &[0; TOKEN_BYTES], &[0]].concat()).unwrap();
    let mut silent = TcpStream::connect(target.address).unwrap();
    let mut chatty = TcpStream::connect(target.address).unwrap();
    chatty.write_all(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n").unwrap();
    assert_closed(&mut wrong_token);
    assert_closed(&mut chatty);
    let (sender, path) = sender_to(&target, 1);
    let writer = write_in_background(path, b"memory".to_vec());
    let mut arrived = vec![];
    target.program.accept().unwrap().0.read_to_end(&mut arrived).unwrap();
    writer.join().unwrap();
    assert_eq!(arrived, b"memory");
    assert!(sender.error().is_none() && target.receiver.error().is_none());
    assert!(TcpStream::connect(target.address).is_err(), "all have come: nobody listens any more");
    assert_closed(&mut silent);
}

#[test]
fn a_connection_comes_once() {
    let target = packed(2);
    let _first = connect(&target, 0);
    let mut program = target.program.accept().unwrap().0;
    let mut again = connect(&target, 0);
    assert_closed(&mut again);
    program.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert_eq!(program.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock, "the first one stays");
}

#[test]
fn a_receiver_that_goes_away_is_an_error_and_the_program_waits_for_the_sender_to_end() {
    let target = packed(1);
    let (sender, path) = sender_to(&target, 1);
    let Target { receiver, program, directory: _directory, .. } = target;
    let mut socket = UnixStream::connect(&path).unwrap();
    socket.write_all(&content(1, 1)).unwrap();
    let _accepted = program.accept().unwrap();
    drop(receiver);
    socket.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
    let more = content(64, 2);
    eventually("the sender notices", || {
        drop((&socket).write_all(&more));
        sender.error().is_some()
    });
    assert!(matches!(sender.error(), Some(RelayError::Wire(_))), "{:?}", sender.error());
    let held_up = (0..100).find_map(|_| (&socket).write_all(&more).err()).unwrap();
    assert_eq!(held_up.kind(), io::ErrorKind::WouldBlock, "the program is held up, not cut off");
    drop(sender);
    assert!((&socket).write_all(&more).is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe));
    assert!(!path.exists(), "nothing is left behind");
}

#[test]
fn nobody_at_the_other_end_is_an_error_with_the_address() {
    let target = packed(1);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let settings = SenderSettings { destination: closed, ..target.settings(Treatment::Packed, 1) };
    let (sender, path) = start(settings.clone());
    let _program = UnixStream::connect(path).unwrap();
    eventually("it fails", || sender.error().is_some());
    assert!(sender.error().unwrap().to_string().contains(&closed.to_string()));
    let none = Sender::start(SenderSettings { connections: 0, ..settings }, |_| Ok(()));
    assert!(matches!(none, Err(RelayError::Connections(0))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn arbitrary_frames_reach_no_program_unbounded(
        frames in prop::collection::vec(
            (
                prop::sample::select(vec![0_u8, 1, 2, 255]),
                prop::sample::select(vec![0_u8, 1, 2, 3, 4]),
                0..BLOCK_BYTES_MAX * 2,
                prop::collection::vec(any::<u8>(), 0..5_000),
                any::<bool>(),
            ),
            1..4,
        ),
    ) {
        let target = packed(1);
        let mut wire = connect(&target, 0);
        let mut program = target.program.accept().unwrap().0;
        let mut claimed_bytes = 0;
        for (kind, flags, raw_bytes, bytes, is_raw) in frames {
            // Otherwise, hardly any block would be a raw one, and only a raw one lets those after it be checked.
            let (kind, flags, raw_bytes) = if is_raw { (0, 0, bytes.len()) } else { (kind, flags, raw_bytes) };
            claimed_bytes += raw_bytes.min(BLOCK_BYTES_MAX);
            let [r0, r1, r2, ..] = raw_bytes.to_le_bytes();
            let [w0, w1, w2, ..] = bytes.len().to_le_bytes();
            // The receiver may close the connection before everything is written.
            drop(wire.write_all(&[&[kind, r0, r1, r2, flags, w0, w1, w2], &bytes[..]].concat()));
        }
        drop(wire.shutdown(Shutdown::Write));
        program.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut arrived = vec![];
        program.read_to_end(&mut arrived).unwrap();
        prop_assert!(arrived.len() <= claimed_bytes);
    }
}
