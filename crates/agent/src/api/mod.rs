//! The API: HTTP and JSON, over TLS and over the Unix socket alike.
//!
//! A request with `?host=NAME` is for another host; the agent passes it on under its own certificate,
//! so it can do there what a host may do, not what an operator may.

pub mod authorization;
mod forward;
mod handlers;
pub mod types;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use drainpipe_engine::problem::{Problem, ProblemKind};

use crate::agent::Agent;

/// Longest request body. The longest honest one is a VM's specification.
const BODY_BYTES_MAX: usize = 1 << 20;

/// Longest that a caller may have an answer held back.
const WAIT_MAX: Duration = Duration::from_mins(1);

/// A failed request.
#[derive(Debug)]
pub(crate) struct ApiError(Problem);

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (status_of(self.0.kind), Json(self.0)).into_response()
    }
}

fn status_of(kind: ProblemKind) -> StatusCode {
    match kind {
        ProblemKind::BadInput => StatusCode::BAD_REQUEST,
        ProblemKind::NotFound => StatusCode::NOT_FOUND,
        ProblemKind::Conflict => StatusCode::CONFLICT,
        ProblemKind::Refused => StatusCode::UNPROCESSABLE_ENTITY,
        ProblemKind::Forbidden => StatusCode::FORBIDDEN,
        ProblemKind::Unreachable => StatusCode::BAD_GATEWAY,
        ProblemKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// All paths of the API.
pub fn router(agent: Arc<Agent>) -> Router {
    Router::new()
        .route("/v1/host", get(handlers::host))
        .route("/v1/hosts", get(handlers::hosts))
        .route("/v1/vms", get(handlers::vms).post(handlers::create_vm))
        .route("/v1/vms/{name}", get(handlers::vm).delete(handlers::remove_vm))
        .route("/v1/vms/{name}/start", post(handlers::start_vm))
        .route("/v1/vms/{name}/stop", post(handlers::stop_vm))
        .route("/v1/migrations", get(handlers::migrations).post(handlers::migrate))
        .route("/v1/migrations/plan", post(handlers::plan))
        .route("/v1/migrations/{id}", get(handlers::migration))
        .route("/v1/migrations/{id}/cancel", post(handlers::cancel))
        .route("/v1/incoming", post(handlers::permit_incoming))
        .route("/v1/incoming/{id}", get(handlers::incoming).delete(handlers::discard_incoming))
        .route("/v1/incoming/{id}/memory", post(handlers::reserve_memory))
        .route("/v1/incoming/{id}/skeleton", post(handlers::build_skeleton))
        .route("/v1/incoming/{id}/probe", post(handlers::probe))
        .route("/v1/incoming/{id}/connection", post(handlers::connect))
        .route("/v1/incoming/{id}/received", get(handlers::received))
        .route("/v1/incoming/{id}/run", post(handlers::run_incoming))
        .route("/v1/incoming/{id}/finish", post(handlers::finish_incoming))
        .route("/v1/handovers/{id}", get(handlers::hand_over))
        .fallback(handlers::no_such_path)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&agent), forward::forward))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(agent)
}
