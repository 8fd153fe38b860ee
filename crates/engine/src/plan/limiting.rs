//! What keeps a migration within a bandwidth limit.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::incapable::Incapable;
use super::{PlanError, Reason};
use crate::host::facts::HostFacts;

/// What keeps a migration within a bandwidth limit: one that applies when it begins, and one that is set later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LimitKeeper {
    /// The agents: in the relay, or by pacing the hypervisor's connections.
    #[default]
    Agents,
    /// The source's hypervisor, as well as it can.
    Hypervisor,
    /// Nobody can.
    Nobody,
}

impl LimitKeeper {
    /// Whether it is the one that 0.1.0 has.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
    pub(super) fn is_agents(&self) -> bool {
        *self == Self::Agents
    }
    /// Who keeps that of what goes through no relay, with the reason if there is something to say. Fails where one holds
    /// that nobody can keep.
    pub(super) fn without_relay(
        source: &HostFacts,
        target: &HostFacts,
    ) -> Result<(Self, Option<Reason>), PlanError> {
        let Some(hypervisor) = Incapable::among([source], |can| can.connections_are_ours) else {
            return Ok((Self::Agents, None));
        };
        let limit_mbps = source.limits_to(target).all_mbps;
        match (source.hypervisor.capabilities.keeps_limit, limit_mbps) {
            (true, Some(limit_mbps)) => {
                Ok((Self::Hypervisor, Some(Reason::LimitedByHypervisor { hypervisor, limit_mbps })))
            }
            (true, None) => Ok((Self::Hypervisor, None)),
            (false, Some(limit_mbps)) => Err(PlanError::NoLimit { hypervisor, limit_mbps }),
            (false, None) => Ok((Self::Nobody, None)),
        }
    }
}
