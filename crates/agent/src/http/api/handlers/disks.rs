//! Disks that have stayed behind.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::{Routes, tags};
use crate::incoming::{self, Incoming};
use drainpipe_api_types::LeftDisk;

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(left)).routes(routes!(remove_left))
}

/// The disks that stayed here when their VMs left with copies of them, and what is kept of interrupted copies
#[utoipa::path(get, path = "/v1/disks/left", tag = tags::HOSTS, responses(
    (status = 200, description = "The oldest first.", body = Vec<LeftDisk>),
))]
async fn left(State(incoming): State<Arc<Incoming>>) -> Answer<Vec<LeftDisk>> {
    Ok(Json(incoming::left_disks(&incoming)?))
}

/// Remove them
#[utoipa::path(post, path = "/v1/disks/left/remove", tag = tags::HOSTS, responses(
    (status = 200, description = "Those that are gone.", body = Vec<LeftDisk>),
))]
async fn remove_left(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
) -> Answer<Vec<LeftDisk>> {
    authorise(&caller, Operation::ManageVms)?;
    Ok(Json(incoming::remove_left_disks(&incoming).await?))
}
