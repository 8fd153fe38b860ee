//! Other devices of a domain that matter to a migration.

use std::net::IpAddr;
use std::path::PathBuf;

use uuid::Uuid;

use super::element::Element;

/// The name of the channel on which the guest's agent answers libvirt.
const GUEST_AGENT: &str = "org.qemu.guest_agent.0";

/// A device of the host that the guest has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostDevice {
    /// `pci`, `usb`, `mdev`, `scsi`, `scsi_host`; of containers also `storage`, `misc` and `net`.
    pub kind: String,
    /// Its identifier, if the XML has it in one word: an address.
    pub address: String,
    /// Whether the guest goes on over another interface while this one is unplugged for a migration.
    pub is_unplugged_to_migrate: bool,
}

/// A TPM of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tpm {
    /// swtpm, whose state travels with the guest.
    Emulator {
        /// `1.2` or `2.0`.
        version: Option<String>,
        /// The secret that encrypts its state, which the target must have too.
        secret: Option<Uuid>,
    },
    /// The host's own.
    Passthrough {
        /// Its device.
        path: Option<PathBuf>,
    },
    /// Something that others run.
    Other(String),
}

/// A directory of the host that the guest mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// By what.
    pub driver: FileSystemDriver,
    /// The name under which the guest finds it.
    pub tag: String,
    /// The directory of the host.
    pub source: Option<PathBuf>,
}

/// By what a guest mounts a directory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystemDriver {
    /// virtiofs.
    Virtiofs,
    /// 9p.
    NineP,
}

/// Memory that guests share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedMemory {
    /// Its name.
    pub name: String,
    /// `ivshmem`, `ivshmem-plain` or `ivshmem-doorbell`.
    pub model: String,
    /// Whether its contents travel with this guest.
    pub is_master: bool,
}

/// A screen of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Graphics {
    /// `vnc`, `spice` and so on.
    pub kind: String,
    /// The address to which viewers connect, if it is an address.
    pub listens: Vec<IpAddr>,
}

pub(super) fn host_device(device: Element<'_>) -> HostDevice {
    HostDevice {
        kind: device.text_of("type").unwrap_or_default(),
        address: device.at("source").map(source_address).unwrap_or_default(),
        is_unplugged_to_migrate: device
            .at("teaming")
            .is_some_and(|teaming| teaming.attribute("type") == Some("transient")),
    }
}

fn source_address(source: Element<'_>) -> String {
    let id = |name| source.at(name).and_then(|found| found.text_of("id"));
    if let (Some(vendor), Some(product)) = (id("vendor"), id("product")) {
        return format!("{vendor}:{product}");
    }
    let Some(address) = source.at("address") else {
        return source.at("adapter").and_then(|adapter| adapter.text_of("name")).unwrap_or_default();
    };
    let of = |name| address.text_of(name);
    match (of("uuid"), of("device")) {
        (Some(uuid), _) => uuid,
        (None, Some(device)) => {
            of("bus").map_or_else(String::new, |bus| format!("bus {bus}, device {device}"))
        }
        (None, None) => pci_address(address),
    }
}

/// As `lspci` writes it; empty if a part is missing.
pub(super) fn pci_address(address: Element<'_>) -> String {
    let part = |name: &str| {
        let text = address.attribute(name)?;
        u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
    };
    match (part("bus"), part("slot"), part("function")) {
        (Some(bus), Some(slot), Some(function)) => {
            format!("{:04x}:{bus:02x}:{slot:02x}.{function:x}", part("domain").unwrap_or(0))
        }
        _ => String::new(),
    }
}

pub(super) fn tpm(tpm: Element<'_>) -> Tpm {
    let Some(backend) = tpm.at("backend") else { return Tpm::Other(String::new()) };
    match backend.attribute("type").unwrap_or_default() {
        "emulator" => Tpm::Emulator {
            version: backend.text_of("version"),
            secret: backend.at("encryption").and_then(|encryption| encryption.parsed("secret")),
        },
        "passthrough" => {
            Tpm::Passthrough { path: backend.at("device").and_then(|device| device.path_of("path")) }
        }
        other => Tpm::Other(other.to_owned()),
    }
}

/// None for what is no directory, such as a container's image.
pub(super) fn file_system(element: Element<'_>) -> Option<FileSystem> {
    if !matches!(element.attribute("type"), None | Some("mount")) {
        return None;
    }
    let driver = element.at("driver").and_then(|driver| driver.attribute("type"));
    let is_virtiofs = driver == Some("virtiofs");
    let source = element.at("source");
    Some(FileSystem {
        driver: if is_virtiofs { FileSystemDriver::Virtiofs } else { FileSystemDriver::NineP },
        tag: element.at("target").and_then(|target| target.text_of("dir")).unwrap_or_default(),
        source: source.and_then(|source| source.path_of("dir").or_else(|| source.path_of("socket"))),
    })
}

pub(super) fn shared_memory(element: Element<'_>) -> SharedMemory {
    SharedMemory {
        name: element.text_of("name").unwrap_or_default(),
        model: element.at("model").and_then(|model| model.text_of("type")).unwrap_or_default(),
        is_master: element.attribute("role") == Some("master"),
    }
}

pub(super) fn graphics(element: Element<'_>) -> Graphics {
    // libvirt repeats the first `<listen>` in an attribute, for what is older than the element.
    let nested = element.all("listen").filter_map(|listen| listen.parsed("address"));
    let mut listens: Vec<IpAddr> = nested.collect();
    if !element.has("listen") {
        listens.extend(element.parsed::<IpAddr>("listen"));
    }
    Graphics { kind: element.text_of("type").unwrap_or_default(), listens }
}

pub(super) fn is_guest_agent(channel: Element<'_>) -> bool {
    channel.at("target").is_some_and(|target| target.attribute("name") == Some(GUEST_AGENT))
}

/// Whether the host's GPU draws for the guest.
pub(super) fn is_drawn_by_host(video: Element<'_>) -> bool {
    video.at("model/acceleration").is_some_and(|acceleration| acceleration.says_yes("accel3d"))
}
