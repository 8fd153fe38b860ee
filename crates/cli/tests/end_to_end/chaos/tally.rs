//! The outcomes of runs: a line in a file for each, and tables of all lines, from however many sittings.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::silences::SILENCE_MIN;
use super::violation::Violation;

/// The outcome of a run. Its decisions depend only on seed, row and run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Ran {
    /// The QEMU that it used.
    pub(super) qemu: String,
    /// The last commit that changed the program, and whether the program has been changed since.
    pub(super) program: String,
    pub(super) seed: u64,
    pub(super) row: String,
    pub(super) run: usize,
    pub(super) seconds: f64,
    /// How many programs wanted a core in its last minute.
    pub(super) load: f64,
    /// The number of labs at once.
    pub(super) labs: usize,
    pub(super) faults: usize,
    pub(super) told_as_lost: usize,
    /// How its requests ended.
    pub(super) ends: Vec<String>,
    pub(super) paths_out: usize,
    pub(super) longest_silence_ms: u64,
    pub(super) violation: Option<RecordedViolation>,
}

/// A violation, as it is recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RecordedViolation {
    /// Its column in the table.
    kind: String,
    what: String,
    /// The directory with what helps to understand it.
    kept: Option<PathBuf>,
}

/// The columns of what must never happen.
const KINDS: [&str; 7] =
    ["lost", "two copies", "silent for too long", "untrue", "not completed", "not settled", "broken"];

impl RecordedViolation {
    pub(super) fn of(violation: &Violation, kept: Option<PathBuf>) -> Self {
        let kind = match violation {
            Violation::Lost(_) => KINDS[0],
            Violation::TwoCopies(_) => KINDS[1],
            Violation::Silent(_) => KINDS[2],
            Violation::Untrue(_) => KINDS[3],
            Violation::Failed(_) => KINDS[4],
            Violation::Endless(_) => KINDS[5],
            Violation::Broken(_) => KINDS[6],
        };
        Self { kind: kind.into(), what: violation.to_string(), kept }
    }
}

/// The directory of the lines.
pub(super) fn directory() -> PathBuf {
    super::directory().join("runs")
}

/// Adds a line to this process's file, and prints it.
pub(super) fn write(ran: &Ran) -> io::Result<()> {
    let line = serde_json::to_string(ran)?;
    eprintln!("{line}");
    fs::create_dir_all(directory())?;
    let file = directory().join(format!("{}-{}.jsonl", ran.seed, std::process::id()));
    // In one call, since several threads write.
    OpenOptions::new().create(true).append(true).open(file)?.write_all(format!("{line}\n").as_bytes())
}

/// All lines of all sittings.
pub(super) fn read() -> io::Result<Vec<Ran>> {
    let mut all = Vec::new();
    fs::create_dir_all(directory())?;
    for entry in fs::read_dir(directory())? {
        let text = fs::read_to_string(entry?.path())?;
        // If a process was killed, its last line may be incomplete.
        all.extend(text.lines().filter_map(|line| serde_json::from_str::<Ran>(line).ok()));
    }
    Ok(all)
}

/// A table for each program and QEMU, with its rows in this order.
pub(super) fn tables(all: &[Ran], rows: &[&str]) -> String {
    let mut of: BTreeMap<(&str, &str), Vec<&Ran>> = BTreeMap::new();
    for ran in all {
        of.entry((&ran.program, &ran.qemu)).or_default().push(ran);
    }
    of.iter()
        .map(|((program, qemu), ran)| table(&format!("{qemu}, program as of {program}"), ran, rows))
        .collect()
}

fn table(title: &str, all: &[&Ran], rows: &[&str]) -> String {
    let mut seeds: Vec<String> = all.iter().map(|ran| ran.seed.to_string()).collect();
    seeds.sort();
    seeds.dedup();
    let mut loads: Vec<f64> = all.iter().map(|ran| ran.load).collect();
    loads.sort_by(f64::total_cmp);
    let (load, load_max) = (loads[loads.len() / 2], loads[loads.len() - 1]);
    let head = format!(
        "{title}; seeds {}; load {load:.0}, at most {load_max:.0}\n\n\
         | what happens | runs | faults done | migrations completed | killed with its QEMU, told so | {} | paths out | \
         longest silence of a run, median, s | worst, s | a run takes, median, s |\n|{}\n",
        seeds.join(", "),
        KINDS.join(" | "),
        "---|".repeat(KINDS.len() + 9)
    );
    let of_row = |row: &&str| {
        let of_row: Vec<&Ran> = all.iter().copied().filter(|ran| ran.row == **row).collect();
        (!of_row.is_empty()).then(|| line(row, &of_row))
    };
    head + &rows.iter().filter_map(of_row).collect::<String>() + "\n"
}

fn line(name: &str, all: &[&Ran]) -> String {
    let sum = |count: fn(&Ran) -> usize| all.iter().map(|ran| count(ran)).sum::<usize>();
    let kinds = KINDS.map(|kind| {
        let is_it = |ran: &&&Ran| ran.violation.as_ref().is_some_and(|recorded| recorded.kind == kind);
        all.iter().filter(is_it).count().to_string()
    });
    let mut silences: Vec<u64> = all.iter().map(|ran| ran.longest_silence_ms).collect();
    silences.sort_unstable();
    let mut seconds: Vec<f64> = all.iter().map(|ran| ran.seconds).collect();
    seconds.sort_by(f64::total_cmp);
    format!(
        "| {name} | {} | {} | {} of {} | {} | {} | {} | {} | {} | {:.0} |\n",
        all.len(),
        sum(|ran| ran.faults),
        sum(|ran| ran.ends.iter().filter(|end| *end == COMPLETED).count()),
        sum(|ran| ran.ends.len()),
        sum(|ran| ran.told_as_lost),
        kinds.join(" | "),
        sum(|ran| ran.paths_out),
        silence(silences[silences.len() / 2]),
        silence(silences[silences.len() - 1]),
        seconds[seconds.len() / 2]
    )
}

/// The end of a migration that did what it should.
pub(super) const COMPLETED: &str = "migration: completed";

fn silence(ms: u64) -> String {
    if ms == 0 {
        return format!("< {:.1}", SILENCE_MIN.as_secs_f64());
    }
    format!("{:.1}", Duration::from_millis(ms).as_secs_f64())
}
