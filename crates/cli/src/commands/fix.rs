//! `drainpipe check --fix` and `--undo`.

use drainpipe_api_types::{FixRequest, StandingFix};
use drainpipe_engine::finding::Finding;
use drainpipe_engine::finding::fix::Fix;
use drainpipe_engine::problem::Problem;
use serde::Serialize;

use crate::arguments::CheckArguments;
use crate::connection::Fleet;
use crate::exit::Exit;
use crate::{ask, output};

const FIXES: &str = "/v1/fixes";

/// Refuses before anything is begun where nobody could be asked.
pub(crate) fn can_ask(arguments: &CheckArguments) -> Result<(), Problem> {
    if arguments.fix && !arguments.yes { ask::is_possible("--fix") } else { Ok(()) }
}

/// Mends what the findings have a fix for, on the hosts where this person may. Whether anything was
/// changed, and what was refused.
pub(crate) async fn mend(
    fleet: &Fleet,
    arguments: &CheckArguments,
    findings: &[Finding],
) -> Result<bool, Problem> {
    let fixes = by_host(findings, [&arguments.source, &arguments.target]);
    if fixes.is_empty() {
        output::remark("--fix can fix none of this");
        return Ok(false);
    }
    for (host, fixes) in &fixes {
        for fix in fixes {
            output::remark(&format!("on {host}: {fix}"));
        }
    }
    if !arguments.yes && !ask::confirmed("Change this?")? {
        output::remark("nothing is changed");
        return Ok(false);
    }
    let mut refused = None;
    for (host, fixes) in fixes {
        if let Err(problem) = make(fleet, host, fixes).await {
            refused.get_or_insert(problem.context(format!(
                "not everything could be changed on {host}, or it is not known whether it was (`--undo` \
                puts back the old values)"
            )));
        }
    }
    refused.map_or(Ok(true), Err)
}

/// The hosts on which there is something to mend, each with its fixes, none of them twice.
fn by_host<'a>(findings: &[Finding], hosts: [&'a String; 2]) -> Vec<(&'a str, Vec<Fix>)> {
    let of_host = |host: &'a String| {
        let here =
            findings.iter().filter(|finding| finding.places.first().is_some_and(|at| at.host == *host));
        let mut fixes: Vec<Fix> = Vec::new();
        for fix in here.filter_map(|finding| finding.fix.as_ref()) {
            if !fixes.contains(fix) {
                fixes.push(fix.clone());
            }
        }
        (host.as_str(), fixes)
    };
    hosts.map(of_host).into_iter().filter(|(_, fixes)| !fixes.is_empty()).collect()
}

async fn make(fleet: &Fleet, host: &str, fixes: Vec<Fix>) -> Result<(), Problem> {
    let agent = fleet.host(host).await?;
    let standing: Vec<StandingFix> = agent.client().post(&agent.path(FIXES), &FixRequest { fixes }).await?;
    for StandingFix { setting, before, value, .. } in standing {
        output::remark(&format!("on {host}: {setting} is {}, was {}", spaced(&value), spaced(&before)));
    }
    Ok(())
}

/// A fix that was undone, as `--json` prints it.
#[derive(Debug, Serialize)]
struct Undone {
    host: String,
    #[serde(flatten)]
    fix: StandingFix,
}

/// Puts everything back on both hosts; on each as far as this person may.
pub(crate) async fn undo(fleet: &Fleet, arguments: &CheckArguments, json: bool) -> Result<Exit, Problem> {
    let mut refused = None;
    let mut undone = Vec::new();
    for host in [&arguments.source, &arguments.target] {
        match undo_on(fleet, host).await {
            Ok(fixes) => undone.extend(fixes.into_iter().map(|fix| Undone { host: host.clone(), fix })),
            Err(problem) => {
                refused.get_or_insert(problem.context(format!(
                    "not everything could be put back on {host}, or it is not known whether it was \
                    (`--undo` may be repeated)"
                )));
            }
        }
    }
    if json {
        output::json(&undone)?;
    }
    for Undone { host, fix } in &undone {
        output::remark(&format!("on {host}: {}", put_back(fix)));
    }
    match refused {
        Some(problem) => Err(problem),
        None if undone.is_empty() => {
            output::remark("--fix has changed nothing");
            Ok(Exit::Done)
        }
        None => Ok(Exit::Done),
    }
}

async fn undo_on(fleet: &Fleet, host: &str) -> Result<Vec<StandingFix>, Problem> {
    let agent = fleet.host(host).await?;
    let path = agent.path(FIXES);
    let standing: Vec<StandingFix> = agent.client().get(&path).await?;
    // So that nobody is refused where there is nothing to do.
    if standing.is_empty() { Ok(standing) } else { agent.client().delete(&path).await }
}

fn put_back(fix: &StandingFix) -> String {
    let StandingFix { setting, before, now, .. } = fix;
    match now {
        Some(now) if now == before => format!("{setting} is {} again", spaced(before)),
        Some(now) => format!(
            "somebody else has changed {setting} since; it is left as it is: {}; before --fix it was {}",
            spaced(now),
            spaced(before)
        ),
        None => format!("{setting} is gone together with its link"),
    }
}

/// The kernel puts tabs between numbers.
fn spaced(value: &str) -> String {
    value.replace('\t', " ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_was_undone_is_told_with_its_host() {
        let [setting, before, value] = ["net.ipv4.conf.e0.rp_filter", "1", "2"].map(String::from);
        let fix = StandingFix { setting, now: Some(before.clone()), before, value };
        let expected = json!({
            "host": "a", "setting": "net.ipv4.conf.e0.rp_filter", "before": "1", "value": "2", "now": "1"
        });
        assert_eq!(serde_json::to_value(Undone { host: "a".into(), fix }).unwrap(), expected);
    }
}
