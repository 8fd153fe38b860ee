//! Not a test: runs the scenarios again and again, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_SCENARIOS=200 cargo test --release -p drainpipe-cli --test end_to_end` runs each of them 200
//! times with the QEMU that `DRAINPIPE_TEST_QEMU` names; `-- WORD` selects those with that word, or with one of several
//! as in `'tcp|frames'`. `DRAINPIPE_MEASURE_LABS=4` uses four labs at once; `DRAINPIPE_MEASURE_FROM=25` begins with run
//! 25. The decisions of a run depend only on `DRAINPIPE_CHAOS_SEED`, its row and its number. So the same command
//! continues what was interrupted: it does not repeat runs that have a line already.
//! A violation does not end the measurement: it is counted, and the next run gets a new lab.
//!
//! Each run leaves a line in `target/chaos/runs`. `DRAINPIPE_MEASURE_SCENARIOS=0` runs nothing, and prints the tables
//! of all lines there.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use super::busy::Machine;
use super::monitor::Monitor;
use super::random::Random;
use super::scenarios::{SCENARIOS, Scenario};
use super::tally::{self, COMPLETED, Ran, RecordedViolation};
use super::violation::Violation;
use super::world::{REPORTED_AS_LOST, Setting, World};
use super::{HOSTS, lab, number, seed};
use crate::options;

const MEMORY_MIB: u64 = 160;

/// The settings of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bed {
    pub(super) link_mbps: &'static str,
    /// How long a transfer may stand still, if not as long as usual.
    pub(super) stall_s: Option<u32>,
}

/// Runs each scenario whose name contains `word` this often, and prints tables.
pub(crate) fn measure(repeats: usize, word: &str) {
    let rows: Vec<&str> = SCENARIOS.iter().map(|one| one.name).collect();
    if repeats == 0 {
        println!("{}", tally::tables(&tally::read().unwrap(), &rows));
        return;
    }
    let word = if word.is_empty() { None } else { Some(word) };
    let is_wanted = |name: &str| word.is_none_or(|word| word.split('|').any(|part| name.contains(part)));
    let wanted: Vec<usize> = (0..SCENARIOS.len()).filter(|row| is_wanted(SCENARIOS[*row].name)).collect();
    let from = in_memory("DRAINPIPE_MEASURE_FROM").unwrap_or(0);
    let mut sitting = Sitting {
        to_come: Mutex::default(),
        seed: seed(),
        labs: in_memory("DRAINPIPE_MEASURE_LABS").unwrap_or(1),
        qemu: qemu(),
        program: program(),
        machine: Arc::default(),
    };
    let lines = tally::read().unwrap();
    let runs = wanted.into_iter().flat_map(|row| (from..from + repeats).map(move |run| Run { row, run }));
    let to_come = runs.filter(|run| !lines.iter().any(|ran| sitting.has_made(*run, ran))).collect();
    sitting.to_come = Mutex::new(to_come);
    eprintln!("With {}, {} labs at once, DRAINPIPE_CHAOS_SEED={}", sitting.qemu, sitting.labs, sitting.seed);
    thread::scope(|scope| {
        for _ in 0..sitting.labs {
            scope.spawn(|| sitting.work());
        }
    });
    let of_these = |ran: &Ran| ran.program == sitting.program && ran.qemu == sitting.qemu;
    let lines: Vec<Ran> = tally::read().unwrap().into_iter().filter(of_these).collect();
    println!("{}", tally::tables(&lines, &rows));
}

fn in_memory(variable: &str) -> Option<usize> {
    number(variable).map(|number| usize::try_from(number).unwrap())
}

/// QEMU's own name and version.
fn qemu() -> String {
    let qemu = options::other_qemu().unwrap_or_else(|| "qemu-system-x86_64".into());
    let output = Command::new(&qemu).arg("-version").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = said.split(' ').nth(3).unwrap_or(&qemu);
    format!("QEMU {}", version.lines().next().unwrap_or(version))
}

/// The program that is measured. Tests are no part of it.
fn program() -> String {
    let git = |words: &[&str]| {
        let paths = ["--", ":(top,glob)crates/*/src/**", ":(top)Cargo.lock"];
        let output =
            Command::new("git").current_dir(env!("CARGO_MANIFEST_DIR")).args(words).args(paths).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
    };
    let is_changed = !git(&["status", "--porcelain"]).is_empty();
    format!("{}{}", git(&["log", "-1", "--format=%h"]), if is_changed { ", changed" } else { "" })
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One run of a row.
#[derive(Debug, Clone, Copy)]
struct Run {
    row: usize,
    run: usize,
}

impl Run {
    fn scenario(self) -> &'static Scenario {
        &SCENARIOS[self.row]
    }
}

/// What several labs share.
struct Sitting {
    to_come: Mutex<VecDeque<Run>>,
    seed: u64,
    labs: usize,
    qemu: String,
    program: String,
    machine: Arc<Machine>,
}

