//! The directory of a running VM on this host.

use std::io;
use std::path::{Path, PathBuf};

use crate::spec::VmName;

/// `sun_path` of `unix(7)` has 108 bytes, the last one NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The deepest socket that a hypervisor has there.
const DEEPEST_SOCKET: &str = "qemu/own/relay";

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

/// A socket by which a hypervisor and the agent meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPath {
    /// For the agent.
    pub path: PathBuf,
    /// The same for the hypervisor, which may see another tree of files.
    pub of_hypervisor: PathBuf,
}

/// The directory of one running VM, `<runtime directory>/vms/<name>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmDirectory {
    path: PathBuf,
}

impl VmDirectory {
    /// The directory of the VM `name` under an agent's runtime directory. Makes nothing.
    pub fn new(runtime_directory: &Path, name: &VmName) -> Result<Self, PathTooLong> {
        Self::at(Self::of_all(runtime_directory).join(name.as_str()))
    }

    /// One at this path. Makes nothing.
    pub fn at(path: PathBuf) -> Result<Self, PathTooLong> {
        let socket = path.join(DEEPEST_SOCKET);
        let bytes = socket.as_os_str().len();
        if bytes > SOCKET_PATH_BYTES_MAX {
            return Err(PathTooLong { path: socket, bytes });
        }
        Ok(Self { path })
    }

    /// Names of the VMs that have files under an agent's runtime directory, running or not.
    pub fn list(runtime_directory: &Path) -> io::Result<Vec<VmName>> {
        let entries = match std::fs::read_dir(Self::of_all(runtime_directory)) {
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

    fn of_all(runtime_directory: &Path) -> PathBuf {
        runtime_directory.join("vms")
    }

    /// Holds everything below.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Locked by the watchdog that stands beside a migration, so that there is one at a time.
    pub fn guard_post(&self) -> PathBuf {
        self.path.join("guard.post")
    }

    /// What its agent keeps of the VM beside its process.
    pub fn record_file(&self) -> PathBuf {
        self.path.join("record.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_too_long_for_a_socket_is_refused_before_anything_is_made() {
        let name: VmName = "web".parse().expect("a valid name");
        let longest = "x".repeat(SOCKET_PATH_BYTES_MAX - "//vms/web/".len() - DEEPEST_SOCKET.len());
        assert!(VmDirectory::new(Path::new(&format!("/{longest}")), &name).is_ok());
        let error = VmDirectory::new(Path::new(&format!("/{longest}x")), &name).expect_err("too long");
        assert!(error.to_string().contains("108 bytes"), "{error}");
    }
}
