//! Which paths memory uses by RDMA, or why none.

use std::fmt;

use super::{Paths, PlanRequest};
use crate::finding::on;
use crate::format::{mib_free, mib_needed, rate};
use crate::host::facts::{HostFacts, HypervisorVersion, MigrationLink, RdmaFacts, RdmaPort};
use crate::option::RequestedOption;
use crate::paths::path::{Path, Reach, find_paths};
use crate::transfer::encryption::{self, Encryption, WhyClear, WhyEncrypted};

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
    /// The agent of this host does not know it yet.
    OlderAgent(String),
    /// Programs of this host cannot make connections.
    NoConnections(String),
    /// A hypervisor may not lock so much memory.
    MemoryLock {
        /// Name of its host.
        host: String,
        /// What it may lock.
        allowed_bytes: u64,
        /// What it would have to.
        needed_bytes: u64,
    },
    /// No path has a device at both ends.
    NoPath(Vec<String>),
    /// These devices are down.
    Inactive(Vec<String>),
    /// It is to be encrypted, for this reason.
    Encrypted(WhyEncrypted),
    /// It is to keep to a limit, in Mb/s.
    Limited(u64),
    /// Nothing stands against it, but nobody asks for it.
    NotAskedFor,
}

/// The paths that go from a device to a device, if all that RDMA needs is there.
pub(super) fn paths(
    source: &HostFacts,
    target: &HostFacts,
    request: &PlanRequest,
    reaches: &[Reach],
    memory_bytes: u64,
) -> Result<(Paths, WhyClear), NoRdma> {
    let hosts = in_order([source, target]);
    let without = hosts.iter().filter(|host| host.rdma_devices.is_empty());
    let without: Vec<String> = without.map(|host| host.name.clone()).collect();
    if !without.is_empty() {
        return Err(NoRdma::NoDevice(without));
    }
    for host in hosts {
        NoRdma::on(host, memory_bytes).map_or(Ok(()), Err)?;
    }
    // By addresses that QEMU takes for RDMA, whichever a route needs: link-local ones are not among them.
    let found = find_paths(source, target, RequestedOption::Tcp, reaches);
    let ends = |path: &Path| Some([port(source.link(&path.link)?)?, port(target.link(&path.peer_link)?)?]);
    let (fit, others): (Vec<Path>, Vec<Path>) =
        found.into_iter().partition(|path| !path.is_link_local() && ends(path).is_some());
    let is_active = |path: &Path| ends(path).is_some_and(|ends| ends.iter().all(|port| port.is_active));
    let (active, inactive): (Vec<Path>, Vec<Path>) = fit.into_iter().partition(is_active);
    let names = |paths: &[Path]| paths.iter().map(ToString::to_string).collect();
    let paths = Paths::try_from(active).map_err(|_| {
        if inactive.is_empty() { NoRdma::NoPath(names(&others)) } else { NoRdma::Inactive(names(&inactive)) }
    })?;
    let encryption = encryption::decide(source, target, request.encrypt, &paths);
    match (encryption, source.limits_to(target).all_mbps) {
        (Ok(Encryption::Encrypted(why)), _) => Err(NoRdma::Encrypted(why)),
        // There is no plan at all then.
        (Err(_), _) => Err(NoRdma::Encrypted(WhyEncrypted::AskedFor)),
        (Ok(Encryption::Clear(_)), Some(limit_mbps)) => Err(NoRdma::Limited(limit_mbps)),
        (Ok(Encryption::Clear(why)), None) => Ok((paths, why)),
    }
}

/// In the same words whichever host is the source.
fn in_order(mut hosts: [&HostFacts; 2]) -> [&HostFacts; 2] {
    hosts.sort_by(|one, other| one.name.cmp(&other.name));
    hosts
}

fn port(link: &MigrationLink) -> Option<&RdmaPort> {
    link.rdma.as_ref()
}

impl NoRdma {
    /// The reason that would be given if it is not used.
    pub(super) fn between(
        source: &HostFacts,
        target: &HostFacts,
        request: &PlanRequest,
        reaches: &[Reach],
        memory_bytes: u64,
    ) -> Self {
        match paths(source, target, request, reaches, memory_bytes) {
            Ok(_) => Self::NotAskedFor,
            Err(why) => why,
        }
    }

