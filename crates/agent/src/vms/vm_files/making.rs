//! Disks that this host makes, renames and removes itself, through nothing but what VMs may use.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use drainpipe_engine::format::{mib_free, mib_needed};
use drainpipe_engine::host::vm_resources::{AllowedPath, NotAllowed};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskImage, FileRoom, UnfitDevice};
use drainpipe_hypervisor::qcow2;
use rustix::fs::{
    Advice, AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, StatxFlags, fadvise, fstatvfs,
    linkat, makedev, openat, openat2, renameat_with, statat, statx, unlinkat,
};
use rustix::io::Errno;
use thiserror::Error;

use super::Rules;
use crate::store::journal::FileId;

/// Why a file cannot be made, renamed or removed.
#[derive(Debug, Error)]
pub(super) enum CannotMake {
    /// VMs may not use what is there.
    #[error("VMs may not use it")]
    NotAllowed(NotAllowed),
    /// There is something already.
    #[error("it exists already")]
    Taken,
    /// There is not enough room.
    #[error("{} are free there, and {} are needed", mib_free(*.free_bytes), mib_needed(*.needed_bytes))]
    NoRoom { free_bytes: u64, needed_bytes: u64 },
    /// A VM here has it.
    #[error("a VM here uses it as its disk {}", .0.display())]
    InUse(PathBuf),
    /// No device is there.
    #[error("there is no such device; create it, or name a file in a directory that VMs may use")]
    NoDevice,
    /// A device that does not fit.
    #[error(transparent)]
    Unfit(UnfitDevice),
    /// A device that others use.
    #[error(transparent)]
    Storage(Problem),
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

/// What a file system has free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Number of its device.
    pub(crate) device: u64,
    /// What is free and promised to nobody.
    pub(crate) free_bytes: u64,
}

/// A place in a directory that VMs may use.
struct Spot {
    directory: OwnedFd,
    name: OsString,
}

