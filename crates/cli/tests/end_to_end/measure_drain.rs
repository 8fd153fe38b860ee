//! Not a test: measures how fast a host is emptied, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_DRAIN=3 cargo test --release -p drainpipe-cli --test end_to_end` runs everything three times and
//! prints a table. One run takes about seven minutes on two cores. `DRAINPIPE_MEASURE_DRAIN_WAYS=found,2` runs only
//! these ways, out of `loop`, `found`, `auto`, 1, 2, 4 and 8; all but the loop and `auto` use `multichannel`.
//! `DRAINPIPE_MEASURE_DRAIN_MIX=2` uses other guests, from the mixes 1 to 4, and `DRAINPIPE_MEASURE_LINKS_MBPS=250`
//! links of another speed than 1 Gb/s. With `DRAINPIPE_MEASURE_DRAIN_BURNING=4`, four other programs want a core
//! meanwhile. `DRAINPIPE_MEASURE_DRAIN_VMS=16` makes the fourth mix, of 53 guests, smaller.

mod table;

use std::collections::BTreeMap;
use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_api_types::{DrainView, MigrationView};
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState};
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_guest::client::{Gap, Heartbeat, Statistics};
use jiff::Timestamp;

use crate::burner::Burner;
use crate::drain::ask;
use crate::guest::{Guest, UNFILLED_MIB};
use crate::measured_guest::{MeasuredGuest, OS_LIKE, set_aside};
use crate::support::{TestLab, eventually, lab_for_measuring, measured_links_mbps};

