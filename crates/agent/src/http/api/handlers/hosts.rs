//! This host and those that it knows.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::check::Checks;
use crate::http::api::{Routes, tags};
use drainpipe_api_types::{HostStatus, HostView};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(host)).routes(routes!(hosts))
}

/// This host
///
/// What it is and what migrations can use: memory, links, hypervisor.
#[utoipa::path(get, path = "/v1/host", tag = tags::HOSTS, responses(
    (status = 200, description = "The host.", body = HostView),
))]
async fn host(State(checks): State<Arc<Checks>>) -> Answer<HostView> {
    Ok(Json(checks.host_view().await?))
}

/// All hosts that this one knows
///
/// Itself first, then its peers as they answer now. A host that does not answer is listed with the
/// reason.
#[utoipa::path(get, path = "/v1/hosts", tag = tags::HOSTS, responses(
    (status = 200, description = "The hosts.", body = [HostStatus]),
))]
async fn hosts(State(checks): State<Arc<Checks>>) -> Answer<Vec<HostStatus>> {
    Ok(Json(checks.all_hosts().await?))
}
