//! Reads requests; whatever cannot be read is a [`Problem`](drainpipe_engine::problem::Problem).

use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use drainpipe_engine::format::bound;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::by_name::ByName;
use super::error::ApiError;

/// Longest request body. The longest honest one is a VM's specification.
pub(super) const BODY_BYTES_MAX: usize = 1 << 20;

/// Longest body of a request to join: a name, an address, and a request for a certificate.
pub(super) const JOIN_BYTES_MAX: usize = 16 << 10;

/// How long a body may take once its head is here; who sends a byte now and then must not hold one of
/// the server's connections for ever.
const BODY_DEADLINE: Duration = Duration::from_secs(10);

/// A body read within its deadline, or why not.
pub(super) async fn read_in_time<T, E: Into<ApiError>>(
    reading: impl Future<Output = Result<T, E>>,
) -> Result<T, ApiError> {
    let Ok(read) = tokio::time::timeout(BODY_DEADLINE, reading).await else {
        let message = format!("the body did not arrive within {}", bound(BODY_DEADLINE));
        return Err(ApiError::bad_input(StatusCode::REQUEST_TIMEOUT, message));
    };
    read.map_err(Into::into)
}

/// A body of JSON.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let Json(ByName(value)) = read_in_time(Json::from_request(request, state)).await?;
        Ok(Self(value))
    }
}

/// The query.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(ApiError))]
pub(super) struct Query<T>(pub(super) T);

/// The one variable part of a path.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(ApiError))]
pub(super) struct Segment<T>(pub(super) T);

/// Identifier of a migration in a path, in the one form in which the journal has it.
pub(super) struct MigrationId(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for MigrationId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Path(id) = Path::<Uuid>::from_request_parts(parts, state).await?;
        Ok(Self(id.to_string()))
    }
}
