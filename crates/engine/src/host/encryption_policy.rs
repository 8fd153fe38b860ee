//! A host's own rule about encryption, before anybody asks for it.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a host says of migrations from and to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EncryptionPolicy {
    /// Encrypted, unless both hosts trust every network that is used.
    #[default]
    Required,
    /// Encrypted where that is asked for.
    Allowed,
    /// Encrypted only where the other host requires it; it may not be asked for.
    Off,
}

impl fmt::Display for EncryptionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Required => "required",
            Self::Allowed => "allowed",
            Self::Off => "off",
        })
    }
}
