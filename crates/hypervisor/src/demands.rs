//! What moving a VM needs besides its specification: for VMs that another manager of VMs owns.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use drainpipe_engine::check::vm::Notice;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::words::plain;

/// What its host says of moving a VM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Demands {
    /// What keeps it where it is.
    pub obstacles: Vec<Notice>,
    /// What may keep it there, or change with the host.
    pub doubts: Vec<Notice>,
    /// What a target must have.
    pub needs: Vec<Need>,
}

/// Something that a target must have, or the VM is not started there.
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
            Self::Cpu(number) => write!(f, "CPU {number}, to which it is pinned"),
            Self::NumaNode(number) => write!(f, "NUMA node {number}, to which its memory is pinned"),
        }
    }
}

impl Need {
    /// What it is, and what is done on a host that lacks it.
    pub fn notice(&self) -> Notice {
        Notice { what: self.to_string(), remedy: self.remedy() }
    }

    fn remedy(&self) -> String {
        match self {
            Self::Network(name) => {
                let name = plain(name);
                format!(
                    "virsh net-start {name}; if it is not defined there, virsh net-dumpxml {name} on the VM's host and \
                     virsh net-define on the target first"
                )
            }
            Self::Link(name) => format!("ip link lists the links; name one {}", plain(name)),
            Self::Volume { pool, .. } => {
                let pool = plain(pool);
                format!("virsh pool-start {pool}; virsh pool-refresh {pool}: it must be on the same storage")
            }
            Self::Secret(uuid) => {
                format!("virsh secret-define it there too, as virsh secret-dumpxml {uuid} shows it")
            }
            Self::Socket(_) => "start what listens there".into(),
            Self::Firmware(_) => "install the same package of firmware there".into(),
            Self::Address(_) => {
                "let the screen listen on 0.0.0.0 or 127.0.0.1, and start the domain again".into()
            }
            Self::Cpu(_) => {
                "use virsh vcpupin and virsh emulatorpin to pin it to CPUs that both hosts have".into()
            }
            Self::NumaNode(_) => "use virsh numatune to pin it to nodes that both hosts have".into(),
        }
    }
}
