//! What a target must have for a domain, besides the disks, bridges and memory that a specification names.

use std::collections::BTreeSet;
use std::net::IpAddr;

use drainpipe_hypervisor::Need;
use uuid::Uuid;

use super::DomainDescription;
use super::devices::Tpm;
use super::disks::DiskSource;
use super::firmware::Firmware;
use super::interfaces::InterfaceKind;

impl DomainDescription {
    /// All that a target must have beside what [`Self::vm_spec`] says, each once.
    pub fn needs(&self) -> BTreeSet<Need> {
        let mut needs: BTreeSet<Need> =
            self.devices.interfaces.iter().filter_map(|one| of_interface(&one.kind)).collect();
        needs.extend(self.devices.disks.iter().filter_map(|disk| of_source(&disk.source)));
        needs.extend(self.secrets().map(Need::Secret));
        if let Firmware::Uefi { loader: Some(loader), .. } = &self.machine.firmware {
            needs.insert(Need::Firmware(loader.clone()));
        }
        let listens = self.devices.graphics.iter().flat_map(|graphics| &graphics.listens);
        needs
            .extend(listens.filter(|address| !is_everywhere(address)).map(|address| Need::Address(*address)));
        needs.extend(self.bound.highest_cpu.map(Need::Cpu));
        needs.extend(self.bound.highest_node.map(Need::NumaNode));
        needs
    }

    fn secrets(&self) -> impl Iterator<Item = Uuid> {
        let of_tpm = match &self.devices.tpm {
            Some(Tpm::Emulator { secret, .. }) => *secret,
            _ => None,
        };
        self.devices.disks.iter().flat_map(|disk| &disk.secrets).copied().chain(of_tpm)
    }
}

fn of_interface(kind: &InterfaceKind) -> Option<Need> {
    match kind {
        InterfaceKind::Network { name, .. } => Some(Need::Network(name.clone())),
        InterfaceKind::Direct { link, .. } => Some(Need::Link(link.clone())),
        InterfaceKind::VhostUser { socket } => socket.clone().map(Need::Socket),
        _ => None,
    }
}

fn of_source(source: &DiskSource) -> Option<Need> {
    match source {
        DiskSource::Volume { pool, volume } => {
            Some(Need::Volume { pool: pool.clone(), volume: volume.clone() })
        }
        DiskSource::VhostUser { socket } => socket.clone().map(Need::Socket),
        _ => None,
    }
}

/// Whether every host has it.
fn is_everywhere(address: &IpAddr) -> bool {
    address.is_unspecified() || address.is_loopback()
}
