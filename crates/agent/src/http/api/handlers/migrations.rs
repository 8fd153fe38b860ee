//! Migrations from the host.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_engine::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, FollowQuery};
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::{Body, Query, Segment};
use crate::http::api::{Routes, tags};
use crate::outgoing::{self, Outgoing, SendStart};
use drainpipe_api_types::{MigrateRequest, MigrationView, PlanView};

/// Most ended migrations in one answer: a result with an hour of samples takes 2 MB, a usual one 30 kB.
const HISTORY_LIMIT_MAX: u32 = 1_000;

/// Letters of a whole identifier.
const ID_LETTERS: usize = 36;

/// Migrations that an error names.
const NAMED_MAX: usize = 5;

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(migrations, migrate))
        .routes(routes!(plan))
        .routes(routes!(migration))
        .routes(routes!(cancel))
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct HistoryQuery {
    /// How many ended migrations to list, up to 1000.
    #[serde(default = "default_history_limit")]
    #[param(required = false, default = 20, maximum = 1000)]
    limit: u32,
}

fn default_history_limit() -> u32 {
    20
}

/// Migrations from this host
///
/// Those under way, then the last that ended, newest first.
#[utoipa::path(get, path = "/v1/migrations", tag = tags::MIGRATIONS, params(HistoryQuery), responses(
    (status = 200, description = "The migrations.", body = [MigrationView]),
))]
async fn migrations(
    State(outgoing): State<Arc<Outgoing>>,
    Query(query): Query<HistoryQuery>,
) -> Answer<Vec<MigrationView>> {
    if query.limit > HISTORY_LIMIT_MAX {
        return Err(Problem::bad_input(format!("limit: at most {HISTORY_LIMIT_MAX} in one answer")).into());
    }
    let under_way = outgoing.migrations.all();
    let mut views: Vec<MigrationView> =
        under_way.iter().map(|running| running.view(outgoing.host.name())).collect();
    views.extend(outgoing::left_open(&outgoing)?);
    views.extend(outgoing.journal.history(query.limit).map_err(Problem::from)?.into_iter().map(ended));
    Ok(Json(views))
}

fn ended(result: MigrationResult) -> MigrationView {
    MigrationView {
        id: result.id.clone(),
        vm: result.vm.clone(),
        source: result.source.clone(),
        target: result.target.clone(),
        started_at: None,
        requested_option: None,
        progress: None,
        result: Some(result),
        waits_for: None,
    }
}

/// Move a VM to another host
///
/// Answers once the migration has begun; it runs on by itself. Follow it with
/// `GET /v1/migrations/{id}` until there is a `result`.
///
/// A host may move VMs to itself only; root on the source and operators may move them anywhere.
#[utoipa::path(post, path = "/v1/migrations", tag = tags::MIGRATIONS, request_body = MigrateRequest, responses(
    (status = 200, description = "Begun.", body = MigrationView),
    (status = 404, description = "No VM of that name here, or no host of that name.", body = Problem),
    (status = 409, description = "The VM does not run, is there already, or is being changed or moved.", body = Problem),
))]
async fn migrate(
    State(outgoing): State<Arc<Outgoing>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<MigrateRequest>,
) -> Answer<MigrationView> {
    authorise(&caller, Operation::MigrateTo(&request.target))?;
    let running = outgoing::begin(&outgoing, &request, SendStart::Now)?;
    Ok(Json(running.view(outgoing.host.name())))
}

/// Plan a migration and do nothing
///
/// What `drainpipe migrate --dry-run` shows: the option that would be used and why, and over which
/// paths.
#[utoipa::path(post, path = "/v1/migrations/plan", tag = tags::MIGRATIONS, request_body = MigrateRequest, responses(
    (status = 200, description = "The plan.", body = PlanView),
    (status = 404, description = "No VM of that name here, or no host of that name.", body = Problem),
    (status = 409, description = "The VM is there already.", body = Problem),
    (status = 422, description = "There is no way to do it; the message says why.", body = Problem),
    (status = 502, description = "The target or the host asked for does not answer.", body = Problem),
))]
async fn plan(
    State(outgoing): State<Arc<Outgoing>>,
    Body(request): Body<MigrateRequest>,
) -> Answer<PlanView> {
    Ok(Json(outgoing::dry_run(&outgoing, &request).await?))
}

