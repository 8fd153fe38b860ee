//! Hosts, and this description of the API.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::check::Checks;
use crate::http::api::{Routes, openapi};
use drainpipe_api_types::{HostStatus, HostView};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(host)).routes(routes!(hosts)).routes(routes!(openapi_document))
}

/// This host
///
/// What it is and what migrations can use: memory, links, hypervisor.
#[utoipa::path(get, path = "/v1/host", tag = openapi::HOSTS, responses(
    (status = 200, description = "The host.", body = HostView),
))]
async fn host(State(checks): State<Arc<Checks>>) -> Answer<HostView> {
    Ok(Json(checks.host_view().await?))
}

/// All hosts that this one knows
///
/// Itself first, then its peers as they answer now. A host that does not answer is listed with the
/// reason.
#[utoipa::path(get, path = "/v1/hosts", tag = openapi::HOSTS, responses(
    (status = 200, description = "The hosts.", body = [HostStatus]),
))]
async fn hosts(State(checks): State<Arc<Checks>>) -> Answer<Vec<HostStatus>> {
    Ok(Json(checks.all_hosts().await?))
}

/// This document
#[utoipa::path(get, path = "/v1/openapi.json", tag = openapi::HOSTS, responses(
    (status = 200, description = "OpenAPI.", body = Object),
))]
async fn openapi_document() -> Json<&'static OpenApi> {
    Json(openapi::document())
}
