//! A plan while it is being made: not yet said is who encrypts it, and who keeps its limit.

use super::incapable::Incapable;
use super::{
    LimitKeeper, MULTICHANNEL_CONNECTIONS, Packing, Parallel, Paths, Plan, PlanError, Protection, Reason,
    Spread, Transfer, ZstdLevel,
};
use crate::host::facts::HostFacts;
use crate::option::RequestedOption;
use crate::transfer::encryption::Encryption;

/// A plan while it is being made.
pub(super) struct Draft {
    pub(super) requested_option: RequestedOption,
    pub(super) shape: Shape,
    pub(super) encryption: Encryption,
    pub(super) paths: Paths,
    pub(super) reasons: Vec<Reason>,
}

/// What is chosen of a [`Transfer`] before it is known whether its paths have to be encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    OneConnection,
    PostCopy,
    Parallel { spread: Spread, packer: Option<Packer> },
}

/// Who packs memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packer {
    Relay,
    Hypervisor(ZstdLevel),
}

impl Draft {
    /// The plan. Fails where somebody is to encrypt it or to keep its limit, and nobody can.
    pub(super) fn finish(self, source: &HostFacts, target: &HostFacts) -> Result<Plan, PlanError> {
        let Self { requested_option, shape, encryption, paths, mut reasons } = self;
        let by_agents = shape.transfer(&encryption, LimitKeeper::Agents);
        let transfer = if by_agents.relay().is_none() {
            let (limit_keeper, reason) = LimitKeeper::without_relay(source, target)?;
            reasons.extend(reason);
            shape.transfer(&encryption, limit_keeper)
        } else if let Some(hypervisor) = Incapable::to_be_relayed(source, target) {
            return Err(PlanError::NotRelayed { why: encryption.why(), hypervisor });
        } else {
            by_agents
        };
        Ok(Plan { requested_option, transfer, paths, disks: vec![], reasons })
    }
}

impl Shape {
    pub(super) fn spread(self) -> Spread {
        match self {
            Self::OneConnection | Self::PostCopy => Spread::InTurn,
            Self::Parallel { spread, .. } => spread,
        }
    }

    fn transfer(self, encryption: &Encryption, limit_keeper: LimitKeeper) -> Transfer {
        let encryption = encryption.clone();
        let protection = Protection::of(encryption.clone(), limit_keeper);
        let (spread, packing) = match self {
            Self::OneConnection => return Transfer::OneConnection(protection),
            Self::PostCopy => return Transfer::PostCopy { encryption, limit_keeper },
            Self::Parallel { spread, packer: None } => (spread, Packing::Nobody(protection)),
            Self::Parallel { spread, packer: Some(Packer::Hypervisor(level)) } => {
                (spread, Packing::ByHypervisor(level, protection))
            }
            Self::Parallel { spread, packer: Some(Packer::Relay) } => (spread, Packing::ByRelay(encryption)),
        };
        let parallel = Parallel::new(MULTICHANNEL_CONNECTIONS, spread, packing);
        Transfer::Parallel(parallel.expect("only connections that an agent watches are spread: NotSpread"))
    }
}