/// One migration
///
/// With `progress` while it is under way, with `result` when it is over. With both, the hand-over is
/// recorded and the target has not yet said that the VM runs there. With neither, the agent has restarted and
/// cannot go on yet; `waits_for` says why.
///
/// With `wait_ms` the answer comes as soon as it is over, and at the latest then.
#[utoipa::path(get, path = "/v1/migrations/{id}", tag = tags::MIGRATIONS, params(
    ("id" = String, Path, max_length = 36, description = "Its identifier, or a beginning that no other one has."),
    FollowQuery
), responses(
    (status = 200, description = "The migration.", body = MigrationView),
    (status = 409, description = "Several identifiers begin so.", body = Problem),
    (status = 404, description = "No such migration from here, or no host of that name.", body = Problem),
))]
async fn migration(
    State(outgoing): State<Arc<Outgoing>>,
    Segment(id): Segment<String>,
    Query(query): Query<FollowQuery>,
) -> Answer<MigrationView> {
    let (id, wait) = (meant(&outgoing, &id)?, query.wait()?);
    if let Some(running) = outgoing.migrations.get(&id) {
        running.wait_over(wait).await;
    }
    if let Some(running) = outgoing.migrations.get(&id) {
        return Ok(Json(running.view(outgoing.host.name())));
    }
    if let Some(view) = outgoing::left_open(&outgoing)?.into_iter().find(|view| view.id == id) {
        return Ok(Json(view));
    }
    let result = outgoing.journal.result(&id).map_err(Problem::from)?;
    result.map(|result| Json(ended(result))).ok_or_else(|| unknown_migration(&outgoing, &id).into())
}

/// The migration from here that an identifier, or the beginning of one, means.
fn meant(outgoing: &Outgoing, given: &str) -> Result<String, Problem> {
    let beginning = given.to_ascii_lowercase();
    let allowed = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
    if !(1..=ID_LETTERS).contains(&beginning.len()) || !beginning.bytes().all(allowed) {
        return Err(Problem::bad_input(format!(
            "`{}` is neither a migration's identifier nor the beginning of one; `drainpipe history` lists them",
            given.escape_default()
        )));
    }
    let mut ids: BTreeSet<String> = outgoing.journal.migrations_beginning(&beginning)?.into_iter().collect();
    ids.extend(outgoing.migrations.all().iter().map(|running| running.id().to_owned()));
    ids.retain(|id| id.starts_with(&beginning));
    match ids.len() {
        0 => Err(unknown_migration(outgoing, given)),
        1 => Ok(ids.pop_first().expect("there is one")),
        _ => Err(Problem::conflict(format!(
            "several migrations from {} begin with {given}: {}; give more of it",
            outgoing.host.name(),
            ids.into_iter().take(NAMED_MAX).collect::<Vec<_>>().join(", ")
        ))),
    }
}

fn unknown_migration(outgoing: &Outgoing, id: &str) -> Problem {
    Problem::not_found(format!(
        "no migration {id} on {}; `drainpipe history` lists them",
        outgoing.host.name()
    ))
}

/// Cancel a migration
///
/// Answers at once. The migration is undone unless the hand-over is recorded by then; its `result`
/// tells.
#[utoipa::path(post, path = "/v1/migrations/{id}/cancel", tag = tags::MIGRATIONS, params(
    ("id" = String, Path, max_length = 36, description = "Its identifier, or a beginning that no other one has.")
), responses(
    (status = 200, description = "Asked for.", body = ()),
    (status = 409, description = "Several identifiers begin so.", body = Problem),
    (status = 404, description = "No such migration under way, or no host of that name.", body = Problem),
))]
async fn cancel(
    State(outgoing): State<Arc<Outgoing>>,
    Extension(caller): Extension<Caller>,
    Segment(id): Segment<String>,
) -> Answer<()> {
    let id = meant(&outgoing, &id)?;
    let running = outgoing.migrations.get(&id).ok_or_else(|| unknown_migration(&outgoing, &id))?;
    authorise(&caller, Operation::MigrateTo(running.target()))?;
    running.cancel();
    Ok(Json(()))
}
