//! The disks of a domain.

use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::element::Element;

/// A disk of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is an element of its own in the XML")]
pub struct Disk {
    /// The guest's name for it, such as `vda`.
    pub target: String,
    /// libvirt's name for it while the domain is active.
    pub alias: Option<String>,
    /// What the guest sees.
    pub device: DiskDevice,
    /// Where its contents are.
    pub source: DiskSource,
    /// The format of its contents, such as `qcow2`; `None` is raw.
    pub format: Option<String>,
    /// Whether the guest only reads it. CD-ROMs always are.
    pub is_read_only: bool,
    /// Whether other guests write to it too.
    pub is_shareable: bool,
    /// Whether what is written to it is thrown away at the end.
    pub is_transient: bool,
    /// How the host caches it, such as `none`; `None` is the hypervisor's default.
    pub cache: Option<String>,
    /// Whether libvirt goes on without it where it is missing on a migration's target.
    pub is_dropped_if_missing: bool,
    /// The chain of what its image is based on, as far as the XML has it.
    pub backing: Vec<Backing>,
    /// Whether a job copies it, or merges its images.
    pub has_block_job: bool,
    /// The secrets that decrypt it, by UUID.
    pub secrets: Vec<Uuid>,
}

/// What the guest sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskDevice {
    /// A disk.
    Disk,
    /// A CD-ROM.
    Cdrom,
    /// A floppy.
    Floppy,
    /// A SCSI unit that takes the guest's commands.
    Lun,
    /// Something of a newer libvirt.
    Other(String),
}

/// Where the contents of a disk are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskSource {
    /// Nowhere: an empty drive.
    None,
    /// A file.
    File {
        /// Its path.
        path: PathBuf,
    },
    /// A block device.
    Block {
        /// Its path.
        path: PathBuf,
    },
    /// A directory that looks like a disk.
    Directory {
        /// Its path.
        path: PathBuf,
    },
    /// On the network, by QEMU's own client.
    Network {
        /// `rbd`, `iscsi`, `nbd` and so on.
        protocol: String,
        /// The image or export.
        name: Option<String>,
    },
    /// A volume of a storage pool of libvirt's.
    Volume {
        /// The pool.
        pool: String,
        /// The volume.
        volume: String,
    },
    /// A controller that QEMU drives itself.
    Nvme,
    /// Another process, behind a socket.
    VhostUser {
        /// The socket.
        socket: Option<PathBuf>,
    },
    /// Something of a newer libvirt.
    Other(String),
}

/// What an image is based on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// Its format.
    pub format: Option<String>,
    /// Where it is.
    pub source: DiskSource,
}

impl DiskSource {
    /// The file, device or directory, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File { path } | Self::Block { path } | Self::Directory { path } => Some(path),
            _ => None,
        }
    }
}

pub(super) fn parse(disk: Element<'_>) -> Disk {
    let driver = disk.at("driver");
    let of_driver = |name: &str| driver.and_then(|driver| driver.text_of(name));
    let source = disk.at("source");
    let device = device(disk.attribute("device"));
    let policy = source.and_then(|source| source.attribute("startupPolicy"));
    Disk {
        target: disk.at("target").and_then(|target| target.text_of("dev")).unwrap_or_default(),
        alias: disk.at("alias").and_then(|alias| alias.text_of("name")),
        // libvirt takes a CD-ROM for read-only, also where it does not say so.
        is_read_only: disk.has("readonly") || device == DiskDevice::Cdrom,
        device,
        source: parse_source(disk.attribute("type"), source),
        format: of_driver("type"),
        is_shareable: disk.has("shareable"),
        is_transient: disk.has("transient"),
        cache: of_driver("cache"),
        is_dropped_if_missing: matches!(policy, Some("optional" | "requisite")),
        backing: disk.chain("backingStore").filter_map(backing).collect(),
        has_block_job: disk.has("mirror"),
        secrets: secrets(disk),
    }
}

fn device(name: Option<&str>) -> DiskDevice {
    match name {
        None | Some("disk") => DiskDevice::Disk,
        Some("cdrom") => DiskDevice::Cdrom,
        Some("floppy") => DiskDevice::Floppy,
        Some("lun") => DiskDevice::Lun,
        Some(other) => DiskDevice::Other(other.to_owned()),
    }
}

fn parse_source(kind: Option<&str>, source: Option<Element<'_>>) -> DiskSource {
    let Some(source) = source else { return DiskSource::None };
    let path = |attribute, found: fn(PathBuf) -> DiskSource| source.path_of(attribute).map(found);
    let found = match kind {
        None | Some("file") => path("file", |path| DiskSource::File { path }),
        Some("block") => path("dev", |path| DiskSource::Block { path }),
        Some("dir") => path("dir", |path| DiskSource::Directory { path }),
        Some("network") => network(source),
        Some("volume") => volume(source),
        Some("nvme") => Some(DiskSource::Nvme),
        Some("vhostuser") => Some(DiskSource::VhostUser { socket: source.path_of("path") }),
        Some(other) => Some(DiskSource::Other(other.to_owned())),
    };
    found.unwrap_or(DiskSource::None)
}

fn network(source: Element<'_>) -> Option<DiskSource> {
    Some(DiskSource::Network { protocol: source.text_of("protocol")?, name: source.text_of("name") })
}

fn volume(source: Element<'_>) -> Option<DiskSource> {
    Some(DiskSource::Volume { pool: source.text_of("pool")?, volume: source.text_of("volume")? })
}

/// None is the end of the chain, which libvirt writes as an empty element.
fn backing(element: Element<'_>) -> Option<Backing> {
    let kind = element.attribute("type")?;
    let format = element.at("format").and_then(|format| format.text_of("type"));
    Some(Backing { format, source: parse_source(Some(kind), element.at("source")) })
}

fn secrets(disk: Element<'_>) -> Vec<Uuid> {
    let holders = [Some(disk), disk.at("source")].into_iter().flatten();
    let users = holders.flat_map(|holder| holder.all("encryption").chain(holder.all("auth")));
    users.flat_map(|user| user.all("secret")).filter_map(|secret| secret.parsed("uuid")).collect()
}
