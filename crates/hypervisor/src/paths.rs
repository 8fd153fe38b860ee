//! Where a running VM keeps its sockets and files.

use std::io;
use std::path::{Path, PathBuf};

use crate::spec::VmName;

/// `sun_path` of `unix(7)` has 108 bytes, the last one NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;

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
        for path in [paths.qmp_socket(), paths.guard_socket(), paths.relay_socket()] {
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

    /// Where QEMU sends a migration that goes through a relay, or receives it.
    pub fn relay_socket(&self) -> PathBuf {
        self.directory.join("relay.sock")
    }

    /// Locked by the watchdog that stands beside a migration, so that there is one at a time.
    pub fn guard_post(&self) -> PathBuf {
        self.directory.join("guard.post")
    }

    /// QEMU's process id, written by QEMU.
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
        let longest = "x".repeat(SOCKET_PATH_BYTES_MAX - "//vms/web/guard.sock".len());
        assert!(RuntimePaths::new(Path::new(&format!("/{longest}")), &name).is_ok());
        let error = RuntimePaths::new(Path::new(&format!("/{longest}x")), &name).expect_err("too long");
        assert!(error.to_string().contains("108 bytes"), "{error}");
    }
}
