//! Not a test: measures moves of libvirt's domains, compared to `virsh migrate`, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_DOMAINS=3 cargo test --release -p drainpipe-cli --test end_to_end` prints tables, and what is
//! promised; `-- WORD` selects the parts with that word. All commands take turns in one lab, there and back; each time
//! is that of the whole command. `DRAINPIPE_TEST_WITH_LIBVIRT` names the daemon of another libvirt.

mod cable;
mod commands;

use std::time::Instant;

use drainpipe_report::summary::Spread;

use self::commands::{MULTICHANNEL, Move, MoveCommand, TCP, VIRSH, VIRSH_PARALLEL, VIRSH_TLS, move_it};
use crate::guest::{Guest, MIX, UNFILLED_MIB};
use crate::measure_faults::spread;
use crate::support::{TestLab, eventually};
use crate::tls_certificates::write_certificates;

const TWO_LINKS: [&str; 5] = ["--libvirt", "--link", "1000", "--link", "1000"];

/// Faster than what two cores encrypt.
const FAST_LINK: [&str; 4] = ["--libvirt", "--own-cpus", "--link", "unlimited"];

const DRAINED: [&str; 6] = ["one", "two", "three", "four", "five", "six"];
const DRAINED_MIB: u64 = 160;

/// Measures with this many repeats.
type Part = fn(usize) -> Vec<Promise>;

/// The measurements, by the words that select them.
const PARTS: [(&str, Part); 5] = [
    ("small", small_domain),
    ("large", large_domain),
    ("drain", six_domains),
    ("tls", encrypted),
    ("cable", cable::run),
];

/// A line about a promise.
pub(super) struct Promise {
    pub(super) what: &'static str,
    pub(super) promised: &'static str,
    pub(super) measured: String,
    pub(super) holds: bool,
}

pub(crate) fn run(repeats: usize, word: &str) {
    let parts = PARTS.iter().filter(|(name, _)| name.contains(word));
    let promises: Vec<Promise> = parts.flat_map(|(_, part)| part(repeats)).collect();
    println!("| against `virsh migrate` | promise | measured | holds |\n|---|---|---|---|");
    for Promise { what, promised, measured, holds } in promises {
        println!("| {what} | {promised} | {measured} | {} |", if holds { "yes" } else { "**no**" });
    }
}

/// A domain to measure, and how it moves.
struct Measured {
    what: &'static str,
    links: &'static [&'static str],
    memory_mib: u64,
    /// How much of it is filled.
    filled_mib: u64,
    /// What it is filled with.
    mix: &'static str,
    commands: &'static [&'static MoveCommand],
}

/// The moves of each command.
type Moves = Vec<Vec<Move>>;

impl Measured {
    fn run(&self, repeats: usize) -> Moves {
        let lab = TestLab::up(self.links);
        let encrypts = self.commands.iter().any(|command| command.is_encrypted());
        if encrypts {
            give_certificates(&lab);
        }
        let guest = self.start(&lab);
        let mut moves: Moves = self.commands.iter().map(|_| vec![]).collect();
        // The first there and back does not count: libvirt learns then, and memory is touched for the first time.
        for round in 0..=repeats {
            for (command, moves) in self.commands.iter().zip(&mut moves) {
                for (source, target) in [("a", "b"), ("b", "a")] {
                    let taken = move_it(&lab, command, source, target);
                    guest.assert_intact();
                    moves.extend((round > 0).then_some(taken));
                }
            }
        }
        self.print(&moves);
        moves
    }

    fn start(&self, lab: &TestLab) -> Guest {
        let usual = format!("memory_mib={}", self.memory_mib - UNFILLED_MIB);
        let filled = format!("memory_mib={}", self.filled_mib);
        let as_asked = |xml: String| xml.replace(MIX, self.mix).replace(&usual, &filled);
        let guest = lab.start_domain_as("a", "web", self.memory_mib, as_asked);
        eventually("the agent has seen it", || !lab.vms().vms.is_empty());
        guest
    }

    fn print(&self, moves: &Moves) {
        println!(
            "| {} | whole command, s | ÷ virsh's | sent, Gb/s | CPU of the machine, s | pause, ms |",
            self.what
        );
        println!("|---|---|---|---|---|---|");
        let baseline = median(&moves[0], |one| one.total_s);
        for (command, moves) in self.commands.iter().zip(moves) {
            let of = |figure: fn(&Move) -> f64, digits| spread(moves.iter().map(figure), digits);
            println!(
                "| {} | {} | {:.2} | {} | {} | {} |",
                command.name,
                of(|one| one.total_s, 2),
                median(moves, |one| one.total_s) / baseline,
                of(|one| one.gbps, 2),
                of(|one| one.cpu_s, 2),
                of(|one| one.pause_ms, 0)
            );
        }
        println!();
    }
}

