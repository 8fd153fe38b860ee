//! What `check --fix` changes on the host.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::check::fixes::Fixes;
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::Body;
use crate::http::api::{Routes, tags};
use drainpipe_api_types::{FixRequest, StandingFix};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(standing, make, undo))
}

/// Settings that were mended on this host
#[utoipa::path(get, path = "/v1/fixes", tag = tags::HOSTS, responses(
    (status = 200, description = "Those that have not been undone.", body = [StandingFix]),
))]
async fn standing(State(fixes): State<Arc<Fixes>>) -> Answer<Vec<StandingFix>> {
    Ok(Json(fixes.standing().await?))
}

/// Mend settings of this host
///
/// Those that a check's findings name as `fix`. Each stands until it is undone, or until the host is
/// booted; what is as it should be is left alone.
#[utoipa::path(post, path = "/v1/fixes", tag = tags::HOSTS, request_body = FixRequest, responses(
    (status = 200, description = "All that stand now.", body = [StandingFix]),
    (status = 422, description = "The kernel refuses.", body = Problem),
))]
async fn make(
    State(fixes): State<Arc<Fixes>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<FixRequest>,
) -> Answer<Vec<StandingFix>> {
    authorise(&caller, Operation::ChangeHost)?;
    Ok(Json(fixes.make(&request.fixes).await?))
}

/// Put back what was mended on this host
///
/// What somebody else has changed since is left alone.
#[utoipa::path(delete, path = "/v1/fixes", tag = tags::HOSTS, responses(
    (status = 200, description = "What was put back, with its value now.", body = [StandingFix]),
))]
async fn undo(
    State(fixes): State<Arc<Fixes>>,
    Extension(caller): Extension<Caller>,
) -> Answer<Vec<StandingFix>> {
    authorise(&caller, Operation::ChangeHost)?;
    Ok(Json(fixes.undo().await?))
}
