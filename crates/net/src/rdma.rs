//! RDMA devices.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Error;

const CLASS_DIRECTORY: &str = "/sys/class/infiniband";

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaDevice {
    /// The name, as `rdma link` shows it.
    pub name: String,
    /// The link it shares its port with, if any.
    pub link: Option<String>,
}

/// The RDMA devices of this host, by name; none if the kernel has no RDMA.
pub fn rdma_devices() -> Result<Vec<RdmaDevice>, Error> {
    devices_in(Path::new(CLASS_DIRECTORY))
        .map_err(|source| Error::Rdma { path: CLASS_DIRECTORY.to_owned(), source })
}

fn devices_in(class: &Path) -> io::Result<Vec<RdmaDevice>> {
    let entries = match std::fs::read_dir(class) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut devices = Vec::new();
    for entry in entries {
        let entry = entry?;
        devices.push(RdmaDevice { name: name_of(&entry.file_name()), link: link_of(&entry.path()) });
    }
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(devices)
}

/// RoCE names its link with its addresses, also where it is done in software; InfiniBand shares
/// the parent device with its link.
fn link_of(device: &Path) -> Option<String> {
    let from_addresses = entries(&device.join("ports"))
        .flat_map(|port| entries(&port.join("gid_attrs/ndevs")))
        // An unused address answers EINVAL.
        .find_map(|file| std::fs::read_to_string(file).ok())
        .map(|name| name.trim().to_owned());
    from_addresses.or_else(|| {
        let link = entries(&device.join("device/net")).next()?;
        link.file_name().map(name_of)
    })
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let mut paths: Vec<_> = std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.sort();
    paths.into_iter()
}

fn name_of(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn without_rdma_there_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let devices = devices_in(&directory.path().join("infiniband")).unwrap();
        assert_eq!(devices, []);
    }

    #[test]
    fn each_kind_names_its_link() {
        let class = tempfile::tempdir().unwrap();
        let addresses = class.path().join("rxe0/ports/1/gid_attrs/ndevs");
        fs::create_dir_all(&addresses).unwrap();
        fs::write(addresses.join("0"), "eth0\n").unwrap();
        fs::create_dir_all(class.path().join("mlx5_0/device/net/ib0")).unwrap();
        fs::create_dir_all(class.path().join("bare")).unwrap();

        let found: Vec<_> =
            devices_in(class.path()).unwrap().into_iter().map(|device| (device.name, device.link)).collect();
        assert_eq!(
            found,
            [
                ("bare".to_owned(), None),
                ("mlx5_0".to_owned(), Some("ib0".to_owned())),
                ("rxe0".to_owned(), Some("eth0".to_owned())),
            ]
        );
    }
}