/// The domain that the issue means: idle, with hardly anything in its memory.
fn small_domain(repeats: usize) -> Vec<Promise> {
    let commands = &[&VIRSH, &VIRSH_PARALLEL, &TCP, &MULTICHANNEL];
    let what = "256 MiB, of which 144 are zero pages, 2 × 1 Gb/s";
    let empty =
        Measured { what, links: &TWO_LINKS, memory_mib: 256, filled_mib: 144, mix: "zero:100", commands }
            .run(repeats);
    let what = "256 MiB, of which 130 do not shrink, 2 × 1 Gb/s";
    let full = Measured { what, links: &TWO_LINKS, memory_mib: 256, filled_mib: 144, mix: MIX, commands }
        .run(repeats);
    vec![
        at_most("whole command, 256 MiB, of zero pages", "≤ 0.40 ×", 0.4, total_ratio(&empty)),
        at_most("whole command, 256 MiB, filled", "≤ 0.40 ×", 0.4, total_ratio(&full)),
        at_most("pause, 256 MiB, filled", "≤ 1 ×", 1.0, pause_ratio(&full)),
    ]
}

fn large_domain(repeats: usize) -> Vec<Promise> {
    let commands = &[&VIRSH, &VIRSH_PARALLEL, &TCP, &MULTICHANNEL];
    let what = "1280 MiB, of which 1024 are random, 2 × 1 Gb/s";
    let moves =
        Measured { what, links: &TWO_LINKS, memory_mib: 1280, filled_mib: 1024, mix: "random:100", commands };
    let moves = moves.run(repeats);
    let ratio =
        |baseline: usize| median(&moves[3], |one| one.gbps) / median(&moves[baseline], |one| one.gbps);
    vec![
        at_least("throughput of `--live`", "≥ 1.9 ×", 1.9, ratio(0)),
        at_least("throughput of `--live --parallel`", "≥ 1.9 ×", 1.9, ratio(1)),
        at_most("pause, 1280 MiB, random", "≤ 1 ×", 1.0, pause_ratio(&moves)),
    ]
}

/// Over one link, so that only the encryption is compared.
fn encrypted(repeats: usize) -> Vec<Promise> {
    let commands = &[&VIRSH_TLS, &commands::ENCRYPTED];
    let what = "1280 MiB, of which 1024 are random, one unlimited link, encrypted";
    let moves =
        Measured { what, links: &FAST_LINK, memory_mib: 1280, filled_mib: 1024, mix: "random:100", commands };
    let moves = moves.run(repeats);
    let ratio = |figure: fn(&Move) -> f64| median(&moves[1], figure) / median(&moves[0], figure);
    vec![
        at_least("throughput of `--tls`", "≥ 1.5 ×", 1.5, ratio(|one| one.gbps)),
        at_most("CPU of `--tls`", "≤ 0.7 ×", 0.7, ratio(|one| one.cpu_s)),
    ]
}

fn median(moves: &[Move], figure: fn(&Move) -> f64) -> f64 {
    median_of(moves.iter().map(figure))
}

fn median_of(values: impl Iterator<Item = f64>) -> f64 {
    Spread::of(values).map_or(f64::NAN, |spread| spread.median)
}

/// The ratio of the last command's time to the first one's.
fn total_ratio(moves: &Moves) -> f64 {
    ratio(moves, |one| one.total_s)
}

fn pause_ratio(moves: &Moves) -> f64 {
    ratio(moves, |one| one.pause_ms)
}

fn ratio(moves: &Moves, figure: fn(&Move) -> f64) -> f64 {
    let last = moves.last().map_or(f64::NAN, |last| median(last, figure));
    last / median(&moves[0], figure)
}

fn at_most(what: &'static str, promised: &'static str, most: f64, ratio: f64) -> Promise {
    Promise { what, promised, measured: format!("{ratio:.2} ×"), holds: ratio <= most }
}

fn at_least(what: &'static str, promised: &'static str, least: f64, ratio: f64) -> Promise {
    Promise { what, promised, measured: format!("{ratio:.2} ×"), holds: ratio >= least }
}

/// Makes both libvirts encrypt for those who ask for it.
fn give_certificates(lab: &TestLab) {
    let certificates = tempfile::tempdir().unwrap();
    write_certificates(certificates.path());
    for host in ["a", "b"] {
        let own = lab.directory(host).join("libvirt/etc");
        std::fs::create_dir(own.join("tls")).unwrap();
        for file in std::fs::read_dir(certificates.path()).unwrap().map(Result::unwrap) {
            std::fs::copy(file.path(), own.join("tls").join(file.file_name())).unwrap();
        }
        let file = own.join("qemu.conf");
        let settings = std::fs::read_to_string(&file).unwrap();
        let with = format!("{settings}migrate_tls_x509_cert_dir = \"/etc/libvirt/tls\"\n");
        std::fs::write(file, with).unwrap();
        lab.fault(&format!("libvirt-stop {host}"));
        lab.fault(&format!("libvirt-start {host}"));
    }
}

fn six_domains(repeats: usize) -> Vec<Promise> {
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
    let ratio = median_of(drains.iter().copied()) / median_of(loops.iter().copied());
    println!("| six domains of {DRAINED_MIB} MiB, 2 × 1 Gb/s | s | ÷ the loop's |");
    println!("|---|---|---|");
    println!("| a loop of `virsh migrate --live` | {} | 1.00 |", of(&loops));
    println!("| `drainpipe drain` | {} | {ratio:.2} |\n", of(&drains));
    vec![at_most("drain of six domains, of the loop's time", "≤ 0.45 ×", 0.45, ratio)]
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
