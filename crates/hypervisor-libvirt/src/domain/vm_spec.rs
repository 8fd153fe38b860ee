//! The specification that stands for a domain, by which it is planned and checked like every other VM.

use drainpipe_hypervisor::spec::{
    self, Accelerator, DiskFormat, MachineType, Manager, NameError, Nic, SpecProblem, VmName, VmSpec,
};

use super::cpu::CpuChoice;
use super::disks::{Disk, DiskSource};
use super::interfaces::InterfaceKind;
use super::memory::HugePages;
use super::placement::PlacementError;
use super::words::{line, plain};
use super::{DomainDescription, Interface};

const MIB: u64 = 1 << 20;
/// What `<hugepages/>` without a size is on x86-64, unless the host's kernel was started otherwise.
const DEFAULT_HUGE_PAGE_KIB: u64 = 2048;
/// What is no huge page.
const ORDINARY_PAGE_KIB: u64 = 4;

/// Why there is no specification for a domain, so that it can be shown and not migrated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Inexpressible {
    /// Not QEMU's.
    #[error("its hypervisor is {}: only `kvm` and `qemu` can migrate here", plain(.0))]
    Hypervisor(String),
    /// A name that Drainpipe's VMs do not have.
    #[error("{0}; `virsh domrename` gives it another one while it is shut off")]
    Name(NameError),
    /// A machine that Drainpipe does not know.
    #[error("{0}")]
    Machine(NameError),
    /// No machine at all.
    #[error("its XML names no machine type")]
    NoMachine,
    /// Our metadata makes no sense.
    #[error("{0}")]
    Placement(PlacementError),
    /// Memory of pages that are not all alike.
    #[error("its memory is made of huge pages of several sizes: give all its NUMA nodes the same <page>")]
    HugePages,
    /// A format that cannot be looked into.
    #[error(
        "its disk {} has the format {}: only raw and qcow2 can migrate here",
        plain(target),
        plain(format)
    )]
    DiskFormat {
        /// The guest's name for the disk.
        target: String,
        /// The format.
        format: String,
    },
    /// A value that a specification does not take.
    #[error("{}", line(&.0.to_string()))]
    Value(SpecProblem),
}

impl Inexpressible {
    /// All reasons, for people.
    pub(crate) fn in_words(reasons: &[Self]) -> String {
        let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        reasons.join("; ")
    }
}

impl DomainDescription {
    /// The specification that stands for it, or all reasons why there is none.
    ///
    /// It says what planning, promises of memory and checks ask for: memory, huge pages, CPUs, machine, placement, and of
    /// the disks, with what they are based on, and interfaces those with a path or a bridge. The others are in [`Self::needs`]. The domain itself is
    /// started from its XML alone.
    pub fn vm_spec(&self) -> Result<VmSpec, Vec<Inexpressible>> {
        let mut reasons = Vec::new();
        let spec = self.attempt(&mut reasons);
        match spec {
            Some(spec) if reasons.is_empty() => match spec.validate() {
                Ok(()) => Ok(spec),
                Err(problem) => Err(vec![Inexpressible::Value(problem)]),
            },
            _ => Err(reasons),
        }
    }

    /// None only where there are reasons.
    fn attempt(&self, reasons: &mut Vec<Inexpressible>) -> Option<VmSpec> {
        let name = keep(plain(&self.name).parse::<VmName>().map_err(Inexpressible::Name), reasons);
        let machine = keep(self.machine_type(), reasons);
        let accelerator = keep(self.accelerator(), reasons);
        let placement = keep(self.placement.clone().map_err(Inexpressible::Placement), reasons);
        let huge_page_mib = keep(huge_page_mib(&self.memory.huge_pages), reasons);
        let mut disks: Vec<spec::Disk> =
            self.devices.disks.iter().filter_map(|disk| keep(disk_spec(disk), reasons).flatten()).collect();
        for image in self.devices.disks.iter().flat_map(backing_specs) {
            let is_new = |image: &spec::Disk| {
                !disks.iter().any(|disk| disk.path == image.path && disk.format == image.format)
            };
            disks.extend(keep(image, reasons).filter(is_new));
        }
        let huge_page_mib = huge_page_mib?;
        Some(VmSpec {
            name: name?,
            uuid: Some(self.uuid),
            memory_mib: self.memory.bytes.div_ceil(MIB).next_multiple_of(huge_page_mib.unwrap_or(1)),
            // libvirt gives whole MiB.
            memory_padding_kib: Some(0),
            huge_page_mib,
            vcpus: self.cpus.most,
            machine: machine?,
            cpu_model: self.cpu_model(),
            accelerator: accelerator?,
            kernel: self.machine.direct_boot.kernel.clone(),
            initramfs: self.machine.direct_boot.initramfs.clone(),
            kernel_command_line: self.machine.direct_boot.command_line.clone(),
            disks,
            nics: self.devices.interfaces.iter().filter_map(nic).collect(),
            placement: placement?,
            guest: None,
            manager: Some(Manager::Libvirt),
        })
    }

