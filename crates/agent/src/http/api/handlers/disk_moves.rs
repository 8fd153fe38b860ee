//! Disks that move to another place on this host while their VMs run.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::disk_moves::{self, DiskMoves};
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::{Body, Segment};
use crate::http::api::{Routes, tags};
use drainpipe_api_types::{DiskMoveView, MoveDiskRequest};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(disk_move, move_disk)).routes(routes!(cancel_disk_move))
}

/// Move a disk of a VM to another place on this host
///
/// The VM runs on. Answers as soon as the copy is about to begin.
#[utoipa::path(post, path = "/v1/vms/{name}/disk-move", tag = tags::VMS, request_body = MoveDiskRequest, params(
    ("name" = VmName, Path)
), responses(
    (status = 200, description = "It has begun.", body = DiskMoveView),
    (status = 404, description = "No VM of that name here, or no host of that name.", body = Problem),
    (status = 409, description = "The VM does not run, or is being changed or moved.", body = Problem),
    (status = 422, description = "The disk cannot go there; the message says why.", body = Problem),
))]
async fn move_disk(
    State(moves): State<Arc<DiskMoves>>,
    Extension(caller): Extension<Caller>,
    Segment(name): Segment<VmName>,
    Body(request): Body<MoveDiskRequest>,
) -> Answer<DiskMoveView> {
    authorise(&caller, Operation::ManageVms)?;
    Ok(Json(disk_moves::begin(&moves, name.as_str(), &request).await?))
}

/// The last move of a VM's disk on this host
#[utoipa::path(get, path = "/v1/vms/{name}/disk-move", tag = tags::VMS, params(("name" = VmName, Path)), responses(
    (status = 200, description = "How far it is, or how it has ended.", body = DiskMoveView),
    (status = 404, description = "None since the agent has started, or no host of that name.", body = Problem),
))]
async fn disk_move(
    State(moves): State<Arc<DiskMoves>>,
    Segment(name): Segment<VmName>,
) -> Answer<DiskMoveView> {
    Ok(Json(moves.view(name.as_str())?))
}

/// Cancel it
///
/// If it is not too late; the VM keeps the disk that it has then, and nothing is left of the new one.
#[utoipa::path(post, path = "/v1/vms/{name}/disk-move/cancel", tag = tags::VMS, params(("name" = VmName, Path)), responses(
    (status = 200, description = "The agent has heard.", body = DiskMoveView),
    (status = 404, description = "None since the agent has started, or no host of that name.", body = Problem),
    (status = 409, description = "It is over.", body = Problem),
))]
async fn cancel_disk_move(
    State(moves): State<Arc<DiskMoves>>,
    Extension(caller): Extension<Caller>,
    Segment(name): Segment<VmName>,
) -> Answer<DiskMoveView> {
    authorise(&caller, Operation::ManageVms)?;
    Ok(Json(moves.cancel(name.as_str())?))
}
