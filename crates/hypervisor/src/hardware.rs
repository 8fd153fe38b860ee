//! What runs guest instructions: the CPU or a translator.

use serde::{Deserialize, Serialize};

/// What runs guest instructions, decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hardware {
    /// The CPU's virtualisation.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Hardware {
    /// QEMU's name for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}
