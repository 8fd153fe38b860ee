//! A host, a link and a path for tests, without anything special: each test sets what matters to it.

use crate::host::capabilities::{Capabilities, PostCopy};
use crate::host::encryption_policy::EncryptionPolicy;
use crate::host::facts::{HostFacts, HypervisorVersion, MigrationLink};
use crate::paths::path::Path;

/// A host without links, that has no migration address.
pub(crate) fn host(name: &str) -> HostFacts {
    HostFacts {
        name: name.into(),
        cores: 2,
        idle_cores: None,
        core_share: None,
        vm_cores: 0.0,
        packing_cores: None,
        no_packing: None,
        memory_available_bytes: 0,
        huge_pages_available: vec![],
        links: vec![],
        management_links: vec![],
        bandwidth_limit_mbps: None,
        storage_limit_mbps: None,
        encryption: EncryptionPolicy::Required,
        migration_address: None,
        no_migration_address: None,
        rdma_devices: vec![],
        rdma: None,
        hypervisor: HypervisorVersion {
            name: "QEMU".into(),
            version: "7.2.22".into(),
            rdma: false,
            capabilities: Capabilities {
                tells_connections_apart: false,
                zero_pages_in_parallel: false,
                post_copy: Some(PostCopy { in_parallel: false, encrypts: true }),
                ..Capabilities::ALL
            },
        },
        libvirt: None,
    }
}

/// A link that is up, of no known speed, on a network that is not trusted.
pub(crate) fn link(name: &str) -> MigrationLink {
    MigrationLink {
        name: name.into(),
        addresses: vec![],
        speed_mbps: None,
        mtu: 1500,
        usable: true,
        is_trusted: false,
        card: None,
        rdma: None,
    }
}

/// A path between links of this name on both hosts.
pub(crate) fn path(link: &str) -> Path {
    Path {
        link: link.into(),
        address: [10, 0, 0, 1].into(),
        peer_link: link.into(),
        peer_address: [10, 0, 0, 2].into(),
        speed_mbps: None,
        is_standby: false,
        mtu_bytes: None,
    }
}
