//! Which of a VM's disks are copied, and where to.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::format::exact_bytes;
use crate::storage::{CopyReason, DiskCopy, DiskDevice, DiskImage, DiskName};

/// One disk of a VM, as its host knows it, and whether the target sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmDisk {
    /// Which it is.
    pub disk: DiskName,
    /// Its path on the source.
    pub path: String,
    /// Whether the guest may only read it.
    pub is_read_only: bool,
    /// The block device that it is; absent of a file.
    pub device: Option<DiskDevice>,
    /// Whether its data is in another file than the image.
    pub has_data_file: bool,
    /// Whether it stands on other images.
    pub has_backing: bool,
    /// Why its hypervisor does not copy it, and what to do; none if it does.
    pub obstacle: Option<String>,
    /// What its file holds.
    pub image: DiskImage,
    /// What the guest sees of it.
    pub size_bytes: u64,
    /// What its file takes.
    pub allocated_bytes: u64,
    /// What the target has under the same path.
    pub there: There,
    /// Where the target wants it, if it is copied; absent for the same path.
    pub place: Option<String>,
}

/// What a target has under a disk's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum There {
    /// Nothing, and VMs may have disks there.
    Nothing,
    /// Something; or it is not known what, or VMs may have no disk there. Whether the VM may go so, others say.
    Other,
}

/// Why disks cannot be copied.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotCopied {
    /// The VM has no such disk.
    #[error("VM {vm} has no disk {disk}: it has {count}, the first is vda")]
    NoSuchDisk {
        /// The VM.
        vm: String,
        /// What was asked for.
        disk: DiskName,
        /// How many it has.
        count: usize,
    },
    /// Two go to one place.
    #[error("two disks of VM {vm} would go to {path}: give each its own path with --disk")]
    SamePlace {
        /// The VM.
        vm: String,
        /// Where to.
        path: String,
    },
    /// It has no writer, and so no reason to be copied with a running VM.
    #[error(
        "{disk} of VM {vm} ({path}) is read-only, and such disks are not copied: copy the file to {target} yourself, under the \
         same path"
    )]
    ReadOnly {
        /// The VM.
        vm: String,
        /// Which disk.
        disk: DiskName,
        /// Its path.
        path: String,
        /// The target.
        target: String,
    },
    /// No file is made where a device is to be, and no device.
    #[error(
        "{disk} of VM {vm} ({path}) is a block device of {}, and {target} has none under that \
        path: create one of that size there, and name it with --disk {disk}=PATH to overwrite it, or name a \
        file",
        exact_bytes(*bytes)
    )]
    NoDevice {
        /// The VM.
        vm: String,
        /// Which disk.
        disk: DiskName,
        /// Its path.
        path: String,
        /// What it has.
        bytes: u64,
        /// The target.
        target: String,
    },
    /// Its hypervisor does not copy it.
    #[error("{disk} of VM {vm} ({path}) is not copied: {why}")]
    Obstacle {
        /// The VM.
        vm: String,
        /// Which disk.
        disk: DiskName,
        /// Its path.
        path: String,
        /// Why, and what to do.
        why: String,
    },
    /// More than the image.
    #[error(
        "{disk} of VM {vm} ({path}) has its data in another file (`data_file`), and such images are not copied yet"
    )]
    DataFile {
        /// The VM.
        vm: String,
        /// Which disk.
        disk: DiskName,
        /// Its path.
        path: String,
    },
}

/// The disks that are copied: those that somebody has said a place for, and those that the target does not see.
pub fn copies(
    vm: &str,
    target: &str,
    disks: &[VmDisk],
    places: &BTreeMap<DiskName, String>,
) -> Result<Vec<DiskCopy>, NotCopied> {
    if let Some(disk) = places.keys().find(|place| disks.iter().all(|disk| disk.disk != **place)) {
        return Err(NotCopied::NoSuchDisk { vm: vm.into(), disk: *disk, count: disks.len() });
    }
    let copies = disks.iter().filter_map(|disk| copy(disk, places.get(&disk.disk)).map(|copy| (disk, copy)));
    let copies: Vec<(&VmDisk, DiskCopy)> = copies.collect();
    let mut taken = BTreeSet::new();
    for (disk, copy) in &copies {
        check(vm, target, disk, copy.why)?;
        if !taken.insert(&copy.to) {
            return Err(NotCopied::SamePlace { vm: vm.into(), path: copy.to.clone() });
        }
    }
    Ok(copies.iter().map(|(_, copy)| copy.clone()).collect())
}

fn copy(of: &VmDisk, place: Option<&String>) -> Option<DiskCopy> {
    let (to, why) = match place {
        Some(place) => (place.clone(), CopyReason::AskedFor),
        None if of.there == There::Nothing => {
            (of.place.as_ref().unwrap_or(&of.path).clone(), CopyReason::NotSeen)
        }
        None => return None,
    };
    Some(DiskCopy {
        disk: of.disk,
        from: of.path.clone(),
        to,
        image: of.image,
        size_bytes: of.size_bytes,
        // How much of a device is in use, nobody knows.
        allocated_bytes: of.device.as_ref().map_or(of.allocated_bytes, |device| device.size_bytes),
        why,
        is_flattened: of.has_backing,
        from_device: of.device.clone(),
    })
}

