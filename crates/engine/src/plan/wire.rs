//! A plan in JSON, between agents and for users: flat, as in 0.1.0. JSON can describe impossible plans, which are
//! refused when they are read.

use std::borrow::Cow;
use std::num::NonZeroU8;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use super::paths::NothingCarries;
use super::{LimitKeeper, Packing, Parallel, Plan, Protection, Reason, Spread, Transfer, ZstdLevel};
use crate::option::{MigrationOption, RequestedOption};
use crate::paths::path::Path;
use crate::storage::DiskCopy;
use crate::transfer::encryption::Encryption;

/// How one migration will be done.
#[derive(Serialize, Deserialize, ToSchema)]
pub(super) struct WirePlan {
    /// What was asked for.
    requested_option: RequestedOption,
    /// What will be used.
    option: MigrationOption,
    /// Why `option` is not what was asked for, or why `auto` chose it.
    reason: Option<String>,
    /// Paths that will carry the migration. With [`Spread::InTurn`] only one does: the first that
    /// connects.
    paths: Vec<Path>,
    /// How the connections use the paths.
    spread: Spread,
    /// Connections for memory besides QEMU's main one; absent for a single stream.
    multifd_channels: Option<u8>,
    /// Whether a relay on either host packs the connections, as far as that makes them faster.
    #[serde(default)]
    is_compressed: bool,
    /// Whether the connections are encrypted, and why: by that relay, or with post-copy by the hypervisor.
    #[serde(default)]
    encryption: Encryption,
    /// Whether the VM may run on the target before all its memory is there, where it does not converge. From then on
    /// until the rest has followed, it needs both hosts.
    #[serde(default)]
    post_copy: bool,
    /// What keeps it within a bandwidth limit; absent for the agents.
    #[serde(default, skip_serializing_if = "LimitKeeper::is_agents")]
    limit_keeper: LimitKeeper,
    /// The VM's disks that are copied, before its memory; the target sees all others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    disks: Vec<DiskCopy>,
}

/// What cannot be, and a plan says all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum Contradiction {
    #[error(transparent)]
    Paths(#[from] NothingCarries),
    #[error("a plan by {0}, which goes over one connection, with multifd_channels")]
    ManyConnections(MigrationOption),
    #[error("a plan by {0}, which goes over many connections, without multifd_channels")]
    OneConnection(MigrationOption),
    #[error("a plan by {0}, which goes over one connection and so by one path, that is routed")]
    Routed(MigrationOption),
    #[error(
        "a plan by {0} that is routed, with a limit that somebody else keeps: no agent sees which path each connection uses"
    )]
    RoutedUnpaced(MigrationOption),
    #[error("a plan by {0} that is compressed: that is another option")]
    Compressed(MigrationOption),
    #[error("a plan by {0} that is not compressed")]
    NotCompressed(MigrationOption),
    #[error("a plan by {0} with post-copy, which goes over one connection and is not compressed")]
    PostCopy(MigrationOption),
    #[error("a plan by {0} through the agents, with a limit that somebody else keeps")]
    LimitOfRelay(MigrationOption),
    #[error("a plan by {0} that is encrypted, which nobody does to RDMA")]
    EncryptedRdma(MigrationOption),
    #[error("a plan by {0} whose limit somebody keeps, which nobody can")]
    LimitOfRdma(MigrationOption),
}

impl WirePlan {
    fn transfer(&self) -> Result<Transfer, Contradiction> {
        match self.option {
            MigrationOption::Tcp => self.over_one_connection(),
            MigrationOption::Direct => self.by_rdma(),
            MigrationOption::Multichannel => self.parallel(Packing::Nobody(self.protection()?)),
            MigrationOption::Compression => self.parallel(self.packed_by_relay()?),
            MigrationOption::QemuZstd1 => self.packed_by_hypervisor(ZstdLevel::One),
            MigrationOption::QemuZstd3 => self.packed_by_hypervisor(ZstdLevel::Three),
        }
    }

    fn over_one_connection(&self) -> Result<Transfer, Contradiction> {
        self.may_take_one_connection()?;
        if !self.post_copy {
            return self.protection().map(Transfer::OneConnection);
        }
        Ok(Transfer::PostCopy { encryption: self.encryption.clone(), limit_keeper: self.limit_keeper })
    }

