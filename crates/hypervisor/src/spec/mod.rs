//! The specification of a VM, as its owner writes it.
//!
//! A [`VmSpec`] is read from TOML by people and exchanged as JSON by agents. Before a VM starts it
//! becomes a [`ResolvedSpec`], in which nothing is left for a host to decide: the source sends its
//! own to the target, so that both build the same machine.

mod names;
mod owner;
mod parse;
mod placement;
mod resolve;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use drainpipe_engine::format::mib;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

pub use names::{GroupName, MacAddress, MachineType, NameError, VmName};
pub use owner::{Manager, OwnersAct};
pub use parse::SpecError;
pub use placement::Placement;
pub use resolve::{ResolveError, ResolvedSpec, loses_writes};

/// Guest memory allowed: less boots nothing, more exceeds x86-64's 64 TiB.
const MEMORY_MIB: std::ops::RangeInclusive<u64> = 16..=64 << 20;
/// Memory allowed beyond whole MiB.
const MEMORY_PADDING_KIB: std::ops::RangeInclusive<u64> = 0..=1024;
/// Sizes of huge pages on x86-64.
const HUGE_PAGE_MIB: [u64; 2] = [2, 1024];
/// Virtual CPUs allowed: the most that QEMU's `pc-q35` takes without an interrupt remapper.
const VCPUS: std::ops::RangeInclusive<u32> = 1..=255;
/// Devices of one kind, so that every one has its own fixed PCI slot.
const DEVICES_MAX: usize = 8;
/// Devices of a VM that another manager builds, which chooses the slots.
const MANAGED_DEVICES_MAX: usize = 256;
/// Linux' limit for the name of an interface.
const INTERFACE_NAME_LENGTH_MAX: usize = 15;
/// Linux' limit on x86 for a kernel's command line (`COMMAND_LINE_SIZE`).
const KERNEL_COMMAND_LINE_BYTES_MAX: usize = 2047;

/// Specification of one VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// The VM's name, unique among the hosts that it may migrate between.
    pub name: VmName,
    /// The VM's UUID; derived from its name if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = "uuid")]
    pub uuid: Option<Uuid>,
    /// Guest memory, in MiB.
    #[schema(minimum = 16, maximum = 67_108_864)]
    pub memory_mib: u64,
    /// Memory beyond `memory_mib`, in KiB, at most 1024. Left to the agent, who knows when it is
    /// needed; see [`ResolvedSpec::memory_kib`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 1024)]
    pub memory_padding_kib: Option<u64>,
    /// Size of the huge pages that the host has set aside and that hold the guest memory, in MiB: 2 or 1024.
    /// Absent: ordinary memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub huge_page_mib: Option<u64>,
    /// Virtual CPUs.
    #[schema(minimum = 1, maximum = 255)]
    pub vcpus: u32,
    /// Machine type with its version, such as `pc-q35-7.2`.
    pub machine: MachineType,
    /// QEMU's CPU model. `host` and `max` migrate only between hosts with equal CPUs and QEMUs.
    #[serde(default = "default_cpu_model")]
    pub cpu_model: String,
    /// How guest instructions run.
    #[serde(default)]
    pub accelerator: Accelerator,
    /// Kernel to boot directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// Its initial RAM file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub initramfs: Option<PathBuf>,
    /// Its command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_command_line: Option<String>,
    /// Disks, which both hosts must reach under the same path.
    #[serde(default, rename = "disk", skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 8)]
    pub disks: Vec<Disk>,
    /// Network interfaces.
    #[serde(default, rename = "nic", skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 8)]
    pub nics: Vec<Nic>,
    /// Where it may be when a host is emptied.
    #[serde(default, skip_serializing_if = "Placement::is_free")]
    pub placement: Placement,
    /// Where the services of Drainpipe's own test guest answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestServices>,
    /// The VM's owner, if that is not Drainpipe: it defines, starts and stops the VM. The rest then says what a
    /// migration must know about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manager: Option<Manager>,
}

/// How guest instructions run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// KVM where the host's CPU has it, else TCG.
    #[default]
    Auto,
    /// The CPU's virtualisation.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

/// A disk of the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// File or block device.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// What the file holds. It is never guessed: a guest could write a qcow2 header into a raw
    /// disk and so have QEMU open any file as its backing file.
    pub format: DiskFormat,
    /// Whether the guest may only read it.
    #[serde(default)]
    pub read_only: bool,
}

/// Format of a disk's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// The file is the disk.
    Raw,
    /// QEMU's own format.
    Qcow2,
}

/// A network interface of the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// Bridge on the host, of the same name on every host.
    #[schema(max_length = 15)]
    pub bridge: String,
    /// MAC address; derived from the VM's name if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<MacAddress>,
}

/// Services of Drainpipe's test guest, which `bench` and `verify` use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GuestServices {
    /// Answers heartbeats (UDP).
    #[schema(value_type = String, example = "192.0.2.7:7400")]
    pub heartbeat: SocketAddr,
    /// Takes commands (TCP).
    #[schema(value_type = String, example = "192.0.2.7:7401")]
    pub control: SocketAddr,
}

/// What is wrong with a value, and at which key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{key}`: {message}")]
pub struct SpecProblem {
    /// The key, such as `nic.0.bridge`.
    pub key: String,
    message: String,
}

fn default_cpu_model() -> String {
    "qemu64".to_owned()
}

