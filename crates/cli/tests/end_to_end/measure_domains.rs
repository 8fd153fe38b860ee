//! Not a test: measures the moves of libvirt's domains beside `virsh migrate`, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_DOMAINS=3 cargo test --release -p drainpipe-cli --test end_to_end` prints tables; with `-- WORD`, of what
//! has that word. All ways take turns in one lab, there and back; each time is that of the whole command.

use std::time::Instant;

use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_report::summary::Spread;

use crate::measure_faults::spread;
use crate::support::{TestLab, eventually};

/// Of the lab's usual pages, idle.
const SIZES_MIB: [u64; 2] = [400, 256];
const DRAINED: [&str; 6] = ["one", "two", "three", "four", "five", "six"];
const DRAINED_MIB: u64 = 160;

const TWO_LINKS: [&str; 5] = ["--libvirt", "--link", "1000", "--link", "1000"];

/// How one domain is moved.
#[derive(Clone, Copy)]
enum MoveCommand {
    Virsh(&'static [&'static str]),
    Drainpipe(&'static str),
}

const COMMANDS: [(&str, MoveCommand); 4] = [
    ("`virsh migrate --live`", MoveCommand::Virsh(&[])),
    (
        "`virsh migrate --live --parallel`, 8 connections",
        MoveCommand::Virsh(&["--parallel", "--parallel-connections", "8"]),
    ),
    ("Drainpipe, `tcp`", MoveCommand::Drainpipe("tcp")),
    ("Drainpipe, `multichannel`", MoveCommand::Drainpipe("multichannel")),
];

/// Seconds of the command, and ms of the pause as the hypervisor says.
struct Move {
    total_s: f64,
    pause_ms: f64,
}

pub(crate) fn run(repeats: usize, word: &str) {
    println!("| domain, links | way | whole command, s | ÷ virsh's | pause, ms |");
    println!("|---|---|---|---|---|");
    for memory_mib in SIZES_MIB {
        let what = format!("{memory_mib} MiB, 2 × 1 Gb/s");
        if what.contains(word) {
            one_domain(&what, memory_mib, repeats);
        }
    }
    println!();
    let what = format!("six domains of {DRAINED_MIB} MiB, 2 × 1 Gb/s");
    println!("| {what} | s | ÷ the loop's |");
    println!("|---|---|---|");
    if what.contains(word) {
        six_domains(repeats);
    }
}

fn one_domain(what: &str, memory_mib: u64, repeats: usize) {
    let lab = TestLab::up(&TWO_LINKS);
    let guest = lab.start_domain("a", "web", memory_mib, "");
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    let mut moves: [Vec<Move>; 4] = Default::default();
    for _ in 0..repeats {
        for ((_, way), moves) in COMMANDS.iter().zip(&mut moves) {
            for (source, target) in [("a", "b"), ("b", "a")] {
                moves.push(move_it(&lab, *way, source, target));
                guest.assert_intact();
            }
        }
    }
    let baseline = median(&moves[0]);
    for ((way, _), moves) in COMMANDS.iter().zip(&moves) {
        let total = spread(moves.iter().map(|one| one.total_s), 2);
        let pause = spread(moves.iter().map(|one| one.pause_ms), 0);
        println!("| {what} | {way} | {total} | {:.2} | {pause} |", median(moves) / baseline);
    }
}

fn median(moves: &[Move]) -> f64 {
    Spread::of(moves.iter().map(|one| one.total_s)).map_or(f64::NAN, |spread| spread.median)
}

fn move_it(lab: &TestLab, way: MoveCommand, source: &str, target: &str) -> Move {
    let began = Instant::now();
    match way {
        MoveCommand::Virsh(more) => {
            lab.migrate_domain_with("web", source, target, "e0", more);
            let total_s = began.elapsed().as_secs_f64();
            Move {
                total_s,
                pause_ms: pause_ms(&lab.virsh(target, &["domjobinfo", "web", "--completed"]).done()),
            }
        }
        MoveCommand::Drainpipe(option) => {
            let result: MigrationResult = lab.json(&["migrate", "web", target, "--option", option]);
            Move { total_s: began.elapsed().as_secs_f64(), pause_ms: result.downtime_ms.unwrap_or(f64::NAN) }
        }
    }
}

/// As in `Total downtime:   325          ms`.
fn pause_ms(job: &str) -> f64 {
    let line = job.lines().find(|line| line.starts_with("Total downtime:"));
    line.and_then(|line| line.split_whitespace().nth(2)?.parse().ok()).unwrap_or(f64::NAN)
}

fn six_domains(repeats: usize) {
    let lab = TestLab::up(&TWO_LINKS);
    let guests = DRAINED.map(|name| lab.start_domain("a", name, DRAINED_MIB, ""));
    eventually("the agent has seen them", || lab.vms().vms.len() == DRAINED.len());
    let (mut loops, mut drains) = (vec![], vec![]);
    for _ in 0..repeats {
        loops.push(timed(|| move_all(&lab, "a", "b")));
        move_all(&lab, "b", "a");
        eventually("the agent has seen them", || lab.vms().vms.iter().all(|vm| vm.host == "a"));
        drains.push(timed(|| drop(lab.drainpipe(&["drain", "a", "--yes"]).done())));
        lab.drainpipe(&["resume", "a", "--failback"]).done();
    }
    for guest in &guests {
        guest.assert_intact();
    }
    let of = |times: &[f64]| spread(times.iter().copied(), 2);
    let median = |times: &[f64]| Spread::of(times.iter().copied()).map_or(f64::NAN, |spread| spread.median);
    println!("| a loop of `virsh migrate --live` | {} | 1.00 |", of(&loops));
    println!("| `drainpipe drain` | {} | {:.2} |", of(&drains), median(&drains) / median(&loops));
}

fn move_all(lab: &TestLab, source: &str, target: &str) {
    for name in DRAINED {
        lab.migrate_domain_with(name, source, target, "e0", &[]);
    }
}

fn timed(act: impl FnOnce()) -> f64 {
    let began = Instant::now();
    act();
    began.elapsed().as_secs_f64()
}