impl Spot {
    fn find(rules: &Rules, path: &Path) -> Result<Self, CannotMake> {
        let allowed = rules.resources.allowed_path(path).map_err(CannotMake::NotAllowed)?;
        let AllowedPath::Below { directory, rest } = allowed else {
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

    /// `promised_bytes` says what of it others will take.
    fn room(&self, promised_bytes: impl FnOnce(u64) -> u64) -> Result<Room, CannotMake> {
        let file_system = fstatvfs(&self.directory)?;
        let device = rustix::fs::fstat(&self.directory)?.st_dev;
        let free = file_system.f_bavail.saturating_mul(file_system.f_frsize);
        Ok(Room { device, free_bytes: free.saturating_sub(promised_bytes(device)) })
    }

    /// What is there, if it is a file.
    fn file(&self) -> Result<Option<FileId>, CannotMake> {
        self.file_named(&self.name)
    }

    fn file_named(&self, name: &OsStr) -> Result<Option<FileId>, CannotMake> {
        match look(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
            Ok((FileType::RegularFile, file)) => Ok(Some(file)),
            Ok(_) => Ok(None),
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

/// What is under a name, and which file it is.
fn look(directory: impl AsFd, name: &OsStr, flags: AtFlags) -> Result<(FileType, FileId), Errno> {
    let found = statx(directory, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
    let device = makedev(found.stx_dev_major, found.stx_dev_minor);
    let says_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
    let born_ns = found.stx_btime.tv_sec.saturating_mul(1_000_000_000) + i64::from(found.stx_btime.tv_nsec);
    let file = FileId { device, inode: found.stx_ino, born_ns: if says_birth { born_ns } else { 0 } };
    Ok((FileType::from_raw_mode(found.stx_mode.into()), file))
}

/// Refuses a file that a VM names, by whatever path.
fn check_unused(file: FileId, named: &[PathBuf]) -> Result<(), CannotMake> {
    let is_it =
        |path: &&PathBuf| look(CWD, path.as_os_str(), AtFlags::empty()).is_ok_and(|(_, other)| other == file);
    named.iter().find(is_it).map_or(Ok(()), |path| Err(CannotMake::InUse(path.clone())))
}

/// Which file is there, if it is one.
pub(super) fn identify(rules: &Rules, path: &Path) -> Result<Option<FileId>, CannotMake> {
    Spot::find(rules, path)?.file()
}

/// What a file takes, and what is free beside it; none if another one is there, or none.
pub(super) fn file_room(rules: &Rules, path: &Path, file: FileId) -> Result<Option<FileRoom>, CannotMake> {
    const BLOCK_BYTES: u64 = 512;
    let spot = Spot::find(rules, path)?;
    if spot.file()? != Some(file) {
        return Ok(None);
    }
    let blocks = statat(&spot.directory, &spot.name, AtFlags::SYMLINK_NOFOLLOW)?.st_blocks;
    let file_system = fstatvfs(&spot.directory)?;
    let free_bytes = file_system.f_bavail.saturating_mul(file_system.f_frsize);
    Ok(Some(FileRoom { taken_bytes: blocks.cast_unsigned() * BLOCK_BYTES, free_bytes }))
}

/// Makes all of a file durable, whoever wrote it, and has the kernel forget it: who reads it next reads what the storage has.
/// Whether it was there.
pub(super) fn settle(rules: &Rules, path: &Path, file: FileId) -> Result<bool, CannotMake> {
    let spot = Spot::find(rules, path)?;
    if spot.file()? != Some(file) {
        return Ok(false);
    }
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = openat(&spot.directory, &spot.name, flags, Mode::empty())?;
    if look(&opened, OsStr::new(""), AtFlags::EMPTY_PATH)? != (FileType::RegularFile, file) {
        return Ok(false);
    }
    rustix::fs::fsync(&opened)?;
    fadvise(&opened, 0, None, Advice::DontNeed)?;
    Ok(true)
}

/// What is free on the file system where a disk would be made.
pub(super) fn room(
    rules: &Rules,
    path: &Path,
    promised_bytes: impl FnOnce(u64) -> u64,
) -> Result<Room, CannotMake> {
    Spot::find(rules, path)?.room(promised_bytes)
}

/// Whether a disk could be made there, which takes so much; `promised_bytes` says what of a file system others will take.
pub(super) fn check_room(
    rules: &Rules,
    path: &Path,
    bytes: u64,
    promised_bytes: impl FnOnce(u64) -> u64,
) -> Result<(), CannotMake> {
    check_free(rules, path)?;
    let free_bytes = room(rules, path, promised_bytes)?.free_bytes;
    if free_bytes >= bytes {
        return Ok(());
    }
    Err(CannotMake::NoRoom { free_bytes, needed_bytes: bytes })
}

/// Refuses a name that something has.
pub(super) fn check_free(rules: &Rules, path: &Path) -> Result<(), CannotMake> {
    let spot = Spot::find(rules, path)?;
    match statat(&spot.directory, &spot.name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Err(CannotMake::Taken),
        Err(_) => Ok(()),
    }
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
    Ok(look(&file, OsStr::new(""), AtFlags::EMPTY_PATH)?.1)
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

/// Removes what an agent that ended in the middle of it has made under that name. Whether there was anything.
pub(super) fn remove_unplaced(rules: &Rules, path: &Path, named: &[PathBuf]) -> Result<bool, CannotMake> {
    match identify(rules, path)? {
        Some(file) => remove(rules, path, file, named),
        None => Ok(false),
    }
}

/// Removes a file unless one of the paths that VMs name leads to it. Whether it was there.
pub(super) fn remove(
    rules: &Rules,
    path: &Path,
    file: FileId,
    named: &[PathBuf],
) -> Result<bool, CannotMake> {
    let spot = Spot::find(rules, path)?;
    if spot.file()? != Some(file) {
        return Ok(false);
    }
    check_unused(file, named)?;
    unlinkat(&spot.directory, &spot.name, AtFlags::empty())?;
    spot.sync()?;
    Ok(true)
}

/// Gives a file another name in its directory, unless one of the paths that VMs name leads to it. Whether it has that
/// name now.
pub(super) fn rename(
    rules: &Rules,
    path: &Path,
    name: &OsStr,
    file: FileId,
    named: &[PathBuf],
) -> Result<bool, CannotMake> {
    let spot = Spot::find(rules, path)?;
    if spot.file()? != Some(file) {
        // It may have been done already.
        return Ok(spot.file_named(name)? == Some(file));
    }
    check_unused(file, named)?;
    if spot.file_named(name)? == Some(file) {
        unlinkat(&spot.directory, &spot.name, AtFlags::empty())?;
    } else {
        rename_to_free(&spot.directory, &spot.name, name)?;
    }
    spot.sync()?;
    Ok(true)
}

fn rename_to_free(directory: &OwnedFd, from: &OsStr, to: &OsStr) -> Result<(), Errno> {
    match renameat_with(directory, from, directory, to, RenameFlags::NOREPLACE) {
        // NFS does not know that flag.
        Err(Errno::INVAL) => link_and_unlink(directory, from, to),
        renamed => renamed,
    }
}

fn link_and_unlink(directory: &OwnedFd, from: &OsStr, to: &OsStr) -> Result<(), Errno> {
    linkat(directory, from, directory, to, AtFlags::empty())?;
    unlinkat(directory, from, AtFlags::empty())
}

/// Gives a file that was made under another name its own.
pub(super) fn place(rules: &Rules, made: &Path, name: &OsStr, file: FileId) -> Result<(), CannotMake> {
    let placed = rename(rules, made, name, file, &[]);
    match placed {
        Ok(true) => Ok(()),
        Ok(false) => Err(CannotMake::Io(io::ErrorKind::NotFound.into())),
        Err(error) => {
            // A search for what is left knows the name.
            let _ = remove(rules, made, file, &[]);
            Err(error)
        }
    }
}

/// The name that a disk has until the journal knows which file it is, by this migration or move.
pub(super) fn unplaced_path(path: &Path, id: &str) -> PathBuf {
    with_suffix(path, "new", id)
}

/// The name of a disk that has stayed behind by this migration.
pub(super) fn left_path(path: &Path, migration: &str) -> PathBuf {
    with_suffix(path, "migrated", migration)
}

/// The name of what is there of a copy that was interrupted in this migration.
pub(super) fn kept_path(path: &Path, migration: &str) -> PathBuf {
    with_suffix(path, "interrupted", migration)
}

/// The name of a disk that its VM has left for another one, by this move.
pub(super) fn moved_path(path: &Path, id: &str) -> PathBuf {
    with_suffix(path, "moved", id)
}

fn with_suffix(path: &Path, word: &str, id: &str) -> PathBuf {
    let beginning: String = id.chars().take(8).collect();
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{word}-{beginning}"));
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_linked_and_unlinked_has_another_name_and_overwrites_nothing() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("a"), "content").unwrap();
        std::fs::write(directory.path().join("taken"), "another").unwrap();
        let at = OwnedFd::from(File::open(directory.path()).unwrap());
        let rename = |to: &str| link_and_unlink(&at, OsStr::new("a"), OsStr::new(to));
        assert_eq!(rename("taken"), Err(Errno::EXIST));
        rename("b").unwrap();
        assert!(!directory.path().join("a").exists());
        assert_eq!(std::fs::read(directory.path().join("b")).unwrap(), b"content");
        assert_eq!(std::fs::read(directory.path().join("taken")).unwrap(), b"another");
    }
}
