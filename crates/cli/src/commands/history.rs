//! `drainpipe history`.

use drainpipe_api_types::MigrationView;
use drainpipe_engine::format;
use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::problem::{Problem, ProblemKind};
use futures_util::future::join_all;
use serde::de::DeserializeOwned;

use super::migrate;
use crate::arguments::HistoryArguments;
use crate::connection::{ConnectionArguments, Fleet};
use crate::exit::Exit;
use crate::output;

pub(crate) async fn run(
    connection: &ConnectionArguments,
    arguments: &HistoryArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let fleet = connection.fleet()?;
    if let Some(id) = &arguments.id {
        let (_, view) = find(&fleet, id).await?;
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
    let Found { mut migrations, silent } = of_all_hosts(&fleet, arguments.limit).await?;
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

/// Migrations, and why some host did not tell its own.
pub(crate) struct Found {
    /// Those under way, then the ended ones, newest first.
    pub(crate) migrations: Vec<MigrationView>,
    /// Hosts, and what was wrong with each.
    pub(super) silent: Vec<(String, Problem)>,
}

/// The last migrations of all hosts, so many of each. Each host keeps those that began there.
pub(crate) async fn of_all_hosts(fleet: &Fleet, limit: u32) -> Result<Found, Problem> {
    let path = format!("/v1/migrations?limit={limit}");
    let mut found = Found { migrations: vec![], silent: vec![] };
    for (host, answer) in ask_all::<Vec<MigrationView>>(fleet, &path).await? {
        match answer {
            Ok(migrations) => found.migrations.extend(migrations),
            Err(problem) => found.silent.push((host, problem)),
        }
    }
    found.migrations.sort_by(|one, other| {
        let age = |view: &MigrationView| (view.result.is_none(), began(view).map(str::to_owned));
        age(other).cmp(&age(one))
    });
    Ok(found)
}

/// What each host says, all asked at once.
async fn ask_all<T: DeserializeOwned>(
    fleet: &Fleet,
    path: &str,
) -> Result<Vec<(String, Result<T, Problem>)>, Problem> {
    let asked = fleet.hosts().await?.into_iter().map(|status| async move {
        if let Some(error) = status.error {
            return (status.name, Err(Problem::new(ProblemKind::Unreachable, error)));
        }
        let answer = match fleet.host(&status.name).await {
            Ok(host) => host.client().get(&host.path(path)).await,
            Err(problem) => Err(problem),
        };
        (status.name, answer)
    });
    Ok(join_all(asked).await)
}

/// The migration that an identifier or the beginning of one means, and the host that it began on.
pub(super) async fn find(fleet: &Fleet, id: &str) -> Result<(String, MigrationView), Problem> {
    let is_id = !id.is_empty() && id.chars().all(|letter| letter.is_ascii_hexdigit() || letter == '-');
    if !is_id {
        return Err(Problem::bad_input(format!(
            "`{id}` is neither a migration's identifier nor the beginning of one; `drainpipe history` lists them"
        )));
    }
    let (mut found, mut silent) = (vec![], vec![]);
    for (host, answer) in ask_all::<MigrationView>(fleet, &format!("/v1/migrations/{id}")).await? {
        match answer {
            Ok(view) => found.push((host, view)),
            Err(problem) if problem.kind == ProblemKind::NotFound => {}
            Err(problem) if problem.kind == ProblemKind::Conflict => return Err(problem),
            Err(problem) => silent.push((host, problem)),
        }
    }
    if found.len() > 1 {
        let ids: Vec<&str> = found.iter().map(|(_, view)| view.id.as_str()).collect();
        return Err(Problem::conflict(format!(
            "several migrations begin with {id}: {}; give more of it",
            ids.join(", ")
        )));
    }
    found.pop().ok_or_else(|| match silent.pop() {
        None => Problem::not_found(format!("no migration {id} on any host; `drainpipe history` lists them")),
        Some((host, problem)) => {
            let message = &problem.message;
            Problem::new(
                problem.kind,
                format!("no migration {id} on the hosts that answer; not {host}: {message}"),
            )
        }
    })
}

/// A line for each.
pub(super) fn table(migrations: &[MigrationView]) -> Result<(), Problem> {
    let head = ["migration", "vm", "from", "to", "began", "option", "took", "rate", "outcome"];
    output::table(&head, migrations.iter().map(row).collect())
}

fn began(view: &MigrationView) -> Option<&str> {
    view.result.as_ref().map(|result| result.started_at.as_str()).or(view.started_at.as_deref())
}

fn row(view: &MigrationView) -> Vec<String> {
    let mut row = vec![view.id.clone(), view.vm.clone(), view.source.clone(), view.target.clone()];
    row.push(began(view).map(output::time).unwrap_or_default());
    if let Some(result) = &view.result {
        row.extend([
            result.choice.option.to_string(),
            format::duration(result.times.total_ms),
            format::rate(result.memory.throughput_gbps),
            outcome_word(result.outcome).into(),
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

fn outcome_word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Failed => "failed",
        Outcome::Cancelled => "cancelled",
        Outcome::InDoubt => "in doubt",
        Outcome::Lost => "lost",
    }
}

fn tell(view: &MigrationView) -> Result<(), Problem> {
    let Some(result) = &view.result else {
        let waits = view.waits_for.as_ref().map_or(String::new(), |why| format!("; it waits: {why}"));
        return output::print(&format!("under way{waits}\n"));
    };
    let mut text =
        format!("{} {} → {}: {}\n", result.vm, result.source, result.target, outcome_word(result.outcome));
    if let Some(error) = &result.error {
        text.push_str(error);
        text.push('\n');
    }
    if let Some(still) = migrate::standstill(result) {
        text.push_str(&still);
        text.push('\n');
    }
    output::print(&text)?;
    let rows = result
        .events
        .iter()
        .map(|event| vec![format::duration(event.ms), event.step.number().to_string(), event.what.clone()]);
    output::table(&["after", "step", "what"], rows.collect())
}
