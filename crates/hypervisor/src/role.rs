//! The purpose of a VM's process.

/// What a new VM's process is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Boots the guest.
    Fresh,
    /// Waits for the state of a guest that runs elsewhere.
    Incoming,
}
