//! Failed requests: always a [`Problem`] as JSON, whatever refused them.

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use drainpipe_engine::problem::{Problem, ProblemKind};

/// A failed request.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    problem: Problem,
}

impl ApiError {
    /// A request that HTTP has a closer word for than "bad".
    pub(super) fn bad_input(status: StatusCode, message: impl std::fmt::Display) -> Self {
        Self { status, problem: Problem::bad_input(message) }
    }
}

impl From<Problem> for ApiError {
    fn from(problem: Problem) -> Self {
        Self { status: status_of(problem.kind), problem }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.problem)).into_response()
    }
}

impl From<JsonRejection> for ApiError {
    fn from(rejection: JsonRejection) -> Self {
        let status = match rejection.status() {
            // To axum, values that do not fit; here, 422 is a check's refusal.
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        };
        Self::bad_input(status, rejection.body_text())
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        Self::bad_input(StatusCode::BAD_REQUEST, rejection.body_text())
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        Self::bad_input(StatusCode::BAD_REQUEST, rejection.body_text())
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

pub(super) async fn no_such_path() -> ApiError {
    Problem::not_found("no such path; GET /v1/openapi.json describes the API").into()
}

pub(super) async fn no_such_method(method: Method) -> ApiError {
    let message = format!("this path does not support {method}; GET /v1/openapi.json describes the API");
    ApiError::bad_input(StatusCode::METHOD_NOT_ALLOWED, message)
}
