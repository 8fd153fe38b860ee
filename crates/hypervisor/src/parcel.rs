//! What one operation of a hypervisor hands to the next one, on the other host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most bytes of each part. libvirt takes no longer string (`REMOTE_STRING_MAX`); those of ordinary VMs have some 10 kB.
const PART_BYTES_MAX: usize = 512 << 10;

/// What one act of a hypervisor hands to the next one, on the other host. The agents carry it and do not read it. QEMU that
/// is driven directly hands nothing over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Parcel {
    /// What the VM is, in the hypervisor's words: a domain's XML.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// What only the hypervisor understands.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cookie: String,
}

/// A parcel that no honest hypervisor hands over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "what the other host's hypervisor hands over has {bytes} bytes, and at most {PART_BYTES_MAX} are accepted"
)]
pub struct ParcelTooLong {
    bytes: usize,
}

impl Parcel {
    /// Whether nothing is handed over.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses one that is longer than any of an ordinary VM.
    pub fn check(&self) -> Result<(), ParcelTooLong> {
        let bytes = self.cookie.len().max(self.description.as_ref().map_or(0, String::len));
        if bytes <= PART_BYTES_MAX { Ok(()) } else { Err(ParcelTooLong { bytes }) }
    }
}
