//! A capture of everything that passes the interfaces of hosts, searched for the contents of the guest's memory.
//!
//! `DRAINPIPE_MEASURE_CAPTURE=1 cargo test -p drainpipe-cli --test end_to_end` prints a table of all options, each
//! unencrypted and encrypted.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufRead, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_guest::mix::{Kind, Layout, RUN_PAGES};
use drainpipe_guest::page::{Content, Identity, PAGE_WORDS};
use drainpipe_guest::protocol::Dirtying;
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, eth, socket_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::guest::{MIX, UNFILLED_MIB};
use crate::support::TestLab;

/// The first byte of each word that the search looks for.
const MARK: u8 = 0xd7;

/// A guest's seed if its parameters name none.
const SEED: u64 = 0;

const PAGES_PER_MIB: u64 = 256;

/// The longest frame that offloads allow.
const FRAME_BYTES_MAX: usize = 1 << 17;

/// More than a link delivers while the machine is busy elsewhere.
const UNREAD_BYTES_MAX: usize = 128 << 20;

const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What was seen on the interfaces of some hosts.
#[derive(Debug)]
pub(crate) struct Seen {
    /// The bytes of all frames, headers included, on the host that saw less.
    pub(crate) bytes: u64,
    /// The numbers of the random pages of the guest's memory that were seen.
    pub(crate) pages: BTreeSet<u64>,
}

/// The random pages of a guest with this much memory that it has not rewritten: a word of each page, and its number.
pub(crate) struct KnownPages(HashMap<u64, u64>);

