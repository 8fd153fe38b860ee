//! Images that a real QEMU has open.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_storage::{CopyRequest, Task, copy};

use crate::support::{assert_same, refused, request, sparse};

const QEMU: &str = "qemu-system-x86_64";

/// A QEMU that runs no guest. It ends with the value.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).expect("it was started here");
    }
}

fn open(image: &Path, access: &str) -> Option<Qemu> {
    let drive = format!("file={},format=raw,if=virtio,{access}", image.display());
    let mut command = Command::new(QEMU);
    command.args(["-S", "-nodefaults", "-display", "none", "-accel", "tcg", "-drive", &drive]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().ok().map(Qemu)
}

#[test]
fn an_image_that_a_vm_writes_to_is_not_copied() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("a"), directory.path().join("b"));
    sparse(&source, 1 << 20, &[(0, 4096)]);
    let Some(writer) = open(&source, "readonly=off") else {
        eprintln!("SKIPPED: no {QEMU}");
        return;
    };
    let forced = CopyRequest { is_forced: true, ..request(&source, &target) };
    let copied = || copy(&forced, &Task::default());
    let begun = Instant::now();
    while copied().is_ok() {
        assert!(begun.elapsed() < Duration::from_secs(30), "QEMU does not open its disk");
        thread::sleep(Duration::from_millis(50));
    }
    assert!(refused(copied()).contains("in use by a VM"));
    let onto = CopyRequest { is_forced: true, ..request(&target, &source) };
    assert!(refused(copy(&onto, &Task::default())).contains("must not be overwritten"));
    drop(writer);

    let _reader = open(&source, "readonly=on");
    thread::sleep(Duration::from_millis(500));
    copied().unwrap();
    assert_same(&source, &target);
}
