//! `drainpipe history`.

use drainpipe_api_types::MigrationView;
use drainpipe_engine::format;
use drainpipe_engine::problem::Problem;

use super::migrate;
use crate::arguments::HistoryArguments;
use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::migrations::{self, FoundMigrations, began};
use crate::output;

pub(crate) async fn run(
    connection: &ConnectionArguments,
    arguments: &HistoryArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let fleet = connection.fleet()?;
    if let Some(id) = &arguments.id {
        let (_, view) = migrations::find(&fleet, id).await?;
        if json {
            output::json(&view)?;
        } else {
            tell(&view)?;
        }
        return Ok(Exit::Done);
    }
    let hosts = fleet.hosts().await?;
    if let Some(name) = arguments.host.as_ref().filter(|name| !hosts.iter().any(|host| host.name == **name)) {
        return Err(Problem::not_found(format!("no host {name}; `drainpipe hosts` lists them")));
    }
    // For one host, what others have sent to it counts too.
    let FoundMigrations { mut migrations, silent } =
        migrations::of_all_hosts(&fleet, arguments.limit).await?;
    if let Some(name) = &arguments.host {
        migrations.retain(|view| [&view.source, &view.target].contains(&name));
    }
    let mut ended = 0;
    migrations.retain(|view| {
        ended += u32::from(view.result.is_some());
        view.result.is_none() || ended <= arguments.limit
    });
    if json {
        output::json(&migrations)?;
    } else {
        table(&migrations)?;
    }
    for (host, error) in &silent {
        output::remark(&format!("{host} was not asked, so migrations from there are missing: {error}"));
    }
    Ok(Exit::of_list(silent.len()))
}

/// A line for each.
pub(super) fn table(migrations: &[MigrationView]) -> Result<(), Problem> {
    let head = ["migration", "vm", "from", "to", "began", "option", "took", "rate", "outcome"];
    output::table(&head, migrations.iter().map(row).collect())
}

fn row(view: &MigrationView) -> Vec<String> {
    let mut row = vec![view.id.clone(), view.vm.clone(), view.source.clone(), view.target.clone()];
    row.push(began(view).map(output::time).unwrap_or_default());
    if let Some(result) = &view.result {
        row.extend([
            result.choice.option.to_string(),
            format::duration(result.times.total_ms),
            format::rate(result.memory.throughput_gbps),
            result.outcome.to_string(),
        ]);
    } else {
        let step = view.progress.as_ref().map_or("waits", |progress| progress.step.title());
        row.extend([
            view.requested_option.map(|option| option.to_string()).unwrap_or_default(),
            String::new(),
            view.progress.as_ref().map_or_else(String::new, |progress| format::rate(progress.rate_gbps)),
            format!("under way: {step}"),
        ]);
    }
    row
}

fn tell(view: &MigrationView) -> Result<(), Problem> {
    let Some(result) = &view.result else {
        let waits = view.waits_for.as_ref().map_or(String::new(), |why| format!("; it waits: {why}"));
        return output::print(&format!("under way{waits}\n"));
    };
    let mut text = format!("{} {} → {}: {}\n", result.vm, result.source, result.target, result.outcome);
    if let Some(error) = &result.failure.error {
        text.push_str(error);
        text.push('\n');
    }
    if let Some(still) = migrate::standstill(result) {
        text.push_str(&still);
        text.push('\n');
    }
    output::print(&text)?;
    let rows =
        result.record.events.iter().map(|event| {
            vec![format::duration(event.ms), event.step.number().to_string(), event.what.clone()]
        });
    output::table(&["after", "step", "what"], rows.collect())
}
