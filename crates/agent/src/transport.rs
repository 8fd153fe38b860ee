//! A plan in the hypervisor's terms.

use drainpipe_engine::plan::Plan;
use drainpipe_hypervisor::migration::{Multifd, TlsKey, Transport, Zstd};

/// How many connections QEMU makes: one for all that is no memory, and without multifd for everything.
pub(crate) fn connections(plan: &Plan) -> usize {
    usize::from(plan.multifd_channels.unwrap_or(0)) + 1
}

/// How the plan has bytes travel; `tls` for what QEMU encrypts itself.
pub(crate) fn transport(plan: &Plan, tls: Option<TlsKey>) -> Transport {
    let compression = plan.option.qemu_zstd_level().map(|level| Zstd { level });
    match plan.multifd_channels {
        Some(channels) => Transport::Multifd(Multifd { channels, compression }),
        None if plan.post_copy => Transport::PostCopy { tls },
        None => Transport::Single,
    }
}
