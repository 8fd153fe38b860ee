//! Not a test: measures how fast a host is emptied, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_DRAIN=3 cargo test --release -p drainpipe-cli --test end_to_end` makes everything three
//! times and prints a table. Once takes about six minutes on two cores. `DRAINPIPE_MEASURE_DRAIN_WAYS=found,2`
//! makes only these ways, of `loop`, `found`, 1, 2, 4 and 8.

use std::collections::BTreeMap;
use std::env;
use std::time::{Duration, Instant};

use drainpipe_agent::api::types::{DrainView, MigrationView};
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState};
use drainpipe_engine::result::MigrationResult;
use drainpipe_guest::client::Heartbeat;
use drainpipe_guest::protocol::Verification;
use jiff::Timestamp;

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

/// The links are looked at over such times.
const GAP_MS: u64 = 100;

/// A prediction holds within this share of what was measured.
const HOLDS_WITHIN: f64 = 0.15;

pub(crate) fn run(repeats: usize) {
    let ways = env::var("DRAINPIPE_MEASURE_DRAIN_WAYS").unwrap_or_else(|_| "loop,found,1,2,4,8".into());
    let ways: Vec<&str> = ways.split(',').collect();
    let lab = lab_for_measuring();
    let guests = start_guests(&lab);
    let rounds: Vec<Round> = (0..repeats).map(|_| Round::measure(&lab, &guests, &ways)).collect();
    print_table(&rounds);
    for round in &rounds {
        print_vms(round);
    }
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
    loop_s: Option<f64>,
    found: Option<Drained>,
    fixed: BTreeMap<&'static str, Drained>,
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
    /// Of each VM, in the order of the drain.
    results: Vec<MigrationResult>,
    pages: u64,
}

impl Round {
    fn measure(lab: &TestLab, guests: &[Guest], ways: &[&str]) -> Self {
        let alone_ms = GUESTS.iter().zip(guests).map(|((name, ..), guest)| {
            let heartbeat = guest.heartbeat_every(BEAT);
            lab.migrate(name, "b", &[]);
            heartbeat.stop().longest_gap_ms
        });
        let alone_ms = alone_ms.collect();
        let began = Instant::now();
        let is_loop = ways.contains(&"loop");
        for (name, ..) in GUESTS {
            let option = if is_loop { "tcp" } else { "auto" };
            lab.drainpipe(&["migrate", name, "a", "--option", option]).done();
        }
        let loop_s = is_loop.then(|| began.elapsed().as_secs_f64());
        let found = ways.contains(&"found").then(|| drain(lab, guests, &[]));
        let fixed = FIXED.into_iter().filter(|transfers| ways.contains(transfers));
        let fixed = fixed.map(|transfers| (transfers, drain(lab, guests, &["--transfers", transfers])));
        Self { alone_ms, loop_s, found, fixed: fixed.collect() }
    }

    /// The time of the best fixed number, in s.
    fn best_fixed_s(&self) -> Option<f64> {
        self.fixed.values().map(Drained::moving_s).min_by(f64::total_cmp)
    }

