//! One function a path: reads the request, checks the caller, calls the part that does it.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{Extension, FromRequest, FromRequestParts, Path, State};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::result::MigrationResult;
use drainpipe_identity::Peer;
use serde::Deserialize;

use super::authorization::{Caller, Operation, authorise};
use super::types::{
    ConnectionRequest, CreateVm, Endpoint, HandOverView, HostStatus, HostView, IncomingRequest, IncomingView,
    MigrateRequest, MigrationView, PlanView, Scope, TargetUse, VmList, VmView,
};
use super::{ApiError, WAIT_MAX};
use crate::agent::Agent;
use crate::incoming;
use crate::outgoing;
use crate::probe::{self, ProbePorts, ProbeRequest};

type Answer<T> = Result<Json<T>, ApiError>;
type Shared = State<Arc<Agent>>;
type From = Extension<Caller>;

/// JSON whose rejection is a [`Problem`], as every other failure is.
#[derive(FromRequest)]
#[from_request(via(Json), rejection(ApiError))]
pub(super) struct Body<T>(T);

/// A query whose rejection is a [`Problem`].
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(ApiError))]
pub(super) struct Query<T>(T);

impl std::convert::From<JsonRejection> for ApiError {
    fn from(rejection: JsonRejection) -> Self {
        Self(Problem::bad_input(rejection.body_text()))
    }
}

impl std::convert::From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self(Problem::bad_input(rejection.body_text()))
    }
}

#[derive(Deserialize)]
pub(super) struct VmsQuery {
    #[serde(default)]
    scope: Scope,
}

#[derive(Deserialize)]
pub(super) struct StopQuery {
    #[serde(default)]
    force: bool,
}

#[derive(Deserialize)]
pub(super) struct HistoryQuery {
    #[serde(default = "default_history_limit")]
    limit: u32,
}

fn default_history_limit() -> u32 {
    20
}

#[derive(Deserialize)]
pub(super) struct WaitQuery {
    #[serde(default)]
    wait_ms: u64,
}

pub(super) async fn no_such_path() -> ApiError {
    ApiError(Problem::not_found("no such path; /v1/openapi.json describes the API"))
}

pub(super) async fn host(State(agent): Shared) -> Answer<HostView> {
    Ok(Json(agent.view().await?))
}

pub(super) async fn hosts(State(agent): Shared) -> Answer<Vec<HostStatus>> {
    Ok(Json(agent.all_hosts().await?))
}

pub(super) async fn vms(State(agent): Shared, Query(query): Query<VmsQuery>) -> Answer<VmList> {
    Ok(Json(agent.list_vms(query.scope).await))
}

pub(super) async fn vm(State(agent): Shared, Path(name): Path<String>) -> Answer<VmView> {
    Ok(Json(agent.vms.get(&name).await?))
}

pub(super) async fn create_vm(
    State(agent): Shared,
    Extension(caller): From,
    Body(request): Body<CreateVm>,
) -> Answer<()> {
    authorise(&caller, Operation::ManageVms)?;
    request.spec.validate().map_err(Problem::bad_input)?;
    if agent.incoming.definitions().iter().any(|coming| coming.name == request.spec.name) {
        let name = &request.spec.name;
        return Err(Problem::conflict(format!("a VM {name} is on its way to {}", agent.name())).into());
    }
    Ok(Json(agent.vms.create(request.spec)?))
}

pub(super) async fn start_vm(
    State(agent): Shared,
    Extension(caller): From,
    Path(name): Path<String>,
) -> Answer<()> {
    authorise(&caller, Operation::ManageVms)?;
    Ok(Json(agent.vms.start(&name).await?))
}

pub(super) async fn stop_vm(
    State(agent): Shared,
    Extension(caller): From,
    Path(name): Path<String>,
    Query(query): Query<StopQuery>,
) -> Answer<()> {
    authorise(&caller, Operation::ManageVms)?;
    Ok(Json(agent.vms.stop(&name, query.force).await?))
}

pub(super) async fn remove_vm(
    State(agent): Shared,
    Extension(caller): From,
    Path(name): Path<String>,
) -> Answer<()> {
    authorise(&caller, Operation::ManageVms)?;
    Ok(Json(agent.vms.remove(&name).await?))
}

pub(super) async fn migrations(
    State(agent): Shared,
    Query(query): Query<HistoryQuery>,
) -> Answer<Vec<MigrationView>> {
    let under_way = agent.outgoing.all();
    let mut views: Vec<MigrationView> = under_way.iter().map(|running| running.view(agent.name())).collect();
    views.extend(agent.journal.history(query.limit).map_err(Problem::from)?.into_iter().map(ended));
    Ok(Json(views))
}

fn ended(result: MigrationResult) -> MigrationView {
    MigrationView {
        id: result.id.clone(),
        vm: result.vm.clone(),
        source: result.source.clone(),
        target: result.target.clone(),
        progress: None,
        result: Some(result),
    }
}

