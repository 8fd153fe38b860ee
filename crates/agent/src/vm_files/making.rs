//! Disks that this host makes, renames and removes itself, through nothing but what VMs may use.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use drainpipe_engine::storage::DiskImage;
use drainpipe_engine::vm_resources::{NotAllowed, Place};
use drainpipe_hypervisor::qcow2;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags, fstatvfs, openat, openat2, renameat_with,
    statat, unlinkat,
};
use rustix::io::Errno;
use thiserror::Error;

use super::Rules;
use crate::journal::FileId;

/// Why a file cannot be made, renamed or removed.
#[derive(Debug, Error)]
pub(super) enum CannotMake {
    /// VMs may not use what is there.
    #[error("no VM may use it")]
    NotAllowed(NotAllowed),
    /// There is something already.
    #[error("there is something under that name already")]
    Taken,
    /// There is not enough room.
    #[error("{free_mib} MiB are free there, {needed_mib} MiB are needed")]
    NoRoom { free_mib: u64, needed_mib: u64 },
    /// No such image can be.
    #[error("{0}")]
    Image(qcow2::TooLarge),
    /// The kernel refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for CannotMake {
    fn from(error: Errno) -> Self {
        if error == Errno::EXIST { Self::Taken } else { Self::Io(error.into()) }
    }
}

/// A place in a directory that VMs may use.
struct Spot {
    directory: OwnedFd,
    name: OsString,
}

impl Spot {
    fn find(rules: &Rules, path: &Path) -> Result<Self, CannotMake> {
        let place = rules.resources.place(path).map_err(CannotMake::NotAllowed)?;
        let Place::Below { directory, rest } = place else {
            return Err(CannotMake::NotAllowed(NotAllowed::NoFile));
        };
        let name = rest.file_name().ok_or(CannotMake::NotAllowed(NotAllowed::Outside))?.to_owned();
        let look = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let top = rustix::fs::open(directory, look, Mode::empty())?;
        let parent = rest.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = match parent {
            None => top,
            Some(parent) => {
                let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
                openat2(top, parent, look, Mode::empty(), resolve)?
            }
        };
        Ok(Self { directory, name })
    }

    /// What is there, if it is a file.
    fn file(&self) -> Result<Option<FileId>, CannotMake> {
        match statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile => Ok(None),
            Ok(stat) => Ok(Some(FileId { device: stat.st_dev, inode: stat.st_ino })),
        }
    }

    fn sync(&self) -> Result<(), CannotMake> {
        let directory = openat(
            &self.directory,
            ".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(rustix::fs::fsync(directory)?)
    }
}

/// Whether a disk could be made there, which takes so much; `promised_bytes` says what of a file system others will take.
pub(super) fn check_room(
    rules: &Rules,
    path: &Path,
    bytes: u64,
    promised_bytes: impl FnOnce(u64) -> u64,
) -> Result<(), CannotMake> {
    let spot = Spot::find(rules, path)?;
    if statat(&spot.directory, &spot.name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
        return Err(CannotMake::Taken);
    }
    let file_system = fstatvfs(&spot.directory)?;
    let device = rustix::fs::fstat(&spot.directory)?.st_dev;
    let free = file_system.f_bavail.saturating_mul(file_system.f_frsize);
    let free = free.saturating_sub(promised_bytes(device));
    if free >= bytes {
        return Ok(());
    }
    Err(CannotMake::NoRoom { free_mib: free >> 20, needed_mib: bytes.div_ceil(1 << 20) })
}

/// Makes an empty disk where nothing is.
pub(super) fn make(rules: &Rules, path: &Path, image: DiskImage, bytes: u64) -> Result<FileId, CannotMake> {
    let spot = Spot::find(rules, path)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = File::from(openat(&spot.directory, &spot.name, flags, Mode::RUSR | Mode::WUSR)?);
    let made = fill(&file, image, bytes).and_then(|()| spot.sync());
    if let Err(error) = made {
        // It is this one: nobody else has made one under that name meanwhile.
        let _ = unlinkat(&spot.directory, &spot.name, AtFlags::empty());
        return Err(error);
    }
    let metadata = file.metadata()?;
    Ok(FileId { device: metadata.dev(), inode: metadata.ino() })
}

fn fill(file: &File, image: DiskImage, bytes: u64) -> Result<(), CannotMake> {
    match image {
        DiskImage::Raw => file.set_len(bytes)?,
        DiskImage::Qcow2 { cluster_bytes } => {
            let empty = qcow2::empty(bytes, cluster_bytes).map_err(CannotMake::Image)?;
            file.set_len(empty.file_bytes)?;
            for (at, content) in empty.parts {
                file.write_all_at(&content, at)?;
            }
        }
    }
    Ok(file.sync_all()?)
}

/// Removes a file that this host has made. Whether it was there.
pub(super) fn remove(rules: &Rules, path: &Path, file: FileId) -> Result<bool, CannotMake> {
    let spot = Spot::find(rules, path)?;
    if spot.file()? != Some(file) {
        return Ok(false);
    }
    unlinkat(&spot.directory, &spot.name, AtFlags::empty())?;
    spot.sync()?;
    Ok(true)
}

/// Removes what is under a name that only a disk which was left has. Whether it was there.
pub(super) fn remove_left(rules: &Rules, path: &Path) -> Result<bool, CannotMake> {
    match Spot::find(rules, path)?.file()? {
        Some(file) => remove(rules, path, file),
        None => Ok(false),
    }
}

/// Gives a file another name in its directory. Whether it was there.
pub(super) fn rename(rules: &Rules, path: &Path, name: &OsStr) -> Result<bool, CannotMake> {
    let spot = Spot::find(rules, path)?;
    if spot.file()?.is_none() {
        return Ok(false);
    }
    renameat_with(&spot.directory, &spot.name, &spot.directory, name, RenameFlags::NOREPLACE)?;
    spot.sync()?;
    Ok(true)
}

/// The name of a disk that has stayed behind by this migration.
pub(super) fn left_path(path: &Path, migration: &str) -> PathBuf {
    let beginning: String = migration.chars().take(8).collect();
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".migrated-{beginning}"));
    name.into()
}
