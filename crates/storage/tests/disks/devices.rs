//! Block devices: loop devices, with root.

use std::fs;
use std::path::{Path, PathBuf};

use drainpipe_storage::method::Method;
use drainpipe_storage::{CopyRequest, CreateRequest, Task, copy, create};

use crate::mounted::{is_inside, run};
use crate::noise::noise;
use crate::support::{assert_same, refused, request, sparse};

const MIB: usize = 1 << 20;

/// A device over a file. It ends when this is dropped.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path) -> Self {
        Self(run("losetup", &["--find", "--show", file.to_str().unwrap()]).into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.0.to_str().unwrap()]);
    }
}

fn filled(path: &Path, length: usize) -> Loop {
    fs::write(path, noise(length, 3)).unwrap();
    Loop::over(path)
}

#[test]
fn a_device_is_overwritten_only_if_told() {
    if is_inside("devices::a_device_is_overwritten_only_if_told", &["losetup"]) {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("a");
        sparse(&source, 12 << 20, &[(MIB as u64, MIB), (9 << 20, 3 * MIB)]);
        let device = filled(&directory.path().join("b"), 16 * MIB);
        let plain = request(&source, &device.0);
        assert!(refused(copy(&plain, &Task::default())).contains("--force overwrites it"));
        copy(&CopyRequest { is_forced: true, ..plain }, &Task::default()).unwrap();
        let there = fs::read(&device.0).unwrap();
        assert!(there[..12 * MIB] == fs::read(&source).unwrap(), "holes of the source are zeroes there");
        assert!(there[12 * MIB..] == noise(16 * MIB, 3)[12 * MIB..], "the rest is as it was");

        let back = directory.path().join("c");
        copy(&request(&device.0, &back), &Task::default()).unwrap();
        assert_same(&device.0, &back);
        let large = directory.path().join("large");
        sparse(&large, 17 << 20, &[]);
        let too_large = CopyRequest { is_forced: true, ..request(&large, &device.0) };
        assert!(refused(copy(&too_large, &Task::default())).contains("take a larger device"));
    }
}

#[test]
fn a_device_of_zeroes_is_made_by_the_device() {
    if is_inside("devices::a_device_of_zeroes_is_made_by_the_device", &["losetup"]) {
        let directory = tempfile::tempdir().unwrap();
        for is_preallocated in [false, true] {
            let device = filled(&directory.path().join("b"), 16 * MIB);
            let target = device.0.clone();
            let request = CreateRequest { target, size_bytes: None, is_preallocated, is_forced: true };
            let result = create(&request, &Task::default()).unwrap();
            assert!(fs::read(&device.0).unwrap().iter().all(|byte| *byte == 0), "{result:?}");
            assert_eq!(result.disk_bytes, 16 << 20);
            let able = [Method::Unmap, Method::DeviceZeroes, Method::WriteZeroes, Method::ZeroesByThreads];
            assert!(able.contains(&result.method));
        }
    }
}

#[test]
fn a_mounted_device_is_in_use() {
    if is_inside("devices::a_mounted_device_is_in_use", &["losetup", "mkfs.ext4"]) {
        let directory = tempfile::tempdir().unwrap();
        let (image, on) = (directory.path().join("image"), directory.path().join("on"));
        sparse(&image, 16 << 20, &[]);
        fs::create_dir(&on).unwrap();
        let device = Loop::over(&image);
        let name = device.0.to_str().unwrap();
        run("mkfs.ext4", &["-q", name]);
        run("mount", &[name, on.to_str().unwrap()]);
        let copying = refused(copy(&request(&device.0, &directory.path().join("b")), &Task::default()));
        assert!(copying.contains("unmount it"), "{copying}");
        run("umount", &[on.to_str().unwrap()]);
    }
}
