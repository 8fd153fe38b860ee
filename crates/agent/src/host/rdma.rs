//! This host's abilities for migrations by RDMA.

use drainpipe_engine::host::facts::{MigrationLink, RdmaFacts, RdmaPort};
use drainpipe_net::{RdmaDevice, has_rdma_connections};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use super::migration_links::MigrationLinks;

/// What programs find, beside devices.
pub(crate) fn facts() -> RdmaFacts {
    RdmaFacts { connects: has_rdma_connections(), memory_lock_bytes: memory_lock_bytes() }
}

/// The same links, with their RDMA devices.
pub(crate) fn with_ports(mut links: MigrationLinks, devices: &[RdmaDevice]) -> MigrationLinks {
    for link in links.first.iter_mut().chain(&mut links.management) {
        link.rdma = port_of(link, devices);
    }
    links
}

fn port_of(link: &MigrationLink, devices: &[RdmaDevice]) -> Option<RdmaPort> {
    let RdmaDevice { name, is_active, .. } = RdmaDevice::of_link(&link.name, devices)?;
    Some(RdmaPort { device: name.clone(), is_active: *is_active })
}

/// What VMs may lock: whatever they need where the agent may raise their limit, or else what it got from systemd, as those
/// who start VMs did.
fn memory_lock_bytes() -> Option<u64> {
    let own = capabilities(None).map_or(CapabilitySet::empty(), |own| own.effective);
    if own.contains(CapabilitySet::SYS_RESOURCE) {
        return None;
    }
    getrlimit(Resource::Memlock).maximum
}
