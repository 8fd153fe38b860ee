//! A plan in the hypervisor's terms.

use drainpipe_engine::plan::{Packing, Plan, Transfer};
use drainpipe_hypervisor::{Parallel, TlsKey, Transport, Zstd};

/// How many connections the hypervisor makes: one for all that is no memory, and without parallel ones for everything.
pub(crate) fn connections(plan: &Plan) -> usize {
    plan.transfer.parallel().map_or(0, |parallel| usize::from(parallel.channels().get())) + 1
}

/// How the plan has bytes travel; `tls` for what QEMU encrypts itself.
pub(crate) fn transport(plan: &Plan, tls: Option<TlsKey>) -> Transport {
    let parallel = match &plan.transfer {
        Transfer::PostCopy { .. } => return Transport::PostCopy { tls },
        Transfer::OneConnection(_) => return Transport::Single,
        Transfer::Rdma(_) => return Transport::Rdma,
        Transfer::Parallel(parallel) => parallel,
    };
    let compression = match parallel.packing() {
        Packing::ByHypervisor(level, _) => Some(Zstd { level: level.number() }),
        Packing::ByRelay(_) | Packing::Nobody(_) => None,
    };
    Transport::Parallel(Parallel { channels: parallel.channels().get(), compression })
}
