//! How far the memory has got, by the hypervisor.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What the hypervisor says of a transfer, reduced to what decisions need.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Transferred {
    /// Bytes sent since the start that the target's host has acknowledged.
    pub sent_bytes: u64,
    /// Bytes of memory still to go through in this round.
    pub remaining_bytes: u64,
    /// Bytes of memory in all.
    pub total_bytes: u64,
    /// Rounds begun.
    pub rounds: u64,
    /// Bytes that the hypervisor has sent since the start, before anybody packs them.
    pub passed_bytes: u64,
    /// How fast the VM's memory got dirty, as the hypervisor saw recently at the end of a round.
    pub dirty_bytes_per_s: u64,
}

impl Transferred {
    /// In the first round all of it is dirty, and nobody has looked yet.
    pub(crate) fn dirty_bytes_per_ms(&self) -> f64 {
        if self.rounds > 1 { self.dirty_bytes_per_s as f64 / 1e3 } else { 0.0 }
    }
}
