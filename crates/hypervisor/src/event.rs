//! What a hypervisor reports without being asked.

use std::time::SystemTime;

use crate::state::MigrationStatus;

/// Something that has happened to a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmEvent {
    /// What.
    pub what: Happening,
    /// When, by the host's clock; absent where the hypervisor does not know.
    pub at: Option<SystemTime>,
}

/// What may happen to a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happening {
    /// Its migration stands somewhere else.
    Migration(MigrationStatus),
    /// Its guest runs again.
    Resumed,
    /// It is about to end.
    Ending,
    /// Anything else, by the hypervisor's name for it.
    Other(String),
}