impl KnownPages {
    pub(crate) fn of(memory_mib: u64) -> Self {
        let layout = Layout::new(MIX.parse().unwrap());
        let pages = 0..(memory_mib - UNFILLED_MIB) * PAGES_PER_MIB;
        let random =
            pages.filter(|index| layout.kind(usize::try_from(*index).unwrap() / RUN_PAGES) == Kind::Random);
        Self(random.filter_map(|index| Some((known_word(index)?, index))).collect())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Finds known words at any place.
    fn find(&self, frames: &[u8], pages: &mut BTreeSet<u64>) {
        let mut rest = frames;
        // The standard library's own search is fast even in a test without optimisation.
        while rest.skip_until(MARK).unwrap() > 0 {
            let begin = frames.len() - rest.len() - 1;
            let word = frames[begin..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            pages.extend(word.and_then(|word| self.0.get(&word)));
        }
    }
}

/// A word of the page; `None` for the few pages that have no such word.
fn known_word(index: u64) -> Option<u64> {
    // A random page does not depend on the rank.
    let page = Identity { kind: Kind::Random, index, rank: 0 };
    let mut words = [0; PAGE_WORDS];
    Content::new(SEED, page, 0).write(&mut words);
    words.into_iter().find(|word| word.to_le_bytes()[0] == MARK)
}

/// Captures everything that passes the interfaces of hosts from its beginning on.
pub(crate) struct Capture {
    going: Arc<AtomicBool>,
    takers: Vec<JoinHandle<Vec<u8>>>,
}

impl Capture {
    #[track_caller]
    pub(crate) fn begin(lab: &TestLab, hosts: &[&str]) -> Self {
        let going = Arc::new(AtomicBool::new(true));
        let takers = hosts.iter().map(|host| {
            let (socket, going) = (packets_in(lab.namespace(host)), Arc::clone(&going));
            thread::spawn(move || take(socket, &going))
        });
        Self { takers: takers.collect(), going }
    }

    /// Ends the capture, and searches it.
    #[track_caller]
    pub(crate) fn end(self, known: &KnownPages) -> Seen {
        self.going.store(false, Ordering::Relaxed);
        let mut seen = Seen { bytes: u64::MAX, pages: BTreeSet::new() };
        for taker in self.takers {
            let frames = taker.join().unwrap();
            seen.bytes = seen.bytes.min(frames.len() as u64);
            known.find(&frames, &mut seen.pages);
        }
        seen
    }
}

/// A socket that receives everything that passes any interface of a namespace.
#[track_caller]
fn packets_in(namespace: PathBuf) -> OwnedFd {
    let opened = thread::spawn(move || {
        let namespace = File::open(namespace).unwrap();
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        let packets =
            socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, Some(eth::ALL))
                .unwrap();
        set_socket_recv_buffer_size_force(&packets, UNREAD_BYTES_MAX).unwrap();
        set_socket_timeout(&packets, Timeout::Recv, Some(LOOK_EVERY)).unwrap();
        packets
    });
    opened.join().unwrap()
}

/// Takes frames, one behind the other. The search comes later, since it takes longer than they take to arrive.
fn take(packets: OwnedFd, going: &AtomicBool) -> Vec<u8> {
    let (mut packets, mut frames) = (File::from(packets), Vec::new());
    let mut frame = vec![0; FRAME_BYTES_MAX];
    loop {
        match packets.read(&mut frame) {
            Ok(length) => frames.extend_from_slice(&frame[..length]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !going.load(Ordering::Relaxed) {
                    return frames;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Fails the test unless most of a migration's bytes were captured, except those that TCP sent twice, and none of its
/// memory is among them.
#[track_caller]
pub(crate) fn assert_unseen(result: &MigrationResult, seen: &Seen) {
    assert!(
        seen.bytes as f64 >= result.memory.wire_bytes as f64 * 0.8,
        "{} of {} bytes",
        seen.bytes,
        result.memory.wire_bytes
    );
    assert_eq!(seen.pages.len(), 0, "of the guest's pages, these passed in the clear: {:?}", seen.pages);
}

/// Fails the test unless nearly all memory is in the capture. A page that a frame's end splits may be missed.
#[track_caller]
pub(crate) fn assert_seen(known: &KnownPages, seen: &Seen) {
    let (found, all) = (seen.pages.len(), known.count());
    assert!(found as f64 >= all as f64 * 0.9, "{found} of {all} pages that passed in the clear were seen");
}

/// With post-copy, the guest has to be busy, but the pages that it has not rewritten are known.
const WAYS: [(&str, &[&str]); 4] = [
    ("`tcp`", &["--option", "tcp"]),
    ("`multichannel`", &["--option", "multichannel"]),
    ("`compression`", &["--option", "compression"]),
    ("post-copy", &["--post-copy"]),
];

const MEASURED_MIB: u64 = 256;
const LINK_MBPS: &str = "300";

/// More than the links carry, within a part of the memory: the rest is sent once.
const BUSY: Dirtying = Dirtying { mib_per_s: 150, locality_percent: 50 };

pub(crate) fn run() {
    let lab = TestLab::up(&["--link", LINK_MBPS, "--link", LINK_MBPS]);
    let guest = lab.start_guest("web", MEASURED_MIB, "");
    let known = KnownPages::of(MEASURED_MIB);
    println!("| | | sent, MB | captured, MB | of {} known pages, seen |", known.count());
    println!("|---|---|---|---|---|");
    let mut target = "b";
    for (name, arguments) in WAYS {
        for (how, encrypt) in [("in the clear", &[][..]), ("encrypted", &["--encrypt"])] {
            let is_post_copy = arguments == ["--post-copy"];
            if is_post_copy {
                guest.set_dirty(BUSY);
            }
            let capture = Capture::begin(&lab, &["a", "b"]);
            let result = lab.migrate("web", target, &[arguments, encrypt].concat());
            let seen = capture.end(&known);
            guest.set_dirty(Dirtying::IDLE);
            guest.assert_intact();
            assert_eq!(result.times.post_copy_ms.is_some(), is_post_copy, "{result:#?}");
            assert_eq!(
                result.connection_use.encryption.as_ref().is_some_and(|used| used.is_encrypted),
                !encrypt.is_empty()
            );
            let mb = |bytes: u64| bytes as f64 / 1e6;
            let (sent, captured) = (mb(result.memory.wire_bytes), mb(seen.bytes));
            println!("| {name} | {how} | {sent:.0} | {captured:.0} | {} |", seen.pages.len());
            target = if target == "b" { "a" } else { "b" };
        }
    }
}