impl VmSpec {
    /// Checks everything that the values' own types do not.
    pub fn validate(&self) -> Result<(), SpecProblem> {
        check_range("memory_mib", &self.memory_mib, &MEMORY_MIB)?;
        check_range("memory_padding_kib", &self.memory_padding_kib.unwrap_or(0), &MEMORY_PADDING_KIB)?;
        self.check_huge_pages()?;
        check_range("vcpus", &self.vcpus, &VCPUS)?;
        check_cpu_model(&self.cpu_model)?;
        self.check_boot()?;
        self.check_count("disk", self.disks.len())?;
        for (index, disk) in self.disks.iter().enumerate() {
            check_path(&format!("disk.{index}.path"), &disk.path)?;
        }
        self.check_count("nic", self.nics.len())?;
        self.nics.iter().enumerate().try_for_each(|(index, nic)| check_nic(index, nic))?;
        self.placement.validate()
    }

    /// Puts these disks, by their numbers from 0, in other places.
    pub fn move_disks(&mut self, places: &BTreeMap<usize, PathBuf>) {
        for (index, disk) in self.disks.iter_mut().enumerate() {
            if let Some(place) = places.get(&index) {
                disk.path.clone_from(place);
            }
        }
    }

    fn check_count(&self, key: &str, count: usize) -> Result<(), SpecProblem> {
        let max = if self.is_built_elsewhere() { MANAGED_DEVICES_MAX } else { DEVICES_MAX };
        if count <= max {
            return Ok(());
        }
        Err(problem(format!("{key}.{max}"), format!("{count} are too many: at most {max} are allowed")))
    }

    fn check_huge_pages(&self) -> Result<(), SpecProblem> {
        let Some(size) = self.huge_page_mib else { return Ok(()) };
        if !HUGE_PAGE_MIB.contains(&size) {
            return Err(problem(
                "huge_page_mib",
                format!("{size} is not the size of a huge page: use 2 or 1024"),
            ));
        }
        if !self.memory_mib.is_multiple_of(size) {
            let message = format!("{} is not a whole number of huge pages of {}", self.memory_mib, mib(size));
            return Err(problem("memory_mib", message));
        }
        if self.memory_padding_kib.unwrap_or(0) > 0 {
            let message =
                "needs memory_padding_kib = 0, which a guest without KVM has with QEMU 9.0 or later";
            return Err(problem("huge_page_mib", message));
        }
        Ok(())
    }

    fn check_boot(&self) -> Result<(), SpecProblem> {
        for (key, path) in [("kernel", &self.kernel), ("initramfs", &self.initramfs)] {
            path.as_deref().map_or(Ok(()), |path| check_path(key, path))?;
        }
        let orphan = [
            ("initramfs", self.initramfs.is_some()),
            ("kernel_command_line", self.kernel_command_line.is_some()),
        ];
        for (key, present) in orphan {
            if present && self.kernel.is_none() {
                return Err(problem(key, "needs `kernel`; add it, or remove this line"));
            }
        }
        let command_line = self.kernel_command_line.as_deref().unwrap_or_default();
        if command_line.len() > KERNEL_COMMAND_LINE_BYTES_MAX || command_line.contains('\0') {
            let message = format!("at most {KERNEL_COMMAND_LINE_BYTES_MAX} bytes, none of them NUL");
            return Err(problem("kernel_command_line", message));
        }
        Ok(())
    }
}

fn problem(key: impl Into<String>, message: impl Into<String>) -> SpecProblem {
    SpecProblem { key: key.into(), message: message.into() }
}

fn check_range<T: PartialOrd + std::fmt::Display>(
    key: &str,
    value: &T,
    allowed: &std::ops::RangeInclusive<T>,
) -> Result<(), SpecProblem> {
    if allowed.contains(value) {
        return Ok(());
    }
    let (low, high) = (allowed.start(), allowed.end());
    Err(problem(key, format!("{value} is out of range: {low} to {high} is allowed")))
}

fn check_cpu_model(model: &str) -> Result<(), SpecProblem> {
    // Commas append CPU features, which QEMU checks itself.
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.,+=".contains(&byte);
    if (1..=200).contains(&model.len()) && model.bytes().all(allowed) {
        return Ok(());
    }
    let message = format!(
        "`{}` is not a CPU model: use a name from `qemu-system-x86_64 -cpu help`, such as `qemu64`",
        model.escape_default()
    );
    Err(problem("cpu_model", message))
}

fn check_path(key: &str, path: &Path) -> Result<(), SpecProblem> {
    if path.is_absolute() && !path.as_os_str().as_encoded_bytes().contains(&0) {
        return Ok(());
    }
    let message = format!(
        "`{}` must be an absolute path: the agents of source and target both open it",
        path.display()
    );
    Err(problem(key, message))
}

fn check_nic(index: usize, nic: &Nic) -> Result<(), SpecProblem> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let bridge = nic.bridge.as_str();
    let valid = (1..=INTERFACE_NAME_LENGTH_MAX).contains(&bridge.len())
        && bridge.bytes().all(allowed)
        && bridge != "."
        && bridge != "..";
    if valid {
        return Ok(());
    }
    let message = format!(
        "`{}` is not the name of a bridge: use 1 to {INTERFACE_NAME_LENGTH_MAX} letters, digits, `-`, `_` and `.`",
        bridge.escape_default()
    );
    Err(problem(format!("nic.{index}.bridge"), message))
}
