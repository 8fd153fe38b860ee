//! Disks that move to another place on their host while their VMs run.

use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskName, DiskProgress};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Which disk is to move, and where to.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveDiskRequest {
    /// Which of the VM's disks.
    #[schema(value_type = String, example = "vda")]
    pub disk: DiskName,
    /// A path where nothing is yet.
    pub to: String,
}

/// A disk that moves, or has moved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskMoveView {
    /// The move.
    pub id: String,
    /// The VM.
    pub vm: String,
    /// Which of its disks.
    #[schema(value_type = String, example = "vda")]
    pub disk: DiskName,
    /// Where it was.
    pub from: String,
    /// Where it goes.
    pub to: String,
    /// How far the copy is; absent before it has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<DiskProgress>,
    /// How it has ended; absent until it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<DiskMoveResult>,
}

/// How the move of a disk has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskMoveResult {
    /// Which disk the VM has.
    pub outcome: DiskMoveOutcome,
    /// Why it has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Problem>,
    /// From the request to the end; of a move that an earlier agent began, from when this one took it up.
    pub total_ms: f64,
    /// What was gone through, with what the guest wrote meanwhile.
    pub copied_bytes: u64,
    /// Where the old disk is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<String>,
}

/// Which disk a VM has after a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskMoveOutcome {
    /// The new one.
    Completed,
    /// The old one.
    Failed,
    /// The old one, as somebody cancelled.
    Cancelled,
}
