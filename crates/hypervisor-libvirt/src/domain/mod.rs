//! A libvirt domain, as its XML describes it. Pure: nothing here asks a host.
//!
//! ```text
//! limits      bounds on XML that may come from another host
//! element     an element, and what is in it
//! memory      how much memory it has, and what holds it
//! cpu         its CPUs, and what of the host they are bound to
//! firmware    what it boots with
//! disks       its disks
//! interfaces  its network interfaces
//! devices     host devices, TPMs, mounts, screens
//! placement   our own metadata: where it may be
//! obstacles   what cannot migrate, and what may not
//! needs       what a target must have that a specification does not say
//! trust       what of XML that another host has sent is let in
//! vm_spec     the specification that stands for it
//! snapshot    what is known of a snapshot, and whether it goes along
//! ```
//!
//! Drainpipe skips what it does not ask for, and keeps unknown words of libvirt's fixed lists as text: each libvirt adds some.

mod cpu;
mod devices;
mod disks;
mod element;
mod error;
mod firmware;
mod interfaces;
mod limits;
mod memory;
mod needs;
mod obstacles;
mod placement;
mod snapshot;
mod trust;
mod vm_spec;

use std::path::PathBuf;

use drainpipe_hypervisor::spec::Placement;
use drainpipe_hypervisor::words;
use uuid::Uuid;

pub use cpu::{Bound, CpuChoice, Cpus};
pub use devices::{FileSystem, FileSystemDriver, Graphics, HostDevice, SharedMemory, Tpm};
pub use disks::{Backing, Disk, DiskDevice, DiskSource};
pub use drainpipe_hypervisor::Need;
pub use error::DomainXmlError;
pub use firmware::{DirectBoot, Firmware};
pub use interfaces::{Interface, InterfaceKind};
pub use memory::{HugePages, Memory, MemoryDevice, MemorySource};
pub use obstacles::{Doubt, Obstacle};
pub use placement::{NAMESPACE as PLACEMENT_NAMESPACE, PlacementError};
pub use snapshot::{Left, Snapshot, are_in_order, snapshot};
pub use trust::{Untrusted, refusal};
pub use vm_spec::Inexpressible;

use element::Element;

/// The namespace of arguments that are handed to QEMU as they are.
const QEMU_NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// What a domain's XML says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainDescription {
    /// `kvm`, `qemu`, or another hypervisor.
    pub hypervisor: String,
    /// Its name, which may be any.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// A line that its owner wrote.
    pub title: Option<String>,
    /// What its owner wrote.
    pub description: Option<String>,
    /// Where it may be when a host is emptied, or why that is not known.
    pub placement: Result<Placement, PlacementError>,
    /// Its memory.
    pub memory: Memory,
    /// Its CPUs.
    pub cpus: Cpus,
    /// The things of the host that it is bound to.
    pub bound: Bound,
    /// What it is built as, and boots.
    pub machine: Machine,
    /// What is in it.
    pub devices: Devices,
    /// How its memory is encrypted, such as `sev`.
    pub launch_security: Option<String>,
    /// Whether QEMU gets arguments from it that libvirt does not know.
    pub has_qemu_arguments: bool,
}

/// What a domain is built as, and boots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Machine type, such as `pc-q35-7.2`.
    pub kind: Option<String>,
    /// Architecture, such as `x86_64`.
    pub architecture: Option<String>,
    /// The program that runs it.
    pub emulator: Option<PathBuf>,
    /// Its firmware.
    pub firmware: Firmware,
    /// A kernel that is booted without a boot loader.
    pub direct_boot: DirectBoot,
}

/// A domain's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices {
    /// Its disks.
    pub disks: Vec<Disk>,
    /// Its network interfaces.
    pub interfaces: Vec<Interface>,
    /// Devices of the host that it has.
    pub host_devices: Vec<HostDevice>,
    /// Its TPM.
    pub tpm: Option<Tpm>,
    /// Directories of the host that it mounts.
    pub file_systems: Vec<FileSystem>,
    /// Memory that it shares with other guests.
    pub shared_memory: Vec<SharedMemory>,
    /// Its screens.
    pub graphics: Vec<Graphics>,
    /// Whether the host's GPU draws for it.
    pub is_drawn_by_host: bool,
    /// Whether its agent may answer libvirt.
    pub has_guest_agent: bool,
}

