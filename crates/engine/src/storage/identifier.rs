//! The name by which a block device is known on all hosts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Name that a block device itself has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceIdentifier {
    /// What assigned it: one device may have identifiers of several kinds.
    pub kind: DeviceIdentifierKind,
    /// The name.
    pub value: String,
}

/// Where the name of a block device comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceIdentifierKind {
    /// UUID of a mapping: a logical volume, or a device with several paths.
    DeviceMapper,
    /// WWID of an NVM Express namespace.
    Nvme,
    /// WWID of a SCSI device.
    Scsi,
}
