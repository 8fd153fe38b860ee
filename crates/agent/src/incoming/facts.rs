//! What migrations need to know about this host at present.

use drainpipe_engine::host::facts::{HostFacts, HypervisorVersion};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::HypervisorFacts;

use super::Incoming;
use super::memory::memory_free;
use crate::host::rdma;

impl Incoming {
    /// What they need to know.
    pub(crate) async fn facts(&self) -> Result<HostFacts, Problem> {
        let host = &self.host;
        let devices = drainpipe_net::rdma_devices().map_err(Problem::failed)?;
        let links = rdma::with_ports(host.migration_links().await?, &devices);
        let migration_address = host.migration_address().await?;
        let packing = self.transfer.packing()?;
        let limits = self.transfer.bandwidth.limits();
        let memory = memory_free(self)?;
        Ok(HostFacts {
            name: host.name().into(),
            cores: host.hardware.cores,
            idle_cores: host.idle_cores.known(),
            core_share: host.idle_cores.share(),
            vm_cores: self.vms.cores_taken(),
            packing_cores: packing.cores.try_into().ok(),
            no_packing: packing.obstacle,
            memory_available_bytes: memory.bytes,
            huge_pages_available: memory.huge_pages,
            links: links.first,
            management_links: links.management,
            bandwidth_limit_mbps: limits.all_mbps,
            storage_limit_mbps: limits.storage_mbps,
            encryption: host.config.encryption,
            no_migration_address: migration_address.as_ref().err().cloned(),
            migration_address: migration_address.ok(),
            rdma_devices: devices.into_iter().map(|device| device.name).collect(),
            rdma: Some(rdma::facts()),
            hypervisor: described(self.vms.facts()),
            libvirt: self.vms.facts_of_manager().as_ref().map(described),
        })
    }
}

fn described(hypervisor: &HypervisorFacts) -> HypervisorVersion {
    HypervisorVersion {
        name: hypervisor.name.clone(),
        version: hypervisor.version.to_string(),
        rdma: hypervisor.rdma,
        capabilities: hypervisor.capabilities,
    }
}
