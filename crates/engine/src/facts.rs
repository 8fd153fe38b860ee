//! What one host tells another about itself before a migration.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// QEMU's own use of memory beside the guest's: code, translation cache of TCG, buffers of 16 channels.
const QEMU_OVERHEAD_BYTES: u64 = 128 << 20;

/// Memory that a host must have available for a VM to come.
pub fn memory_needed_bytes(vm_memory_bytes: u64) -> u64 {
    vm_memory_bytes.saturating_add(QEMU_OVERHEAD_BYTES)
}

/// One host, as far as decisions need it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostFacts {
    /// Name of the host, the one its certificate carries.
    pub name: String,
    /// Processor cores.
    pub cores: u32,
    /// Memory that new VMs can take: available, less what is reserved for VMs on their way.
    pub memory_available_bytes: u64,
    /// Links that the configuration gives to migrations, in order of preference.
    pub links: Vec<MigrationLink>,
    /// The host's address for routed multichannel; absent when none is configured.
    #[schema(value_type = Option<String>)]
    pub migration_address: Option<IpAddr>,
    /// Names of the RDMA devices that the kernel knows.
    pub rdma_devices: Vec<String>,
    /// The hypervisor.
    pub hypervisor: HypervisorVersion,
}

/// The hypervisor of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HypervisorVersion {
    /// Such as `QEMU`.
    pub name: String,
    /// Such as `7.2.22`.
    pub version: String,
    /// Whether it was built with RDMA migration.
    pub rdma: bool,
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
}
