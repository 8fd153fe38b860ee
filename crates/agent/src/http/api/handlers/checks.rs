//! The check between two hosts, and what their agents say to each other for it.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::check::CheckReport;
use drainpipe_engine::check::facts::CheckFacts;
use drainpipe_engine::check::vm::VmFit;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Answer;
use super::between_agents::{check_paths, own_links};
use crate::check::{self, Checks, Round, RoundResult, SessionRequest, SessionView, VmsRequest, WayBack};
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::{Body, Segment};
use crate::http::api::{Routes, tags};
use drainpipe_api_types::CheckRequest;

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(check_hosts)).routes(routes!(check_facts))
}

pub(in crate::http::api) fn routes_for_agents() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(check_vms))
        .routes(routes!(check_way_back))
        .routes(routes!(begin_check))
        .routes(routes!(play_check_round))
        .routes(routes!(end_check))
}

/// Check everything between this host and another
///
/// Sends some hundred packets over each path, from both ends, and changes nothing. `findings` is empty
/// when all is well.
#[utoipa::path(post, path = "/v1/check", tag = tags::HOSTS, request_body = CheckRequest, responses(
    (status = 200, description = "What was found, the worst first.", body = CheckReport),
    (status = 404, description = "No host of that name.", body = Problem),
    (status = 409, description = "Too many checks are under way.", body = Problem),
    (status = 422, description = "The other host's answers make no sense.", body = Problem),
))]
async fn check_hosts(
    State(checks): State<Arc<Checks>>,
    Body(request): Body<CheckRequest>,
) -> Answer<CheckReport> {
    Ok(Json(check::run(&checks, &request.target, request.vm.as_ref().map(VmName::as_str)).await?))
}

/// What this host says of itself to a check
#[utoipa::path(get, path = "/v1/check/facts", tag = tags::HOSTS, responses(
    (status = 200, description = "The facts.", body = CheckFacts),
))]
async fn check_facts(State(checks): State<Arc<Checks>>) -> Answer<CheckFacts> {
    Ok(Json(check::read(&checks).await?))
}

/// How could these VMs come here?
#[utoipa::path(post, path = "/v1/check/vms", tag = tags::BETWEEN_AGENTS, request_body = VmsRequest, responses(
    (status = 200, description = "An answer for each, in the same order.", body = [VmFit]),
    (status = 400, description = "Too many at once.", body = Problem),
))]
async fn check_vms(State(checks): State<Arc<Checks>>, Body(request): Body<VmsRequest>) -> Answer<Vec<VmFit>> {
    Ok(Json(check::fits(&checks, &request).await?))
}

/// Does your agent reach mine?
#[utoipa::path(get, path = "/v1/check/way-back", tag = tags::BETWEEN_AGENTS, responses(
    (status = 200, description = "What came of trying, within three seconds.", body = WayBack),
))]
async fn check_way_back(
    State(checks): State<Arc<Checks>>,
    Extension(caller): Extension<Caller>,
) -> Answer<WayBack> {
    Ok(Json(check::try_back(&checks, caller.host()?).await))
}

/// Take part in a check
///
/// Opens a TCP and a UDP port on each path for some seconds.
#[utoipa::path(post, path = "/v1/check/sessions", tag = tags::BETWEEN_AGENTS, request_body = SessionRequest, responses(
    (status = 200, description = "The ports.", body = SessionView),
    (status = 409, description = "Too many checks are under way.", body = Problem),
))]
async fn begin_check(
    State(checks): State<Arc<Checks>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<SessionRequest>,
) -> Answer<SessionView> {
    let source = caller.host()?;
    check_paths(&own_links(&checks.host).await?, &request.paths)?;
    Ok(Json(check::open(&checks, source, request).await?))
}

/// Send packets of these sizes, and say what has arrived
#[utoipa::path(post, path = "/v1/check/sessions/{id}/rounds", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), request_body = Round, responses(
    (status = 200, description = "What has arrived so far.", body = RoundResult),
    (status = 404, description = "No such check, or it is over.", body = Problem),
    (status = 422, description = "Too many rounds.", body = Problem),
))]
async fn play_check_round(
    State(checks): State<Arc<Checks>>,
    Extension(caller): Extension<Caller>,
    Segment(id): Segment<Uuid>,
    Body(round): Body<Round>,
) -> Answer<RoundResult> {
    check_source(&checks, &caller, id)?;
    Ok(Json(check::play(&checks, id, &round).await?))
}

/// End a check
#[utoipa::path(delete, path = "/v1/check/sessions/{id}", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses(
    (status = 200, description = "Its ports are closed.", body = ()),
    (status = 404, description = "No such check, or it is over.", body = Problem),
))]
async fn end_check(
    State(checks): State<Arc<Checks>>,
    Extension(caller): Extension<Caller>,
    Segment(id): Segment<Uuid>,
) -> Answer<()> {
    check_source(&checks, &caller, id)?;
    check::close(&checks, id);
    Ok(Json(()))
}

fn check_source(checks: &Checks, caller: &Caller, id: Uuid) -> Result<(), Problem> {
    let source = check::source_of(checks, id)?;
    authorise(caller, Operation::CarryOnCheck { source: &source })
}
