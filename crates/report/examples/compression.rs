//! Compression beside QEMU's own and beside none, over several benches, as Markdown tables: a row for each bench,
//! and what of that was promised.
//!
//! ```text
//! cargo run -p drainpipe-report --example compression -- bench/results/compression/*/results.json
//! ```
//!
//! Exits with 1 if a figure does not hold.

mod promises;

use std::process::ExitCode;

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::option::RequestedOption;
use drainpipe_report::summary::Spread;
use drainpipe_report::{BenchReport, Conditions};

use crate::promises::{Figure, markdown, read};

/// The columns of the table; all but the first are what compression is compared with.
const OPTIONS: [RequestedOption; 4] = [
    RequestedOption::Compression,
    RequestedOption::Multichannel,
    RequestedOption::QemuZstd1,
    RequestedOption::QemuZstd3,
];

const PAGE_BYTES: u64 = 4096;

/// What takes more than this of another time is about as fast.
const NOISE: f64 = 0.97;

fn main() -> ExitCode {
    let reports: Result<Vec<BenchReport>, String> =
        std::env::args().skip(1).map(|path| read(&path)).collect();
    let cells: Vec<Cell> = match reports {
        Ok(reports) if reports.is_empty() => {
            eprintln!("usage: compression RESULTS.json…");
            return ExitCode::from(2);
        }
        Ok(reports) => reports.iter().map(Cell::of).collect(),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let figures = figures(&cells);
    print!("{}\n{}", table(&cells), markdown(&figures));
    ExitCode::from(u8::from(figures.iter().any(|figure| !figure.holds)))
}

/// What the guest of a bench does meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writes {
    Nothing,
    WholePages,
    PartsOfPages,
    AsFastAsItCan,
}

/// One bench.
struct Cell {
    contents: String,
    links: String,
    rate: String,
    writes: Writes,
    /// In the order of [`OPTIONS`].
    measured: [Measured; 4],
}

/// What one option did.
struct Measured {
    tried: usize,
    completed: usize,
    transfer_s: Option<Spread>,
    cpu_s: Option<f64>,
    guest_mib_per_s: Option<f64>,
}

impl Cell {
    fn of(report: &BenchReport) -> Self {
        let conditions = &report.conditions;
        Self {
            contents: conditions.guest.content.clone().unwrap_or_else(|| "unknown".into()),
            links: links(conditions),
            rate: rate(conditions),
            writes: writes(conditions),
            measured: OPTIONS.map(|option| Measured::of(&report.results, option)),
        }
    }

    fn name(&self) -> String {
        format!("{}, {}, {}", self.contents, self.links, self.rate)
    }

    fn median_s(&self, option: usize) -> Option<f64> {
        self.measured[option].transfer_s.map(|spread| spread.median)
    }

    /// Compression's time over that of the fastest of the others; endless if it has none.
    fn against_best(&self) -> Option<f64> {
        let best = (1..OPTIONS.len()).filter_map(|option| self.median_s(option)).reduce(f64::min)?;
        Some(self.median_s(0).map_or(f64::INFINITY, |median| median / best))
    }

    fn against_raw(&self, quantity: impl Fn(&Measured) -> Option<f64>) -> Option<f64> {
        Some(quantity(&self.measured[0])? / quantity(&self.measured[1])?)
    }

    fn time_against_raw(&self) -> Option<f64> {
        self.against_raw(|measured| measured.transfer_s.map(|spread| spread.median))
    }

    /// Whether any way to compress is faster than none, by more than noise.
    fn pays(&self) -> bool {
        let raw = self.median_s(1);
        [0, 2, 3].iter().any(|&option| {
            self.median_s(option).is_some_and(|packed| raw.is_none_or(|raw| packed < raw * NOISE))
        })
    }

    fn is_in_matrix(&self) -> bool {
        matches!(self.writes, Writes::Nothing | Writes::WholePages)
    }
}

