//! How memory travels from one QEMU to the other.

use std::num::NonZeroU8;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::limiting::LimitKeeper;
use super::relay::Relay;
use crate::option::MigrationOption;
use crate::paths::path::Path;
use crate::transfer::encryption::{Encryption, WhyClear, WhyEncrypted};

/// How memory travels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transfer {
    /// Over one connection, by the first path that connects.
    OneConnection(Protection),
    /// The same, and the VM may run on the target before all its memory is there. QEMU 10.0 refuses that together with
    /// multifd, 7.2 does not say what comes of it, and only QEMU may change the bytes.
    PostCopy {
        /// Whether the hypervisor encrypts it, by its own TLS. The VM is lost if a part of its memory is, and a relay
        /// would end with its agent.
        encryption: Encryption,
        /// Encrypted or not, there is no relay that would keep a limit.
        limit_keeper: LimitKeeper,
    },
    /// Over many at once.
    Parallel(Parallel),
    /// The source's network card writes into the target's memory, by one path. Nothing else goes with it: no encryption,
    /// no relay, no bandwidth limit, no post-copy, no second path.
    Rdma(WhyClear),
}

/// Many connections at once: QEMU's multifd. Only those go by a route that the agents pace: of the others, nobody sees
/// which path each has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parallel {
    channels: NonZeroU8,
    spread: Spread,
    packing: Packing,
}

impl Parallel {
    /// Where such connections cannot go by a route, and are to, none.
    pub fn new(channels: NonZeroU8, spread: Spread, packing: Packing) -> Option<Self> {
        let is_paced = packing.limit_keeper() == LimitKeeper::Agents;
        (is_paced || spread == Spread::InTurn).then_some(Self { channels, spread, packing })
    }

    /// Connections for memory besides QEMU's main one.
    pub fn channels(&self) -> NonZeroU8 {
        self.channels
    }

    /// What packs memory.
    pub fn packing(&self) -> &Packing {
        &self.packing
    }
}

/// What packs memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Packing {
    /// Nothing: it is sent as it is.
    Nobody(Protection),
    /// QEMU itself, all pages alike. To compare with.
    ByHypervisor(ZstdLevel, Protection),
    /// A relay on either host, as far as that makes the connections faster; and whether it encrypts, too.
    ByRelay(Encryption),
}

/// Whether connections that no relay packs are encrypted. A relay does that, and keeps the limit of what it carries; so
/// somebody else keeps it only in the clear.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Protection {
    /// By a relay on either host.
    Encrypted(WhyEncrypted),
    /// Without a relay.
    Clear(WhyClear, LimitKeeper),
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
    pub(super) fn option(&self) -> MigrationOption {
        match self {
            Self::OneConnection(_) | Self::PostCopy { .. } => MigrationOption::Tcp,
            Self::Rdma(_) => MigrationOption::Direct,
            Self::Parallel(Parallel { packing, .. }) => match packing {
                Packing::Nobody(_) => MigrationOption::Multichannel,
                Packing::ByRelay(_) => MigrationOption::Compression,
                Packing::ByHypervisor(ZstdLevel::One, _) => MigrationOption::QemuZstd1,
                Packing::ByHypervisor(ZstdLevel::Three, _) => MigrationOption::QemuZstd3,
            },
        }
    }

    pub(super) fn spread(&self) -> Spread {
        self.parallel().map_or(Spread::InTurn, |parallel| parallel.spread)
    }

    /// How it goes over many connections; none where it goes over one.
    pub fn parallel(&self) -> Option<&Parallel> {
        match self {
            Self::OneConnection(_) | Self::PostCopy { .. } | Self::Rdma(_) => None,
            Self::Parallel(parallel) => Some(parallel),
        }
    }

    /// Whether the source's network card writes into the target's memory.
    pub fn is_by_rdma(&self) -> bool {
        matches!(self, Self::Rdma(_))
    }

    pub(super) fn relay(&self) -> Option<Relay> {
        match self {
            Self::OneConnection(protection) => protection.relay(),
            Self::Parallel(Parallel { packing, .. }) => packing.relay(),
            Self::PostCopy { .. } | Self::Rdma(_) => None,
        }
    }

    pub(super) fn encryption(&self) -> Encryption {
        match self {
            Self::OneConnection(protection) => protection.encryption(),
            Self::PostCopy { encryption, .. } => encryption.clone(),
            Self::Parallel(Parallel { packing, .. }) => packing.encryption(),
            Self::Rdma(why) => Encryption::Clear(why.clone()),
        }
    }

    pub(super) fn limit_keeper(&self) -> LimitKeeper {
        match self {
            Self::OneConnection(protection) => protection.limit_keeper(),
            Self::PostCopy { limit_keeper, .. } => *limit_keeper,
            Self::Parallel(Parallel { packing, .. }) => packing.limit_keeper(),
            Self::Rdma(_) => LimitKeeper::Nobody,
        }
    }
}

impl Packing {
    fn relay(&self) -> Option<Relay> {
        match self {
            Self::Nobody(protection) | Self::ByHypervisor(_, protection) => protection.relay(),
            Self::ByRelay(Encryption::Encrypted(_)) => Some(Relay::PacksAndEncrypts),
            Self::ByRelay(Encryption::Clear(_)) => Some(Relay::Packs),
        }
    }

    fn encryption(&self) -> Encryption {
        match self {
            Self::Nobody(protection) | Self::ByHypervisor(_, protection) => protection.encryption(),
            Self::ByRelay(encryption) => encryption.clone(),
        }
    }

    fn limit_keeper(&self) -> LimitKeeper {
        match self {
            Self::Nobody(protection) | Self::ByHypervisor(_, protection) => protection.limit_keeper(),
            Self::ByRelay(_) => LimitKeeper::Agents,
        }
    }
}

impl Protection {
    /// Of what goes through no relay unless one encrypts it.
    pub fn of(encryption: Encryption, keeper_in_clear: LimitKeeper) -> Self {
        match encryption {
            Encryption::Encrypted(why) => Self::Encrypted(why),
            Encryption::Clear(why) => Self::Clear(why, keeper_in_clear),
        }
    }

    fn relay(&self) -> Option<Relay> {
        matches!(self, Self::Encrypted(_)).then_some(Relay::Encrypts)
    }

    fn encryption(&self) -> Encryption {
        match self {
            Self::Encrypted(why) => Encryption::Encrypted(why.clone()),
            Self::Clear(why, _) => Encryption::Clear(why.clone()),
        }
    }

    fn limit_keeper(&self) -> LimitKeeper {
        match self {
            Self::Encrypted(_) => LimitKeeper::Agents,
            Self::Clear(_, limit_keeper) => *limit_keeper,
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
