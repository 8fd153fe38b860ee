//! Holds the results of a bench against the figures that this project promises, as a Markdown table:
//!
//! ```text
//! cargo run -p drainpipe-report --example figures -- target/demo/results.json
//! ```
//!
//! Exits with 1 if a figure does not hold.

mod promises;

use std::process::ExitCode;

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::option::{MigrationOption, RequestedOption};
use drainpipe_report::BenchReport;
use drainpipe_report::summary::Spread;

use crate::promises::{Figure, markdown, read};

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: figures RESULTS.json");
        return ExitCode::from(2);
    };
    let report = match read(&path) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let figures = figures(&report);
    print!("{}", markdown(&figures));
    ExitCode::from(u8::from(figures.iter().any(|figure| !figure.holds)))
}

fn figures(report: &BenchReport) -> Vec<Figure> {
    let tcp = completed(report, RequestedOption::Tcp);
    let multichannel = completed(report, RequestedOption::Multichannel);
    let all: Vec<&MigrationResult> = report.results.iter().collect();
    let mut figures = vec![];
    if let (Some(one), Some(many)) = (throughput(&tcp), throughput(&multichannel)) {
        let ratio = many.median / one.median;
        figures.push(at_least("multichannel against tcp, throughput", 1.9, ratio, None));
    }
    if let Some(share) = Spread::of(tcp.iter().filter_map(|result| share_of_links(result))) {
        figures.push(at_least("tcp, share of the one link", 0.93, share.median, Some(share)));
    }
    if let Some(share) = Spread::of(multichannel.iter().filter_map(|result| share_of_links(result))) {
        figures.push(at_least("multichannel, share of both links together", 0.95, share.median, Some(share)));
    }
    let part =
        |result: &&MigrationResult| result.traffic.paths.iter().map(|path| path.share).fold(1.0, f64::min);
    if let Some(part) = Spread::of(multichannel.iter().map(part)) {
        let what = "multichannel, bytes on the link that carried less";
        figures.push(at_least(what, 0.4, part.min, Some(part)));
    }
    figures.extend(at_most(
        "setup (steps 1–5), ms, the slowest",
        250.0,
        all.iter().map(|result| result.times.setup_ms),
    ));
    figures.extend(at_most(
        "steps 9–10, ms, the slowest",
        250.0,
        all.iter().map(|result| result.times.completion_ms),
    ));
    figures.extend(agents_cpu(&tcp, &multichannel));
    figures.push(memory(&all));
    figures.push(completeness(&all));
    figures
}

fn completed(report: &BenchReport, option: RequestedOption) -> Vec<&MigrationResult> {
    let wanted = |result: &&MigrationResult| {
        result.choice.requested_option == option
            && result.outcome == Outcome::Completed
            && matches!(result.choice.option, MigrationOption::Tcp | MigrationOption::Multichannel)
    };
    report.results.iter().filter(wanted).collect()
}

fn throughput(results: &[&MigrationResult]) -> Option<Spread> {
    Spread::of(results.iter().map(|result| result.memory.throughput_gbps))
}

fn share_of_links(result: &MigrationResult) -> Option<f64> {
    let speeds: Option<Vec<u64>> = result.traffic.paths.iter().map(|path| path.speed_mbps).collect();
    let sum_mbps: u64 = speeds?.iter().sum();
    (sum_mbps > 0).then(|| result.memory.throughput_gbps * 1000.0 / sum_mbps as f64)
}

fn agents_cpu(tcp: &[&MigrationResult], multichannel: &[&MigrationResult]) -> Option<Figure> {
    let share = |result: &&MigrationResult| {
        let used = result.host_use.cpu_seconds;
        (used.source_agent + used.target_agent) / (used.source_vmm + used.target_vmm)
    };
    let spread = Spread::of(tcp.iter().chain(multichannel).map(share))?;
    Some(Figure {
        what: "our agents' CPU, share of both QEMUs'",
        promise: "≤ 0.03".into(),
        measured: describe(spread.median, Some(spread)),
        holds: spread.median <= 0.03,
    })
}

fn memory(all: &[&MigrationResult]) -> Figure {
    let checked: Vec<_> = all.iter().filter_map(|result| result.record.verified).collect();
    let pages: u64 = checked.iter().map(|verified| verified.pages).sum();
    let bad: u64 = checked.iter().map(|verified| verified.bad).sum();
    Figure {
        what: "pages checked after every migration",
        promise: "all, none bad".into(),
        measured: format!("{pages} in {} of {} migrations, {bad} bad", checked.len(), all.len()),
        holds: bad == 0 && checked.len() == all.len(),
    }
}

fn completeness(all: &[&MigrationResult]) -> Figure {
    let completed = all.iter().filter(|result| result.outcome == Outcome::Completed).count();
    Figure {
        what: "migrations completed",
        promise: "all".into(),
        measured: format!("{completed} of {}", all.len()),
        holds: completed == all.len(),
    }
}

fn at_least(what: &'static str, least: f64, value: f64, spread: Option<Spread>) -> Figure {
    Figure { what, promise: format!("≥ {least}"), measured: describe(value, spread), holds: value >= least }
}

fn at_most(what: &'static str, most: f64, values: impl Iterator<Item = f64>) -> Option<Figure> {
    let spread = Spread::of(values)?;
    Some(Figure {
        what,
        promise: format!("≤ {most}"),
        measured: format!("{:.0} (median {:.0})", spread.max, spread.median),
        holds: spread.max <= most,
    })
}

fn describe(value: f64, spread: Option<Spread>) -> String {
    match spread {
        Some(Spread { min, max, .. }) => format!("{value:.3} ({min:.3}–{max:.3})"),
        None => format!("{value:.2}"),
    }
}
