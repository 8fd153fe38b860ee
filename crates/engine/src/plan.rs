//! The plan of one migration: how memory travels, over which paths, and why. An immutable value, shown by `--dry-run`;
//! its executor decides nothing.
//!
//! The type has no form for what cannot be, such as post-copy over many connections or a plan without a path. What
//! another host sends is checked where it is read (`plan/wire.rs`), and nowhere else.

mod compression;
pub mod disks;
mod error;
mod incapable;
mod limiting;
mod making;
mod narrowing;
mod paths;
mod rdma;
mod reason;
mod relay;
mod request;
mod route;
mod spreading;
pub(crate) mod standby;
#[cfg(test)]
mod tests;
mod transfer;
mod wire;

use serde::{Deserialize, Serialize};

pub use self::error::PlanError;
pub use self::incapable::{Incapable, NoPostCopy};
pub use self::limiting::LimitKeeper;
pub use self::making::{MULTICHANNEL_CONNECTIONS, plan};
pub use self::paths::Paths;
pub(crate) use self::rdma::NoRdma;
pub use self::reason::Reason;
pub use self::relay::Relay;
pub use self::request::PlanRequest;
pub(crate) use self::route::no_route;
pub use self::transfer::{Packing, Parallel, Spread, Transfer, ZstdLevel};
use self::wire::WirePlan;
use crate::option::{MigrationOption, RequestedOption};
use crate::paths::path::Path;
use crate::storage::DiskCopy;
use crate::transfer::encryption::Encryption;

/// How one migration will be done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "WirePlan", into = "WirePlan")]
pub struct Plan {
    /// What was asked for.
    pub requested_option: RequestedOption,
    /// How memory travels.
    pub transfer: Transfer,
    /// Whether the connections are encrypted, and why: by a relay, or with post-copy by the hypervisor.
    pub encryption: Encryption,
    /// Paths that will carry the migration. With [`Spread::InTurn`] only one does: the first that connects.
    pub paths: Paths,
    /// What keeps it within a bandwidth limit.
    pub limit_keeper: LimitKeeper,
    /// The VM's disks that are copied, before its memory; the target sees all others.
    pub disks: Vec<DiskCopy>,
    /// Why it is not done as it was asked for, or why `auto` chose this.
    pub reasons: Vec<Reason>,
}

impl Plan {
    /// The same plan, its paths seen from the other end.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self { paths: self.paths.reversed(), ..self.clone() }
    }

    /// What people call it.
    pub fn option(&self) -> MigrationOption {
        self.transfer.option()
    }

    /// How the connections use the paths.
    pub fn spread(&self) -> Spread {
        self.transfer.spread()
    }

    /// Whether the VM may run on the target before all its memory is there, where it does not converge. From then on
    /// until the rest has followed, it needs both hosts.
    pub fn post_copy(&self) -> bool {
        self.transfer == Transfer::OneConnection { post_copy: true }
    }

    /// Whether a relay on either host packs the connections, as far as that makes them faster.
    pub fn is_compressed(&self) -> bool {
        self.option() == MigrationOption::Compression
    }

    /// What a relay on either host does between QEMU and the network; none where there is no relay.
    pub fn relay(&self) -> Option<Relay> {
        let encrypts = self.encryption.is_encrypted && !self.is_encrypted_by_hypervisor();
        match (self.is_compressed(), encrypts) {
            (true, true) => Some(Relay::PacksAndEncrypts),
            (true, false) => Some(Relay::Packs),
            (false, true) => Some(Relay::Encrypts),
            (false, false) => None,
        }
    }

    /// Whether the hypervisor encrypts it, by its own TLS. With post-copy the VM is lost if a part of its memory is, and a
    /// relay would end with its agent.
    pub fn is_encrypted_by_hypervisor(&self) -> bool {
        self.encryption.is_encrypted && self.post_copy()
    }

    /// The paths that carry at once.
    pub fn carrying(&self) -> impl Iterator<Item = &Path> {
        self.spread().carrying(&self.paths)
    }

    /// What they carry together, in Mb/s; absent where a speed is not known.
    pub fn carried_mbps(&self) -> Option<u64> {
        self.carrying().map(|path| path.speed_mbps).sum()
    }

    /// Its reasons, in words; none where there is nothing to say.
    pub fn reason(&self) -> Option<String> {
        let words = self.reasons.iter().map(ToString::to_string);
        words.reduce(|one, other| format!("{one}; {other}"))
    }
}
