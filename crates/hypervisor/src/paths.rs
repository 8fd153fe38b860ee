//! Where a running VM keeps its sockets and files.

use std::io;
use std::path::{Path, PathBuf};

use crate::spec::VmName;

/// `sun_path` of `unix(7)` has 108 bytes, the last one NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// In QEMU's working directory.
const OWN: &str = "own";
const INCOMING_RELAY: &str = "own/relay";
const TLS: &str = "tls";

/// The directory is too deep for Unix sockets in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{path} has {bytes} bytes, but Linux allows at most {SOCKET_PATH_BYTES_MAX} for the path of a socket; \
     choose a shorter runtime directory"
)]
pub struct PathTooLong {
    /// The socket that cannot be made.
    pub path: PathBuf,
    bytes: usize,
}

/// Where QEMU and its agent meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPath {
    /// For the agent.
    pub path: PathBuf,
    /// The same for QEMU, from its working directory: those above are closed to it.
    pub of_qemu: PathBuf,
}

/// The files of one running VM, `<runtime directory>/vms/<name>/…`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimePaths {
    directory: PathBuf,
}

impl RuntimePaths {
    /// The paths of the VM `name` under an agent's runtime directory. Makes nothing.
    pub fn new(runtime_directory: &Path, name: &VmName) -> Result<Self, PathTooLong> {
        Self::at(Self::directory_of_all(runtime_directory).join(name.as_str()))
    }

    /// The paths in one QEMU's own directory.
    pub(crate) fn at(directory: PathBuf) -> Result<Self, PathTooLong> {
        let paths = Self { directory };
        for path in [paths.qmp_socket(), paths.guard_socket(), paths.qemu_directory().join(INCOMING_RELAY)] {
            let bytes = path.as_os_str().len();
            if bytes > SOCKET_PATH_BYTES_MAX {
                return Err(PathTooLong { path, bytes });
            }
        }
        Ok(paths)
    }

    /// Names of the VMs that have files under an agent's runtime directory, running or not.
    pub fn list(runtime_directory: &Path) -> io::Result<Vec<VmName>> {
        let entries = match std::fs::read_dir(Self::directory_of_all(runtime_directory)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry?.file_name().to_str().and_then(|name| name.parse::<VmName>().ok()));
        }
        names.sort();
        Ok(names)
    }

    fn directory_of_all(runtime_directory: &Path) -> PathBuf {
        runtime_directory.join("vms")
    }

    /// Holds everything below.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// QMP for the agent.
    pub fn qmp_socket(&self) -> PathBuf {
        self.directory.join("qmp.sock")
    }

    /// QMP for a watchdog. A QMP socket serves one client at a time, so the agent's own would be
    /// taken while the agent lives.
    pub fn guard_socket(&self) -> PathBuf {
        self.directory.join("guard.sock")
    }

    /// QEMU's working directory. Root's: only what QEMU reaches there is not closed to it. A QEMU that runs as root, of an
    /// older agent, has none.
    pub(crate) fn qemu_directory(&self) -> PathBuf {
        self.directory.join("qemu")
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

    /// Holds the key of a migration that QEMU encrypts itself.
    pub(crate) fn tls_directory(&self) -> SharedPath {
        self.shared(TLS, TLS)
    }

    /// `of_root` is for a QEMU without a working directory of its own.
    fn shared(&self, of_qemu: &str, of_root: &str) -> SharedPath {
        if self.qemu_directory().is_dir() {
            return SharedPath { path: self.qemu_directory().join(of_qemu), of_qemu: of_qemu.into() };
        }
        let path = self.directory.join(of_root);
        SharedPath { of_qemu: path.clone(), path }
    }

    /// Locked by the watchdog that stands beside a migration, so that there is one at a time.
    pub fn guard_post(&self) -> PathBuf {
        self.directory.join("guard.post")
    }

    /// QEMU's process id, written before QEMU begins.
    pub fn pid_file(&self) -> PathBuf {
        self.directory.join("pid")
    }

    /// What QEMU writes to its standard error.
    pub fn log_file(&self) -> PathBuf {
        self.directory.join("qemu.log")
    }

    /// What its agent keeps of the VM beside its QEMU.
    pub fn record_file(&self) -> PathBuf {
        self.directory.join("record.json")
    }

    /// The resolved specification that QEMU was started from.
    pub fn spec_file(&self) -> PathBuf {
        self.directory.join("spec.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_before_anything_is_made() {
        let name: VmName = "web".parse().expect("a valid name");
        let longest = "x".repeat(SOCKET_PATH_BYTES_MAX - "//vms/web/qemu/own/relay".len());
        assert!(RuntimePaths::new(Path::new(&format!("/{longest}")), &name).is_ok());
        let error = RuntimePaths::new(Path::new(&format!("/{longest}x")), &name).expect_err("too long");
        assert!(error.to_string().contains("108 bytes"), "{error}");
    }
}
