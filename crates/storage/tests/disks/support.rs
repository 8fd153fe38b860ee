//! Disks, and questions about them.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use drainpipe_storage::method::Method;
use drainpipe_storage::{CopyRequest, CreateRequest, DiskError, DiskResult, Task, copy, create};

use crate::noise::noise;

/// A sparse file with noise at these places.
pub(crate) fn sparse(path: &Path, size_bytes: u64, data: &[(u64, usize)]) {
    let file = File::create(path).unwrap();
    file.set_len(size_bytes).unwrap();
    for (at, length) in data {
        let length = (*length as u64).min(size_bytes.saturating_sub(*at));
        file.write_all_at(&noise(usize::try_from(length).unwrap(), *at + 1), *at).unwrap();
    }
    file.sync_all().unwrap();
}

pub(crate) fn request(source: &Path, target: &Path) -> CopyRequest {
    CopyRequest { source: source.into(), target: target.into(), is_forced: false, method: None }
}

pub(crate) fn copied_by(source: &Path, target: &Path, method: Method) -> Result<DiskResult, DiskError> {
    copy(&CopyRequest { method: Some(method), ..request(source, target) }, &Task::default())
}

pub(crate) fn created(
    target: &Path,
    size_bytes: u64,
    is_preallocated: bool,
) -> Result<DiskResult, DiskError> {
    let request = CreateRequest {
        target: target.into(),
        size_bytes: Some(size_bytes),
        is_preallocated,
        is_forced: false,
    };
    create(&request, &Task::default())
}

/// The words of an error, as a person reads them.
#[track_caller]
pub(crate) fn refused(tried: Result<DiskResult, DiskError>) -> String {
    match tried {
        Err(DiskError::Problem(problem)) => problem.message,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub(crate) fn assert_same(source: &Path, target: &Path) {
    assert!(fs::read(source).unwrap() == fs::read(target).unwrap(), "the copy differs");
}

/// How much of its file system a file takes.
pub(crate) fn taken_bytes(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

pub(crate) fn names(directory: &Path) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into()).collect();
    names.sort();
    names
}
