//! The migrations of all hosts. Each host keeps those that began there.

use drainpipe_api_types::MigrationView;
use drainpipe_engine::problem::{Problem, ProblemKind};
use futures_util::future::join_all;
use serde::de::DeserializeOwned;

use crate::connection::Fleet;

/// Migrations, and why some host did not tell its own.
pub(crate) struct FoundMigrations {
    /// Those under way, then the ended ones, newest first.
    pub(crate) migrations: Vec<MigrationView>,
    /// Hosts, and what was wrong with each.
    pub(crate) silent: Vec<(String, Problem)>,
}

/// The last migrations of all hosts, so many of each.
pub(crate) async fn of_all_hosts(fleet: &Fleet, limit: u32) -> Result<FoundMigrations, Problem> {
    let path = format!("/v1/migrations?limit={limit}");
    let mut found = FoundMigrations { migrations: vec![], silent: vec![] };
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
pub(crate) async fn find(fleet: &Fleet, id: &str) -> Result<(String, MigrationView), Problem> {
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

/// When it began, if it has.
pub(crate) fn began(view: &MigrationView) -> Option<&str> {
    view.result.as_ref().map(|result| result.started_at.as_str()).or(view.started_at.as_deref())
}
