//! What is refused before anything begins.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use drainpipe_engine::format;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::qcow2::{self, OtherFiles};
use rustix::fs::statvfs;

use crate::end::{Disk, DiskDestination, directory_of};
use crate::error::of_path;

/// Nothing is lost unless that was said.
pub(crate) fn unless_forced(destination: &DiskDestination, is_forced: bool) -> Result<(), Problem> {
    match destination {
        DiskDestination::Device(disk) if !is_forced => Err(Problem::conflict(format!(
            "{} is a block device, and what it holds would be lost; --force overwrites it",
            disk.path.display()
        ))),
        DiskDestination::File { replaced: Some(disk), .. } if !is_forced => Err(Problem::conflict(format!(
            "{} is there already; take another name, or --force to replace it",
            disk.path.display()
        ))),
        _ => Ok(()),
    }
}

/// A disk is not copied to itself.
pub(crate) fn the_same(source: &Disk, destination: &DiskDestination) -> Result<(), Problem> {
    let identity = |disk: &Disk| {
        let metadata = &disk.metadata;
        if disk.is_device() { (0, metadata.rdev()) } else { (metadata.dev(), metadata.ino()) }
    };
    match destination.there().filter(|there| identity(there) == identity(source)) {
        Some(there) => Err(Problem::bad_input(format!(
            "{} and {} are the same disk; name another target",
            source.path.display(),
            there.path.display()
        ))),
        None => Ok(()),
    }
}

/// A device has the size that it has.
pub(crate) fn too_small(destination: &DiskDestination, size_bytes: u64) -> Result<(), Problem> {
    match destination {
        DiskDestination::Device(disk) if disk.size_bytes < size_bytes => Err(Problem::refused(format!(
            "{} has {}, and {} are needed; take a larger device",
            disk.path.display(),
            format::bytes(disk.size_bytes as f64),
            format::bytes(size_bytes as f64)
        ))),
        _ => Ok(()),
    }
}

/// Refuses a file that its file system has no room for.
pub(crate) fn without_room(target: &Path, needed_bytes: u64) -> Result<(), Problem> {
    let directory = directory_of(target);
    let found =
        statvfs(directory).map_err(|error| of_path("look at the directory", directory, &error.into()))?;
    let free_bytes = found.f_bavail.saturating_mul(found.f_frsize);
    if free_bytes >= needed_bytes {
        return Ok(());
    }
    Err(Problem::refused(format!(
        "{} needs {}, and its file system has {} left; free {} there, or name a place that has more",
        target.display(),
        format::bytes(needed_bytes as f64),
        format::bytes(free_bytes as f64),
        format::bytes((needed_bytes - free_bytes) as f64)
    )))
}

/// Refuses an image whose copy would not be a disk of its own.
pub(crate) fn torn_image(source: &Disk, target: &Path) -> Result<(), Problem> {
    let failed = |error: io::Error| of_path("read", &source.path, &error);
    let Some(others) = other_files(&source.file, source.size_bytes).map_err(failed)? else { return Ok(()) };
    let is_moved = !is_same_directory(&source.path, target) || source.is_device();
    what_tears(&others, is_moved)
        .map_or(Ok(()), |why| Err(Problem::refused(format!("{} {why}", source.path.display()))))
}

/// What a qcow2 image names. What does not hold together as one is a disk like any other.
fn other_files(file: &File, size_bytes: u64) -> io::Result<Option<OtherFiles>> {
    let beginning = read_beginning(file, size_bytes, qcow2::LENGTH_TOLD_BYTES)?;
    let Ok(cluster_bytes) = qcow2::first_cluster_bytes(&beginning) else { return Ok(None) };
    Ok(qcow2::other_files(&read_beginning(file, size_bytes, cluster_bytes)?).ok())
}

fn read_beginning(file: &File, size_bytes: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let there = usize::try_from(size_bytes).unwrap_or(usize::MAX).min(bytes);
    let mut beginning = vec![0; there];
    file.read_exact_at(&mut beginning, 0)?;
    Ok(beginning)
}

fn is_same_directory(source: &Path, target: &Path) -> bool {
    let whole = |path: &Path| -> Option<PathBuf> { directory_of(path).canonicalize().ok() };
    whole(source).is_some() && whole(source) == whole(target)
}

/// Pure: why a copy of an image that names these files would not be whole.
fn what_tears(others: &OtherFiles, is_moved: bool) -> Option<String> {
    if let Some(data) = &others.data {
        return Some(format!(
            "keeps its data in another file, {data}, which the copy would share with it; `qemu-img convert` copies both"
        ));
    }
    let backing = others.backing.as_ref().map(|backing| backing.file.as_str())?;
    let is_relative = qcow2::is_path(backing) && !backing.starts_with('/');
    (is_moved && is_relative).then(|| {
        format!(
            "has a backing file that it names from its own directory, {backing}: in another, the copy would not find \
             it; `qemu-img rebase -u -F FORMAT -b /…/{backing}` gives it an absolute path"
        )
    })
}

#[cfg(test)]
mod tests {
    use drainpipe_hypervisor::qcow2::Backing;

    use super::*;

    fn backed_by(file: &str) -> OtherFiles {
        OtherFiles { backing: Some(Backing { file: file.into(), format: None }), data: None }
    }

    #[test]
    fn a_relative_backing_file_is_found_from_its_own_directory_only() {
        assert!(what_tears(&backed_by("base.qcow2"), true).unwrap().contains("qemu-img rebase"));
        assert_eq!(what_tears(&backed_by("base.qcow2"), false), None);
        for elsewhere in ["/srv/base.qcow2", "nbd://host/base"] {
            assert_eq!(what_tears(&backed_by(elsewhere), true), None);
        }
        assert_eq!(what_tears(&OtherFiles::default(), true), None);
    }

    #[test]
    fn two_images_never_share_a_data_file() {
        let apart = OtherFiles { backing: None, data: Some("/srv/data.raw".into()) };
        assert!(what_tears(&apart, false).unwrap().contains("/srv/data.raw"));
    }

    #[test]
    fn what_looks_like_an_image_and_is_none_is_a_disk() {
        let file = tempfile::tempfile().unwrap();
        for content in [&b""[..], b"QFI", b"QFI\xfb", &[b'Q'; 600]] {
            file.set_len(0).unwrap();
            file.write_all_at(content, 0).unwrap();
            assert_eq!(other_files(&file, content.len() as u64).unwrap(), None);
        }
    }
}