    fn drains(&self) -> impl Iterator<Item = (&str, &Drained)> {
        let fixed = self.fixed.iter().map(|(transfers, drained)| (*transfers, drained));
        self.found.iter().map(|drained| ("found", drained)).chain(fixed)
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
    let migrations = status.moves.iter().map(|one| one.migration.as_deref().expect("it has moved"));
    let result = |id| {
        let view: MigrationView = lab.json(&["history", id, "--host", "a"]);
        view.result.expect("it is over")
    };
    let results = migrations.map(result).collect();
    lab.drainpipe(&["resume", "a", "--failback"]).done();
    Drained { wall_s, bytes, silences_ms, status, results, pages }
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
    /// When the first migration began.
    fn began(&self) -> Timestamp {
        let began = self.results.iter().map(|result| result.started_at.parse().expect("it is a time"));
        began.min().expect("there were VMs")
    }

    fn started_ms(&self, result: &MigrationResult) -> f64 {
        let started: Timestamp = result.started_at.parse().expect("it is a time");
        started.duration_since(self.began()).as_secs_f64() * 1e3
    }

    /// When this VM's turn on the links came.
    fn released_ms(&self, result: &MigrationResult) -> f64 {
        self.started_ms(result) + result.setup_ms + result.held_ms
    }

    /// From the command to the first VM's turn.
    fn before_first_byte_ms(&self) -> f64 {
        let released = self.results.iter().map(|result| self.released_ms(result)).fold(f64::MAX, f64::min);
        self.wall_s * 1e3 - self.status.elapsed_ms + released
    }

    /// When the links carried less than four fifths of what they can, by what migrations have sent.
    fn gaps(&self) -> String {
        let mut carried = BTreeMap::<u64, f64>::new();
        for result in &self.results {
            for pair in result.samples.windows(2) {
                let bytes = |at: usize| pair[at].path_bytes.iter().sum::<u64>() as f64;
                let [from_ms, to_ms] = [0, 1].map(|at: usize| self.started_ms(result) + pair[at].ms);
                let per_ms = (bytes(1) - bytes(0)) / (to_ms - from_ms).max(1.0);
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "ms of a drain")]
                for ms in from_ms as u64..to_ms as u64 {
                    *carried.entry(ms / GAP_MS).or_default() += per_ms;
                }
            }
        }
        let full = LINKS_BYTES_PER_S / 1e3 * GAP_MS as f64;
        let last = carried.keys().next_back().copied().unwrap_or(0);
        let shares = (0..=last).map(|at| (at * GAP_MS, carried.get(&at).copied().unwrap_or(0.0) / full));
        let slow: Vec<String> =
            shares.filter(|(_, share)| *share < 0.8).map(|(ms, share)| format!("{ms}: {share:.2}")).collect();
        format!("Links less than 0.8 full, by time in ms and share: {}.", slow.join(", "))
    }

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
    let found = || rounds.iter().filter_map(|round| Some((round, round.found.as_ref()?)));
    let of = |value: fn(&Drained) -> f64, digits| spread(found().map(|(_, drained)| value(drained)), digits);
    let predictions: Vec<f64> = found().flat_map(|(_, drained)| drained.predictions()).collect();
    let held = predictions.iter().filter(|ratio| holds(**ratio)).count();
    let silences = found().flat_map(|(_, drained)| drained.silences_ms.iter().copied());
    let alone = rounds.iter().flat_map(|round| round.alone_ms.iter().copied());
    let pages: u64 = rounds.iter().flat_map(Round::drains).map(|(_, drained)| drained.pages).sum();
    println!("| figure | promise | measured |");
    println!("|---|---|---|");
    line("drain, the whole command, s", "", &of(|drained| drained.wall_s, 2));
    line("drain, from the plan on, s", "", &of(Drained::moving_s, 2));
    line("loop of `migrate --option tcp`, s", "", &spread(rounds.iter().filter_map(|round| round.loop_s), 2));
    let against_loop = found().filter_map(|(round, drained)| Some(drained.wall_s / round.loop_s?));
    line("whole command ÷ loop", "≤ 0.45", &spread(against_loop, 3));
    line("bytes sent ÷ both links, s", "", &of(Drained::bound_s, 2));
    line("from the plan on ÷ that", "≤ 1.08", &of(|drained| drained.moving_s() / drained.bound_s(), 3));
    line("whole command ÷ that", "", &of(|drained| drained.wall_s / drained.bound_s(), 3));
    line("before the first byte, ms", "", &of(Drained::before_first_byte_ms, 0));
    for transfers in FIXED {
        let fixed = rounds.iter().filter_map(|round| round.fixed.get(transfers)).map(Drained::moving_s);
        line(&format!("drain with `--transfers {transfers}`, from the plan on, s"), "", &spread(fixed, 2));
    }
    line("found number at a time", "", &of(|drained| f64::from(drained.status.transfers), 0));
    let against_fixed =
        found().filter_map(|(round, drained)| Some(drained.moving_s() / round.best_fixed_s()?));
    line("found ÷ best fixed", "≤ 1.05", &spread(against_fixed, 3));
    let whole = |drained: &Drained| drained.status.predicted_ms / drained.status.elapsed_ms;
    line("whole, predicted ÷ measured", "0.85–1.15", &of(whole, 3));
    let of_vms = format!("{held} of {}", predictions.len());
    line("VMs predicted within 15 %", "9 of 10", &of_vms);
    line("VM, predicted ÷ measured", "", &spread(predictions.into_iter(), 3));
    line("longest silence of each guest, moved alone, ms", "", &spread(alone, 0));
    line("longest silence of each guest, drain, ms", "", &spread(silences, 0));
    let against_alone = found().map(|(round, drained)| worst(&drained.silences_ms, &round.alone_ms));
    line("worst of a guest in the drain ÷ alone", "≤ 1.5", &spread(against_alone, 2));
    line("pages checked after drains, none bad", "", &pages.to_string());
}

/// The largest of the ratios.
fn worst(silences_ms: &[f64], alone_ms: &[f64]) -> f64 {
    silences_ms.iter().zip(alone_ms).map(|(drain_ms, alone_ms)| drain_ms / alone_ms).fold(0.0, f64::max)
}

/// What became of each VM, and when the links stood still.
fn print_vms(round: &Round) {
    for (way, drained) in round.drains() {
        println!();
        println!("Number at a time: {way}. All times in ms, from the begin of the drain.");
        println!();
        println!(
            "| VM | on the links | paused | sent | predicted | transfer | sent ÷ predicted bytes | silence | alone |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for (one, result) in drained.status.moves.iter().zip(&drained.results) {
            let at = GUESTS.iter().position(|(name, ..)| *name == one.vm).expect("it is one of the guests");
            let released = drained.released_ms(result);
            println!(
                "| {} | {released:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {:.3} | {:.0} | {:.0} |",
                one.vm,
                released + result.transfer_ms - result.blackout_ms.unwrap_or(0.0),
                released + result.transfer_ms,
                one.predicted_ms,
                result.transfer_ms,
                one.sent_bytes as f64 / one.predicted_bytes.max(1) as f64,
                drained.silences_ms[at],
                round.alone_ms[at],
            );
        }
        println!();
        println!("{}", drained.gaps());
    }
}

fn line(figure: &str, promise: &str, measured: &str) {
    println!("| {figure} | {promise} | {measured} |");
}
