//! Why an act on a VM did not succeed.

use std::fmt;

/// How an act on a VM ended, as far as anybody needs to distinguish failures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmErrorKind {
    /// The hypervisor did not answer in time. The act may still take effect.
    Mute,
    /// The hypervisor closed its control connection, so whether the act took effect is not known.
    Gone,
    /// The hypervisor refused.
    Refused,
    /// No such VM runs here: only remains, if anything.
    NotRunning,
    /// The guest must not run yet: its memory is not complete.
    MemoryIncomplete,
    /// The guest did not react to its power button.
    GuestIgnores,
    /// Something else listens at that port.
    PortTaken,
    /// Anything else.
    Failed,
}

/// Why an act on a VM did not succeed, in words for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmError {
    /// What kind of failure it is.
    pub kind: VmErrorKind,
    message: String,
}

impl VmError {
    /// A failure of this kind, with what is wrong, where, and what to do.
    pub fn new(kind: VmErrorKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string() }
    }

    /// A failure that nobody needs to tell from others.
    pub fn failed(message: impl fmt::Display) -> Self {
        Self::new(VmErrorKind::Failed, message)
    }

    /// Whether the hypervisor did not answer in time.
    pub fn is_mute(&self) -> bool {
        self.kind == VmErrorKind::Mute
    }
}

impl fmt::Display for VmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for VmError {}
