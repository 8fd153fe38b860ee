//! Why memory does not go by RDMA.

use std::fmt;

use crate::host::facts::{HostFacts, HypervisorVersion};

/// Why RDMA cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoRdma {
    /// These hosts have no device.
    NoDevice(Vec<String>),
    /// A hypervisor cannot do it.
    HypervisorWithout {
        /// Name of its host.
        host: String,
        /// Which one it is.
        hypervisor: HypervisorVersion,
    },
    /// Nothing stands against it but that it is not done yet.
    NotUsedYet,
}

impl NoRdma {
    /// In the same words whichever host is the source.
    pub(super) fn between(source: &HostFacts, target: &HostFacts) -> Self {
        let mut hosts = [source, target];
        hosts.sort_by(|one, other| one.name.cmp(&other.name));
        let without = hosts.iter().filter(|host| host.rdma_devices.is_empty());
        let without: Vec<String> = without.map(|host| host.name.clone()).collect();
        if !without.is_empty() {
            return Self::NoDevice(without);
        }
        match hosts.iter().find(|host| !host.hypervisor.rdma) {
            Some(host) => {
                Self::HypervisorWithout { host: host.name.clone(), hypervisor: host.hypervisor.clone() }
            }
            None => Self::NotUsedYet,
        }
    }
}

impl fmt::Display for NoRdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice(hosts) => write!(f, "no RDMA device on {}", hosts.join(" and ")),
            Self::HypervisorWithout { host, hypervisor: HypervisorVersion { name, version, .. } } => {
                write!(f, "{name} {version} on {host} is built without RDMA")
            }
            Self::NotUsedYet => {
                f.write_str("both hosts have RDMA, which this version of Drainpipe does not use yet")
            }
        }
    }
}
