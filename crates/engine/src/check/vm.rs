//! What two hosts say about a VM that may move from one to the other.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::facts::{ImplausibleFacts, LIST_MAX, WORD_BYTES_MAX, is_plain};
use crate::host::facts::MemoryNeeds;
use crate::host::vm_resources::NotAllowed;
use crate::storage::DeviceIdentifier;

/// The length of a path in Linux (`PATH_MAX`).
const PATH_BYTES_MAX: usize = 4096;

/// A running VM of the source, and what the target says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmCheck {
    /// What the source says.
    pub vm: VmFacts,
    /// What the target says.
    pub fit: VmFit,
}

/// A running VM, as its host describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmFacts {
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// The part of it that was added so that a QEMU before 9.0 sees all the guest's writes.
    pub padding_bytes: u64,
    /// Size of the huge pages that hold it, in MiB, if any do.
    pub huge_page_mib: Option<u64>,
    /// QEMU's machine type, with its version.
    pub machine: String,
    /// QEMU's CPU model, maybe with features behind commas.
    pub cpu_model: String,
    /// Version of the QEMU that runs it.
    pub qemu_version: String,
    /// What that CPU model is on its host.
    pub cpu: Option<CpuFeatures>,
    /// The files that its QEMU opens.
    pub files: Vec<VmFile>,
    /// What keeps it on its host, whatever the target.
    pub obstacles: Vec<Notice>,
    /// What may keep it there, or change with the host.
    pub doubts: Vec<Notice>,
    /// What a target must have, beside CPU, memory, files and bridges.
    pub needs: Vec<Notice>,
}

/// What a VM's host has to say of it to people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// What it is.
    pub what: String,
    /// What can be done about it.
    pub remedy: String,
}

/// How the host to which a VM would go could take it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct VmFit {
    /// Whether another VM there has its name.
    pub name_taken: bool,
    /// Why it cannot run there, whatever its CPU and files.
    pub obstacle: Option<Obstacle>,
    /// What its CPU model is there; absent where that is not known.
    pub cpu: Option<CpuFeatures>,
    /// The files that its QEMU opens, in the order of [`VmFacts::files`].
    pub files: Vec<FileState>,
    /// Bridges that its NICs join, and that the host does not have.
    #[serde(default)]
    pub missing_bridges: Vec<String>,
    /// Bridges that its NICs join, and that no VM may join there.
    #[serde(default)]
    pub bridges_not_allowed: Vec<String>,
    /// Files that no VM may use there; each is [`FileState::Missing`] among the files.
    #[serde(default)]
    pub files_not_allowed: Vec<FileNotAllowed>,
    /// What is free where disks would be made that the host does not have, as far as that is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disk_rooms: Vec<DiskRoom>,
    /// Where the host wants disks that it does not have, if not under their paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disk_places: Vec<DiskPlace>,
    /// What it needs and the host lacks, by places in [`VmFacts::needs`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lacking: Vec<usize>,
}

/// Where a disk would be made on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskRoom {
    /// Which of the files, from 0.
    pub index: usize,
    /// Number of the device of the file system there.
    pub device: u64,
    /// What is free on that, and promised to no VM that comes.
    pub free_bytes: u64,
}

/// Where a host wants a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskPlace {
    /// Which of the files, from 0.
    pub index: usize,
    /// Its path there.
    pub path: String,
}

impl DiskPlace {
    fn is_plausible(&self, files: usize) -> bool {
        let Self { index, path } = self;
        *index < files
            && path.starts_with('/')
            && path.len() <= PATH_BYTES_MAX
            && !path.chars().any(char::is_control)
    }
}

/// A file that no VM may use on a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileNotAllowed {
    /// Which of the files, from 0.
    pub index: usize,
    /// Why.
    pub why: NotAllowed,
}

/// Why a host cannot run a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Obstacle {
    /// Its QEMU does not know the machine type.
    MachineUnknown {
        /// The newest that it knows of that kind.
        newest: Option<String>,
    },
    /// The VM runs by KVM, which the host lacks.
    NoKvm,
    /// Its QEMU would lose writes of this TCG guest when it moves on from there.
    LosesWrites,
}

