//! `drainpipe bench`.

use std::path::Path;

use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::problem::Problem;
use drainpipe_report::{BenchReport, html, table};

use crate::arguments::BenchArguments;
use crate::bench::Bench;
use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::output;

pub(crate) async fn run(
    connection: &ConnectionArguments,
    arguments: &BenchArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let bench = Bench {
        vm: arguments.vm.clone(),
        host: arguments.host.clone(),
        options: arguments.options.clone(),
        repeat: arguments.repeat,
        encrypt: arguments.encrypt,
        content: arguments.content.clone(),
        client_namespace: arguments.client_namespace.clone(),
        heartbeat: arguments.watching.heartbeat(),
        watched: true,
    };
    if let Some(file) = &arguments.report {
        // Not after an hour of measuring.
        write(file, "")?;
    }
    let report = bench.run(&connection.fleet()?).await?;
    if let Some(file) = &arguments.report {
        write(file, &html::page(&report))?;
        output::remark(&format!("report: {}", file.display()));
    }
    show(&report, json)?;
    Ok(verdict(&report))
}

/// Prints a report.
pub(crate) fn show(report: &BenchReport, json: bool) -> Result<(), Problem> {
    if json {
        return output::json(report);
    }
    let (width, coloured) = output::page();
    output::print(&table::text(report, width, coloured))
}

/// How a bench ended: as its worst migration, and badly if a page was.
pub(crate) fn verdict(report: &BenchReport) -> Exit {
    let bad_pages =
        report.results.iter().any(|result| result.record.verified.is_some_and(|verified| verified.bad > 0));
    match report.results.iter().find(|result| result.outcome != Outcome::Completed) {
        Some(result) => Exit::of_result(result),
        None if bad_pages => Exit::Failed,
        None => Exit::Done,
    }
}

/// Writes a file whole.
pub(crate) fn write(file: &Path, text: &str) -> Result<(), Problem> {
    std::fs::write(file, text)
        .map_err(|error| Problem::failed(format!("cannot write {}: {error}", file.display())))
}
