//! The memory that a sender holds, measured in a process that does nothing else.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_relay::{
    ConcurrentSenders, PACKING_THREADS_MAX, Sender, SenderSettings, TOKEN_BYTES, Token, Treatment,
};
use socket2::SockRef;

/// The connections of QEMU's multifd, and QEMU's first one.
const CONNECTIONS: usize = 17;
const PAGE_BYTES: usize = 4096;
const PAGES_OF_A_PACKET: usize = 100;
const PACKETS_OF_A_ROUND: usize = 12;
const ROUNDS: usize = 4;
const CACHE_BYTES: usize = 8 << 20;

/// The promised limit, which `sender/memory.rs` adds up; it includes what the allocator keeps after it was freed.
const RESIDENT_BYTES_MAX: usize = 64 << 20;

/// How much a receiver takes at a time.
const TAKEN_BYTES: usize = 32 << 10;

/// What the programs and receivers of this test hold: a packet, and what was taken, for each connection.
const TEST_BYTES: usize = CONNECTIONS * (1344 + PAGES_OF_A_PACKET * PAGE_BYTES + TAKEN_BYTES);

/// Pages that shrink by a third, of which a part changes from round to round.
fn page(seed: usize, round: usize, page: &mut [u8]) {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for (at, byte) in page.iter_mut().enumerate() {
        if at == 1500 {
            state = state.wrapping_add(round as u64);
        }
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = b' ' + state.to_be_bytes()[3] % 40;
    }
}

/// A round of one connection, as QEMU's multifd sends it.
fn round(connection: usize, round: usize, to: &mut impl Write) {
    for packet in 0..=PACKETS_OF_A_ROUND {
        // The last one is a sync.
        let pages = if packet < PACKETS_OF_A_ROUND { PAGES_OF_A_PACKET } else { 0 };
        let mut bytes = vec![0; 1344 + pages * PAGE_BYTES];
        bytes[..8].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
        bytes[11] = u8::from(pages == 0);
        bytes[16..20].copy_from_slice(&u32::try_from(pages).unwrap().to_be_bytes());
        bytes[20..24].copy_from_slice(&u32::try_from(pages * PAGE_BYTES).unwrap().to_be_bytes());
        for number in 0..pages {
            let place = (connection * PACKETS_OF_A_ROUND + packet) * PAGES_OF_A_PACKET + number;
            bytes[320 + 8 * number..][..8].copy_from_slice(&((place * PAGE_BYTES) as u64).to_be_bytes());
            page(place, round, &mut bytes[1344 + number * PAGE_BYTES..][..PAGE_BYTES]);
        }
        to.write_all(&bytes).unwrap();
    }
}

fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// A receiver that takes a little every 20 ms.
fn take_slowly(mut wire: TcpStream) {
    let mut room = vec![0; TAKEN_BYTES];
    while wire.read(&mut room).is_ok_and(|count| count > 0) {
        thread::sleep(Duration::from_millis(20));
    }
}

fn write(path: &Path, connection: usize) {
    let mut program = UnixStream::connect(path).unwrap();
    let mut initial = [0; 64];
    initial[..8].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1]);
    program.write_all(&initial).unwrap();
    for number in 0..ROUNDS {
        round(connection, number, &mut program);
    }
}

#[test]
fn what_a_sender_with_sixteen_threads_holds_is_bounded() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    SockRef::from(&listener).set_recv_buffer_size(64 << 10).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let settings = SenderSettings {
        path: directory.path().join("out.sock"),
        users: vec![],
        destination: listener.local_addr().unwrap(),
        connections: CONNECTIONS,
        token: Token([1; TOKEN_BYTES]),
        treatment: Treatment::Packed,
        cores: PACKING_THREADS_MAX,
        cpus: vec![],
        gives_way: true,
        concurrent: ConcurrentSenders::default(),
        page_cache_bytes: CACHE_BYTES,
    };
    let path = settings.path.clone();
    let before = resident_bytes();
    let sender = Sender::start(settings, |_| Ok(())).unwrap();
    let writers: Vec<_> = (0..CONNECTIONS)
        .map(|connection| {
            let path = path.clone();
            thread::spawn(move || write(&path, connection))
        })
        .collect();
    for _ in 0..CONNECTIONS {
        let wire = listener.accept().unwrap().0;
        thread::spawn(move || take_slowly(wire));
    }
    let (mut most, end) = (0, Instant::now() + Duration::from_mins(2));
    while writers.iter().any(|writer| !writer.is_finished()) {
        assert!(Instant::now() < end, "it does not come to an end: {:?}", sender.figures());
        most = most.max(resident_bytes());
        thread::sleep(Duration::from_millis(5));
    }
    let figures = sender.figures();
    assert!(sender.error().is_none(), "{figures:?}");
    if figures.packing_cpu_seconds <= 0.0 {
        eprintln!("SKIPPED: no core was idle, so that nothing was packed");
        return;
    }
    let held = most.saturating_sub(before + CACHE_BYTES + TEST_BYTES);
    println!("{:.1} MiB beyond the copies of pages", held as f64 / f64::from(1 << 20));
    assert!(held <= RESIDENT_BYTES_MAX, "{held} bytes");
}
