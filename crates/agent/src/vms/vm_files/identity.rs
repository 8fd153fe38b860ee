//! What distinguishes one disk from another.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use drainpipe_engine::check::vm::FileIdentity;
use drainpipe_engine::storage::{DeviceIdentifier, DeviceIdentifierKind};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{F_UNLCK, F_WRLCK, SEEK_SET, flock};
use rustix::fs::{FileType, OFlags, fstatfs};

use super::opening::FoundFile;

/// Longest name of a device that is read; WWIDs are shorter.
const DEVICE_BYTES_MAX: usize = 128;

/// Where QEMU's image locks begin, and how many bytes they may be (`block/file-posix.c`).
const LOCK_FIRST: i64 = 100;
const LOCK_BYTES: i64 = 200;

/// File systems that one host mounts at a time, by their magic numbers (`statfs(2)`): ext, XFS, Btrfs,
/// tmpfs, overlayfs, F2FS, ZFS.
const LOCAL_FILE_SYSTEMS: [u64; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0xf2f5_2010, 0x2fc1_2fc1];

/// What is known of a file or block device without changing anything.
pub(super) fn identify(found: &FoundFile) -> FileIdentity {
    if found.kind() == FileType::BlockDevice { of_device(found) } else { of_file(found) }
}

fn of_file(found: &FoundFile) -> FileIdentity {
    let file = found.open(OFlags::RDONLY | OFlags::NONBLOCK).ok();
    FileIdentity {
        block_device: false,
        size_bytes: u64::try_from(found.stat.st_size).unwrap_or(0),
        inode: found.stat.st_ino,
        local_filesystem: is_local(found.handle()),
        locked: file.as_ref().and_then(is_locked),
        device: None,
    }
}

fn is_local(file: &OwnedFd) -> bool {
    fstatfs(file)
        .is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|magic| LOCAL_FILE_SYSTEMS.contains(&magic)))
}

/// Asks whether somebody's lock is in the way of one over all that QEMU may lock; takes none.
fn is_locked(file: &OwnedFd) -> Option<bool> {
    let mut lock = flock {
        l_type: i16::try_from(F_WRLCK).ok()?,
        l_whence: i16::try_from(SEEK_SET).ok()?,
        l_start: LOCK_FIRST,
        l_len: LOCK_BYTES,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)).ok()?;
    Some(i32::from(lock.l_type) != F_UNLCK)
}

fn of_device(found: &FoundFile) -> FileIdentity {
    of_number(found.stat.st_rdev)
}

/// What is known of the block device of that number.
pub(super) fn of_number(number: u64) -> FileIdentity {
    let sysfs = sysfs_of(number);
    let sectors: u64 = text(&sysfs.join("size")).and_then(|sectors| sectors.parse().ok()).unwrap_or(0);
    FileIdentity {
        block_device: true,
        // The kernel counts in sectors of 512 bytes, whatever the device has.
        size_bytes: sectors.saturating_mul(512),
        inode: 0,
        local_filesystem: false,
        locked: None,
        device: identifier(&sysfs),
    }
}

/// A block device's directory in sysfs.
pub(super) fn sysfs_of(number: u64) -> PathBuf {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// The name that a block device has, by its directory in sysfs.
fn identifier(sysfs: &Path) -> Option<DeviceIdentifier> {
    let files = [
        ("dm/uuid", DeviceIdentifierKind::DeviceMapper),
        ("wwid", DeviceIdentifierKind::Nvme),
        ("device/wwid", DeviceIdentifierKind::Scsi),
    ];
    let of_kind = |(file, kind)| Some(DeviceIdentifier { kind, value: text(&sysfs.join(file))? });
    files.into_iter().find_map(of_kind)
}

fn text(file: &Path) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let text: String = text.trim().chars().take(DEVICE_BYTES_MAX).collect();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_device_is_named_with_the_kind_of_its_name() {
        let sysfs = tempfile::tempdir().unwrap();
        for directory in ["dm", "device"] {
            fs::create_dir(sysfs.path().join(directory)).unwrap();
        }
        assert_eq!(identifier(sysfs.path()), None);
        let named = |file: &str, kind, value: &str| {
            fs::write(sysfs.path().join(file), format!("{value}\n")).unwrap();
            let value = value.to_owned();
            assert_eq!(identifier(sysfs.path()), Some(DeviceIdentifier { kind, value }), "{file}");
        };
        named("device/wwid", DeviceIdentifierKind::Scsi, "naa.6001");
        named("wwid", DeviceIdentifierKind::Nvme, "eui.6001");
        named("dm/uuid", DeviceIdentifierKind::DeviceMapper, "mpath-36001");
    }
}
