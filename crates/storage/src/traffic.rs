//! The kernel's counters of what goes through this host.

use std::fs;
use std::path::{Path, PathBuf};

use crate::measured::Traffic;

/// Sectors in the counters of devices, whatever the device has.
const SECTOR_BYTES: u64 = 512;

/// What is looked at before and after.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    /// What this process read and wrote.
    Process,
    /// What the file system mounted here did with its server.
    NfsMount(PathBuf),
    /// The counters of these devices, by their directories in sysfs.
    Devices(Vec<PathBuf>),
    /// What the host wrote to block devices.
    Host,
}

/// Counters as they were.
#[derive(Debug)]
pub(crate) struct Meter {
    source: Source,
    before: Option<Traffic>,
}

impl Meter {
    pub(crate) fn begin(source: Source) -> Self {
        Self { before: source.read(), source }
    }

    /// What has gone through since; nothing if the kernel does not tell.
    pub(crate) fn end(&self) -> Option<Traffic> {
        let (before, after) = (self.before?, self.source.read()?);
        Some(Traffic {
            read_bytes: after.read_bytes.saturating_sub(before.read_bytes),
            written_bytes: after.written_bytes.saturating_sub(before.written_bytes),
        })
    }
}

impl Source {
    fn read(&self) -> Option<Traffic> {
        let text = |path: &Path| fs::read_to_string(path).ok();
        match self {
            Self::Process => of_process(&text(Path::new("/proc/self/io"))?),
            Self::NfsMount(mounted_on) => of_mount(&text(Path::new("/proc/self/mountstats"))?, mounted_on),
            Self::Devices(devices) => {
                let all = devices.iter().map(|device| of_device(&text(&device.join("stat"))?));
                all.collect::<Option<Vec<_>>>().map(|all| sum(&all))
            }
            Self::Host => of_host(&text(Path::new("/proc/vmstat"))?),
        }
    }
}

fn sum(all: &[Traffic]) -> Traffic {
    all.iter().fold(Traffic::default(), |sum, one| Traffic {
        read_bytes: sum.read_bytes.saturating_add(one.read_bytes),
        written_bytes: sum.written_bytes.saturating_add(one.written_bytes),
    })
}

/// The number that stands behind a name at the beginning of a line.
fn number_behind(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().parse().ok()
}

fn of_process(io: &str) -> Option<Traffic> {
    Some(Traffic {
        read_bytes: number_behind(io, "read_bytes:")?,
        written_bytes: number_behind(io, "write_bytes:")?,
    })
}

/// Counted where requests are handed down, in KiB: commands without data, as to free blocks, are not in it.
fn of_host(vmstat: &str) -> Option<Traffic> {
    let bytes = |name| Some(number_behind(vmstat, name)?.saturating_mul(1024));
    Some(Traffic { read_bytes: bytes("pgpgin ")?, written_bytes: bytes("pgpgout ")? })
}

/// Documentation/block/stat.rst: the third and the seventh number.
fn of_device(stat: &str) -> Option<Traffic> {
    let numbers: Vec<u64> = stat.split_whitespace().map_while(|number| number.parse().ok()).collect();
    let bytes = |index: usize| Some(numbers.get(index)?.saturating_mul(SECTOR_BYTES));
    Some(Traffic { read_bytes: bytes(2)?, written_bytes: bytes(6)? })
}

/// Bytes that the server sent and got: the fifth and the sixth number of a mount.
fn of_mount(mountstats: &str, mounted_on: &Path) -> Option<Traffic> {
    let place = format!(" mounted on {} with fstype nfs", mounted_on.display());
    let (_, rest) = mountstats.split_once(&place)?;
    let own = rest.split("\ndevice ").next()?;
    let counts = own.lines().find_map(|line| line.trim_start().strip_prefix("bytes:"))?;
    let numbers: Vec<u64> = counts.split_whitespace().map_while(|number| number.parse().ok()).collect();
    Some(Traffic { read_bytes: *numbers.get(4)?, written_bytes: *numbers.get(5)? })
}

/// Where the NFS of a file is mounted; nothing of a file elsewhere.
pub(crate) fn nfs_mount_of(file: &Path) -> Option<PathBuf> {
    let whole = fs::canonicalize(file).ok()?;
    mount_around(&fs::read_to_string("/proc/self/mountinfo").ok()?, &whole)
}

/// The last mount that a path is below, if it is of NFS.
fn mount_around(mountinfo: &str, path: &Path) -> Option<PathBuf> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (own, behind) = line.split_once(" - ")?;
        Some((own.split(' ').nth(4)?, behind.split(' ').next()?))
    });
    let around = mounts.filter(|(mounted_on, _)| path.starts_with(mounted_on));
    let (mounted_on, kind) = around.max_by_key(|(mounted_on, _)| mounted_on.len())?;
    kind.starts_with("nfs").then(|| mounted_on.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic(read_bytes: u64, written_bytes: u64) -> Traffic {
        Traffic { read_bytes, written_bytes }
    }

    #[test]
    fn counters_are_read_as_the_kernel_writes_them() {
        assert_eq!(
            of_process("rchar: 1\nwchar: 2\nread_bytes: 4096\nwrite_bytes: 8192\n"),
            Some(traffic(4096, 8192))
        );
        assert_eq!(of_host("nr_dirty 3\npgpgin 5\npgpgout 7\n"), Some(traffic(5120, 7168)));
        assert_eq!(of_device("   1   2   3   4   5   6   7   8 0 0 0\n"), Some(traffic(1536, 3584)));
        let mounts = "device a mounted on /srv with fstype nfs4 statvers=1.1\n\tbytes:\t1 2 3 4 5 6 7 8\n\
                      device b mounted on /srv/b with fstype nfs4 statvers=1.1\n\tbytes:\t1 2 3 4 50 60 7 8\n";
        assert_eq!(of_mount(mounts, Path::new("/srv")), Some(traffic(5, 6)));
        assert_eq!(of_mount(mounts, Path::new("/srv/b")), Some(traffic(50, 60)));
        assert_eq!(of_mount(mounts, Path::new("/other")), None);
        assert_eq!(of_process(""), None);
    }

    #[test]
    fn this_kernel_is_understood() {
        assert!(Source::Process.read().is_some() && Source::Host.read().is_some());
    }

    #[test]
    fn the_mount_of_a_file_is_the_innermost() {
        let mountinfo = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:40 / /srv rw shared:1 - nfs4 host:/ rw\n\
                         3 2 8:2 / /srv/local rw - xfs /dev/sdb rw\n";
        let of = |path: &str| mount_around(mountinfo, Path::new(path));
        assert_eq!(of("/srv/a.img"), Some("/srv".into()));
        assert_eq!(of("/srv/local/a.img"), None);
        assert_eq!(of("/srvx/a.img"), None);
    }
}