/// A guest: its name, its memory, and how many MiB/s of its filled memory it rewrites.
type Row = (&'static str, u64, u32);

/// Guests of several sizes, two of which rewrite a little; equal guests at rest; large and small guests, half of which
/// rewrite.
const MIXES: [&[Row]; 3] = [
    &[
        ("cache", 256, 0),
        ("proxy", 256, 0),
        ("mail", 384, 4),
        ("web1", 512, 0),
        ("web2", 512, 0),
        ("queue", 768, 4),
        ("shop", 768, 0),
        ("db", 1024, 0),
    ],
    &[
        ("web1", 512, 0),
        ("web2", 512, 0),
        ("web3", 512, 0),
        ("web4", 512, 0),
        ("web5", 512, 0),
        ("web6", 512, 0),
        ("web7", 512, 0),
        ("web8", 512, 0),
    ],
    &[
        ("cache1", 256, 8),
        ("cache2", 256, 8),
        ("proxy1", 256, 0),
        ("proxy2", 256, 0),
        ("proxy3", 256, 0),
        ("db1", 1024, 16),
        ("db2", 1024, 16),
        ("shop", 1024, 0),
    ],
];

/// The fourth mix: many small guests at rest.
const MANY: usize = 53;
const OF_MANY_MIB: u64 = 144;

/// The option without compression.
const PLAIN: &str = "multichannel";

/// Fixed numbers of VMs on the links at a time, to compare with the number that the drain finds.
const FIXED: [&str; 4] = ["1", "2", "4", "8"];

/// How often each of eight guests is asked; more guests are asked less often. Eight answers a millisecond would need
/// both cores.
const BEAT: Duration = Duration::from_millis(20);
const GUESTS_OF_BEAT: u32 = 8;

/// How long a drain of many guests on busy cores may take.
const PATIENCE: Duration = Duration::from_mins(10);

/// The time between two looks at the reported time left.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How far back agents look to see how busy their hosts are.
const BUSY_FOR: Duration = Duration::from_secs(6);

/// The times over which the links are measured.
const GAP_MS: u64 = 100;

/// A prediction holds within this share of what was measured.
const HOLDS_WITHIN: f64 = 0.15;

/// How often each guest moves alone, and how many guests do; the others of a large mix are like these.
const ALONE: usize = 3;
const ALONE_MAX: usize = 8;

pub(crate) fn run(repeats: usize) {
    let ways = env::var("DRAINPIPE_MEASURE_DRAIN_WAYS").unwrap_or_else(|_| "loop,found,auto,1,2,4,8".into());
    let ways: Vec<&str> = ways.split(',').collect();
    let mix = env::var("DRAINPIPE_MEASURE_DRAIN_MIX").map_or(1, |mix| mix.parse().expect("a number"));
    let burning =
        env::var("DRAINPIPE_MEASURE_DRAIN_BURNING").map_or(0, |many| many.parse().expect("a number"));
    let rows = rows(mix);
    let huge_pages = set_aside(memory_mib(&rows));
    let lab = lab_for_measuring();
    let guests = start_guests(&lab, &rows, huge_pages.is_some());
    let _burning: Vec<Burner> = (0..burning).map(|_| Burner::start()).collect();
    let rounds: Vec<Round> = (0..repeats).map(|_| Round::measure(&lab, &guests, &ways)).collect();
    table::print(&rounds);
}

fn rows(mix: usize) -> Vec<Row> {
    let how_many =
        env::var("DRAINPIPE_MEASURE_DRAIN_VMS").map_or(MANY, |many| many.parse().expect("a number"));
    let many = || (1..=how_many).map(|number| (&*format!("vm{number}").leak(), OF_MANY_MIB, 0)).collect();
    MIXES.get(mix - 1).map_or_else(many, |rows| rows.to_vec())
}

/// Enough for all guests on both hosts, and for those that end on one while others begin.
fn memory_mib(rows: &[Row]) -> u64 {
    let all_mib: u64 = rows.iter().map(|(_, memory_mib, _)| memory_mib).sum();
    2 * all_mib + rows.iter().map(|(_, memory_mib, _)| *memory_mib).max().unwrap_or(0)
}

/// Starts guests one after the other: if many boot at once on few cores, some QEMU is not ready in time.
fn start_guests(lab: &TestLab, rows: &[Row], is_in_huge_pages: bool) -> Vec<Guest> {
    let start = |(name, memory_mib, dirty_mib_per_s): &Row| {
        let guest = MeasuredGuest {
            name,
            memory_mib: *memory_mib,
            // The more memory a guest has, the more of it its kernel keeps.
            filled_mib: memory_mib - UNFILLED_MIB - memory_mib / 8,
            mix: OS_LIKE.mix,
            kernel_parameters: &format!("drainpipe.dirty_mib_per_s={dirty_mib_per_s}"),
            is_in_huge_pages,
        };
        let guest = guest.start(lab);
        guest.wait_until_ready();
        guest
    };
    rows.iter().map(start).collect()
}

/// One round, in which all guests go from a to b or back in several ways.
struct Round {
    /// The silences of each guest that moved alone.
    alone: BTreeMap<String, Alone>,
    /// The time of a shell's loop over one link.
    loop_s: Option<f64>,
    found: Option<Drained>,
    auto: Option<Drained>,
    fixed: BTreeMap<&'static str, Drained>,
}

/// One drain of host a.
struct Drained {
    /// The time of the whole command.
    wall_s: f64,
    /// The bytes sent over both links.
    bytes: f64,
    /// The longest silence of each guest, and when it began.
    silences: BTreeMap<String, Silence>,
    status: DrainStatus,
    /// What the drain reported while it was under way.
    reports: Vec<ProgressReport>,
    /// The result of each VM, in the order of the drain.
    results: Vec<MigrationResult>,
    pages: u64,
}

/// What a drain under way reported.
struct ProgressReport {
    elapsed_ms: f64,
    moved: usize,
    eta_ms: Option<f64>,
}

/// The longest silence of a guest in each of [`ALONE`] moves, in ms.
struct Alone {
    median_ms: f64,
    most_ms: f64,
}

/// A silence of a guest.
struct Silence {
    // `None` if more silences came before it than are listed.
    began: Option<Timestamp>,
    ms: f64,
}

impl Round {
    fn measure(lab: &TestLab, guests: &[Guest], ways: &[&str]) -> Self {
        let alone = moved_alone(lab, guests);
        // These guests have ended on b.
        let began = Instant::now();
        let is_loop = ways.contains(&"loop");
        let option = if is_loop { "tcp" } else { PLAIN };
        for guest in guests.iter().take(ALONE_MAX) {
            lab.drainpipe(&["migrate", &guest.name, "a", "--option", option]).done();
        }
        let loop_s = is_loop.then(|| began.elapsed().as_secs_f64());
        let plain = ["--option", PLAIN];
        let found = ways.contains(&"found").then(|| drain(lab, guests, &plain));
        let fixed = FIXED.into_iter().filter(|transfers| ways.contains(transfers));
        let fixed = fixed.map(|transfers| {
            (transfers, drain(lab, guests, &[&plain[..], &["--transfers", transfers]].concat()))
        });
        let fixed = fixed.collect();
        let auto = ways.contains(&"auto").then(|| {
            there_and_back(lab, guests);
            drain(lab, guests, &[])
        });
        Self { alone, loop_s, found, auto, fixed }
    }

    /// The time of the best fixed number, in s.
    fn best_fixed_s(&self) -> Option<f64> {
        self.fixed.values().map(Drained::moving_s).min_by(f64::total_cmp)
    }

    fn drains(&self) -> impl Iterator<Item = (&str, &Drained)> {
        let fixed = self.fixed.iter().map(|(transfers, drained)| (*transfers, drained));
        let found = self.found.iter().map(|drained| ("found", drained));
        found.chain(self.auto.iter().map(|drained| ("found, by `auto`", drained))).chain(fixed)
    }
}

/// Moves each guest to b, back, and to b again.
fn moved_alone(lab: &TestLab, guests: &[Guest]) -> BTreeMap<String, Alone> {
    let mut silences_ms = BTreeMap::<String, Vec<f64>>::new();
    for time in 0..ALONE {
        for guest in guests.iter().take(ALONE_MAX) {
            let (_, heartbeat) = listen(guest, BEAT);
            lab.migrate(&guest.name, ["b", "a"][time % 2], &["--option", PLAIN]);
            silences_ms.entry(guest.name.clone()).or_default().push(heartbeat.stop().longest_gap_ms);
        }
    }
    let alone = |mut ms: Vec<f64>| {
        ms.sort_by(f64::total_cmp);
        Alone { median_ms: ms[ALONE / 2], most_ms: ms[ALONE - 1] }
    };
    silences_ms.into_iter().map(|(name, ms)| (name, alone(ms))).collect()
}

/// Moves guests there and back, so that it is known what compression brings, as on a host that has moved VMs before.
fn there_and_back(lab: &TestLab, guests: &[Guest]) {
    for (guest, host) in guests.iter().flat_map(|guest| [(guest, "b"), (guest, "a")]) {
        lab.migrate(&guest.name, host, &[]);
    }
}

/// Empties a, checks all memory, and moves everything back.
fn drain(lab: &TestLab, guests: &[Guest], arguments: &[&str]) -> Drained {
    let beat = BEAT * u32::try_from(guests.len()).expect("they are few").max(GUESTS_OF_BEAT) / GUESTS_OF_BEAT;
    let heartbeats: Vec<(Timestamp, Heartbeat)> = guests.iter().map(|guest| listen(guest, beat)).collect();
    // The hosts become as busy as they will be, before the plan is made.
    thread::sleep(BUSY_FOR);
    let bytes_before = sent_bytes(lab);
    let began = Instant::now();
    let is_over = AtomicBool::new(false);
    let (drained, reports) = thread::scope(|scope| {
        let reports = scope.spawn(|| followed(lab, &is_over));
        let drained = lab.start(&[&["drain", "a", "--yes", "--json"], arguments].concat()).wait_for(PATIENCE);
        is_over.store(true, Ordering::Relaxed);
        (drained.done(), reports.join().expect("it looks, and nothing else"))
    });
    let drained: DrainView = serde_json::from_str(&drained).expect("what it prints with --json");
    let wall_s = began.elapsed().as_secs_f64();
    let bytes = sent_bytes(lab) - bytes_before;
    let silences = guests.iter().zip(heartbeats);
    let silences =
        silences.map(|(guest, (since, beat))| (guest.name.clone(), longest(beat, since))).collect();
    let status = drained.status.expect("there was a drain");
    assert_eq!(status.state, DrainState::Drained, "{status:#?}");
    let pages = guests.iter().map(checked_pages).sum();
    let migrations = status.moves.iter().map(|one| one.migration.as_deref().expect("it has moved"));
    let result = |id| {
        let view: MigrationView = lab.json(&["history", id, "--host", "a"]);
        view.result.expect("it is over")
    };
    let results = migrations.map(result).collect();
    lab.start(&["resume", "a", "--failback"]).wait_for(PATIENCE).done();
    Drained { wall_s, bytes, silences, status, reports, results, pages }
}

/// What the drain reports until it is over.
fn followed(lab: &TestLab, is_over: &AtomicBool) -> Vec<ProgressReport> {
    let mut reports = vec![];
    while !is_over.load(Ordering::Relaxed) {
        let status = ask::<DrainView>(lab, "a", "/v1/drain", None).ok().and_then(|view| view.status);
        if let Some(status) = status.filter(|status| status.state == DrainState::Moving) {
            let (elapsed_ms, moved, eta_ms) = (status.elapsed_ms, status.moved(), status.eta_ms);
            reports.push(ProgressReport { elapsed_ms, moved, eta_ms });
        }
        thread::sleep(LOOK_EVERY);
    }
    reports
}

/// Listens to a guest that answers, from now on.
fn listen(guest: &Guest, beat: Duration) -> (Timestamp, Heartbeat) {
    let heartbeat = guest.heartbeat_every(beat);
    eventually("the guest answers", || heartbeat.statistics().answered > 0);
    heartbeat.reset();
    (Timestamp::now(), heartbeat)
}

/// What both links together carry.
fn links_bytes_per_s() -> f64 {
    2.0 * f64::from(measured_links_mbps()) * 125e3
}

fn longest(heartbeat: Heartbeat, since: Timestamp) -> Silence {
    let Statistics { gaps, longest_gap_ms, .. } = heartbeat.stop();
    let listed = gaps.into_iter().find(|gap| gap.length_ms >= longest_gap_ms);
    let began = listed.map(|Gap { start_ms, .. }| since + Duration::from_secs_f64(start_ms / 1e3));
    Silence { began, ms: longest_gap_ms }
}

fn checked_pages(guest: &Guest) -> u64 {
    eventually("the guest is reached", || guest.control().is_some());
    let found = guest.verify();
    assert_eq!(found.bad, 0, "{}: bad pages: {found}", guest.name);
    found.pages
}

/// The bytes that host a has sent over its migration links, by the kernel's counters.
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

    fn ms_at(&self, time: Timestamp) -> f64 {
        time.duration_since(self.began()).as_secs_f64() * 1e3
    }

    fn started_ms(&self, result: &MigrationResult) -> f64 {
        self.ms_at(result.started_at.parse().expect("it is a time"))
    }

    /// When this VM's turn on the links came.
    fn released_ms(&self, result: &MigrationResult) -> f64 {
        self.started_ms(result) + result.times.setup_ms + result.times.held_ms
    }

    /// The time from the command to the first VM's turn.
    fn before_first_byte_ms(&self) -> f64 {
        let released = self.results.iter().map(|result| self.released_ms(result)).fold(f64::MAX, f64::min);
        self.wall_s * 1e3 - self.status.elapsed_ms + released
    }

    /// The times when the links carried less than four fifths of what they can, by what migrations sent.
    fn gaps(&self) -> String {
        let mut carried = BTreeMap::<u64, f64>::new();
        for result in &self.results {
            for pair in result.record.samples.windows(2) {
                let bytes = |at: usize| pair[at].path_bytes.iter().sum::<u64>() as f64;
                let [from_ms, to_ms] = [0, 1].map(|at: usize| self.started_ms(result) + pair[at].ms);
                let per_ms = (bytes(1) - bytes(0)) / (to_ms - from_ms).max(1.0);
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "ms of a drain")]
                for ms in from_ms as u64..to_ms as u64 {
                    *carried.entry(ms / GAP_MS).or_default() += per_ms;
                }
            }
        }
        let full = links_bytes_per_s() / 1e3 * GAP_MS as f64;
        let last = carried.keys().next_back().copied().unwrap_or(0);
        let shares = (0..=last).map(|at| (at * GAP_MS, carried.get(&at).copied().unwrap_or(0.0) / full));
        let slow: Vec<String> =
            shares.filter(|(_, share)| *share < 0.8).map(|(ms, share)| format!("{ms}: {share:.2}")).collect();
        format!("Links less than 0.8 full, by time in ms and share: {}.", slow.join(", "))
    }

    /// The time from the plan to the end.
    fn moving_s(&self) -> f64 {
        self.status.elapsed_ms / 1e3
    }

    fn bound_s(&self) -> f64 {
        self.bytes / links_bytes_per_s()
    }

    /// The ratio of predicted to measured time, for each transfer.
    fn predictions(&self) -> impl Iterator<Item = f64> {
        let moved = self.status.moves.iter().filter(|one| one.state == MoveState::Moved);
        moved.filter_map(|one| Some(one.predicted_ms / one.transfer_ms?))
    }
}
