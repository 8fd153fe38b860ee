//! RDMA devices.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::Error;

const CLASS_DIRECTORY: &str = "/sys/class/infiniband";

/// By which programs make connections.
const CONNECTION_MANAGER: &str = "/dev/infiniband/rdma_cm";

/// How the kernel writes that a port can carry something.
const ACTIVE: &str = "4: ACTIVE";

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaDevice {
    /// The name, as `rdma link` shows it.
    pub name: String,
    /// The links it shares its port with: one, with its VLANs.
    pub links: Vec<String>,
    /// Whether a port of it can carry anything now.
    pub is_active: bool,
}

impl RdmaDevice {
    /// The first of these that shares its port with a link.
    pub fn of_link<'a>(link: &str, devices: &'a [Self]) -> Option<&'a Self> {
        devices.iter().find(|device| device.links.iter().any(|own| own == link))
    }
}

/// Whether programs of this host can make RDMA connections.
pub fn has_rdma_connections() -> bool {
    Path::new(CONNECTION_MANAGER).exists()
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
        devices.push(RdmaDevice {
            name: name_of(&entry.file_name()),
            links: links_of(&entry.path()),
            is_active: is_active(&entry.path()),
        });
    }
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(devices)
}

/// RoCE names its links with its addresses, also where it is done in software; InfiniBand shares
/// the parent device with its link.
fn links_of(device: &Path) -> Vec<String> {
    let mut links: Vec<String> = entries(&device.join("ports"))
        .flat_map(|port| entries(&port.join("gid_attrs/ndevs")))
        // An unused address answers EINVAL.
        .filter_map(|file| std::fs::read_to_string(file).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    if links.is_empty() {
        let beside = entries(&device.join("device/net"));
        links.extend(beside.take(1).filter_map(|link| link.file_name().map(name_of)));
    }
    links.sort();
    links.dedup();
    links
}

fn is_active(device: &Path) -> bool {
    let mut states =
        entries(&device.join("ports")).filter_map(|port| std::fs::read_to_string(port.join("state")).ok());
    states.any(|state| state.trim() == ACTIVE)
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
        for (index, link) in ["eth0.7\n", "eth0\n", "eth0.7\n"].into_iter().enumerate() {
            fs::write(addresses.join(index.to_string()), link).unwrap();
        }
        fs::write(class.path().join("rxe0/ports/1/state"), "4: ACTIVE\n").unwrap();
        fs::create_dir_all(class.path().join("mlx5_0/device/net/ib0")).unwrap();
        fs::create_dir_all(class.path().join("mlx5_0/ports/1")).unwrap();
        fs::write(class.path().join("mlx5_0/ports/1/state"), "1: DOWN\n").unwrap();
        fs::create_dir_all(class.path().join("bare")).unwrap();

        let found = devices_in(class.path()).unwrap();
        let said: Vec<_> = found
            .iter()
            .map(|device| (device.name.as_str(), device.links.join(" "), device.is_active))
            .collect();
        let expected = [("bare", "", false), ("mlx5_0", "ib0", false), ("rxe0", "eth0 eth0.7", true)];
        assert_eq!(said, expected.map(|(name, links, is_active)| (name, links.to_owned(), is_active)));
        let device_of = |link| RdmaDevice::of_link(link, &found).map(|device| device.name.as_str());
        assert_eq!(
            [device_of("eth0.7"), device_of("ib0"), device_of("eth1")],
            [Some("rxe0"), Some("mlx5_0"), None]
        );
    }
}
