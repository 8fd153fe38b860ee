//! A sample of a running VM's memory.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::relayed::Compressible;

/// What a sample of a running VM's memory has shown.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemorySample {
    /// Share of pages that hold nothing but zeros, or were never touched: 0 to 1.
    pub zero_share: f64,
    /// How fast clean pages get dirty.
    pub dirty_bytes_per_s: u64,
    /// How much gets dirty again and again; the memory's size where no end of it was seen.
    pub dirty_set_bytes: u64,
    /// The part of it, zeros left out, that shrinks; absent where that is not known.
    #[serde(default)]
    pub compressible: Option<Compressible>,
}