    /// What keeps two hosts with devices from it; nothing where one has none, which is no fault.
    pub(crate) fn for_direct(source: &HostFacts, target: &HostFacts, memory_bytes: u64) -> Option<Self> {
        let request = RequestedOption::Direct.into();
        paths(source, target, &request, &[], memory_bytes)
            .err()
            .filter(|why| !matches!(why, Self::NoDevice(_)))
    }

    /// How to get it.
    pub(crate) fn remedy(&self) -> String {
        match self {
            Self::NoDevice(hosts) => on(&hosts.join(" and "), "rdma link, to see what the kernel knows"),
            Self::HypervisorWithout { host, .. } => {
                on(host, "install a QEMU with RDMA, as Debian's is; libvirt's domains do not move by RDMA")
            }
            Self::OlderAgent(host) => on(host, "install the newer drainpipe"),
            Self::NoConnections(host) => {
                on(host, "modprobe rdma_ucm; echo rdma_ucm > /etc/modules-load.d/drainpipe-rdma.conf")
            }
            Self::MemoryLock { host, .. } => on(
                host,
                "LimitMEMLOCK=infinity under [Service], with systemctl edit drainpipe and systemctl edit \
                drainpipe-keeper@; then restart both",
            ),
            Self::NoPath(_) => "give both links of a path addresses in one subnet; see `rdma link` on both hosts for \
                                which link has a device; for RDMA in software: rdma link add rxe0 type rxe netdev LINK"
                .into(),
            Self::Inactive(_) => "look at the cable, and at `rdma link` on both hosts".into(),
            Self::Encrypted(_) => {
                "if the network may be trusted, add it to trusted_networks in agent.toml on both hosts".into()
            }
            Self::Limited(_) => "drainpipe limit, to lift the limit".into(),
            Self::NotAskedFor => "drainpipe migrate VM HOST --option direct".into(),
        }
    }

    /// What this host lacks, beside devices.
    fn on(host: &HostFacts, memory_bytes: u64) -> Option<Self> {
        let name = || host.name.clone();
        if !host.hypervisor.rdma {
            return Some(Self::HypervisorWithout { host: name(), hypervisor: host.hypervisor.clone() });
        }
        let Some(RdmaFacts { connects, memory_lock_bytes }) = host.rdma else {
            return Some(Self::OlderAgent(name()));
        };
        if !connects {
            return Some(Self::NoConnections(name()));
        }
        let needed_bytes = RdmaFacts::locked_bytes(memory_bytes);
        let allowed_bytes = memory_lock_bytes.filter(|allowed_bytes| *allowed_bytes < needed_bytes)?;
        Some(Self::MemoryLock { host: name(), allowed_bytes, needed_bytes })
    }
}

impl fmt::Display for NoRdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice(hosts) => write!(f, "no RDMA device on {}", hosts.join(" and ")),
            Self::HypervisorWithout { host, hypervisor: HypervisorVersion { name, version, .. } } => {
                write!(f, "{name} {version} on {host} cannot move VMs by RDMA")
            }
            Self::OlderAgent(host) => {
                write!(
                    f,
                    "{host} runs an older drainpipe, which does not use its RDMA device: upgrade {host}"
                )
            }
            Self::NoConnections(host) => {
                write!(f, "programs cannot make RDMA connections on {host}: load the module rdma_ucm there")
            }
            Self::MemoryLock { host, allowed_bytes, needed_bytes } => write!(
                f,
                "RDMA locks {} of memory, and VMs of {host} may lock {}: start its agent with LimitMEMLOCK=infinity",
                mib_needed(*needed_bytes),
                mib_free(*allowed_bytes)
            ),
            Self::NoPath(paths) if paths.is_empty() => f.write_str("no path between RDMA devices"),
            Self::NoPath(paths) => {
                let paths = paths.join(", ");
                write!(
                    f,
                    "no path that carries now has an RDMA device and an address at both ends: there is {paths}"
                )
            }
            Self::Inactive(paths) => write!(f, "the RDMA devices of {} are down", paths.join(", ")),
            Self::Encrypted(why) => {
                write!(f, "RDMA cannot be encrypted, and this migration is to be ({why})")
            }
            Self::Limited(mbps) => {
                write!(f, "RDMA keeps no bandwidth limit, and there is one of {}", rate(*mbps as f64 / 1e3))
            }
            Self::NotAskedFor => f.write_str("RDMA is used only if the option direct asks for it"),
        }
    }
}
