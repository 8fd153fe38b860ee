//! How memory travels from one QEMU to the other.

use std::num::NonZeroU8;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::limiting::LimitKeeper;
use super::relay::Relay;
use crate::option::MigrationOption;
use crate::paths::path::Path;

/// How memory travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// Over one connection, by the first path that connects.
    OneConnection(Protection),
    /// The same, and the VM may run on the target before all its memory is there. QEMU 10.0 refuses that together with
    /// multifd, 7.2 does not say what comes of it, and only QEMU may change the bytes.
    PostCopy {
        /// Whether the hypervisor encrypts it, by its own TLS. The VM is lost if a part of its memory is, and a relay
        /// would end with its agent.
        is_encrypted: bool,
        /// Encrypted or not, there is no relay that would keep a limit.
        limit_keeper: LimitKeeper,
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
    /// What packs memory.
    pub packing: Packing,
}

/// What packs memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Nothing: it is sent as it is.
    Nobody(Protection),
    /// QEMU itself, all pages alike. To compare with.
    ByHypervisor(ZstdLevel, Protection),
    /// A relay on either host, as far as that makes the connections faster.
    ByRelay {
        /// Whether it encrypts, too.
        is_encrypted: bool,
    },
}

/// Whether connections that no relay packs are encrypted. A relay does that, and keeps the limit of what it carries; so
/// somebody else keeps it only in the clear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// By a relay on either host.
    Encrypted,
    /// Without a relay.
    Clear(LimitKeeper),
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
            Self::OneConnection(_) | Self::PostCopy { .. } => MigrationOption::Tcp,
            Self::Rdma => MigrationOption::Direct,
            Self::Parallel(Parallel { packing, .. }) => match packing {
                Packing::Nobody(_) => MigrationOption::Multichannel,
                Packing::ByRelay { .. } => MigrationOption::Compression,
                Packing::ByHypervisor(ZstdLevel::One, _) => MigrationOption::QemuZstd1,
                Packing::ByHypervisor(ZstdLevel::Three, _) => MigrationOption::QemuZstd3,
            },
        }
    }

    pub(super) fn spread(self) -> Spread {
        self.parallel().map_or(Spread::InTurn, |parallel| parallel.spread)
    }

    /// How it goes over many connections; none where it goes over one.
    pub fn parallel(self) -> Option<Parallel> {
        match self {
            Self::OneConnection(_) | Self::PostCopy { .. } | Self::Rdma => None,
            Self::Parallel(parallel) => Some(parallel),
        }
    }

    pub(super) fn relay(self) -> Option<Relay> {
        match self {
            Self::OneConnection(protection) => protection.relay(),
            Self::Parallel(Parallel { packing, .. }) => packing.relay(),
            Self::PostCopy { .. } | Self::Rdma => None,
        }
    }

    pub(super) fn is_encrypted(self) -> bool {
        match self {
            Self::PostCopy { is_encrypted, .. } => is_encrypted,
            Self::OneConnection(_) | Self::Parallel(_) | Self::Rdma => {
                self.relay().is_some_and(Relay::encrypts)
            }
        }
    }

    pub(super) fn limit_keeper(self) -> LimitKeeper {
        match self {
            Self::OneConnection(protection) => protection.limit_keeper(),
            Self::PostCopy { limit_keeper, .. } => limit_keeper,
            Self::Parallel(Parallel { packing, .. }) => packing.limit_keeper(),
            Self::Rdma => LimitKeeper::Nobody,
        }
    }
}

impl Packing {
    fn relay(self) -> Option<Relay> {
        match self {
            Self::Nobody(protection) | Self::ByHypervisor(_, protection) => protection.relay(),
            Self::ByRelay { is_encrypted: true } => Some(Relay::PacksAndEncrypts),
            Self::ByRelay { is_encrypted: false } => Some(Relay::Packs),
        }
    }

    fn limit_keeper(self) -> LimitKeeper {
        match self {
            Self::Nobody(protection) | Self::ByHypervisor(_, protection) => protection.limit_keeper(),
            Self::ByRelay { .. } => LimitKeeper::Agents,
        }
    }
}

impl Protection {
    /// Of what goes through no relay unless one encrypts it.
    pub fn of(is_encrypted: bool, keeper_in_clear: LimitKeeper) -> Self {
        if is_encrypted { Self::Encrypted } else { Self::Clear(keeper_in_clear) }
    }

    fn relay(self) -> Option<Relay> {
        (self == Self::Encrypted).then_some(Relay::Encrypts)
    }

    fn limit_keeper(self) -> LimitKeeper {
        match self {
            Self::Encrypted => LimitKeeper::Agents,
            Self::Clear(limit_keeper) => limit_keeper,
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
