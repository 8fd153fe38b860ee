//! The four performance options, and the choice between them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

/// How memory travels: the four options of `reference.md`'s system, as presets of codec and paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MigrationOption {
    /// One connection over one path; the next path only if the first cannot be connected.
    Tcp,
    /// Compressed on its way.
    Compression,
    /// Many connections over every path, by weighted multipath routes; where `auto` takes it only to encrypt on several
    /// cores, over one path and without a route.
    Multichannel,
    /// Remote direct memory access.
    Direct,
    /// Many connections over every path, packed by QEMU itself, all pages alike, with zstd at level 1. To
    /// compare with.
    #[serde(rename = "qemu-zstd-1")]
    QemuZstd1,
    /// The same at level 3.
    #[serde(rename = "qemu-zstd-3")]
    QemuZstd3,
}

/// What a caller asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
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
    /// See [`MigrationOption::QemuZstd1`].
    #[serde(rename = "qemu-zstd-1")]
    QemuZstd1,
    /// See [`MigrationOption::QemuZstd3`].
    #[serde(rename = "qemu-zstd-3")]
    QemuZstd3,
}

impl fmt::Display for MigrationOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Compression => "compression",
            Self::Multichannel => "multichannel",
            Self::Direct => "direct",
            Self::QemuZstd1 => "qemu-zstd-1",
            Self::QemuZstd3 => "qemu-zstd-3",
        })
    }
}

impl RequestedOption {
    /// All that can be asked for.
    pub const ALL: [Self; 7] = [
        Self::Auto,
        Self::Tcp,
        Self::Compression,
        Self::Multichannel,
        Self::Direct,
        Self::QemuZstd1,
        Self::QemuZstd3,
    ];

    /// Whether the agents may compress: because it was asked for, or where they find that it pays.
    pub fn may_compress(self) -> bool {
        matches!(self, Self::Auto | Self::Compression)
    }

    /// The option that is asked for by its name; none if the choice is left to Drainpipe.
    pub fn named(self) -> Option<MigrationOption> {
        match self {
            Self::Auto => None,
            Self::Tcp => Some(MigrationOption::Tcp),
            Self::Compression => Some(MigrationOption::Compression),
            Self::Multichannel => Some(MigrationOption::Multichannel),
            Self::Direct => Some(MigrationOption::Direct),
            Self::QemuZstd1 => Some(MigrationOption::QemuZstd1),
            Self::QemuZstd3 => Some(MigrationOption::QemuZstd3),
        }
    }
}

impl fmt::Display for RequestedOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.named() {
            None => f.write_str("auto"),
            Some(option) => option.fmt(f),
        }
    }
}

/// A word that is no option.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "no migration option `{0}`: use auto, tcp, compression, multichannel or direct; for comparisons, \
    qemu-zstd-1 or qemu-zstd-3"
)]
pub struct UnknownOption(pub String);

impl FromStr for RequestedOption {
    type Err = UnknownOption;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|option| option.to_string() == word)
            .ok_or_else(|| UnknownOption(word.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_read_as_it_is_written() {
        for option in RequestedOption::ALL {
            assert_eq!(option.to_string().parse(), Ok(option));
            assert_eq!(serde_json::to_value(option).unwrap(), option.to_string());
        }
        assert!("smb".parse::<RequestedOption>().is_err());
    }
}
