//! The disks that move with a VM in a drain, and which devices their copies keep busy.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::storage::{DiskCopy, allowance_ms};

/// A disk that is copied with a VM, and the devices between which it goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainedDisk {
    /// What is copied where to.
    #[serde(flatten)]
    pub copy: DiskCopy,
    /// Number of the device that it is read from, on its host.
    pub from_device: u64,
    /// Number of the device of the file system that takes it, on the target.
    pub to_device: u64,
}

/// A file system of a target, on which disks may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileSystemView {
    /// Number of its device there.
    pub device: u64,
    /// What is free and promised to nobody.
    pub free_bytes: u64,
}

/// From one device to another: copies between the same two share what these can do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DevicePair {
    target: String,
    from_device: u64,
    to_device: u64,
}

/// Between which devices these are copied.
pub(super) fn device_pairs(target: &str, disks: &[DrainedDisk]) -> BTreeSet<DevicePair> {
    let pair = |disk: &DrainedDisk| DevicePair {
        target: target.to_owned(),
        from_device: disk.from_device,
        to_device: disk.to_device,
    };
    disks.iter().map(pair).collect()
}

/// What their copies have to carry. Of an image that stands on others it is not known, and at most its size.
pub(super) fn bytes(disks: &[DrainedDisk]) -> u64 {
    disks.iter().fold(0, |sum, disk| sum.saturating_add(disk.copy.room_bytes()))
}

/// How much longer a migration may take that copies these.
pub fn longer_ms(disks: &[DrainedDisk]) -> f64 {
    disks.iter().map(|disk| allowance_ms(std::slice::from_ref(&disk.copy))).sum()
}
