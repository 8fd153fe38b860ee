//! What one host tells another about itself before a migration.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::bandwidth::classes::Limits;
use crate::host::capabilities::Capabilities;
use crate::host::encryption_policy::EncryptionPolicy;
use crate::host::facts_0_1_0;
use crate::known::if_known;

/// QEMU's own use of memory beside the guest's: code, translation cache of TCG, buffers of 16 channels.
const QEMU_OVERHEAD_BYTES: u64 = 128 << 20;

/// Huge pages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HugePages {
    /// Size of each, in MiB.
    pub size_mib: u64,
    /// How many.
    pub count: u64,
}

/// What a VM needs of a host's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Ordinary memory.
    pub bytes: u64,
    /// Huge pages that the host has set aside, which are no part of the ordinary memory.
    pub huge_pages: Option<HugePages>,
}

impl MemoryNeeds {
    /// The needs of a VM with so much memory, in huge pages of this size if one is given.
    pub fn of(memory_bytes: u64, huge_page_mib: Option<u64>) -> Self {
        let Some(size_mib) = huge_page_mib.filter(|size_mib| *size_mib > 0) else {
            return Self { bytes: memory_bytes.saturating_add(QEMU_OVERHEAD_BYTES), huge_pages: None };
        };
        let count = (memory_bytes >> 20).div_ceil(size_mib);
        Self { bytes: QEMU_OVERHEAD_BYTES, huge_pages: Some(HugePages { size_mib, count }) }
    }
}

/// One host, as far as decisions need it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostFacts {
    /// Name of the host, the one its certificate carries.
    pub name: String,
    /// Processor cores.
    pub cores: u32,
    /// Cores that nothing used in the last second, or in the last five if these are fewer, of those on which its agent may
    /// run; with those that migrations take. Absent while that is not known.
    #[serde(default)]
    pub idle_cores: Option<f64>,
    /// What one thread more gets of a core, 0 to 1, by how many threads wanted one in the last five seconds, and by what
    /// those of the agent got. Absent while that is not known.
    #[serde(default)]
    pub core_share: Option<f64>,
    /// Cores that its VMs took recently, while none was on its way; those that were not counted yet are left out.
    #[serde(default)]
    pub vm_cores: f64,
    /// Cores on which its agent packs memory at most: none where it has one core, and what packs there would not leave
    /// that to its VMs, or where the agent may not run on the configured ones any more. Absent where the agent does not
    /// say.
    #[serde(default)]
    pub packing_cores: Option<u32>,
    /// Why these are none.
    #[serde(default, deserialize_with = "if_known")]
    pub no_packing: Option<NoPacking>,
    /// Memory that new VMs can take: available, less what is promised to VMs on their way and what those that
    /// run have not touched yet.
    pub memory_available_bytes: u64,
    /// Huge pages that new VMs can take: of each size that the kernel has, those that are free, less what is
    /// promised.
    #[serde(default)]
    pub huge_pages_available: Vec<HugePages>,
    /// Links that the configuration gives to migrations, in order of preference.
    pub links: Vec<MigrationLink>,
    /// Links of the management network that are among none of these; they carry migrations where no
    /// other link makes a path.
    pub management_links: Vec<MigrationLink>,
    /// Mb/s that migrations may take of its links now, in each direction; absent for no limit.
    #[serde(default)]
    pub bandwidth_limit_mbps: Option<u64>,
    /// Mb/s that copies of disks may take of them now, in each direction; absent for no limit of their own.
    #[serde(default)]
    pub storage_limit_mbps: Option<u64>,
    /// What it says of encryption.
    #[serde(default)]
    pub encryption: EncryptionPolicy,
    /// The host's address for routed multichannel: configured, or else chosen by its agent.
    #[schema(value_type = Option<String>)]
    pub migration_address: Option<IpAddr>,
    /// Why it has none.
    #[serde(default, deserialize_with = "if_known")]
    pub no_migration_address: Option<NoMigrationAddress>,
    /// Names of the RDMA devices that the kernel knows.
    pub rdma_devices: Vec<String>,
    /// What migrations by RDMA find on it; absent where its agent knows none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaFacts>,
    /// The hypervisor.
    pub hypervisor: HypervisorVersion,
    /// The libvirt that answers on it, with whose domains its agent deals; absent where none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<HypervisorVersion>,
}

/// A domain cannot be on a host without libvirt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no libvirt answers on {host}, which a domain needs: install or start it (`systemctl status libvirtd virtqemud`), and \
     look at [libvirt] in its agent.toml"
)]
pub struct NoLibvirt {
    /// The host.
    pub host: String,
}

impl HostFacts {
    /// What this host and the target let a migration take.
    pub fn limits_to(&self, target: &Self) -> Limits {
        let least = |of: fn(&Self) -> Option<u64>| [self, target].into_iter().filter_map(of).min();
        Limits {
            all_mbps: least(|host| host.bandwidth_limit_mbps),
            storage_mbps: least(|host| host.storage_limit_mbps),
        }
    }

    /// The same host, as a domain of libvirt has it: what can be done is what libvirt can do.
    pub fn for_domain(self) -> Result<Self, NoLibvirt> {
        let Some(hypervisor) = self.libvirt.clone() else { return Err(NoLibvirt { host: self.name }) };
        Ok(Self { hypervisor, ..self })
    }

    /// How many huge pages of a size new VMs can take.
    pub fn huge_pages_of(&self, size_mib: u64) -> u64 {
        let of_size = self.huge_pages_available.iter().filter(|pages| pages.size_mib == size_mib);
        of_size.map(|pages| pages.count).sum()
    }

