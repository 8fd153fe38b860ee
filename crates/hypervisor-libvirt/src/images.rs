//! The images on a domain's disks, and which of them libvirt does not copy safely.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use drainpipe_engine::storage::DiskImage;
use drainpipe_hypervisor::spec::{Disk, DiskFormat};
use drainpipe_hypervisor::{OpenDisk, Version, qcow2};

/// Clusters are at most so large.
const BEGINNING_BYTES_MAX: u64 = 2 << 20;

/// QEMU's mirror of a qcow2 image loses writes of the guest as it begins, from the one to before the other, where its node is
/// not told to ignore discards. libvirt tells it the contrary (docs/decisions/0096).
const LOSES_WRITES_SINCE: Version = Version { major: 8, minor: 0, micro: 0 };
const LOSES_WRITES_BEFORE: Version = Version { major: 10, minor: 2, micro: 2 };

/// The QEMU that runs a domain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Qemu {
    /// The version of the program that libvirt now starts.
    pub(crate) version: Version,
    /// Whether it is that program.
    pub(crate) is_of_version: bool,
    pub(crate) pid: Option<u32>,
}

impl Qemu {
    /// Whether another program was started than is there by now.
    fn is_replaced(&self) -> bool {
        let program = self.pid.and_then(|pid| fs::read_link(format!("/proc/{pid}/exe")).ok());
        program.is_some_and(|program| program.to_string_lossy().ends_with(" (deleted)"))
    }

    fn loses_writes(&self) -> Option<String> {
        const REMEDY: &str = "shut the domain down and copy the image, convert it to raw (`qemu-img \
            convert`), or install another QEMU and boot the domain again";
        if self.is_replaced() {
            return Some(format!(
                "its QEMU was replaced since the domain was booted, and some versions lose writes of the guest as the copy \
                 of a qcow2 image begins: {REMEDY}"
            ));
        }
        if !self.is_of_version {
            return Some(format!(
                "libvirt does not report the version of the QEMU that it runs in, and some versions lose \
                writes of the guest as the \
                 copy of a qcow2 image begins: {REMEDY}"
            ));
        }
        (LOSES_WRITES_SINCE..LOSES_WRITES_BEFORE).contains(&self.version).then(|| {
            format!(
                "QEMU {} may lose writes of the guest as libvirt's copy of a qcow2 image begins (8.0 to 10.2.1 do): {REMEDY}",
                self.version
            )
        })
    }
}

/// What is known of a disk. If that cannot be found out, it has an obstacle, which matters only if it is to be copied.
pub(crate) fn open_disk(disk: &Disk, qemu: &Qemu, has_snapshots: bool) -> OpenDisk {
    look(&disk.path, disk.format).map_or_else(
        |why| unknown(&why),
        |found| {
            let obstacle = obstacle(&found, qemu, has_snapshots);
            OpenDisk { obstacle, ..found }
        },
    )
}

fn obstacle(found: &OpenDisk, qemu: &Qemu, has_snapshots: bool) -> Option<String> {
    if found.obstacle.is_some() {
        return found.obstacle.clone();
    }
    if found.image == DiskImage::Raw {
        return None;
    }
    if found.has_backing {
        let why = "it has backing images, which libvirt would look for on the target: `virsh blockpull` \
            merges them into one image";
        return Some(why.into());
    }
    if has_snapshots {
        let why =
            "the domain has snapshots, which are not part of a copy: `virsh snapshot-delete` merges one";
        return Some(why.into());
    }
    qemu.loses_writes()
}

fn unknown(why: &io::Error) -> OpenDisk {
    OpenDisk {
        image: DiskImage::Raw,
        size_bytes: 0,
        allocated_bytes: 0,
        has_backing: false,
        has_data_file: false,
        obstacle: Some(why.to_string()),
    }
}

fn look(path: &Path, format: DiskFormat) -> io::Result<OpenDisk> {
    let metadata = fs::metadata(path)?;
    let kind = metadata.file_type();
    if kind.is_block_device() {
        return Err(io::Error::other("it is a block device, and only files of a domain can be copied"));
    }
    if !kind.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    let raw = OpenDisk::raw_file(&metadata);
    match format {
        DiskFormat::Raw => Ok(raw),
        DiskFormat::Qcow2 => of_image(&beginning(path)?, raw).map_err(io::Error::other),
    }
}

fn of_image(beginning: &[u8], raw: OpenDisk) -> Result<OpenDisk, qcow2::ImageError> {
    let others = qcow2::other_files(beginning)?;
    let cluster_bytes = qcow2::first_cluster_bytes(beginning)? as u64;
    Ok(OpenDisk {
        image: DiskImage::Qcow2 { cluster_bytes },
        size_bytes: qcow2::size_bytes(beginning)?,
        has_backing: others.backing.is_some(),
        has_data_file: others.data.is_some(),
        ..raw
    })
}

fn beginning(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(BEGINNING_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn qemu(major: u32, minor: u32, micro: u32) -> Qemu {
        Qemu { version: Version { major, minor, micro }, is_of_version: true, pid: None }
    }

    fn disk(directory: &Path, format: DiskFormat) -> Disk {
        let path = directory.join("disk");
        let mut file = File::create(&path).unwrap();
        match format {
            DiskFormat::Raw => file.set_len(5 << 20).unwrap(),
            DiskFormat::Qcow2 => {
                let empty = qcow2::empty(5 << 20, 32 << 10).unwrap();
                file.set_len(empty.file_bytes).unwrap();
                file.write_all(&empty.parts[0].1).unwrap();
            }
        }
        Disk { path, format, read_only: false }
    }

    #[test]
    fn a_file_says_what_it_holds() {
        let directory = tempfile::tempdir().unwrap();
        let raw = open_disk(&disk(directory.path(), DiskFormat::Raw), &qemu(9, 2, 0), true);
        assert_eq!((raw.image, raw.size_bytes, raw.obstacle), (DiskImage::Raw, 5 << 20, None));
        let image = open_disk(&disk(directory.path(), DiskFormat::Qcow2), &qemu(7, 2, 0), false);
        let expected = DiskImage::Qcow2 { cluster_bytes: 32 << 10 };
        assert_eq!((image.image, image.size_bytes, image.obstacle), (expected, 5 << 20, None));
    }

    #[test]
    fn what_libvirt_does_not_copy_well_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let image = disk(directory.path(), DiskFormat::Qcow2);
        let obstacle = |qemu: Qemu, has_snapshots| open_disk(&image, &qemu, has_snapshots).obstacle;
        for (qemu, loses) in [
            (qemu(7, 2, 22), false),
            (qemu(8, 0, 0), true),
            (qemu(10, 0, 2), true),
            (qemu(10, 2, 1), true),
            (qemu(10, 2, 2), false),
            (qemu(11, 0, 0), false),
        ] {
            assert_eq!(
                obstacle(qemu, false).is_some_and(|why| why.contains("may lose writes")),
                loses,
                "{qemu:?}"
            );
        }
        let another = Qemu { is_of_version: false, ..qemu(7, 2, 0) };
        assert!(obstacle(another, false).unwrap().contains("another QEMU"));
        assert!(obstacle(qemu(7, 2, 0), true).unwrap().contains("snapshots"));
        let gone = Disk { path: directory.path().join("gone"), format: DiskFormat::Raw, read_only: false };
        assert!(open_disk(&gone, &qemu(7, 2, 0), false).obstacle.is_some());
        let null = Disk { path: "/dev/null".into(), ..gone };
        assert!(open_disk(&null, &qemu(7, 2, 0), false).obstacle.unwrap().contains("not a file"));
    }
}
