//! How memory travels from one QEMU to the other.

use std::num::NonZeroU8;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::option::MigrationOption;
use crate::paths::path::Path;

/// How memory travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Over one connection, by the first path that connects.
    OneConnection {
        /// Whether the VM may run on the target before all its memory is there. QEMU 10.0 refuses that together with
        /// multifd, 7.2 does not say what comes of it, and only QEMU may change the bytes.
        post_copy: bool,
    },
    /// Over many at once.
    Parallel(Parallel),
    /// The source's network card writes into the target's memory, by one path. Nothing else goes with it: no encryption,
    /// no relay, no bandwidth limit, no post-copy, no second path.
    Rdma,
}

/// Many connections at once: QEMU's multifd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parallel {
    /// Connections for memory besides QEMU's main one.
    pub channels: NonZeroU8,
    /// How they use the paths.
    pub spread: Spread,
    /// What packs memory; none if it is sent as it is.
    pub packing: Option<Packing>,
}

/// What packs memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// A relay on either host, as far as that makes the connections faster.
    ByRelay,
    /// QEMU itself, all pages alike. To compare with.
    ByHypervisor(ZstdLevel),
}

/// How hard QEMU packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZstdLevel {
    /// [`MigrationOption::QemuZstd1`]
    One,
    /// [`MigrationOption::QemuZstd3`]
    Three,
}

/// How connections use paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// The first path that connects carries everything.
    InTurn,
    /// All paths carry, by a weighted multipath route between the hosts' migration addresses.
    Routed,
}

impl Transfer {
    /// What people call it.
    pub(super) fn option(self) -> MigrationOption {
        match self {
            Self::OneConnection { .. } => MigrationOption::Tcp,
            Self::Rdma => MigrationOption::Direct,
            Self::Parallel(Parallel { packing: None, .. }) => MigrationOption::Multichannel,
            Self::Parallel(Parallel { packing: Some(packing), .. }) => match packing {
                Packing::ByRelay => MigrationOption::Compression,
                Packing::ByHypervisor(ZstdLevel::One) => MigrationOption::QemuZstd1,
                Packing::ByHypervisor(ZstdLevel::Three) => MigrationOption::QemuZstd3,
            },
        }
    }

    pub(super) fn spread(self) -> Spread {
        self.parallel().map_or(Spread::InTurn, |parallel| parallel.spread)
    }

    /// How it goes over many connections; none where it goes over one.
    pub fn parallel(self) -> Option<Parallel> {
        match self {
            Self::OneConnection { .. } | Self::Rdma => None,
            Self::Parallel(parallel) => Some(parallel),
        }
    }
}

impl ZstdLevel {
    /// As zstd counts them.
    pub fn number(self) -> u8 {
        match self {
            Self::One => 1,
            Self::Three => 3,
        }
    }
}

impl Spread {
    /// Those of these paths that carry at once.
    pub(super) fn carrying(self, paths: &[Path]) -> impl Iterator<Item = &Path> {
        let most = if self == Self::InTurn { 1 } else { paths.len() };
        paths.iter().filter(|path| !path.is_standby).take(most)
    }
}