fn check(vm: &str, target: &str, of: &VmDisk, why: CopyReason) -> Result<(), NotCopied> {
    let (vm, disk, path) = (vm.to_owned(), of.disk, of.path.clone());
    match of {
        VmDisk { is_read_only: true, .. } => {
            Err(NotCopied::ReadOnly { vm, disk, path, target: target.into() })
        }
        VmDisk { device: Some(device), place: None, .. } if why == CopyReason::NotSeen => {
            let (bytes, target) = (device.size_bytes, target.into());
            Err(NotCopied::NoDevice { vm, disk, path, bytes, target })
        }
        VmDisk { has_data_file: true, .. } => Err(NotCopied::DataFile { vm, disk, path }),
        VmDisk { obstacle: Some(obstacle), .. } => {
            Err(NotCopied::Obstacle { vm, disk, path, why: obstacle.clone() })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(index: usize) -> DiskName {
        DiskName::at(index).unwrap()
    }

    fn disk(index: usize, there: There) -> VmDisk {
        VmDisk {
            disk: name(index),
            path: format!("/srv/{index}"),
            is_read_only: false,
            device: None,
            has_data_file: false,
            has_backing: false,
            obstacle: None,
            image: DiskImage::Raw,
            size_bytes: 100,
            allocated_bytes: 50,
            there,
            place: None,
        }
    }

    fn device(size_bytes: u64) -> DiskDevice {
        DiskDevice { size_bytes, identifier: None }
    }

    fn chosen(
        disks: &[VmDisk],
        places: &[(usize, &str)],
    ) -> Result<Vec<(String, String, CopyReason)>, String> {
        let places = places.iter().map(|(index, path)| (name(*index), (*path).to_owned())).collect();
        let copies = copies("web", "b", disks, &places).map_err(|why| why.to_string())?;
        Ok(copies.into_iter().map(|copy| (copy.from, copy.to, copy.why)).collect())
    }

    #[test]
    fn those_that_the_target_does_not_see_are_copied_and_no_others() {
        let disks = [disk(0, There::Other), disk(1, There::Nothing)];
        let expected = ("/srv/1".into(), "/srv/1".into(), CopyReason::NotSeen);
        assert_eq!(chosen(&disks, &[]), Ok(vec![expected]));
    }

    #[test]
    fn one_goes_where_the_target_wants_it_unless_somebody_says_where() {
        let wanted = |index| VmDisk { place: Some(format!("/big/{index}")), ..disk(index, There::Nothing) };
        let of_device = VmDisk { device: Some(device(200)), ..wanted(2) };
        let chosen = chosen(&[wanted(0), wanted(1), of_device], &[(1, "/fast/1")]).unwrap();
        let to: Vec<&str> = chosen.iter().map(|(_, to, _)| to.as_str()).collect();
        assert_eq!(to, ["/big/0", "/fast/1", "/big/2"]);
    }

    #[test]
    fn one_with_a_place_goes_there_whatever_the_target_sees() {
        let disks = [disk(0, There::Other), disk(1, There::Nothing)];
        let chosen = chosen(&disks, &[(0, "/big/0"), (1, "/big/1")]).unwrap();
        let expected =
            [0, 1].map(|index| (format!("/srv/{index}"), format!("/big/{index}"), CopyReason::AskedFor));
        assert_eq!(chosen, expected);
    }

    #[test]
    fn a_device_goes_where_somebody_says() {
        let of = VmDisk { device: Some(device(200)), allocated_bytes: 0, ..disk(0, There::Other) };
        let places = [(name(0), "/dev/vg0/web".to_owned())].into();
        let copied = copies("web", "b", &[of], &places).unwrap().remove(0);
        assert_eq!(
            (copied.from_device, copied.allocated_bytes),
            (Some(device(200)), 200),
            "all of it may be in use"
        );
    }

    #[test]
    fn what_cannot_be_copied_is_said() {
        let nothing = disk(0, There::Nothing);
        for (refused, words) in [
            (VmDisk { is_read_only: true, ..nothing.clone() }, "is read-only"),
            (
                VmDisk { device: Some(device(200)), ..nothing.clone() },
                "a block device of 200 bytes, and b has none",
            ),
            (VmDisk { has_data_file: true, ..nothing.clone() }, "data_file"),
            (
                VmDisk { obstacle: Some("it is too new".into()), ..nothing.clone() },
                "not copied: it is too new",
            ),
        ] {
            let said = chosen(std::slice::from_ref(&refused), &[]).unwrap_err();
            assert!(said.contains(words) && said.contains("vda of VM web (/srv/0)"), "{said}");
            let seen = VmDisk { there: There::Other, ..refused };
            assert_eq!(chosen(&[seen], &[]), Ok(vec![]), "it need not be");
        }
        assert!(
            chosen(std::slice::from_ref(&nothing), &[(1, "/x")]).unwrap_err().contains("has no disk vdb")
        );
        let both = [nothing, disk(1, There::Nothing)];
        assert!(chosen(&both, &[(1, "/srv/0")]).unwrap_err().contains("two disks of VM web"));
    }
}
