//! What this host's hypervisor can do.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use drainpipe_engine::host::capabilities::Capabilities;
use serde::{Deserialize, Serialize};

use crate::cpu_models::CpuModels;

/// Version of a hypervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number.
    pub micro: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// What this host's hypervisor can do. Changes only when it is upgraded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HypervisorFacts {
    /// Its name, for people.
    pub name: String,
    /// What it can do in a migration.
    pub capabilities: Capabilities,
    /// The program.
    pub binary: PathBuf,
    /// Its version.
    pub version: Version,
    /// Machine types that it knows, without aliases.
    pub machines: Vec<String>,
    /// Whether migration over RDMA is built in.
    pub rdma: bool,
    /// Why KVM cannot be used; `None` when it can.
    pub kvm_missing: Option<String>,
    /// What its CPU models are on this host.
    pub cpu_models: CpuModels,
    /// Tells the program from one that an upgrade puts in its place.
    pub stamp: Option<BinaryStamp>,
}

/// Inode and time of modification of a program's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BinaryStamp {
    inode: u64,
    modified: SystemTime,
}

impl BinaryStamp {
    /// The stamp of a program, found as a shell finds it; `None` where there is none.
    pub fn of(binary: &Path) -> Option<Self> {
        let metadata = find(binary)?.metadata().ok()?;
        Some(Self { inode: metadata.ino(), modified: metadata.modified().ok()? })
    }
}

/// As a shell finds it.
fn find(binary: &Path) -> Option<PathBuf> {
    if binary.components().count() > 1 {
        return Some(binary.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(binary)).find(|file| file.is_file())
}

impl HypervisorFacts {
    /// Whether the program has been replaced or removed since it was asked.
    pub fn is_outdated(&self) -> bool {
        BinaryStamp::of(&self.binary) != self.stamp
    }

    /// The newest machine type of the same family as `machine`.
    pub fn newest_like(&self, machine: &str) -> Option<&str> {
        let (family, _) = machine.rsplit_once('-')?;
        let version = |name: &str| -> Option<Vec<u32>> {
            let (of, version) = name.rsplit_once('-')?;
            (of == family).then(|| version.split('.').filter_map(|part| part.parse().ok()).collect())
        };
        let known = self.machines.iter().filter_map(|name| Some((version(name)?, name.as_str())));
        known.max().map(|(_, name)| name)
    }
}
