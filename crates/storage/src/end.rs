//! What a disk is, or is to be: looked at, and nothing changed.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use drainpipe_engine::problem::Problem;
use rustix::fs::{CWD, Mode, OFlags, SeekFrom, fstatfs, openat, seek, statfs};

use crate::error::of_path;
use crate::method::{End, FileSystem};

/// A disk that is there.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    pub(crate) end: End,
    pub(crate) size_bytes: u64,
    pub(crate) metadata: Metadata,
}

impl Disk {
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.end, End::Device { .. })
    }

    /// Its directory in sysfs, of a device.
    pub(crate) fn sysfs(&self) -> Option<PathBuf> {
        self.is_device().then(|| sysfs_of(&self.metadata))
    }
}

/// Where a disk is to be.
#[derive(Debug)]
pub(crate) enum DiskDestination {
    /// A file that is made.
    File {
        /// Its file system's kind.
        file_system: FileSystem,
        /// What it replaces.
        replaced: Option<Disk>,
    },
    /// A block device, which is written to.
    Device(Disk),
}

impl DiskDestination {
    pub(crate) fn end(&self) -> End {
        match self {
            Self::File { file_system, .. } => End::File(*file_system),
            Self::Device(disk) => disk.end.clone(),
        }
    }

    /// What would be lost.
    pub(crate) fn there(&self) -> Option<&Disk> {
        match self {
            Self::File { replaced, .. } => replaced.as_ref(),
            Self::Device(disk) => Some(disk),
        }
    }
}

/// The disk that is to be read.
pub(crate) fn source(path: &Path) -> Result<Disk, Problem> {
    let metadata = fs::metadata(path).map_err(|error| of_path("read", path, &error))?;
    disk(path, &metadata, OFlags::RDONLY)
}

/// Where the disk is to be written.
pub(crate) fn destination(path: &Path) -> Result<DiskDestination, Problem> {
    if path.file_name().is_none() {
        return Err(Problem::bad_input(format!("{} names no file; give the disk a name", path.display())));
    }
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return new_file(path),
        metadata => metadata.map_err(|error| of_path("look at", path, &error))?,
    };
    if metadata.is_dir() {
        let advice = "is a directory; name the file in it, too";
        return Err(Problem::bad_input(format!("{} {advice}", path.display())));
    }
    if metadata.file_type().is_block_device() {
        return disk(path, &metadata, OFlags::RDWR).map(DiskDestination::Device);
    }
    refuse_link(path)?;
    let replaced = disk(path, &metadata, OFlags::RDONLY)?;
    Ok(DiskDestination::File { file_system: file_system_around(path)?, replaced: Some(replaced) })
}

fn new_file(path: &Path) -> Result<DiskDestination, Problem> {
    refuse_link(path)?;
    Ok(DiskDestination::File { file_system: file_system_around(path)?, replaced: None })
}

/// What is renamed to a link's name would take the link's place, and not that of what it leads to.
fn refuse_link(path: &Path) -> Result<(), Problem> {
    match fs::read_link(path) {
        Ok(leads_to) => Err(Problem::bad_input(format!(
            "{} is a symbolic link; name what it leads to: {}",
            path.display(),
            leads_to.display()
        ))),
        Err(_) => Ok(()),
    }
}

fn file_system_around(path: &Path) -> Result<FileSystem, Problem> {
    let directory = directory_of(path);
    let found =
        statfs(directory).map_err(|error| of_path("look at the directory", directory, &error.into()))?;
    Ok(file_system(u64::try_from(found.f_type).unwrap_or_default()))
}

/// The directory that a file is in.
pub(crate) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a disk. While a block device is open like this, nobody mounts it.
fn disk(path: &Path, metadata: &Metadata, access: OFlags) -> Result<Disk, Problem> {
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let advice = "is neither a file nor a block device; name a disk";
        return Err(Problem::bad_input(format!("{} {advice}", path.display())));
    }
    let alone = if kind.is_block_device() { OFlags::EXCL } else { OFlags::empty() };
    let flags = access | alone | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let failed = |error: rustix::io::Errno| of_path("open", path, &error.into());
    let file = File::from(openat(CWD, path, flags, Mode::empty()).map_err(failed)?);
    let metadata = file.metadata().map_err(|error| of_path("look at", path, &error))?;
    let size_bytes = seek(&file, SeekFrom::End(0)).map_err(failed)?;
    let end = if kind.is_block_device() {
        End::Device { scsi_target: scsi_target(&sysfs_of(&metadata)) }
    } else {
        let found = fstatfs(&file).map_err(failed)?;
        End::File(file_system(u64::try_from(found.f_type).unwrap_or_default()))
    };
    Ok(Disk { path: path.into(), file, end, size_bytes, metadata })
}

/// By the magic numbers of statfs(2).
fn file_system(magic: u64) -> FileSystem {
    match magic {
        // XFS, Btrfs, OCFS2, Bcachefs, ZFS.
        0x5846_5342 | 0x9123_683e | 0x7461_636f | 0xca45_1a4e | 0x2fc1_2fc1 => FileSystem::Sharing,
        // NFS, CIFS by both of its numbers, Ceph.
        0x6969 | 0xff53_4d42 | 0xfe53_4d42 | 0x00c3_6400 => FileSystem::Remote,
        // tmpfs, ramfs.
        0x0102_1994 | 0x8584_58f6 => FileSystem::Memory,
        _ => FileSystem::Plain,
    }
}

fn sysfs_of(device: &Metadata) -> PathBuf {
    let number = device.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// The target that a whole SCSI device is a unit of; a partition of one has none.
fn scsi_target(sysfs: &Path) -> Option<String> {
    let device = fs::canonicalize(sysfs.join("device")).ok()?;
    target_in(device.file_name()?.to_str()?)
}

/// From host, channel, target and unit to what all units of a target have.
fn target_in(address: &str) -> Option<String> {
    let parts: Vec<&str> = address.split(':').collect();
    let is_address = parts.len() == 4 && parts.iter().all(|part| part.parse::<u64>().is_ok());
    is_address.then(|| parts[..3].join(":"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_one_target_are_known_by_their_addresses() {
        assert_eq!(target_in("2:0:1:7").as_deref(), Some("2:0:1"));
        assert_eq!(target_in("virtio3"), None);
        assert_eq!(target_in("2:0:1"), None);
    }

    #[test]
    fn a_target_is_a_name_in_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let wrong = |path: &Path| destination(path).unwrap_err().message;
        assert!(wrong(directory.path()).contains("name the file in it"));
        assert!(wrong(&directory.path().join("none/a.img")).contains("no such file or directory"));
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("elsewhere", &link).unwrap();
        assert!(wrong(&link).contains("name what it leads to: elsewhere"));
        assert!(source(Path::new("/dev/null")).unwrap_err().message.contains("neither a file"));
    }
}
