//! Copies, without root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_storage::method::Method;
use drainpipe_storage::{CopyRequest, DiskError, Task, copy};
use proptest::prelude::*;

use crate::support::{assert_same, copied_by, names, refused, request, sparse, taken_bytes};

/// How much more a file system may take for its own records of a file.
const NOTES_BYTES: u64 = 64 << 10;

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sparse_disk_is_copied_with_its_holes(
        size in 0_u64..24 << 20,
        data in prop::collection::vec((0_u64..24 << 20, 1_usize..600_000), 0..8),
        method in prop::sample::select(vec![None, Some(Method::Threads), Some(Method::CopyRange)]),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let (source, target) = (directory.path().join("a"), directory.path().join("b"));
        sparse(&source, size, &data);
        let request = CopyRequest { method, ..request(&source, &target) };
        let result = copy(&request, &Task::default()).unwrap();
        assert_same(&source, &target);
        prop_assert_eq!(result.disk_bytes, size);
        let (from, to) = (taken_bytes(&source), taken_bytes(&target));
        prop_assert!(to <= from + NOTES_BYTES, "{to} are taken, of {from}: {result:?}");
        prop_assert_eq!(names(directory.path()).len(), 2);
    }
}

#[test]
fn zeroes_become_holes() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("a"), directory.path().join("b"));
    fs::write(&source, vec![0; 20 << 20]).unwrap();
    let result = copied_by(&source, &target, Method::Threads).unwrap();
    assert_same(&source, &target);
    assert!(taken_bytes(&target) <= NOTES_BYTES);
    assert_eq!((result.host.host_read_bytes, result.host.host_written_bytes), (20 << 20, 0));
}

#[test]
fn a_cancelled_copy_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("a"), directory.path().join("b"));
    sparse(&source, 200 << 20, &[(0, 200 << 20)]);
    let task = Task::default();
    let request = CopyRequest { method: Some(Method::Threads), ..request(&source, &target) };
    let ended = thread::scope(|scope| {
        let copying = scope.spawn(|| copy(&request, &task));
        let begun = Instant::now();
        while task.progress().0 == 0 && begun.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(1));
        }
        task.cancel();
        copying.join().unwrap()
    });
    assert_eq!(ended, Err(DiskError::Cancelled));
    assert_eq!(names(directory.path()), [Path::new("a")]);
}

#[test]
fn nothing_is_overwritten_without_being_told() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("a"), directory.path().join("b"));
    sparse(&source, 1 << 20, &[(0, 1 << 20)]);
    fs::write(&target, "precious").unwrap();
    assert!(refused(copy(&request(&source, &target), &Task::default())).contains("--force"));
    assert_eq!(fs::read(&target).unwrap(), b"precious");
    let forced = CopyRequest { is_forced: true, ..request(&source, &target) };
    copy(&forced, &Task::default()).unwrap();
    assert_same(&source, &target);
    assert_eq!(names(directory.path()).len(), 2);
}

#[test]
fn what_makes_no_sense_is_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let (source, link) = (directory.path().join("a"), directory.path().join("link"));
    sparse(&source, 1 << 20, &[]);
    fs::hard_link(&source, &link).unwrap();
    let forced = |target: &Path| {
        let request = CopyRequest { is_forced: true, ..request(&source, target) };
        refused(copy(&request, &Task::default()))
    };
    assert!(forced(&link).contains("are the same disk"));
    assert!(forced(directory.path()).contains("is a directory"));
    assert!(forced(&directory.path().join("none/b")).contains("no such file or directory"));
    let absent = directory.path().join("absent");
    assert!(
        refused(copy(&request(&absent, &link), &Task::default())).contains("look whether the path is right")
    );
    assert!(refused(copied_by(&source, &absent, Method::ExtendedCopy)).contains("leave --method out"));
    assert_eq!(names(directory.path()).len(), 2);
}

#[test]
fn who_may_read_the_disk_may_read_the_copy_and_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("a"), directory.path().join("b"));
    sparse(&source, 1 << 20, &[]);
    fs::set_permissions(&source, fs::Permissions::from_mode(0o640)).unwrap();
    copy(&request(&source, &target), &Task::default()).unwrap();
    assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
fn an_image_is_copied_only_where_it_stays_whole() {
    let directory = tempfile::tempdir().unwrap();
    let elsewhere = directory.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let source = directory.path().join("top.qcow2");
    fs::write(&source, drainpipe_hypervisor::qcow2::fuzzing::header(3, Some("base.qcow2"), &[])).unwrap();
    let message = refused(copy(&request(&source, &elsewhere.join("top.qcow2")), &Task::default()));
    assert!(message.contains("base.qcow2") && message.contains("qemu-img rebase"), "{message}");
    let beside = directory.path().join("beside.qcow2");
    copy(&request(&source, &beside), &Task::default()).unwrap();
    assert_same(&source, &beside);
}
