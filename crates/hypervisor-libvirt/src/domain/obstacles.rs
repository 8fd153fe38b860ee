//! What keeps a domain from migrating, in libvirt's and QEMU's words, before anything is sent.
//!
//! A disk's cache mode is no obstacle: QEMU 4.0 and later drop their cache when the target takes over, so libvirt
//! refuses none. The XML does not say whether both hosts share a disk's storage.
//!
//! If several versions of libvirt refuse the same thing in different words, these are the plainest. Newer ones leave
//! it to QEMU which devices of a host may migrate, and QEMU 8.0 and later let some VFIO, vDPA and virtiofs devices
//! pass if their drivers can. Drainpipe refuses them nevertheless: nothing says whether the target has such a device.

use std::fmt;

use super::devices::{FileSystemDriver, SharedMemory, Tpm};
use super::disks::{Disk, DiskSource};
use super::interfaces::{Interface, InterfaceKind};
use super::words::plain;
use super::{DomainDescription, HostDevice};

/// Why a domain cannot migrate, in words for people: what it is, who refuses, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// It has a device of the host.
    HostDevice {
        /// `pci`, `mdev`, `scsi` or `scsi_host`.
        kind: String,
        /// Which one.
        address: String,
    },
    /// A network interface of it is a device of the host.
    HostInterface {
        /// Which one.
        address: String,
    },
    /// A network interface of it is vDPA.
    Vdpa,
    /// It mounts a directory of the host by virtiofs.
    Virtiofs {
        /// The name under which the guest finds it.
        tag: String,
    },
    /// It shares memory whose contents stay behind.
    SharedMemory {
        /// Its name.
        name: String,
    },
    /// What is written to a disk is thrown away at the end.
    TransientDisk {
        /// The guest's name for it.
        target: String,
    },
    /// A disk is a controller in this host.
    NvmeDisk {
        /// The guest's name for it.
        target: String,
    },
    /// A disk is being copied, or its images merged.
    BlockJob {
        /// The guest's name for it.
        target: String,
    },
    /// Its time stamp counter is invariant, without a frequency.
    InvariantTsc,
    /// A DIMM has no address.
    DimmWithoutAddress,
    /// Its memory is encrypted with a key of this host's CPU.
    EncryptedMemory {
        /// By what, such as `sev`.
        by: String,
    },
    /// The host's GPU draws for it.
    HostDraws,
    /// It has the host's TPM.
    HostTpm,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostDevice { kind, address } => write!(
                f,
                "it has a device of this host, {kind} {}, which stays here; libvirt refuses it: cannot migrate a domain \
                 with <hostdev mode='subsystem' type='{kind}'>. Detach it with `virsh detach-device`, or shut the domain \
                 down",
                plain(address),
                kind = plain(kind)
            ),
            Self::HostInterface { address } => write!(
                f,
                "a network interface is the device {} of this host, which stays here; libvirt refuses it: cannot migrate \
                 a domain with <interface type='hostdev'>. Detach it, or team it with a virtio interface (<teaming \
                 type='transient'>)",
                plain(address)
            ),
            Self::Vdpa => f.write_str(
                "a network interface is vDPA, on a device of this host; libvirt refuses it: vDPA devices cannot be \
                 migrated. Detach it with `virsh detach-interface`",
            ),
            Self::Virtiofs { tag } => write!(
                f,
                "it mounts a directory of this host, `{}`; libvirt refuses it: migration with virtiofs device is not \
                 supported. Unmount it in the guest and detach it with `virsh detach-device`",
                plain(tag)
            ),
            Self::SharedMemory { name } => write!(
                f,
                "it shares the memory `{}` with other domains of this host; libvirt migrates only ivshmem-plain and \
                 ivshmem-doorbell with role='master'. Detach it with `virsh detach-device`",
                plain(name)
            ),
            Self::TransientDisk { target } => write!(
                f,
                "its disk {} is transient; libvirt refuses it: migration with transient disk is not supported. Detach \
                 the disk, or remove <transient/> and start the domain again",
                plain(target)
            ),
            Self::NvmeDisk { target } => write!(
                f,
                "its disk {} is an NVMe controller in this host; libvirt refuses it: Migration without shared storage \
                 is unsafe. Move its contents to storage that both hosts reach",
                plain(target)
            ),
            Self::BlockJob { target } => write!(
                f,
                "its disk {target} is being copied or committed; libvirt refuses it: domain has active block job. Wait \
                 for its end, or end it with `virsh blockjob DOMAIN {target} --abort`",
                target = plain(target)
            ),
            Self::InvariantTsc => f.write_str(
                "its CPU has the feature invtsc; libvirt refuses it: domain has 'invtsc' CPU feature but TSC frequency \
                 is not specified. Add <timer name='tsc' frequency='…'/> to its <clock>, or disable the \
                     feature, and start the domain again",
            ),
            Self::DimmWithoutAddress => f.write_str(
                "a DIMM has no address; libvirt refuses it: domain's dimm info lacks slot ID or base address. Give it \
                 one, or detach it",
            ),
            Self::EncryptedMemory { by } => write!(
                f,
                "its memory is encrypted by this host's CPU ({}), and QEMU does not migrate that. Shut the domain down to \
                 move it",
                plain(by)
            ),
            Self::HostDraws => f.write_str(
                "it renders with this host's GPU; QEMU refuses it: virgl is not yet migratable. Set \
                accel3d='no' at its \
                 <video>, and start the domain again",
            ),
            Self::HostTpm => f.write_str(
                "it has this host's TPM, whose state stays in this host. Give it an emulated one (<backend \
                 type='emulator'>), or shut the domain down",
            ),
        }
    }
}

