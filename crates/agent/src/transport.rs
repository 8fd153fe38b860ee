//! A plan in the hypervisor's terms.

use drainpipe_engine::plan::Plan;
use drainpipe_hypervisor::migration::{Multifd, Transport};

/// How the plan has bytes travel.
pub(crate) fn transport(plan: &Plan) -> Transport {
    Transport { multifd: plan.multifd_channels.map(|channels| Multifd { channels, compression: None }) }
}