    /// A link that migrations may use, by its name.
    pub fn link(&self, name: &str) -> Option<&MigrationLink> {
        self.links.iter().chain(&self.management_links).find(|link| link.name == name)
    }
}

/// Why an agent packs nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NoPacking {
    /// It has one core, and the kernel would not leave that to a VM that wants it.
    NotGivenBack,
    /// It may not run on any of the CPUs any more that its configuration names.
    CpusLost,
}

impl fmt::Display for NoPacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotGivenBack => {
                "the kernel would not leave its cores to VMs that want them: they are in another cgroup, or \
                session, than the agent"
            }
            Self::CpusLost => {
                "the agent may no longer run on any of the `cpus` under [compression] in its agent.toml"
            }
        })
    }
}

/// Why an agent has not chosen a migration address, and none is configured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "why")]
pub enum NoMigrationAddress {
    /// The one it would choose is an IPv6 address, and the kernel has none or IPv6 is off.
    Ipv6Off,
    /// The one it would choose is somebody's already.
    Taken {
        /// The address.
        #[schema(value_type = String)]
        address: IpAddr,
        /// The subnet of a link, or the destination of a route, that it belongs to.
        #[schema(value_type = String)]
        by: IpNet,
    },
}

impl fmt::Display for NoMigrationAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipv6Off => f.write_str("IPv6 is off, and no migration_address is configured"),
            Self::Taken { address, by } => write!(
                f,
                "the address {address} that it would take belongs to {by}, and no migration_address is configured"
            ),
        }
    }
}

/// The hypervisor of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(from = "WireHypervisor")]
pub struct HypervisorVersion {
    /// Such as `QEMU`.
    pub name: String,
    /// Such as `7.2.22`.
    pub version: String,
    /// Whether it was built with RDMA migration.
    pub rdma: bool,
    /// What it can do. Name and version are for people alone.
    pub capabilities: Capabilities,
}

/// The same, as other hosts say it.
#[derive(Deserialize)]
struct WireHypervisor {
    name: String,
    version: String,
    rdma: bool,
    /// 0.1.0 does not say.
    capabilities: Option<Capabilities>,
}

impl From<WireHypervisor> for HypervisorVersion {
    fn from(wire: WireHypervisor) -> Self {
        let WireHypervisor { name, version, rdma, capabilities } = wire;
        let capabilities = capabilities.unwrap_or_else(|| facts_0_1_0::capabilities(&name, &version));
        Self { name, version, rdma, capabilities }
    }
}

/// What a host has for migrations by RDMA, beside devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RdmaFacts {
    /// Whether programs can make connections (`/dev/infiniband/rdma_cm`, by the module `rdma_ucm`).
    pub connects: bool,
    /// What the hypervisor of a VM may lock in memory; absent for as much as it likes. RDMA locks what it carries.
    pub memory_lock_bytes: Option<u64>,
}

impl RdmaFacts {
    /// What a hypervisor locks to move a VM with so much memory: that, its buffers, and memory of the machine's devices.
    pub fn locked_bytes(memory_bytes: u64) -> u64 {
        const BESIDE_BYTES: u64 = 256 << 20;
        memory_bytes.saturating_add(BESIDE_BYTES)
    }
}

/// The RDMA device of a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RdmaPort {
    /// Its name, as `rdma link` shows it.
    pub device: String,
    /// Whether its port can carry anything now.
    pub is_active: bool,
}

/// A network interface that migrations may use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationLink {
    /// Name of the interface.
    pub name: String,
    /// Its addresses with their prefixes.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpNet>,
    /// As configured, else as the driver says.
    pub speed_mbps: Option<u64>,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// Administratively up, with a carrier.
    pub usable: bool,
    /// Whether the host trusts its network: what goes over it need not be encrypted.
    #[serde(default)]
    pub is_trusted: bool,
    /// The card that it is a VLAN of: of the links of one card one makes a path. Absent for the card itself, and where
    /// somebody has configured the link.
    #[serde(default)]
    pub card: Option<String>,
    /// Its RDMA device, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaPort>,
}

impl MigrationLink {
    /// What it shares its speed with.
    pub fn card(&self) -> &str {
        self.card.as_ref().unwrap_or(&self.name)
    }

    /// Its first IPv6 link-local address.
    pub fn link_local(&self) -> Option<Ipv6Addr> {
        self.addresses.iter().find_map(|net| match net.addr() {
            IpAddr::V6(address) if address.is_unicast_link_local() => Some(address),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::host::capabilities::Committer;

    fn read(hypervisor: serde_json::Value) -> HypervisorVersion {
        serde_json::from_value(hypervisor).unwrap()
    }

    #[test]
    fn a_hypervisor_of_0_1_0_is_read_as_the_qemu_that_it_is() {
        for (version, major) in [("7.2.22", 7), ("10.0.2", 10)] {
            let said = read(json!({ "name": "QEMU", "version": version, "rdma": true }));
            let capabilities = facts_0_1_0::of_qemu(Some(major));
            let expected =
                HypervisorVersion { name: "QEMU".into(), version: version.into(), rdma: true, capabilities };
            assert_eq!(said, expected);
        }
    }

    #[test]
    fn what_a_host_says_of_its_hypervisor_goes_before_its_name_and_version() {
        let capabilities = Capabilities { commits: Committer::Agents, ..Capabilities::NONE };
        let said =
            json!({ "name": "QEMU", "version": "10.0.2", "rdma": false, "capabilities": capabilities });
        assert_eq!(read(said.clone()).capabilities, capabilities);
        assert_eq!(serde_json::to_value(read(said.clone())).unwrap(), said);
    }
}
