//! What must never be.

use std::fmt;

/// Something that must not be, in words for people.
#[derive(Debug, Clone)]
pub(super) enum Violation {
    /// Two copies of a VM ran at the same time.
    TwoCopies(String),
    /// A VM's QEMU ended while the guest ran, and no fault did it.
    Lost(String),
    /// A VM was silent for longer than the faults and the promises allow.
    Silent(String),
    /// What was said of a VM was not so.
    Untrue(String),
    /// A migration failed that no fault may end.
    Failed(String),
    /// Something does not come to an end.
    Endless(String),
    /// Memory was changed on its way, or a program of ours came to a bad end.
    Broken(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TwoCopies(what) => write!(f, "two copies ran at once: {what}"),
            Self::Lost(what) => write!(f, "a QEMU ended while its guest ran, and no fault did it: {what}"),
            Self::Silent(what) | Self::Untrue(what) | Self::Failed(what) | Self::Broken(what) => {
                f.write_str(what)
            }
            Self::Endless(what) => write!(f, "does not settle: {what}"),
        }
    }
}