pub(super) async fn migrate(
    State(agent): Shared,
    Extension(caller): From,
    Body(request): Body<MigrateRequest>,
) -> Answer<MigrationView> {
    authorise(&caller, Operation::MigrateTo(&request.target))?;
    Ok(Json(outgoing::begin(&agent, &request)?))
}

pub(super) async fn plan(State(agent): Shared, Body(request): Body<MigrateRequest>) -> Answer<PlanView> {
    Ok(Json(outgoing::dry_run(&agent, &request).await?))
}

pub(super) async fn migration(State(agent): Shared, Path(id): Path<String>) -> Answer<MigrationView> {
    if let Some(running) = agent.outgoing.get(&id) {
        return Ok(Json(running.view(agent.name())));
    }
    let result = agent.journal.result(&id).map_err(Problem::from)?;
    result.map(|result| Json(ended(result))).ok_or_else(|| unknown_migration(&agent, &id))
}

fn unknown_migration(agent: &Agent, id: &str) -> ApiError {
    Problem::not_found(format!("no migration {id} on {}; `drainpipe history` lists them", agent.name()))
        .into()
}

pub(super) async fn cancel(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
) -> Answer<()> {
    let running = agent.outgoing.get(&id).ok_or_else(|| unknown_migration(&agent, &id))?;
    authorise(&caller, Operation::MigrateTo(running.target()))?;
    running.cancel();
    Ok(Json(()))
}

pub(super) async fn permit_incoming(
    State(agent): Shared,
    Extension(caller): From,
    Body(request): Body<IncomingRequest>,
) -> Answer<()> {
    let source = sender(&caller)?;
    Ok(Json(incoming::permit(&agent, source, request)?))
}

/// The host that sends a VM; nobody but a host does.
fn sender(caller: &Caller) -> Result<&str, Problem> {
    match caller {
        Caller::Peer(Peer::Host(name)) => Ok(name),
        _ => Err(authorise(caller, Operation::SendVm { source: "a host" })
            .err()
            .unwrap_or_else(|| Problem::refused("only a host sends VMs"))),
    }
}

/// Lets only the source of a migration carry on with it.
fn continue_as_source(agent: &Agent, caller: &Caller, id: &str) -> Result<(), Problem> {
    let recorded = agent.journal.incoming_state(id)?.map(|(source, _)| source);
    let source = agent
        .incoming
        .source_of(id)
        .or(recorded)
        .ok_or_else(|| Problem::not_found(format!("no migration {id} on its way to {}", agent.name())))?;
    authorise(caller, Operation::SendVm { source: &source })
}

pub(super) async fn incoming(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
) -> Answer<IncomingView> {
    sender(&caller)?;
    Ok(Json(incoming::view(&agent, &id).await?))
}

pub(super) async fn discard_incoming(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
) -> Answer<()> {
    let caller_name = sender(&caller)?;
    if agent.journal.incoming_state(&id).map_err(Problem::from)?.is_some() {
        continue_as_source(&agent, &caller, &id)?;
    }
    Ok(Json(incoming::discard(&agent, &id, caller_name).await?))
}

pub(super) async fn reserve_memory(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
) -> Answer<()> {
    continue_as_source(&agent, &caller, &id)?;
    Ok(Json(incoming::reserve_memory(&agent, &id)?))
}

pub(super) async fn build_skeleton(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
) -> Answer<()> {
    continue_as_source(&agent, &caller, &id)?;
    Ok(Json(incoming::build_skeleton(&agent, &id).await?))
}

pub(super) async fn probe(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
    Body(request): Body<ProbeRequest>,
) -> Answer<ProbePorts> {
    continue_as_source(&agent, &caller, &id)?;
    Ok(Json(probe::open(&agent, request).await?))
}

pub(super) async fn connect(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
    Body(request): Body<ConnectionRequest>,
) -> Answer<Endpoint> {
    continue_as_source(&agent, &caller, &id)?;
    Ok(Json(incoming::connect(&agent, &id, request).await?))
}

pub(super) async fn received(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
    Query(query): Query<WaitQuery>,
) -> Answer<IncomingView> {
    continue_as_source(&agent, &caller, &id)?;
    let wait = Duration::from_millis(query.wait_ms).min(WAIT_MAX);
    Ok(Json(incoming::wait_received(&agent, &id, wait).await?))
}

pub(super) async fn run_incoming(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
) -> Answer<()> {
    continue_as_source(&agent, &caller, &id)?;
    Ok(Json(incoming::run(&agent, &id).await?))
}

pub(super) async fn finish_incoming(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
) -> Answer<TargetUse> {
    continue_as_source(&agent, &caller, &id)?;
    Ok(Json(incoming::finish(&agent, &id).await?))
}

pub(super) async fn hand_over(
    State(agent): Shared,
    Extension(caller): From,
    Path(id): Path<String>,
) -> Answer<HandOverView> {
    let (target, view) = outgoing::hand_over_view(&agent, &id)?;
    if let Some(target) = &target {
        authorise(&caller, Operation::AskHandOver { target })?;
    }
    Ok(Json(view))
}
