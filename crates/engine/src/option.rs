//! The four performance options, and the choice between them.

use serde::{Deserialize, Serialize};

/// How memory travels: the four options of `reference.md`'s system, as presets of codec and paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MigrationOption {
    /// One connection over one path; the next path only if the first cannot be connected.
    Tcp,
    /// Compressed on its way.
    Compression,
    /// Many connections over every path, by weighted multipath routes.
    Multichannel,
    /// Remote direct memory access.
    Direct,
}

/// What a caller asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestedOption {
    /// The best that both hosts have.
    #[default]
    Auto,
    /// See [`MigrationOption::Tcp`].
    Tcp,
    /// See [`MigrationOption::Compression`].
    Compression,
    /// See [`MigrationOption::Multichannel`].
    Multichannel,
    /// See [`MigrationOption::Direct`].
    Direct,
}