impl DomainDescription {
    /// Reads a domain's XML, as libvirt gives it or as another host has sent it.
    pub fn parse(xml: &str) -> Result<Self, DomainXmlError> {
        let document = element::parse(xml)?;
        let domain = Element::root(&document);
        if domain.name() != "domain" || domain.namespace().is_some() {
            return Err(DomainXmlError::NotADomain { root: words::plain(domain.name()) });
        }
        describe(domain)
    }
}

/// The program that libvirt starts, by its XML of its domains' capabilities.
pub(crate) fn emulator_of(capabilities_xml: &str) -> Option<PathBuf> {
    let document = element::parse(capabilities_xml).ok()?;
    Element::root(&document).at("path").and_then(Element::text).map(PathBuf::from)
}

fn describe(domain: Element<'_>) -> Result<DomainDescription, DomainXmlError> {
    let text = |path: &str| domain.at(path).and_then(Element::text);
    Ok(DomainDescription {
        hypervisor: domain.text_of("type").unwrap_or_default(),
        name: text("name").ok_or(DomainXmlError::Missing { element: "name" })?,
        uuid: uuid(text("uuid"))?,
        title: text("title"),
        description: text("description"),
        placement: placement::parse(domain.at("metadata")),
        memory: memory::parse(domain)?,
        cpus: cpu::parse(domain)?,
        bound: cpu::bound(domain),
        machine: machine(domain),
        devices: devices(domain.at("devices")),
        launch_security: domain.at("launchSecurity").and_then(|security| security.text_of("type")),
        has_qemu_arguments: has_qemu_arguments(domain),
    })
}

fn machine(domain: Element<'_>) -> Machine {
    let kind = domain.at("os/type");
    Machine {
        kind: kind.and_then(|kind| kind.text_of("machine")),
        architecture: kind.and_then(|kind| kind.text_of("arch")),
        emulator: domain.at("devices/emulator").and_then(Element::text).map(PathBuf::from),
        firmware: firmware::parse(domain.at("os")),
        direct_boot: firmware::direct_boot(domain.at("os")),
    }
}

fn devices(element: Option<Element<'_>>) -> Devices {
    let all = InDevices(element);
    Devices {
        disks: all.map("disk", disks::parse),
        interfaces: all.map("interface", interfaces::parse),
        host_devices: all.map("hostdev", devices::host_device),
        tpm: all.map("tpm", devices::tpm).into_iter().next(),
        file_systems: all.map("filesystem", devices::file_system).into_iter().flatten().collect(),
        shared_memory: all.map("shmem", devices::shared_memory),
        graphics: all.map("graphics", devices::graphics),
        is_drawn_by_host: all.map("video", devices::is_drawn_by_host).contains(&true),
        has_guest_agent: all.map("channel", devices::is_guest_agent).contains(&true),
    }
}

fn uuid(text: Option<String>) -> Result<Uuid, DomainXmlError> {
    let text = text.ok_or(DomainXmlError::Missing { element: "uuid" })?;
    text.trim().parse().map_err(|_| DomainXmlError::Invalid {
        element: "uuid",
        message: format!("`{}` is no UUID", words::plain(&text)),
    })
}

fn has_qemu_arguments(domain: Element<'_>) -> bool {
    domain.elements().any(|element| element.namespace() == Some(QEMU_NAMESPACE))
}

/// The element of all devices, if there is one.
struct InDevices<'a>(Option<Element<'a>>);

impl<'a> InDevices<'a> {
    fn map<T>(&self, name: &str, parse: fn(Element<'a>) -> T) -> Vec<T> {
        self.0.into_iter().flat_map(|devices| devices.all(name)).map(parse).collect()
    }
}
