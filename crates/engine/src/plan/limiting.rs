//! What keeps a migration within a bandwidth limit.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::incapable::Incapable;
use super::{Plan, PlanError, Reason};
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
}

/// The same plan, with who keeps its limit. Fails where one holds that nobody can keep.
pub(super) fn with_limit_keeper(
    plan: Plan,
    source: &HostFacts,
    target: &HostFacts,
) -> Result<Plan, PlanError> {
    if plan.relay().is_some() {
        return Ok(plan);
    }
    let Some(hypervisor) = Incapable::among([source], |can| can.connections_are_ours) else {
        return Ok(plan);
    };
    let limit_mbps = source.limits_to(target).all_mbps;
    let keeps_limit = source.hypervisor.capabilities.keeps_limit;
    let Plan { mut reasons, .. } = plan;
    let limit_keeper = match (keeps_limit, limit_mbps) {
        (true, Some(limit_mbps)) => {
            reasons.push(Reason::LimitedByHypervisor { hypervisor, limit_mbps });
            LimitKeeper::Hypervisor
        }
        (true, None) => LimitKeeper::Hypervisor,
        (false, Some(limit_mbps)) => return Err(PlanError::NoLimit { hypervisor, limit_mbps }),
        (false, None) => LimitKeeper::Nobody,
    };
    Ok(Plan { limit_keeper, reasons, ..plan })
}
