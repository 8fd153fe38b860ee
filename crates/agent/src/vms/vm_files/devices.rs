//! Block devices that a copy of a disk overwrites: nobody else uses them, and somebody has allowed it.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use drainpipe_engine::check::vm::FileIdentity;
use drainpipe_engine::storage::{DiskCopy, DiskDevice, DiskImage, FileRoom};
use drainpipe_hypervisor::qcow2;
use drainpipe_storage::IdleDevice;
use drainpipe_storage::device::number_of;
use rustix::fs::{Advice, OFlags, fadvise};

use super::Rules;
use super::identity::{of_number, sysfs_of};
use super::making::CannotMake;
use super::opening::{FoundFile, Unusable, find};
use crate::store::journal::FileId;

/// The block device at a path, whoever may use it.
pub(crate) fn device_at(path: &Path) -> Option<DiskDevice> {
    number_of(path).map(of_number).map(described)
}

fn described(FileIdentity { size_bytes, device, .. }: FileIdentity) -> DiskDevice {
    DiskDevice { size_bytes, identifier: device }
}

fn found(rules: &Rules, path: &Path) -> Result<FoundFile, CannotMake> {
    find(rules, path).map_err(|error| match error {
        Unusable::Missing => CannotMake::NoDevice,
        Unusable::NotAllowed(why) => CannotMake::NotAllowed(why),
    })
}

/// Which device is there, if there is one.
pub(super) fn identify(rules: &Rules, path: &Path) -> Result<Option<FileId>, CannotMake> {
    match found(rules, path) {
        Ok(found) => Ok(Some(FileId::of_device(found.stat.st_rdev))),
        Err(CannotMake::NoDevice) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Takes the device that a copy would overwrite. `named` are the disks of VMs.
pub(super) fn take(rules: &Rules, copy: &DiskCopy, named: &[PathBuf]) -> Result<IdleDevice, CannotMake> {
    let path = Path::new(&copy.to);
    let found = found(rules, path)?;
    check_unused(found.stat.st_rdev, named)?;
    described(of_number(found.stat.st_rdev)).check(copy).map_err(CannotMake::Unfit)?;
    let idle = IdleDevice::take(path).map_err(CannotMake::Storage)?;
    // Its name may stand for another one since.
    if idle.number() == found.stat.st_rdev { Ok(idle) } else { Err(CannotMake::NoDevice) }
}

/// Makes it the empty disk that is copied to. A raw one needs nothing: each byte will be written.
pub(super) fn overwrite(rules: &Rules, copy: &DiskCopy, named: &[PathBuf]) -> Result<FileId, CannotMake> {
    let idle = take(rules, copy, named)?;
    if let DiskImage::Qcow2 { cluster_bytes } = copy.image {
        let empty = qcow2::empty(copy.size_bytes, cluster_bytes).map_err(CannotMake::Image)?;
        // An empty image relies on zeroes between its parts.
        let mut at = 0;
        while at < empty.file_bytes {
            let step = cluster_bytes.min(empty.file_bytes - at);
            idle.file().write_all_at(&vec![0; usize::try_from(step).unwrap_or(0)], at)?;
            at += step;
        }
        for (at, content) in empty.parts {
            idle.file().write_all_at(&content, at)?;
        }
        idle.file().sync_all()?;
    }
    Ok(FileId::of_device(idle.number()))
}

/// Refuses a device if a VM names all or a part of it, by whatever path.
fn check_unused(number: u64, named: &[PathBuf]) -> Result<(), CannotMake> {
    let overlaps = |other: u64| {
        let (one_whole, other_whole) = (whole_of(number), whole_of(other));
        number == other || number == other_whole || one_whole == other
    };
    let is_it = |path: &&PathBuf| number_of(path).is_some_and(overlaps);
    named.iter().find(is_it).map_or(Ok(()), |path| Err(CannotMake::InUse(path.clone())))
}

/// The number of the device that a partition is a part of; of any other device its own.
fn whole_of(number: u64) -> u64 {
    let sysfs = sysfs_of(number);
    if !sysfs.join("partition").exists() {
        return number;
    }
    let whole = fs::canonicalize(sysfs).ok().and_then(|of| fs::read_to_string(of.parent()?.join("dev")).ok());
    let numbers = whole.as_deref().and_then(|text| text.trim().split_once(':'));
    let parsed = numbers.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parsed.map_or(number, |(major, minor)| rustix::fs::makedev(major, minor))
}

fn opened(rules: &Rules, path: &Path, file: FileId) -> Result<Option<OwnedFd>, CannotMake> {
    let found = found(rules, path)?;
    if FileId::of_device(found.stat.st_rdev) != file {
        return Ok(None);
    }
    Ok(Some(found.open(OFlags::RDWR | OFlags::NONBLOCK)?))
}

/// Makes all of it durable, and has the kernel forget it. Whether it was there.
pub(super) fn settle(rules: &Rules, path: &Path, file: FileId) -> Result<bool, CannotMake> {
    let Some(device) = opened(rules, path, file)? else { return Ok(false) };
    rustix::fs::fsync(&device)?;
    fadvise(&device, 0, None, Advice::DontNeed)?;
    Ok(true)
}

/// It takes all of itself; none if another one is there.
pub(super) fn room(rules: &Rules, path: &Path, file: FileId) -> Result<Option<FileRoom>, CannotMake> {
    if identify(rules, path)? != Some(file) {
        return Ok(None);
    }
    Ok(Some(FileRoom { taken_bytes: of_number(file.device).size_bytes, free_bytes: 0 }))
}