/// What a CPU model is on a host: of the features that differ from host to host, which there are.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct CpuFeatures {
    /// Whether the host's QEMU knows the model.
    pub known: bool,
    /// Features of the model that a guest does not get on this host; for models that are whatever the host
    /// is, all that a guest does not get. Not those that the VM has switched off itself.
    pub lacking: BTreeSet<String>,
    /// Each feature that the host's QEMU has a name for.
    pub named: BTreeSet<String>,
}

/// A file that a VM's QEMU opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmFile {
    /// Its path.
    pub path: String,
    /// What for.
    pub purpose: FilePurpose,
    /// What is there.
    pub state: FileState,
}

/// What a VM's QEMU opens a file for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilePurpose {
    /// To boot from: read once.
    Boot,
    /// A disk that the guest may only read.
    ReadOnlyDisk,
    /// A disk that is copied to the target: what is there under its path does not matter.
    CopiedDisk,
    /// A disk that the guest writes to: both hosts must have the very same one.
    Disk,
}

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileState {
    /// Something that can be a disk.
    Present(FileIdentity),
    /// Nothing, or nothing that can be looked at.
    Missing,
    /// The storage has not answered in time.
    Silent,
}

/// What tells one file from another, also between hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileIdentity {
    /// Whether it is a block device and no file.
    pub block_device: bool,
    /// Its size.
    pub size_bytes: u64,
    /// Its inode; says nothing of a block device.
    pub inode: u64,
    /// Whether its file system is of a kind that only one host can have mounted.
    pub local_filesystem: bool,
    /// Whether a QEMU, on whatever host, has it locked as a disk; absent where that cannot be seen.
    pub locked: Option<bool>,
    /// Name that a block device itself has; absent where it has none.
    pub device: Option<DeviceIdentifier>,
}

impl VmFacts {
    /// What it needs of a host's memory.
    pub fn needs(&self) -> MemoryNeeds {
        MemoryNeeds::of(self.memory_bytes, self.huge_page_mib)
    }
}

impl VmFit {
    /// Whether a peer's answer about a VM with so many files and needs may be used.
    pub fn plausible(&self, host: &str, files: usize, needs: usize) -> Result<(), ImplausibleFacts> {
        let features = self.cpu.as_ref().map_or(0, |cpu| cpu.lacking.len().max(cpu.named.len()));
        let bridges = self.missing_bridges.len().max(self.bridges_not_allowed.len());
        let is_known = |file: &FileNotAllowed| file.index < files && file.why.is_plausible();
        if self.files.len() != files
            || self.lacking.len() > needs
            || self.lacking.iter().any(|need| *need >= needs)
            || features.max(bridges).max(self.files_not_allowed.len()) > LIST_MAX
            || !self.files_not_allowed.iter().all(is_known)
            || self.disk_rooms.len() > files
            || self.disk_rooms.iter().any(|room| room.index >= files)
            || self.disk_places.len() > files
            || !self.disk_places.iter().all(|place| place.is_plausible(files))
        {
            return Err(ImplausibleFacts::List { host: host.into() });
        }
        match self.words().find(|word| !is_plain(word)) {
            Some(word) => {
                let word = word.chars().take(WORD_BYTES_MAX).collect();
                Err(ImplausibleFacts::Word { host: host.into(), word })
            }
            None => Ok(()),
        }
    }

    fn words(&self) -> impl Iterator<Item = &String> {
        let newest = match &self.obstacle {
            Some(Obstacle::MachineUnknown { newest }) => newest.as_ref(),
            _ => None,
        };
        let cpu = self.cpu.iter().flat_map(|cpu| cpu.lacking.iter().chain(&cpu.named));
        newest.into_iter().chain(cpu).chain(&self.missing_bridges).chain(&self.bridges_not_allowed)
    }
}
