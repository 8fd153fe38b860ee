//! One function a path: reads the request, checks the caller, calls the part that does it. What the
//! OpenAPI document says of a path stands at its function, and only there.

pub(super) mod bandwidth;
pub(super) mod between_agents;
pub(super) mod checks;
pub(super) mod disk_moves;
pub(super) mod disks;
pub(super) mod drain;
pub(super) mod fixes;
pub(crate) mod fleet;
pub(super) mod hosts;
pub(super) mod journal;
pub(super) mod migrations;
pub(super) mod vms;

use axum::Json;

use super::error::ApiError;

type Answer<T> = Result<Json<T>, ApiError>;