    fn by_rdma(&self) -> Result<Transfer, Contradiction> {
        let option = self.option;
        self.may_take_one_connection()?;
        match &self.encryption {
            _ if self.post_copy => Err(Contradiction::PostCopy(option)),
            Encryption::Encrypted(_) => Err(Contradiction::EncryptedRdma(option)),
            Encryption::Clear(_) if self.limit_keeper != LimitKeeper::Nobody => {
                Err(Contradiction::LimitOfRdma(option))
            }
            Encryption::Clear(why) => Ok(Transfer::Rdma(why.clone())),
        }
    }

    fn may_take_one_connection(&self) -> Result<(), Contradiction> {
        let option = self.option;
        match () {
            () if self.multifd_channels.is_some() => Err(Contradiction::ManyConnections(option)),
            () if self.spread == Spread::Routed => Err(Contradiction::Routed(option)),
            () if self.is_compressed => Err(Contradiction::Compressed(option)),
            () => Ok(()),
        }
    }

    fn packed_by_hypervisor(&self, level: ZstdLevel) -> Result<Transfer, Contradiction> {
        self.parallel(Packing::ByHypervisor(level, self.protection()?))
    }

    fn packed_by_relay(&self) -> Result<Packing, Contradiction> {
        self.relay_keeps_limit()?;
        Ok(Packing::ByRelay(self.encryption.clone()))
    }

    fn parallel(&self, packing: Packing) -> Result<Transfer, Contradiction> {
        let &Self { option, spread, is_compressed, post_copy, .. } = self;
        let channels = self.multifd_channels.and_then(NonZeroU8::new);
        let channels = channels.ok_or(Contradiction::OneConnection(option))?;
        match (is_compressed, matches!(packing, Packing::ByRelay(_))) {
            _ if post_copy => Err(Contradiction::PostCopy(option)),
            (true, false) => Err(Contradiction::Compressed(option)),
            (false, true) => Err(Contradiction::NotCompressed(option)),
            _ => Parallel::new(channels, spread, packing)
                .map(Transfer::Parallel)
                .ok_or(Contradiction::RoutedUnpaced(option)),
        }
    }

    /// Of what no relay packs.
    fn protection(&self) -> Result<Protection, Contradiction> {
        if self.encryption.is_encrypted() {
            self.relay_keeps_limit()?;
        }
        Ok(Protection::of(self.encryption.clone(), self.limit_keeper))
    }

    fn relay_keeps_limit(&self) -> Result<(), Contradiction> {
        let is_relays = self.limit_keeper == LimitKeeper::Agents;
        is_relays.then_some(()).ok_or(Contradiction::LimitOfRelay(self.option))
    }
}

impl TryFrom<WirePlan> for Plan {
    type Error = Contradiction;

    fn try_from(wire: WirePlan) -> Result<Self, Contradiction> {
        let transfer = wire.transfer()?;
        let WirePlan { requested_option, paths, disks, reason, .. } = wire;
        let reasons = reason.into_iter().filter(|reason| !reason.is_empty()).map(Reason::Stated).collect();
        let paths = paths.try_into()?;
        Ok(Self { requested_option, transfer, paths, disks, reasons })
    }
}

impl From<Plan> for WirePlan {
    fn from(plan: Plan) -> Self {
        Self {
            requested_option: plan.requested_option,
            option: plan.option(),
            reason: plan.reason(),
            spread: plan.spread(),
            multifd_channels: plan.transfer.parallel().map(|parallel| parallel.channels().get()),
            is_compressed: plan.is_compressed(),
            post_copy: plan.post_copy(),
            limit_keeper: plan.limit_keeper(),
            encryption: plan.encryption(),
            disks: plan.disks,
            paths: plan.paths.into(),
        }
    }
}

impl PartialSchema for Plan {
    fn schema() -> RefOr<Schema> {
        WirePlan::schema()
    }
}

impl ToSchema for Plan {
    fn name() -> Cow<'static, str> {
        "Plan".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        WirePlan::schemas(schemas);
    }
}
