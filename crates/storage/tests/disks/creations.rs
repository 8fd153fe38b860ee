//! Disks of zeroes, without root.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use drainpipe_storage::method::Method;

use crate::support::{created, names, refused, taken_bytes};

#[test]
fn a_sparse_disk_takes_no_space() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    let result = created(&path, 1 << 40, false).unwrap();
    assert_eq!((result.method, result.host.host_written_bytes), (Method::Sparse, 0));
    let metadata = fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (1 << 40, 0o600));
    assert!(taken_bytes(&path) < 1 << 20);
}

#[test]
fn a_preallocated_disk_has_its_space_and_reads_as_zeroes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    created(&path, 9 << 20, true).unwrap();
    assert!(taken_bytes(&path) >= 9 << 20);
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn sizes_that_no_disk_has_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    for size in [0, 511, 1_000_001] {
        assert!(refused(created(&path, size, false)).contains("multiple of 512"));
    }
    created(&path, 512, false).unwrap();
    assert!(refused(created(&path, 512, false)).contains("--force"));
    let vast = directory.path().join("b");
    let message = refused(created(&vast, 1 << 50, true));
    assert!(message.contains("needs 1024 TiB") && message.contains("free"), "{message}");
    assert_eq!(names(directory.path()).len(), 1);
}