/// What may not migrate: QEMU, or the target, knows more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Doubt {
    /// It may have mounted a directory of the host by 9p.
    NineP {
        /// The name under which the guest finds it.
        tag: String,
    },
    /// It has a USB device of the host, and gets the target's instead.
    UsbDevice {
        /// Which one.
        address: String,
    },
    /// QEMU gets arguments that libvirt does not know.
    QemuArguments,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NineP { tag } => write!(
                f,
                "it shares the directory `{}` of this host by 9p; QEMU refuses to migrate while the guest \
                has it mounted: unmount it in the guest",
                plain(tag)
            ),
            Self::UsbDevice { address } => write!(
                f,
                "it has the USB device {} of this host; after the migration it has the target's device of \
                this kind instead, if there is one: detach it unless you want that",
                plain(address)
            ),
            Self::QemuArguments => f.write_str(
                "it passes arguments to QEMU that libvirt does not know (<qemu:commandline>); what they \
                name must exist on the target too",
            ),
        }
    }
}

impl DomainDescription {
    /// All that keeps it from migrating, as far as its XML says it.
    pub fn obstacles(&self) -> Vec<Obstacle> {
        let mut found: Vec<Obstacle> = self.devices.host_devices.iter().filter_map(of_host_device).collect();
        found.extend(self.devices.interfaces.iter().filter_map(of_interface));
        found.extend(self.devices.disks.iter().flat_map(of_disk));
        found.extend(self.of_mounts());
        found.extend(
            self.devices.shared_memory.iter().filter(|memory| !travels(memory)).map(of_shared_memory),
        );
        let by = self.launch_security.clone();
        found.extend(by.map(|by| Obstacle::EncryptedMemory { by }));
        found.extend(self.of_machine());
        found
    }

    /// All that may keep it from migrating.
    pub fn doubts(&self) -> Vec<Doubt> {
        let mounts = self.devices.file_systems.iter().filter(|mount| mount.driver == FileSystemDriver::NineP);
        let mut found: Vec<Doubt> = mounts.map(|mount| Doubt::NineP { tag: mount.tag.clone() }).collect();
        let usb = self.devices.host_devices.iter().filter(|device| device.kind == "usb");
        found.extend(usb.map(|device| Doubt::UsbDevice { address: device.address.clone() }));
        found.extend(self.has_qemu_arguments.then_some(Doubt::QemuArguments));
        found
    }

    fn of_mounts(&self) -> impl Iterator<Item = Obstacle> {
        let mounts =
            self.devices.file_systems.iter().filter(|mount| mount.driver == FileSystemDriver::Virtiofs);
        mounts.map(|mount| Obstacle::Virtiofs { tag: mount.tag.clone() })
    }

    fn of_machine(&self) -> impl Iterator<Item = Obstacle> {
        let mut dimms = self.memory.devices.iter().filter(|device| device.model == "dimm");
        let all = [
            (self.cpus.has_bare_invariant_tsc, Obstacle::InvariantTsc),
            (dimms.any(|dimm| !dimm.has_address), Obstacle::DimmWithoutAddress),
            (self.devices.is_drawn_by_host, Obstacle::HostDraws),
            (matches!(self.devices.tpm, Some(Tpm::Passthrough { .. })), Obstacle::HostTpm),
        ];
        all.into_iter().filter(|(is_there, _)| *is_there).map(|(_, obstacle)| obstacle)
    }
}

fn of_host_device(device: &HostDevice) -> Option<Obstacle> {
    // libvirt lets USB devices be; see `Doubt::UsbDevice`.
    let migrates = device.kind == "usb" || device.is_unplugged_to_migrate;
    let HostDevice { kind, address, .. } = device.clone();
    (!migrates).then_some(Obstacle::HostDevice { kind, address })
}

fn of_interface(interface: &Interface) -> Option<Obstacle> {
    match &interface.kind {
        InterfaceKind::HostDevice { address } if !interface.is_unplugged_to_migrate => {
            Some(Obstacle::HostInterface { address: address.clone() })
        }
        InterfaceKind::Vdpa => Some(Obstacle::Vdpa),
        _ => None,
    }
}

fn of_disk(disk: &Disk) -> impl Iterator<Item = Obstacle> {
    let target = || disk.target.clone();
    let is_nvme = disk.source == DiskSource::Nvme && !disk.is_read_only;
    let all = [
        (disk.is_transient, Obstacle::TransientDisk { target: target() }),
        (is_nvme, Obstacle::NvmeDisk { target: target() }),
        (disk.has_block_job, Obstacle::BlockJob { target: target() }),
    ];
    all.into_iter().filter(|(is_there, _)| *is_there).map(|(_, obstacle)| obstacle)
}

fn travels(memory: &SharedMemory) -> bool {
    memory.is_master && memory.model != "ivshmem"
}

fn of_shared_memory(memory: &SharedMemory) -> Obstacle {
    Obstacle::SharedMemory { name: memory.name.clone() }
}
