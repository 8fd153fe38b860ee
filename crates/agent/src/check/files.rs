//! What is at a path, as far as it tells one disk from another.
//!
//! The storage may be gone, and then a look at it does not return. So each look is a thread's own
//! affair, with a deadline, and there is one at a time of each path that hangs.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::check::vm::{DeviceIdentifier, DeviceIdentifierKind, FileIdentity, FileState};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{F_UNLCK, F_WRLCK, SEEK_SET, flock};
use rustix::fs::{OFlags, fstatfs};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::lock::lock;

/// How long storage may take to say what is at a path; a migration waits for it.
const LOOK_DEADLINE: Duration = Duration::from_secs(2);

/// Looks at once, those included that never return. Each is a thread; tokio has 512.
const LOOKS_MAX: usize = 128;

/// Longest name of a device that is read; WWIDs are shorter.
const DEVICE_BYTES_MAX: usize = 128;

/// Where QEMU's image locks begin, and how many bytes they may be (`block/file-posix.c`).
const LOCK_FIRST: i64 = 100;
const LOCK_BYTES: i64 = 200;

/// File systems that one host mounts at a time, by their magic numbers (`statfs(2)`): ext, XFS, Btrfs,
/// tmpfs, overlayfs, F2FS, ZFS.
const LOCAL_FILE_SYSTEMS: [u64; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0x794c_7630, 0xf2f5_2010, 0x2fc1_2fc1];

/// Looks at files, but never at those of the agent itself.
#[derive(Debug)]
pub(super) struct Files {
    // Closing any of these would take away the locks that SQLite has on its journal.
    own: PathBuf,
    looks: Arc<Semaphore>,
    since: Arc<Mutex<HashMap<PathBuf, Instant>>>,
}

impl Files {
    /// Of an agent whose own files are below `own`.
    pub(super) fn new(own: &Path) -> Self {
        Self { own: own.to_owned(), looks: Arc::new(Semaphore::new(LOOKS_MAX)), since: Arc::default() }
    }

    /// What is at a path.
    pub(super) async fn look(&self, path: &Path) -> FileState {
        let hangs = lock(&self.since).get(path).is_some_and(|since| since.elapsed() > LOOK_DEADLINE);
        if hangs {
            return FileState::Silent;
        }
        timeout(LOOK_DEADLINE, self.look_unbounded(path)).await.unwrap_or(FileState::Silent)
    }

    async fn look_unbounded(&self, path: &Path) -> FileState {
        let permit = Arc::clone(&self.looks).acquire_owned().await;
        let (path, own, since) = (path.to_owned(), self.own.clone(), Arc::clone(&self.since));
        let look = spawn_blocking(move || {
            lock(&since).insert(path.clone(), Instant::now());
            let state = identify(&path, &own).map_or(FileState::Missing, FileState::Present);
            lock(&since).remove(&path);
            drop(permit);
            state
        });
        look.await.unwrap_or(FileState::Missing)
    }
}

fn identify(path: &Path, own: &Path) -> Option<FileIdentity> {
    let path = fs::canonicalize(path).ok()?;
    if fs::canonicalize(own).is_ok_and(|own| path.starts_with(own)) {
        return None;
    }
    let metadata = fs::metadata(&path).ok()?;
    if metadata.file_type().is_block_device() {
        return Some(of_device(&metadata));
    }
    // Opening anything else, such as a pipe or a watchdog, would do something to it.
    metadata.is_file().then(|| of_file(&path, &metadata))
}

fn of_file(path: &Path, metadata: &Metadata) -> FileIdentity {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path).ok();
    FileIdentity {
        block_device: false,
        size_bytes: metadata.len(),
        inode: metadata.ino(),
        local_filesystem: file.as_ref().is_some_and(is_local),
        locked: file.as_ref().and_then(is_locked),
        device: None,
    }
}

fn is_local(file: &File) -> bool {
    fstatfs(file)
        .is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|magic| LOCAL_FILE_SYSTEMS.contains(&magic)))
}

/// Asks whether somebody's lock is in the way of one over all that QEMU may lock; takes none.
fn is_locked(file: &File) -> Option<bool> {
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

fn of_device(metadata: &Metadata) -> FileIdentity {
    let number = metadata.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let sysfs = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
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

    async fn look(path: &Path) -> FileState {
        Files::new(Path::new("/nonexistent")).look(path).await
    }

    fn identity(state: &FileState) -> &FileIdentity {
        let FileState::Present(identity) = state else { panic!("{state:?}") };
        identity
    }

    #[tokio::test]
    async fn a_file_is_told_from_its_copy() {
        let directory = tempfile::tempdir().unwrap();
        let [one, link, copy] = ["one", "link", "copy"].map(|name| directory.path().join(name));
        fs::write(&one, "disk").unwrap();
        fs::hard_link(&one, &link).unwrap();
        fs::copy(&one, &copy).unwrap();
        let state = look(&one).await;
        assert_eq!(state, look(&link).await);
        assert_eq!((identity(&state).size_bytes, identity(&state).locked), (4, Some(false)));
        assert_ne!(identity(&state).inode, identity(&look(&copy).await).inode);
    }

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

    #[tokio::test]
    async fn many_disks_are_looked_at_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let disk = directory.path().join("disk");
        fs::write(&disk, "disk").unwrap();
        let files = Files::new(Path::new("/nonexistent"));
        let states = futures_util::future::join_all((0..4 * LOOKS_MAX).map(|_| files.look(&disk))).await;
        assert!(states.iter().all(|state| matches!(state, FileState::Present(_))), "{states:?}");
        assert!(lock(&files.since).is_empty());
        let long_ago = Instant::now().checked_sub(LOOK_DEADLINE * 2).unwrap();
        lock(&files.since).insert(disk.clone(), long_ago);
        assert_eq!(files.look(&disk).await, FileState::Silent, "a look has not returned");
    }

    #[tokio::test]
    async fn nothing_else_than_a_disk_is_touched() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("journal");
        fs::write(&file, "").unwrap();
        assert_eq!(Files::new(directory.path()).look(&file).await, FileState::Missing, "the agent's own");
        for path in ["/nonexistent", "/dev/null", "/"] {
            assert_eq!(look(Path::new(path)).await, FileState::Missing, "{path}");
        }
    }
}
