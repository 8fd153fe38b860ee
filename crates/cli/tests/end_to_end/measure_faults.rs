//! Not a test: measures what faults of paths in mid-flight cost, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_FAULTS=10 cargo test --release -p drainpipe-cli --test end_to_end` causes each fault ten times
//! and prints a table; `-- WORD` selects rows with that word. With `DRAINPIPE_MEASURE_ENCRYPTED=1`, migrations are
//! encrypted, so that the agents carry what they watch.

use std::thread;
use std::time::{Duration, Instant};

use drainpipe_engine::migration::result::{MigrationResult, Outcome, PathState};
use drainpipe_engine::migration::step::Step;
use drainpipe_report::summary::Spread;
use rustix::process::{Signal, kill_process};

use crate::guest::Guest;
use crate::measured_guest::MeasuredGuest;
use crate::scene::result_of;
use crate::support::{TestLab, eventually, lab_for_measuring};

const MEMORY_MIB: u64 = 1280;

/// In flight for 4 s over both links, 8 s over one.
const FILLED_MIB: u64 = 960;

/// A link that moves less than this, in bytes per ms, stands still: 5 % of 1 Gb/s.
const MOVES_BYTES_PER_MS: f64 = 6_250.0;

/// What happens in mid-flight, this many ms into the transfer: a fault in the words of `drainpipe lab fault`, with `S`
/// and `D` for source and target, or that an agent is frozen or continues.
struct Row {
    name: &'static str,
    option: &'static str,
    acts: &'static [(u64, &'static str)],
    /// How the migration must end: with the VM on the target, or still running on the source.
    outcome: Outcome,
}

