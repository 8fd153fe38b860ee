//! What a target must have for a domain, beside the disks, bridges and memory that a specification says.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::DomainDescription;
use super::devices::Tpm;
use super::disks::DiskSource;
use super::firmware::Firmware;
use super::interfaces::InterfaceKind;
use super::words::plain;

/// Something that a target must have, or libvirt does not start the domain there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Need {
    /// A network of libvirt's of this name, started.
    Network(String),
    /// A link, for macvtap.
    Link(String),
    /// A storage pool of libvirt's, started, with this volume.
    Volume {
        /// The pool.
        pool: String,
        /// The volume.
        volume: String,
    },
    /// A secret of libvirt's.
    Secret(Uuid),
    /// The socket of another process.
    Socket(PathBuf),
    /// The firmware's file.
    Firmware(PathBuf),
    /// An address on which viewers are listened for.
    Address(IpAddr),
    /// A CPU of this number.
    Cpu(u32),
    /// A NUMA node of this number.
    NumaNode(u32),
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(name) => write!(f, "the libvirt network {}, started", plain(name)),
            Self::Link(name) => write!(f, "the link {} for macvtap", plain(name)),
            Self::Volume { pool, volume } => {
                write!(f, "the libvirt storage pool {} with the volume {}", plain(pool), plain(volume))
            }
            Self::Secret(uuid) => write!(f, "the libvirt secret {uuid}"),
            Self::Socket(path) => write!(f, "the socket {}", plain(&path.to_string_lossy())),
            Self::Firmware(path) => write!(f, "the firmware {}", plain(&path.to_string_lossy())),
            Self::Address(address) => write!(f, "the address {address}, on which its screen listens"),
            Self::Cpu(number) => write!(f, "CPU {number}, to which it is bound"),
            Self::NumaNode(number) => write!(f, "NUMA node {number}, to which its memory is bound"),
        }
    }
}

impl DomainDescription {
    /// All that a target must have beside what [`Self::vm_spec`] says, each once.
    pub fn needs(&self) -> BTreeSet<Need> {
        let mut needs: BTreeSet<Need> =
            self.interfaces.iter().filter_map(|one| of_interface(&one.kind)).collect();
        needs.extend(self.disks.iter().filter_map(|disk| of_source(&disk.source)));
        needs.extend(self.secrets().map(Need::Secret));
        if let Firmware::Uefi { loader: Some(loader), .. } = &self.firmware {
            needs.insert(Need::Firmware(loader.clone()));
        }
        let listens = self.graphics.iter().flat_map(|graphics| &graphics.listens);
        needs
            .extend(listens.filter(|address| !is_everywhere(address)).map(|address| Need::Address(*address)));
        needs.extend(self.bound.highest_cpu.map(Need::Cpu));
        needs.extend(self.bound.highest_node.map(Need::NumaNode));
        needs
    }

    fn secrets(&self) -> impl Iterator<Item = Uuid> {
        let of_tpm = match &self.tpm {
            Some(Tpm::Emulator { secret, .. }) => *secret,
            _ => None,
        };
        self.disks.iter().flat_map(|disk| &disk.secrets).copied().chain(of_tpm)
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