impl Measured {
    fn of(results: &[MigrationResult], option: RequestedOption) -> Self {
        let tried = || results.iter().filter(move |result| result.choice.requested_option == option);
        let completed = || tried().filter(|result| result.outcome == Outcome::Completed);
        let median = |quantity: fn(&MigrationResult) -> Option<f64>| {
            Spread::of(completed().filter_map(quantity)).map(|spread| spread.median)
        };
        Self {
            tried: tried().count(),
            completed: completed().count(),
            transfer_s: Spread::of(completed().map(|result| result.times.transfer_ms / 1000.0)),
            cpu_s: median(|result| {
                let used = result.host_use.cpu_seconds;
                Some(used.source_vmm + used.source_agent + used.target_vmm + used.target_agent)
            }),
            guest_mib_per_s: median(|result| result.memory.guest_rewritten_mib_per_s),
        }
    }

    fn show(&self) -> String {
        let failed = self.tried - self.completed;
        let failed = if failed > 0 { format!(", {failed} failed") } else { String::new() };
        match self.transfer_s {
            Some(Spread { median, min, max }) => format!("{median:.2} ({min:.2}–{max:.2}){failed}"),
            None => format!("–{failed}"),
        }
    }
}

/// "1000 + 1000".
fn links(conditions: &Conditions) -> String {
    let speed = |mbps: Option<u64>| mbps.map_or("unlimited".into(), |mbps| mbps.to_string());
    let links: Vec<String> = conditions.links.iter().map(|link| speed(link.speed_mbps)).collect();
    links.join(" + ")
}

fn writes(conditions: &Conditions) -> Writes {
    let guest = &conditions.guest;
    match guest.dirty_mib_per_s {
        _ if guest.needs_all_cpu() => Writes::AsFastAsItCan,
        Some(rate) if rate > 0.0 && guest.rewrite_bytes.is_some_and(|bytes| bytes < PAGE_BYTES) => {
            Writes::PartsOfPages
        }
        Some(rate) if rate > 0.0 => Writes::WholePages,
        _ => Writes::Nothing,
    }
}

fn rate(conditions: &Conditions) -> String {
    let guest = &conditions.guest;
    let part = guest.dirty_percent.filter(|percent| *percent < 100);
    let part = part.map_or(String::new(), |percent| format!(" in {percent} %"));
    match (writes(conditions), guest.dirty_mib_per_s.unwrap_or(0.0)) {
        (Writes::Nothing, _) => "idle".into(),
        (Writes::AsFastAsItCan, _) => format!("all CPU{part}"),
        (Writes::WholePages, rate) => format!("{rate:.0} MiB/s{part}"),
        (Writes::PartsOfPages, rate) => {
            format!("{rate:.0} MiB/s{part}, {} bytes of a page", guest.rewrite_bytes.unwrap_or(PAGE_BYTES))
        }
    }
}

fn table(cells: &[Cell]) -> String {
    let ratio = |ratio: Option<f64>| ratio.map_or("–".into(), |ratio| format!("{ratio:.2}"));
    let rows = cells.iter().map(|cell| {
        let measured: Vec<String> = cell.measured.iter().map(Measured::show).collect();
        format!(
            "| {} | {} | {} | {} | {} | {} | {} |\n",
            cell.contents,
            cell.links,
            cell.rate,
            measured.join(" | "),
            ratio(cell.against_best()),
            ratio(cell.against_raw(|measured| measured.cpu_s)),
            ratio(cell.against_raw(|measured| measured.guest_mib_per_s).filter(|ratio| ratio.is_finite())),
        )
    });
    format!(
        "| contents | links, Mb/s | guest writes | compression, s | raw, s | QEMU zstd 1, s | QEMU zstd 3, s | ÷ best | \
         CPU ÷ raw | guest's writes ÷ raw |\n|---|---|---|---|---|---|---|---|---|---|\n{}",
        rows.collect::<String>()
    )
}

