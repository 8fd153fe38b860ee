//! What a caller asks for in a plan.

use crate::option::RequestedOption;
use crate::transfer::relayed::Compressible;

/// What a caller asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PlanRequest {
    /// How to send memory.
    pub option: RequestedOption,
    /// Whether to encrypt it, whatever the hosts say.
    pub encrypt: bool,
    /// Whether the VM may run on the target before all its memory is there.
    pub post_copy: bool,
    /// What the VM's memory is to codecs, where it was looked at. Where not, nobody's memory is compressed without
    /// being asked for.
    pub memory: Option<Compressible>,
    /// The share of it that holds nothing but zeros, where it was looked at.
    pub zero_share: Option<f64>,
    /// What packing has saved between the two hosts, in Mb/s; absent where cores never were the limit.
    pub saved_mbps: Option<f64>,
    /// How much longer than predicted compressed migrations took, beside others; absent where none was.
    pub compressed_slower: Option<f64>,
}

impl From<RequestedOption> for PlanRequest {
    fn from(option: RequestedOption) -> Self {
        Self { option, ..Self::default() }
    }
}
