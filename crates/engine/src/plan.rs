//! The plan of one migration: how memory travels, over which paths, and why. An immutable value, shown by `--dry-run`;
//! its executor decides nothing.
//!
//! The type has no form for what cannot be, such as post-copy over many connections, a relay's limit that somebody else
//! keeps, a route for connections that nobody watches, a reason to encrypt what goes in the clear, or a plan without a path. What another host sends is checked where it is read (`plan/wire.rs`), and nowhere else.

mod compression;
pub mod disks;
mod draft;
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
pub use self::transfer::{Packing, Parallel, Protection, Spread, Transfer, ZstdLevel};
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
    /// How memory travels, and why it is encrypted, or is not.
    pub transfer: Transfer,
    /// Paths that will carry the migration. With [`Spread::InTurn`] only one does: the first that connects.
    pub paths: Paths,
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
        matches!(self.transfer, Transfer::PostCopy { .. })
    }

    /// Whether a relay on either host packs the connections, as far as that makes them faster.
    pub fn is_compressed(&self) -> bool {
        self.option() == MigrationOption::Compression
    }

    /// What a relay on either host does between QEMU and the network; none where there is no relay.
    pub fn relay(&self) -> Option<Relay> {
        self.transfer.relay()
    }

    /// Whether the connections are encrypted: by a relay, or with post-copy by the hypervisor.
    pub fn is_encrypted(&self) -> bool {
        self.encryption().is_encrypted()
    }

    /// The same, and why.
    pub fn encryption(&self) -> Encryption {
        self.transfer.encryption()
    }

    /// Whether the hypervisor encrypts it.
    pub fn is_encrypted_by_hypervisor(&self) -> bool {
        matches!(self.transfer, Transfer::PostCopy { encryption: Encryption::Encrypted(_), .. })
    }

    /// What keeps it within a bandwidth limit.
    pub fn limit_keeper(&self) -> LimitKeeper {
        self.transfer.limit_keeper()
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
