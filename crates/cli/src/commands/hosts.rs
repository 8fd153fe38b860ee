//! `drainpipe hosts`.

use drainpipe_api_types::{HostStatus, PathsView};
use drainpipe_engine::format;
use drainpipe_engine::paths::path_record::PathRecord;
use drainpipe_engine::problem::Problem;

use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::output;

pub(crate) async fn run(connection: &ConnectionArguments, json: bool) -> Result<Exit, Problem> {
    let hosts = connection.fleet()?.hosts().await?;
    if json {
        output::json(&hosts)?;
    } else {
        let head = ["host", "address", "state", "version", "hypervisor", "memory free", "links"];
        output::table(&head, hosts.iter().map(row).collect())?;
        for host in &hosts {
            for known in host.host.iter().flat_map(|view| &view.paths) {
                output::print(&paths_line(&host.name, known))?;
            }
            if let Some(error) = &host.error {
                output::remark(&format!("{}: {error}", host.name));
            }
        }
    }
    let silent = hosts.iter().filter(|host| host.host.is_none());
    Ok(Exit::of_list(silent.count()))
}

/// What was found when the paths were last tried.
fn paths_line(host: &str, known: &PathsView) -> String {
    let state = |path: &PathRecord| match &path.fault {
        None => format!("{path} ok"),
        Some(why) => format!("{path} silent since {} ({why})", output::time(&path.since)),
    };
    let states: Vec<String> = known.paths.iter().map(state).collect();
    let states = if states.is_empty() { "none".into() } else { states.join(", ") };
    format!(" paths from {host} to {} at {}: {states}\n", known.peer, output::time(&known.tried_at))
}

fn row(status: &HostStatus) -> Vec<String> {
    let Some(host) = &status.host else {
        let known = [status.name.clone(), status.address.clone(), "unreachable".into()];
        return known.into_iter().chain(vec![String::new(); 4]).collect();
    };
    let facts = &host.facts;
    let links: Vec<String> = facts
        .links
        .iter()
        .map(|link| {
            let speed = link.speed_mbps.map_or(String::new(), |speed| format!(" {}", format::mbps(speed)));
            let state = if link.usable { "" } else { " down" };
            format!("{}{speed}{state}", link.name)
        })
        .collect();
    vec![
        status.name.clone(),
        status.address.clone(),
        if host.cordoned { "cordoned" } else { "ready" }.into(),
        host.release().shown_version(),
        format!("{} {} ({})", facts.hypervisor.name, facts.hypervisor.version, host.accelerator),
        format::bytes(facts.memory_available_bytes as f64),
        links.join(", "),
    ]
}