const fn row(name: &'static str, acts: &'static [(u64, &'static str)]) -> Row {
    Row { name, option: "multichannel", acts, outcome: Outcome::Completed }
}

const ROWS: &[Row] = &[
    row("no fault", &[]),
    Row { option: "tcp", ..row("one link alone", &[]) },
    row("link down at the source", &[(1000, "link-down S e1")]),
    row("link down at the target", &[(1000, "link-down D e1")]),
    row("nothing passes, both directions", &[(1000, "blackhole D e1")]),
    row("nothing passes towards the target", &[(1000, "blackhole D e1 receive")]),
    row("nothing passes towards the source", &[(1000, "blackhole D e1 send")]),
    row("5 % loss", &[(500, "loss D e1 5")]),
    row("nothing passes, healed after 1.5 s", &[(1000, "blackhole D e1"), (2500, "heal D e1")]),
    row(
        "flapping every second",
        &[
            (1000, "link-down D e1"),
            (2000, "link-up D e1"),
            (3000, "link-down D e1"),
            (4000, "link-up D e1"),
            (5000, "link-down D e1"),
            (6000, "link-up D e1"),
        ],
    ),
    row("1 Gb/s becomes 100 Mb/s", &[(1000, "rate e1 100")]),
    row(
        "all links down for 5 s",
        &[(1000, "blackhole D e0"), (1000, "blackhole D e1"), (6000, "heal D e0"), (6000, "heal D e1")],
    ),
    Row {
        outcome: Outcome::Failed,
        ..row(
            "all links down for longer than the bound of 60 s",
            &[(1000, "blackhole D e0"), (1000, "blackhole D e1")],
        )
    },
    row("source's agent stopped for 30 s", &stopped_for_30_s("stop-agent S", "continue-agent S")),
    row("target's agent stopped for 30 s", &stopped_for_30_s("stop-agent D", "continue-agent D")),
];

/// Uses links so slow that the transfer lasts longer.
const fn stopped_for_30_s(stop: &'static str, go_on: &'static str) -> [(u64, &'static str); 4] {
    [(0, "rate e0 100"), (0, "rate e1 100"), (1000, stop), (31_000, go_on)]
}

pub(crate) fn run(repeats: usize, word: &str) {
    let lab = lab_for_measuring();
    let guest = large_guest(&lab, "web");
    println!(
        "| in mid-flight | ended as it must | total, s | longest stall, ms | VM paused, ms | out after, ms | back after, ms |"
    );
    println!("|---|---|---|---|---|---|---|");
    for row in ROWS.iter().filter(|row| row.name.contains(word)) {
        let results: Vec<MigrationResult> = (0..repeats).map(|_| measure(&lab, &guest, row)).collect();
        println!("{}", line(row, &results));
    }
}

/// A guest on the lab's first host with so much memory that faults strike in mid-flight.
pub(crate) fn large_guest(lab: &TestLab, name: &str) -> Guest {
    let guest = MeasuredGuest {
        name,
        memory_mib: MEMORY_MIB,
        filled_mib: FILLED_MIB,
        mix: "random:100",
        kernel_parameters: "",
        is_in_huge_pages: false,
    };
    let guest = guest.start(lab);
    guest.wait_until_ready();
    guest
}

fn measure(lab: &TestLab, guest: &Guest, row: &Row) -> MigrationResult {
    let [source, target] = if lab.qemu_pid("a", "web").is_some() { ["a", "b"] } else { ["b", "a"] };
    let migrating = lab.start(&["migrate", "web", target, "--option", row.option, "--json"]);
    in_flight(lab, source);
    let began = Instant::now();
    for (at_ms, words) in row.acts {
        thread::sleep(Duration::from_millis(*at_ms).saturating_sub(began.elapsed()));
        act(lab, &words.replace('S', source).replace('D', target));
    }
    let result = result_of(&migrating.wait());
    if result.outcome != row.outcome {
        eprintln!("{}: {result:#?}", row.name);
    }
    for host in ["a", "b"] {
        for link in ["e0", "e1"] {
            lab.fault(&format!("heal {host} {link}"));
        }
    }
    for link in ["e0", "e1"] {
        lab.fault(&format!("rate {link} 1000"));
    }
    eventually("the guest is reached", || guest.control().is_some());
    guest.assert_intact();
    result
}

/// Waits until memory is copied from or to this host.
pub(crate) fn in_flight(lab: &TestLab, host: &str) {
    eventually("memory is copied", || step(lab, host) == Some(Step::CopyMemory));
}

/// The step of the last migration from or to this host.
fn step(lab: &TestLab, host: &str) -> Option<Step> {
    lab.migrations(host).first()?.progress.as_ref().map(|progress| progress.step)
}

fn act(lab: &TestLab, words: &str) {
    let signal = |host, signal| kill_process(lab.agent_pid(host).expect("it runs"), signal).unwrap();
    match words.split_once(' ') {
        Some(("stop-agent", host)) => signal(host, Signal::STOP),
        Some(("continue-agent", host)) => signal(host, Signal::CONT),
        _ => lab.fault(words),
    }
}

fn line(row: &Row, results: &[MigrationResult]) -> String {
    let as_it_must = results.iter().filter(|result| result.outcome == row.outcome).count();
    let total_s = results.iter().map(|result| result.times.total_ms / 1000.0);
    let paused_ms = results.iter().filter_map(|result| result.silence.downtime_ms);
    let out_ms = results.iter().filter_map(|result| {
        let out = result.record.events.iter().find(|event| event.what.contains(" is out: "))?;
        Some(out.ms - in_flight_ms(result)? - row.acts.first()?.0 as f64)
    });
    let back_ms = results.iter().filter_map(|result| {
        let healed_ms = in_flight_ms(result)? + row.acts.last()?.0 as f64;
        let turns = result.traffic.paths.iter().flat_map(|path| &path.turns);
        let back = turns.filter(|turn| turn.state == PathState::Back && turn.ms >= healed_ms);
        back.map(|turn| turn.ms - healed_ms).reduce(f64::max)
    });
    format!(
        "| {} | {as_it_must} of {} | {} | {} | {} | {} | {} |",
        row.name,
        results.len(),
        spread(total_s, 1),
        spread(results.iter().map(longest_stall_ms), 0),
        spread(paused_ms, 0),
        spread(out_ms, 0),
        spread(back_ms, 0),
    )
}

/// The beginning of the flight. Acts count from there, except for the 20 ms or so until it is seen.
fn in_flight_ms(result: &MigrationResult) -> Option<f64> {
    Some(result.record.events.iter().find(|event| event.step == Step::CopyMemory)?.ms)
}

/// The longest time in which no link moved data, of those that the migration went on to use. Read from samples that are
/// 100 ms apart.
fn longest_stall_ms(result: &MigrationResult) -> f64 {
    let mut since_ms = None;
    let mut longest_ms = 0.0_f64;
    for pair in result.record.samples.windows(2) {
        let [one, next] = pair else { continue };
        let elapsed_ms = next.ms - one.ms;
        let moved = next.path_bytes.iter().zip(&one.path_bytes).map(|(next, one)| next.saturating_sub(*one));
        let fastest = moved.max().unwrap_or(0) as f64 / elapsed_ms;
        if fastest >= MOVES_BYTES_PER_MS {
            since_ms = None;
        } else {
            longest_ms = longest_ms.max(next.ms - *since_ms.get_or_insert(one.ms));
        }
    }
    longest_ms
}

/// Median, least and most.
pub(crate) fn spread(values: impl Iterator<Item = f64>, digits: usize) -> String {
    match Spread::of(values) {
        None => "–".into(),
        Some(Spread { median, min, max }) if min < max => {
            format!("{median:.digits$} ({min:.digits$}–{max:.digits$})")
        }
        Some(Spread { median, .. }) => format!("{median:.digits$}"),
    }
}
