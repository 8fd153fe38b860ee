//! Where a running VM keeps its sockets and files.

use std::path::{Path, PathBuf};

use drainpipe_hypervisor::spec::VmName;
use drainpipe_hypervisor::{PathTooLong, SharedPath, VmDirectory};

/// In QEMU's working directory.
const OWN: &str = "own";
const INCOMING_RELAY: &str = "own/relay";
const INCOMING_DISKS: &str = "own/disks";
const TLS: &str = "tls";

/// The files of one running VM, `<runtime directory>/vms/<name>/…`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimePaths {
    directory: VmDirectory,
}

impl RuntimePaths {
    /// The paths of the VM `name` under an agent's runtime directory. Makes nothing.
    pub fn new(runtime_directory: &Path, name: &VmName) -> Result<Self, PathTooLong> {
        Ok(Self::of(VmDirectory::new(runtime_directory, name)?))
    }

    /// The paths in one VM's directory.
    pub(crate) fn of(directory: VmDirectory) -> Self {
        Self { directory }
    }

    pub(crate) fn vm_directory(&self) -> &VmDirectory {
        &self.directory
    }

    /// Holds everything below.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// QMP for the agent.
    pub fn qmp_socket(&self) -> PathBuf {
        self.directory().join("qmp.sock")
    }

    /// QMP for a watchdog. A QMP socket serves one client at a time, so the agent's own would be
    /// taken while the agent lives.
    pub fn guard_socket(&self) -> PathBuf {
        self.directory().join("guard.sock")
    }

    /// QEMU's working directory. Root's: only what QEMU reaches there is not closed to it. A QEMU that runs as root, of an
    /// older agent, has none.
    pub(crate) fn qemu_directory(&self) -> PathBuf {
        self.directory().join("qemu")
    }

    /// The only directory that QEMU may write to. What is there may be anything that a hostile QEMU wants it to be.
    pub(crate) fn qemus_own_directory(&self) -> PathBuf {
        self.qemu_directory().join(OWN)
    }

    /// Where QEMU sends a migration that goes through a relay, which listens there.
    pub fn outgoing_relay(&self) -> SharedPath {
        self.shared("relay", "relay.sock")
    }

    /// Where QEMU listens for a migration that comes through a relay.
    pub fn incoming_relay(&self) -> SharedPath {
        self.shared(INCOMING_RELAY, "relay.sock")
    }

    /// Where QEMU takes copies of its disks.
    pub fn incoming_disks(&self) -> SharedPath {
        self.shared(INCOMING_DISKS, "disks.sock")
    }

    /// Holds the key of a migration that QEMU encrypts itself.
    pub(crate) fn tls_directory(&self) -> SharedPath {
        self.shared(TLS, TLS)
    }

    /// `of_root` is for a QEMU without a working directory of its own.
    fn shared(&self, of_hypervisor: &str, of_root: &str) -> SharedPath {
        if self.qemu_directory().is_dir() {
            return SharedPath {
                path: self.qemu_directory().join(of_hypervisor),
                of_hypervisor: of_hypervisor.into(),
            };
        }
        let path = self.directory().join(of_root);
        SharedPath { of_hypervisor: path.clone(), path }
    }

    /// QEMU's process id, written before QEMU begins.
    pub fn pid_file(&self) -> PathBuf {
        self.directory().join("pid")
    }

    /// What QEMU writes to its standard error.
    pub fn log_file(&self) -> PathBuf {
        self.directory().join("qemu.log")
    }

    /// What its agent keeps of the VM beside its QEMU.
    pub fn record_file(&self) -> PathBuf {
        self.directory.record_file()
    }

    /// The resolved specification that QEMU was started from.
    pub fn spec_file(&self) -> PathBuf {
        self.directory().join("spec.json")
    }
}
