//! `drainpipe check`.

mod paths;

use std::time::Duration;

use drainpipe_api_types::CheckRequest;
use drainpipe_engine::check::CheckReport;
use drainpipe_engine::finding::{Finding, Severity};
use drainpipe_engine::problem::Problem;

use super::fix;
use crate::arguments::CheckArguments;
use crate::connection::{ConnectionArguments, Fleet};
use crate::exit::Exit;
use crate::output;

/// The other host's facts, its ports and eight rounds of packets, each with its own deadline; it takes
/// a second or two where all is well.
const CHECK_DEADLINE: Duration = Duration::from_mins(1);

pub(crate) async fn run(
    connection: &ConnectionArguments,
    arguments: &CheckArguments,
    json: bool,
) -> Result<Exit, Problem> {
    fix::can_ask(arguments)?;
    let fleet = connection.fleet()?;
    if arguments.undo {
        return fix::undo(&fleet, arguments, json).await;
    }
    let mut report = ask(&fleet, arguments).await?;
    let mut mended = Ok(false);
    if arguments.fix {
        mended = fix::mend(&fleet, arguments, &report.findings).await;
        if !matches!(mended, Ok(false)) {
            report = ask(&fleet, arguments).await?;
        }
    }
    if json {
        output::json(&report)?;
    } else {
        tell(&report)?;
    }
    mended.map(|_| exit_of(&report.findings))
}

async fn ask(fleet: &Fleet, arguments: &CheckArguments) -> Result<CheckReport, Problem> {
    let source = fleet.host(&arguments.source).await?;
    let request = CheckRequest { target: arguments.target.clone(), vm: arguments.vm.clone() };
    source.client().post_within(&source.path("/v1/check"), &request, CHECK_DEADLINE).await
}

fn exit_of(findings: &[Finding]) -> Exit {
    match findings.iter().map(|finding| finding.severity).min() {
        Some(Severity::Error) => Exit::Refused,
        Some(Severity::Warning) => Exit::Warned,
        Some(Severity::Remark) | None => Exit::Done,
    }
}

fn tell(report: &CheckReport) -> Result<(), Problem> {
    let CheckReport { source, target, findings, paths } = report;
    if !findings.is_empty() {
        let head = ["severity", "where", "what, and what to do"];
        output::table(&head, findings.iter().map(row).collect())?;
    }
    if !paths.is_empty() {
        let (head, rows) = paths::table(source, target, paths);
        output::table(&head, rows)?;
    }
    if findings.is_empty() {
        let count = paths.len();
        let noun = if count == 1 { "path" } else { "paths" };
        output::remark(&format!("nothing is wrong between {source} and {target}: {count} {noun} tried"));
    }
    Ok(())
}

fn row(finding: &Finding) -> Vec<String> {
    let places: Vec<String> = finding.places.iter().map(ToString::to_string).collect();
    let Finding { code, what, effect, remedy, .. } = finding;
    let described = format!("{what} ({code})\neffect: {effect}\nremedy: {remedy}");
    vec![finding.severity.to_string(), places.join("\n"), described]
}