impl Sitting {
    /// Uses one lab after the other, until all runs are done.
    fn work(&self) {
        while let Some(first) = self.next(None) {
            // A test's own failed assertion counts as a violation like any other.
            let mut at = first;
            let began = Instant::now();
            if catch_unwind(AssertUnwindSafe(|| self.in_one_lab(&mut at))).is_err() {
                let violation = Violation::Broken("a test's assertion".into());
                let violation = Some(RecordedViolation::of(&violation, None));
                tally::write(&Ran { violation, ..self.ran(at, began) }).unwrap();
            }
        }
    }

    /// Whether that line belongs to this run.
    fn has_made(&self, run: Run, ran: &Ran) -> bool {
        let same_program = ran.program == self.program && ran.qemu == self.qemu;
        same_program && ran.seed == self.seed && ran.row == run.scenario().name && ran.run == run.run
    }

    /// The next run, if a lab with these settings can make it.
    fn next(&self, bed: Option<Bed>) -> Option<Run> {
        held(&self.to_come).pop_front_if(|next| bed.is_none_or(|bed| next.scenario().bed == bed))
    }

    /// Continues until something is found, or all runs for such a lab are done.
    fn in_one_lab(&self, at: &mut Run) {
        let bed = at.scenario().bed;
        let directory = tempfile::TempDir::new().unwrap();
        let monitor = Monitor::start(directory.path()).unwrap();
        let lab = lab(directory.path(), bed.link_mbps);
        if let Some(stall_s) = bed.stall_s {
            for host in HOSTS {
                lab.configure(host, "[tls]", &format!("[limits]\nstall_s = {stall_s}\n\n[tls]"));
            }
        }
        let setting = Setting {
            memory_mib: MEMORY_MIB,
            dirty_mib_per_s: vec![0],
            name: format!("scenario-{}-{}-{}-{}", self.seed, std::process::id(), at.row, at.run),
            machine: Arc::clone(&self.machine),
        };
        let mut world = World::set(&lab, monitor, &setting);
        let mut is_calm = self.make(*at, &mut world);
        while is_calm && let Some(run) = self.next(Some(bed)) {
            *at = run;
            is_calm = self.make(run, &mut world);
        }
    }

    /// Makes a run; returns whether nothing was found.
    fn make(&self, run: Run, world: &mut World<'_>) -> bool {
        let began = Instant::now();
        let scenario = run.scenario();
        let before = (world.faults_done(), world.counted(REPORTED_AS_LOST));
        world.set_dirty(scenario.dirty_mib_per_s);
        let mut violation = world.round(run.run, &scenario.round(&mut self.random(run))).err();
        let ends = world.take_ends();
        let paths_out = ends.iter().map(|end| end.paths_out).sum();
        let ends: Vec<String> = ends.into_iter().map(|end| end.name).collect();
        if violation.is_none() && scenario.completes && ends != [COMPLETED] {
            violation = Some(Violation::Failed(format!("it was to complete: {ends:?}")));
        }
        if violation.is_none() && scenario.keeps_paths && paths_out > 0 {
            violation = Some(Violation::Failed(format!("healthy paths went out of use {paths_out} times")));
        }
        let recorded =
            violation.map(|violation| RecordedViolation::of(&violation, Some(world.keep(&violation))));
        let is_calm = recorded.is_none();
        let ran = Ran {
            faults: world.faults_done() - before.0,
            told_as_lost: world.counted(REPORTED_AS_LOST) - before.1,
            ends,
            paths_out,
            longest_silence_ms: u64::try_from(world.take_longest_silence().as_millis()).unwrap(),
            violation: recorded,
            ..self.ran(run, began)
        };
        tally::write(&ran).unwrap();
        is_calm
    }

    /// The line of a run of which only the beginning is known yet.
    fn ran(&self, Run { row, run }: Run, began: Instant) -> Ran {
        Ran {
            qemu: self.qemu.clone(),
            program: self.program.clone(),
            seed: self.seed,
            row: SCENARIOS[row].name.into(),
            run,
            seconds: rounded(began.elapsed()),
            load: load(),
            labs: self.labs,
            faults: 0,
            told_as_lost: 0,
            ends: vec![],
            paths_out: 0,
            longest_silence_ms: 0,
            violation: None,
        }
    }

    /// A run's decisions depend neither on earlier runs nor on its lab. Rows are identified by their names, since
    /// others may be added.
    fn random(&self, run: Run) -> Random {
        let of_name = |sum: u64, byte: u8| Random(sum ^ u64::from(byte)).next();
        let row = run.scenario().name.bytes().fold(self.seed, of_name);
        Random(Random(row ^ run.run as u64).next())
    }
}

fn rounded(elapsed: Duration) -> f64 {
    (elapsed.as_secs_f64() * 10.0).round() / 10.0
}

fn load() -> f64 {
    let text = fs::read_to_string(PathBuf::from("/proc/loadavg")).unwrap_or_default();
    text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default()
}
