//! `drainpipe hosts`.

use drainpipe_agent::api::types::HostStatus;
use drainpipe_engine::problem::Problem;

use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::output;

pub(crate) async fn run(connection: &ConnectionArguments, json: bool) -> Result<Exit, Problem> {
    let hosts = connection.fleet()?.hosts().await?;
    if json {
        output::json(&hosts)?;
    } else {
        let head = ["host", "address", "state", "hypervisor", "memory free", "links"];
        output::table(&head, hosts.iter().map(row).collect())?;
        for host in &hosts {
            if let Some(error) = &host.error {
                output::remark(&format!("{}: {error}", host.name));
            }
        }
    }
    Ok(Exit::Done)
}

fn row(status: &HostStatus) -> Vec<String> {
    let Some(host) = &status.host else {
        let unknown = String::new;
        let state = "unreachable".to_owned();
        return vec![status.name.clone(), status.address.clone(), state, unknown(), unknown(), unknown()];
    };
    let facts = &host.facts;
    let links: Vec<String> = facts
        .links
        .iter()
        .map(|link| {
            let speed = link.speed_mbps.map_or(String::new(), |speed| format!(" {speed} Mb/s"));
            let state = if link.usable { "" } else { " down" };
            format!("{}{speed}{state}", link.name)
        })
        .collect();
    vec![
        status.name.clone(),
        status.address.clone(),
        "ready".into(),
        format!("{} {} ({})", facts.hypervisor.name, facts.hypervisor.version, host.accelerator),
        output::bytes(facts.memory_available_bytes),
        links.join(", "),
    ]
}
