//! Emptying the host, and bringing back what left it.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, FollowQuery};
use crate::drain::{self, Drains};
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::{Body, Query};
use crate::http::api::{Routes, tags};
use drainpipe_api_types::{DrainPlanView, DrainRequest, DrainView, ResumeRequest};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(view, begin))
        .routes(routes!(plan))
        .routes(routes!(cancel))
        .routes(routes!(resume))
}

/// Whether this host takes VMs, and how far it is drained
///
/// What is under way, or else what was last: a drain, or the way back of what it moved. With `wait_ms` the answer comes as
/// soon as nothing is under way any more, and at the latest then.
#[utoipa::path(get, path = "/v1/drain", tag = tags::DRAIN, params(FollowQuery), responses(
    (status = 200, description = "How it stands.", body = DrainView),
))]
async fn view(State(drains): State<Arc<Drains>>, Query(query): Query<FollowQuery>) -> Answer<DrainView> {
    drain::wait_over(&drains, query.wait()?).await;
    Ok(Json(drain::view(&drains)?))
}

/// Drain this host
///
/// Cordons it, so that no VM comes to it or is started on it, looks at all hosts, plans, and begins to move
/// all VMs that can be moved. Answers once that has begun, which may take a minute; it runs on by itself.
/// Follow it with `GET /v1/drain` until there is an `ended_at`. A drain that was interrupted, cancelled or
/// left something is carried on.
///
/// The host stays cordoned until `POST /v1/resume`.
#[utoipa::path(post, path = "/v1/drain", tag = tags::DRAIN, request_body = DrainRequest, responses(
    (status = 200, description = "Begun.", body = DrainView),
    (status = 404, description = "A host of that name is not known.", body = Problem),
    (status = 409, description = "A drain, or the way back, is under way.", body = Problem),
    (status = 422, description = "There is no host to drain to.", body = Problem),
))]
async fn begin(
    State(drains): State<Arc<Drains>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<DrainRequest>,
) -> Answer<DrainView> {
    authorise(&caller, Operation::Drain)?;
    Ok(Json(drain::begin(&drains, request).await?))
}

/// Plan a drain and do nothing
///
/// What `drainpipe drain --dry-run` shows: which VM would go where, in which order, how long it would take,
/// and which would stay. The answer may take a minute.
#[utoipa::path(post, path = "/v1/drain/plan", tag = tags::DRAIN, request_body = DrainRequest, responses(
    (status = 200, description = "The plan.", body = DrainPlanView),
    (status = 404, description = "A host of that name is not known.", body = Problem),
    (status = 422, description = "There is no host to drain to.", body = Problem),
))]
async fn plan(State(drains): State<Arc<Drains>>, Body(request): Body<DrainRequest>) -> Answer<DrainPlanView> {
    Ok(Json(drain::plan(&drains, &request).await?))
}

/// Cancel a drain, or the way back
///
/// Answers at once. Nothing new begins; what is under way is undone, or finishes where the hand-over is
/// recorded by then. What has moved stays where it is, and the host stays cordoned until
/// `POST /v1/resume`.
#[utoipa::path(post, path = "/v1/drain/cancel", tag = tags::DRAIN, responses(
    (status = 200, description = "Asked for.", body = DrainView),
    (status = 409, description = "None is under way.", body = Problem),
))]
async fn cancel(
    State(drains): State<Arc<Drains>>,
    Extension(caller): Extension<Caller>,
) -> Answer<DrainView> {
    authorise(&caller, Operation::Drain)?;
    Ok(Json(drain::cancel(&drains)?))
}

/// Let VMs come to this host again
///
/// With `failback`, begins to bring back what the last drain has moved, if it still is where it went: as it went,
/// unless the request says otherwise. What is on its way here already is waited for.
/// Follow that with `GET /v1/drain` until there is an `ended_at`; what did not come can be asked for again.
#[utoipa::path(post, path = "/v1/resume", tag = tags::DRAIN, request_body = ResumeRequest, responses(
    (status = 200, description = "VMs may come; what is to be brought back is on its way.", body = DrainView),
    (status = 409, description = "A drain, or the way back, is under way.", body = Problem),
    (status = 422, description = "There is nothing to bring back: it was never drained.", body = Problem),
))]
async fn resume(
    State(drains): State<Arc<Drains>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<ResumeRequest>,
) -> Answer<DrainView> {
    authorise(&caller, Operation::Drain)?;
    Ok(Json(drain::resume(&drains, request)?))
}
