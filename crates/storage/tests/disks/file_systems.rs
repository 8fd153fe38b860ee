//! Differences between file systems.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use drainpipe_storage::measured::{MeasuredBy, MovedBy};
use drainpipe_storage::method::Method;
use drainpipe_storage::{DiskError, Task, copy};

use crate::mounted::{in_a_file, is_inside, tmpfs};
use crate::noise::noise;
use crate::support::{assert_same, copied_by, created, names, refused, request, sparse, taken_bytes};

const MIB: u64 = 1 << 20;

/// Blocks are shared, the holes are those of the source, and writes to the copy stay in the copy.
fn assert_shares_blocks(on: &Path) {
    let (source, target) = (on.join("a"), on.join("b"));
    sparse(&source, 200 * MIB + 5, &[(MIB, 40 << 20), (150 * MIB, 1000)]);
    let result = copy(&request(&source, &target), &Task::default()).unwrap();
    assert_eq!((result.method, result.moved_by), (Method::Reflink, MovedBy::Storage), "{result:?}");
    assert_eq!(result.host.measured_by, MeasuredBy::ProcessIo);
    assert_same(&source, &target);
    let before = fs::read(&source).unwrap();
    File::options().write(true).open(&target).unwrap().write_all_at(&noise(1 << 20, 7), 2 * MIB).unwrap();
    assert!(fs::read(&source).unwrap() == before, "the source changed with its copy");

    let by_kernel = copied_by(&source, &on.join("c"), Method::CopyRange).unwrap();
    assert_eq!(by_kernel.moved_by, MovedBy::Storage, "{by_kernel:?}");
    assert_same(&source, &on.join("c"));
    let by_hand = copied_by(&source, &on.join("d"), Method::Threads).unwrap();
    assert_eq!((by_hand.moved_by, by_hand.host.host_read_bytes), (MovedBy::Host, by_hand.data_bytes));
    assert_same(&source, &on.join("d"));
    let fixed = created(&on.join("e"), 64 * MIB, true).unwrap();
    assert_eq!(fixed.moved_by, MovedBy::Storage, "{fixed:?}");
    assert!(taken_bytes(&on.join("e")) >= 64 * MIB);
}

#[test]
fn xfs_shares_blocks() {
    if is_inside("file_systems::xfs_shares_blocks", &["mkfs.xfs"]) {
        let directory = tempfile::tempdir().unwrap();
        assert_shares_blocks(&in_a_file(directory.path(), &["mkfs.xfs", "-q"], 512 * MIB));
    }
}

#[test]
fn btrfs_shares_blocks() {
    if is_inside("file_systems::btrfs_shares_blocks", &["mkfs.btrfs"]) {
        let directory = tempfile::tempdir().unwrap();
        assert_shares_blocks(&in_a_file(directory.path(), &["mkfs.btrfs", "-q"], 768 * MIB));
    }
}

#[test]
fn a_copy_by_the_kernel_on_ext4_is_no_offload() {
    if is_inside("file_systems::a_copy_by_the_kernel_on_ext4_is_no_offload", &["mkfs.ext4"]) {
        let directory = tempfile::tempdir().unwrap();
        let on = in_a_file(directory.path(), &["mkfs.ext4", "-q"], 256 * MIB);
        sparse(&on.join("a"), 32 * MIB, &[(0, 32 << 20)]);
        let result = copied_by(&on.join("a"), &on.join("b"), Method::CopyRange).unwrap();
        assert_eq!(result.moved_by, MovedBy::Host, "{result:?}");
        assert!(result.host.host_written_bytes >= 32 * MIB, "{result:?}");
        let best = copy(&request(&on.join("a"), &on.join("c")), &Task::default()).unwrap();
        assert_eq!(best.method, Method::Threads);
        assert_eq!(best.unable.iter().map(|one| one.method).collect::<Vec<_>>(), [Method::Reflink]);
    }
}

#[test]
fn between_two_file_systems_this_program_copies() {
    if is_inside("file_systems::between_two_file_systems_this_program_copies", &["mkfs.ext4"]) {
        let directory = tempfile::tempdir().unwrap();
        let on = in_a_file(directory.path(), &["mkfs.ext4", "-q"], 64 * MIB);
        fs::create_dir(directory.path().join("memory")).unwrap();
        let memory = tmpfs(&directory.path().join("memory"), "64m");
        sparse(&on.join("a"), 30 * MIB + 1, &[(MIB, 9 << 20), (30 * MIB, 1)]);
        let there = copy(&request(&on.join("a"), &memory.join("b")), &Task::default()).unwrap();
        let back = copy(&request(&memory.join("b"), &on.join("c")), &Task::default()).unwrap();
        assert_eq!([there.method, back.method], [Method::Threads; 2]);
        assert_same(&on.join("a"), &on.join("c"));
        assert!(taken_bytes(&memory.join("b")) < 11 * MIB && taken_bytes(&on.join("c")) < 11 * MIB);
        assert!(
            refused(copied_by(&on.join("a"), &memory.join("d"), Method::Reflink))
                .contains("two file systems")
        );
        let counted = copied_by(&memory.join("b"), &memory.join("d"), Method::CopyRange).unwrap();
        assert_eq!((counted.moved_by, counted.host.measured_by), (MovedBy::Host, MeasuredBy::Nothing));
    }
}

#[test]
fn too_little_space_is_told_before_anything_begins() {
    if is_inside("file_systems::too_little_space_is_told_before_anything_begins", &[]) {
        let directory = tempfile::tempdir().unwrap();
        let on = tmpfs(directory.path(), "24m");
        sparse(&on.join("a"), 100 * MIB, &[(0, 16 << 20)]);
        let message = refused(copy(&request(&on.join("a"), &on.join("b")), &Task::default()));
        assert!(message.contains("needs 16.0 MiB") && message.contains("has 8.00 MiB left"), "{message}");
        assert!(refused(created(&on.join("b"), 100 * MIB, true)).contains("needs 100 MiB"));
        created(&on.join("c"), 100 * MIB, false).unwrap();
        assert_eq!(names(&on), [Path::new("a"), Path::new("c")]);
    }
}

#[test]
fn storage_that_fails_in_the_midst_leaves_no_file() {
    if is_inside("file_systems::storage_that_fails_in_the_midst_leaves_no_file", &["mkfs.ext4"]) {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("pool")).unwrap();
        let source = directory.path().join("a");
        sparse(&source, 100 * MIB, &[(0, 100 << 20)]);
        // It promises more than there is, as thin storage does.
        let pool = tmpfs(&directory.path().join("pool"), "40m");
        let on = in_a_file(&pool, &["mkfs.ext4", "-q", "-O", "^has_journal"], 256 * MIB);
        let before = names(&on);
        let ended = copy(&request(&source, &on.join("b")), &Task::default());
        let Err(DiskError::Problem(problem)) = ended else { panic!("{ended:?}") };
        assert!(problem.message.starts_with("cannot write "), "{problem}");
        assert_eq!(names(&on), before);
    }
}
