//! Not a test: measures how fast a host is emptied, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_DRAIN=3 cargo test --release -p drainpipe-cli --test end_to_end` makes everything three
//! times and prints a table. Once takes about six minutes on two cores.

use std::time::{Duration, Instant};

use drainpipe_agent::api::types::DrainView;
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState};
use drainpipe_guest::client::Heartbeat;
use drainpipe_guest::protocol::Verification;

use crate::guest::{Guest, MIX, UNFILLED_MIB};
use crate::measure_faults::{spread, start_for_measuring};
use crate::support::{TestLab, eventually, lab_for_measuring};

/// A guest: its name, its memory, and how fast it rewrites all that is filled of it, in MiB/s.
type Row = (&'static str, u64, u32);

const GUESTS: &[Row] = &[
    ("cache", 256, 0),
    ("proxy", 256, 0),
    ("mail", 384, 4),
    ("web1", 512, 0),
    ("web2", 512, 0),
    ("queue", 768, 4),
    ("shop", 768, 0),
    ("db", 1024, 0),
];

/// Like an operating system's memory.
const OS_LIKE: &str = "zero:40,text:30,random:30";

/// What both links together carry.
const LINKS_BYTES_PER_S: f64 = 250e6;

/// Numbers of VMs on the links at a time with which the number that was found is compared.
const FIXED: [&str; 4] = ["1", "2", "4", "8"];

/// Each guest is asked so often. Eight of them each millisecond would need both cores.
const BEAT: Duration = Duration::from_millis(20);

/// A prediction holds within this share of what was measured.
const HOLDS_WITHIN: f64 = 0.15;

pub(crate) fn run(repeats: usize) {
    let lab = lab_for_measuring();
    let guests = start_guests(&lab);
    let rounds: Vec<Round> = (0..repeats).map(|_| Round::measure(&lab, &guests)).collect();
    print_table(&rounds);
}

/// They boot side by side.
fn start_guests(lab: &TestLab) -> Vec<Guest> {
    let start = |(name, memory_mib, dirty_mib_per_s): &Row| {
        let guest = Guest::new(name, lab.guest_address(), lab.namespace("client"));
        let dirtying = format!("drainpipe.dirty_mib_per_s={dirty_mib_per_s}");
        // The more memory a guest has, the more of it its kernel keeps.
        let filled_mib = memory_mib - UNFILLED_MIB;
        let specification = guest.specification(*memory_mib, &dirtying).replace(MIX, OS_LIKE).replace(
            &format!("drainpipe.memory_mib={filled_mib}"),
            &format!("drainpipe.memory_mib={}", filled_mib - memory_mib / 8),
        );
        start_for_measuring(lab, &guest, specification);
        guest
    };
    let guests: Vec<Guest> = GUESTS.iter().map(start).collect();
    guests.iter().for_each(Guest::wait_until_ready);
    guests
}

/// All guests go from a to b or back, in several ways.
struct Round {
    /// The longest silence of each guest that moved alone, in ms.
    alone_ms: Vec<f64>,
    /// A shell's loop over one link.
    loop_s: f64,
    found: Drained,
    fixed: Vec<Drained>,
}

/// Host a was emptied.
struct Drained {
    /// The whole command.
    wall_s: f64,
    /// Over both links.
    bytes: f64,
    /// The longest silence of each guest, in ms.
    silences_ms: Vec<f64>,
    status: DrainStatus,
    pages: u64,
}

impl Round {
    fn measure(lab: &TestLab, guests: &[Guest]) -> Self {
        let alone_ms = GUESTS.iter().zip(guests).map(|((name, ..), guest)| {
            let heartbeat = guest.heartbeat_every(BEAT);
            lab.migrate(name, "b", &[]);
            heartbeat.stop().longest_gap_ms
        });
        let alone_ms = alone_ms.collect();
        let began = Instant::now();
        for (name, ..) in GUESTS {
            lab.drainpipe(&["migrate", name, "a", "--option", "tcp"]).done();
        }
        let loop_s = began.elapsed().as_secs_f64();
        let found = drain(lab, guests, &[]);
        let fixed = FIXED.map(|transfers| drain(lab, guests, &["--transfers", transfers]));
        Self { alone_ms, loop_s, found, fixed: fixed.into() }
    }

    /// The time of the best fixed number, in s.
    fn best_fixed_s(&self) -> f64 {
        self.fixed.iter().map(Drained::moving_s).fold(f64::INFINITY, f64::min)
    }
}

/// Empties a, has all memory checked, and brings everything back.
fn drain(lab: &TestLab, guests: &[Guest], arguments: &[&str]) -> Drained {
    let heartbeats: Vec<Heartbeat> = guests.iter().map(|guest| guest.heartbeat_every(BEAT)).collect();
    let bytes_before = sent_bytes(lab);
    let began = Instant::now();
    let drained: DrainView = lab.json(&[&["drain", "a", "--yes"], arguments].concat());
    let wall_s = began.elapsed().as_secs_f64();
    let bytes = sent_bytes(lab) - bytes_before;
    let silences_ms = heartbeats.into_iter().map(|heartbeat| heartbeat.stop().longest_gap_ms).collect();
    let status = drained.status.expect("there was a drain");
    assert_eq!(status.state, DrainState::Drained, "{status:#?}");
    let pages = guests.iter().map(checked_pages).sum();
    lab.drainpipe(&["resume", "a", "--failback"]).done();
    Drained { wall_s, bytes, silences_ms, status, pages }
}

fn checked_pages(guest: &Guest) -> u64 {
    eventually("the guest is reached", || guest.control().is_some());
    let Verification { pages, bad } = guest.verify();
    assert_eq!(bad, 0, "{}: bad pages", guest.name);
    pages
}

/// Bytes that host a has sent over its migration links, by the kernel's counters.
fn sent_bytes(lab: &TestLab) -> f64 {
    let bytes = ["e0", "e1"].map(|link| {
        let printed = lab.exec("a", &["ip", "-statistics", "-json", "link", "show", link]).done();
        let links: serde_json::Value = serde_json::from_str(&printed).unwrap();
        links[0]["stats64"]["tx"]["bytes"].as_f64().expect("ip tells what a link has sent")
    });
    bytes.iter().sum()
}

impl Drained {
    /// From the plan to the end.
    fn moving_s(&self) -> f64 {
        self.status.elapsed_ms / 1e3
    }

    fn bound_s(&self) -> f64 {
        self.bytes / LINKS_BYTES_PER_S
    }

    /// Predicted over measured time of each transfer.
    fn predictions(&self) -> impl Iterator<Item = f64> {
        let moved = self.status.moves.iter().filter(|one| one.state == MoveState::Moved);
        moved.filter_map(|one| Some(one.predicted_ms / one.transfer_ms?))
    }
}

fn holds(ratio: f64) -> bool {
    (ratio - 1.0).abs() <= HOLDS_WITHIN
}

fn print_table(rounds: &[Round]) {
    let found = || rounds.iter().map(|round| &round.found);
    let of = |value: fn(&Round) -> f64, digits| spread(rounds.iter().map(value), digits);
    let predictions: Vec<f64> = found().flat_map(Drained::predictions).collect();
    let held = predictions.iter().filter(|ratio| holds(**ratio)).count();
    let silences = || found().flat_map(|drained| drained.silences_ms.iter().copied());
    let alone = || rounds.iter().flat_map(|round| round.alone_ms.iter().copied());
    let against_alone = rounds.iter().map(|round| {
        let pairs = round.found.silences_ms.iter().zip(&round.alone_ms);
        pairs.map(|(drain_ms, alone_ms)| drain_ms / alone_ms).fold(0.0, f64::max)
    });
    let pages: u64 =
        rounds.iter().flat_map(|round| round.fixed.iter().chain([&round.found])).map(|one| one.pages).sum();
    println!("| figure | promise | measured |");
    println!("|---|---|---|");
    line("drain, the whole command, s", "", &of(|round| round.found.wall_s, 2));
    line("drain, from the plan on, s", "", &of(|round| round.found.moving_s(), 2));
    line("loop of `migrate --option tcp`, s", "", &of(|round| round.loop_s, 2));
    line("whole command ÷ loop", "≤ 0.45", &of(|round| round.found.wall_s / round.loop_s, 3));
    line("bytes sent ÷ both links, s", "", &of(|round| round.found.bound_s(), 2));
    line("from the plan on ÷ that", "≤ 1.08", &of(|round| round.found.moving_s() / round.found.bound_s(), 3));
    line("whole command ÷ that", "", &of(|round| round.found.wall_s / round.found.bound_s(), 3));
    for (at, transfers) in FIXED.iter().enumerate() {
        let fixed = spread(rounds.iter().map(|round| round.fixed[at].moving_s()), 2);
        line(&format!("drain with `--transfers {transfers}`, from the plan on, s"), "", &fixed);
    }
    line("found number at a time", "", &of(|round| f64::from(round.found.status.transfers), 0));
    line("found ÷ best fixed", "≤ 1.05", &of(|round| round.found.moving_s() / round.best_fixed_s(), 3));
    let whole = found().map(|drained| drained.status.predicted_ms / drained.status.elapsed_ms);
    line("whole, predicted ÷ measured", "0.85–1.15", &spread(whole, 3));
    let of_vms = format!("{held} of {}", predictions.len());
    line("VMs predicted within 15 %", "9 of 10", &of_vms);
    line("VM, predicted ÷ measured", "", &spread(predictions.into_iter(), 3));
    line("longest silence of each guest, moved alone, ms", "", &spread(alone(), 0));
    line("longest silence of each guest, drain, ms", "", &spread(silences(), 0));
    line("worst of a guest in the drain ÷ alone", "≤ 1.5", &spread(against_alone, 2));
    line("pages checked after drains, none bad", "", &pages.to_string());
}

fn line(figure: &str, promise: &str, measured: &str) {
    println!("| {figure} | {promise} | {measured} |");
}
