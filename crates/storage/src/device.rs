//! A block device that is to be overwritten by somebody else.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use drainpipe_engine::problem::Problem;

use crate::end::{Disk, DiskDestination, destination};
use crate::in_use;

/// A device that nobody uses. While it is held, nobody mounts it.
#[derive(Debug)]
pub struct IdleDevice {
    disk: Disk,
}

impl IdleDevice {
    /// Takes it; nothing is written. Refused where it is mounted, held by a volume group, a RAID or a mapping, or open in a
    /// QEMU.
    pub fn take(path: &Path) -> Result<Self, Problem> {
        let DiskDestination::Device(disk) = destination(path)? else {
            return Err(Problem::bad_input(format!("{} is not a block device", path.display())));
        };
        in_use::refuse_to_lose(&disk)?;
        Ok(Self { disk })
    }

    /// Its number, which is the same under all its names.
    pub fn number(&self) -> u64 {
        self.disk.metadata.rdev()
    }

    /// To write to it.
    pub fn file(&self) -> &File {
        &self.disk.file
    }
}

/// The number of the block device at a path; none if it is none.
pub fn number_of(path: &Path) -> Option<u64> {
    let metadata = fs::metadata(path).ok()?;
    metadata.file_type().is_block_device().then(|| metadata.rdev())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_no_device() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(IdleDevice::take(file.path()).unwrap_err().message.contains("is not a block device"));
        assert_eq!(number_of(file.path()), None);
        assert_eq!(number_of(Path::new("/dev/null")), None, "a character device has a number of its own");
    }
}