fn figures(cells: &[Cell]) -> Vec<Figure> {
    let matrix = || cells.iter().filter(|cell| cell.is_in_matrix());
    let paying = Spread::of(matrix().filter(|cell| cell.pays()).filter_map(Cell::against_best));
    let text = matrix()
        .filter(|cell| cell.contents == "text:100" && cell.writes == Writes::Nothing && cell.links == "1000");
    // Nor does memory shrink that is rewritten meanwhile.
    let random = || matrix().filter(|cell| cell.contents == "random:100");
    let busy = || cells.iter().filter(|cell| cell.writes == Writes::AsFastAsItCan);
    let kept = |cell: &Cell| cell.against_raw(|measured| measured.guest_mib_per_s).map(|kept| 1.0 - kept);
    let partly = cells.iter().filter(|cell| cell.writes == Writes::PartsOfPages);
    [
        worst("÷ best other, the worst cell", 1.05, matrix(), Cell::against_best),
        paying.map(|spread| Figure {
            what: "÷ best other, median of the cells in which packing pays",
            promise: "≤ 0.85".into(),
            measured: format!("{:.2} ({:.2}–{:.2})", spread.median, spread.min, spread.max),
            holds: spread.median <= 0.85,
        }),
        worst("text over 1 Gb/s, time ÷ raw", 0.40, text, Cell::time_against_raw),
        worst("random, time ÷ raw", 1.03, random(), Cell::time_against_raw),
        worst("random, CPU ÷ raw", 1.6, random(), |cell| cell.against_raw(|measured| measured.cpu_s)),
        worst("guest that needs all CPU, work lost against raw", 0.05, busy(), kept),
        worst("guest that rewrites parts of pages, time ÷ raw", 0.5, partly, |cell| {
            // What raw never ends is as good as any time.
            cell.time_against_raw().or_else(|| cell.median_s(0).map(|_| 0.0))
        }),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The largest of a ratio, and where; none if it is known nowhere.
fn worst<'a>(
    what: &'static str,
    most: f64,
    cells: impl Iterator<Item = &'a Cell>,
    ratio: impl Fn(&Cell) -> Option<f64>,
) -> Option<Figure> {
    let known = cells.filter_map(|cell| Some((ratio(cell)?, cell)));
    let (worst, cell) = known.max_by(|left, right| left.0.total_cmp(&right.0))?;
    Some(Figure {
        what,
        promise: format!("≤ {most}"),
        measured: format!("{worst:.2} ({})", cell.name()),
        holds: worst <= most,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(transfer_s: Option<f64>) -> Measured {
        Measured {
            tried: 6,
            completed: 6,
            transfer_s: transfer_s.map(|median| Spread { median, min: median, max: median }),
            cpu_s: Some(2.0),
            guest_mib_per_s: Some(10.0),
        }
    }

    fn cell(writes: Writes, transfer_s: [Option<f64>; 4]) -> Cell {
        let measured = transfer_s.map(measured);
        Cell { contents: "text:100".into(), links: "1000".into(), rate: "idle".into(), writes, measured }
    }

    fn holds(cells: &[Cell], what: &str) -> bool {
        figures(cells).iter().find(|figure| figure.what.starts_with(what)).expect(what).holds
    }

    #[test]
    fn the_best_other_counts_and_the_worst_cell() {
        let good = || cell(Writes::Nothing, [Some(2.0), Some(8.0), Some(2.5), Some(4.0)]);
        let slow = cell(Writes::WholePages, [Some(3.0), Some(2.5), Some(8.0), Some(9.0)]);
        assert!(holds(&[good()], "÷ best other, the worst"));
        assert!(!holds(&[good(), slow], "÷ best other, the worst"));
    }

    #[test]
    fn cells_in_which_nothing_packed_is_faster_do_not_count_where_packing_pays() {
        let useless = cell(Writes::Nothing, [Some(2.0), Some(1.9), Some(8.0), None]);
        assert!(figures(&[useless]).iter().all(|figure| !figure.what.contains("packing pays")));
    }

    #[test]
    fn random_memory_that_is_rewritten_keeps_the_promises_too() {
        let random = |writes, compression_s, compression_cpu_s| {
            let mut cell = cell(writes, [Some(compression_s), Some(2.0), None, None]);
            cell.contents = "random:100".into();
            cell.measured[0].cpu_s = Some(compression_cpu_s);
            cell
        };
        let idle = || random(Writes::Nothing, 2.0, 2.0);
        for what in ["random, time", "random, CPU"] {
            assert!(holds(&[idle(), random(Writes::WholePages, 2.0, 3.0)], what));
            assert!(!holds(&[idle(), random(Writes::WholePages, 2.5, 4.2)], what));
        }
    }

    #[test]
    fn what_did_not_complete_is_no_success_of_compression_but_one_against_raw() {
        assert!(!holds(&[cell(Writes::Nothing, [None, Some(2.0), None, None])], "÷ best other, the worst"));
        let endless = cell(Writes::PartsOfPages, [Some(7.0), None, None, None]);
        assert!(holds(&[endless], "guest that rewrites parts"));
    }
}