    fn machine_type(&self) -> Result<MachineType, Inexpressible> {
        let machine = self.machine.kind.as_ref().ok_or(Inexpressible::NoMachine)?;
        plain(machine).parse().map_err(Inexpressible::Machine)
    }

    /// By what it runs.
    pub(crate) fn accelerator(&self) -> Result<Accelerator, Inexpressible> {
        match self.hypervisor.as_str() {
            "kvm" => Ok(Accelerator::Kvm),
            "qemu" => Ok(Accelerator::Tcg),
            other => Err(Inexpressible::Hypervisor(other.to_owned())),
        }
    }

    /// By QEMU's name, which libvirt's models have too.
    fn cpu_model(&self) -> String {
        match &self.cpus.choice {
            CpuChoice::Custom { model } => model.clone(),
            CpuChoice::HostPassthrough | CpuChoice::HostModel => "host".to_owned(),
            CpuChoice::Maximum => "max".to_owned(),
            CpuChoice::Default | CpuChoice::Other(_) => "qemu64".to_owned(),
        }
    }
}

/// What is there; else its reason joins the others.
fn keep<T>(found: Result<T, Inexpressible>, reasons: &mut Vec<Inexpressible>) -> Option<T> {
    found.map_err(|reason| reasons.push(reason)).ok()
}

fn huge_page_mib(pages: &[HugePages]) -> Result<Option<u64>, Inexpressible> {
    let mut sizes: Vec<u64> =
        pages.iter().map(|pages| pages.page_kib.unwrap_or(DEFAULT_HUGE_PAGE_KIB)).collect();
    sizes.sort_unstable();
    sizes.dedup();
    match sizes.as_slice() {
        [] | [ORDINARY_PAGE_KIB] => Ok(None),
        [size] => Ok(Some((size >> 10).max(1))),
        _ => Err(Inexpressible::HugePages),
    }
}

/// None for a disk that has no path, and for one that may be missing on the target.
fn disk_spec(disk: &Disk) -> Result<Option<spec::Disk>, Inexpressible> {
    if disk.is_dropped_if_missing {
        return Ok(None);
    }
    image(disk, &disk.source, disk.format.as_deref(), disk.is_read_only)
}

/// What the images of a disk are based on: the target opens it too.
fn backing_specs(disk: &Disk) -> impl Iterator<Item = Result<spec::Disk, Inexpressible>> {
    let backing = disk.backing.iter();
    backing.filter_map(|one| image(disk, &one.source, one.format.as_deref(), true).transpose())
}

fn image(
    disk: &Disk,
    source: &DiskSource,
    format: Option<&str>,
    read_only: bool,
) -> Result<Option<spec::Disk>, Inexpressible> {
    let (DiskSource::File { path } | DiskSource::Block { path }) = source else { return Ok(None) };
    let format = match format {
        None | Some("raw") => DiskFormat::Raw,
        Some("qcow2") => DiskFormat::Qcow2,
        Some(other) => {
            let (target, format) = (disk.target.clone(), other.to_owned());
            return Err(Inexpressible::DiskFormat { target, format });
        }
    };
    Ok(Some(spec::Disk { path: path.clone(), format, read_only }))
}

fn nic(interface: &Interface) -> Option<Nic> {
    match &interface.kind {
        InterfaceKind::Bridge { name, .. } => Some(Nic { bridge: name.clone(), mac: interface.mac }),
        _ => None,
    }
}
