//! How much of the host's links migrations may take.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::Body;
use crate::http::api::{Routes, tags};
use crate::transfer::Transfers;
use drainpipe_api_types::{BandwidthRequest, BandwidthView};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(limit, set_limit))
}

/// How much of this host's links migrations may take
#[utoipa::path(get, path = "/v1/bandwidth", tag = tags::HOSTS, responses(
    (status = 200, description = "What holds now.", body = BandwidthView),
))]
async fn limit(State(transfer): State<Arc<Transfers>>) -> Answer<BandwidthView> {
    Ok(Json(transfer.bandwidth.view()))
}

/// Limit it
///
/// Holds within a second, for migrations in flight too, and until it is set again, also when the agent is
/// restarted. What leaves the host and what comes to it are limited each by itself; migrations in flight
/// share the limit fairly. Disks may have a lower limit beside the one for all.
#[utoipa::path(post, path = "/v1/bandwidth", tag = tags::HOSTS, request_body = BandwidthRequest, responses(
    (status = 200, description = "What holds now.", body = BandwidthView),
    (status = 400, description = "A limit of 0.", body = Problem),
))]
async fn set_limit(
    State(transfer): State<Arc<Transfers>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<BandwidthRequest>,
) -> Answer<BandwidthView> {
    authorise(&caller, Operation::ChangeHost)?;
    Ok(Json(transfer.bandwidth.set(request.limited, request.setting)?))
}
