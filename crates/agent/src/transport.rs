//! A plan in the hypervisor's terms.

use drainpipe_engine::plan::Plan;
use drainpipe_hypervisor::migration::{Multifd, Transport, Zstd};

/// How the plan has bytes travel.
pub(crate) fn transport(plan: &Plan) -> Transport {
    let compression = plan.zstd_level.map(|level| Zstd { level });
    Transport { multifd: plan.multifd_channels.map(|channels| Multifd { channels, compression }) }
}
