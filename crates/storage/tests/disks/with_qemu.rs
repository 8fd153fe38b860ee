//! Images that a real QEMU has open.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_storage::{CopyRequest, Task, copy};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{F_UNLCK, F_WRLCK, SEEK_SET, flock};

use crate::support::{assert_same, refused, request, sparse};

const QEMU: &str = "qemu-system-x86_64";

/// A QEMU that runs no guest. It ends when this is dropped.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        self.0.kill().and_then(|()| self.0.wait()).expect("it was started here");
    }
}

/// The bytes that QEMU locks when it reads an image, and when it writes to one.
const READS: i64 = 100;
const WRITES: i64 = 101;

/// Starts a QEMU, and waits until it does this with its disk.
fn open(image: &Path, access: &str, does: i64) -> Option<Qemu> {
    let drive = format!("file={},format=raw,if=virtio,{access}", image.display());
    let mut command = Command::new(QEMU);
    command.args(["-S", "-nodefaults", "-display", "none", "-accel", "tcg", "-drive", &drive]);
    let qemu = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().ok().map(Qemu)?;
    let begun = Instant::now();
    while !is_locked(image, does) {
        assert!(begun.elapsed() < Duration::from_mins(1), "QEMU does not open its disk");
        thread::sleep(Duration::from_millis(20));
    }
    Some(qemu)
}

fn is_locked(image: &Path, byte: i64) -> bool {
    let file = File::open(image).unwrap();
    let mut lock = flock {
        l_type: i16::try_from(F_WRLCK).unwrap(),
        l_whence: i16::try_from(SEEK_SET).unwrap(),
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_GETLK(&mut lock)).unwrap();
    i32::from(lock.l_type) != F_UNLCK
}

#[test]
fn an_image_that_a_vm_writes_to_is_not_copied() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("a"), directory.path().join("b"));
    sparse(&source, 1 << 20, &[(0, 4096)]);
    sparse(&target, 1 << 20, &[]);
    let Some(writer) = open(&source, "readonly=off", WRITES) else {
        eprintln!("SKIPPED: no {QEMU}");
        return;
    };
    let forced = |source: &Path, target: &Path| {
        copy(&CopyRequest { is_forced: true, ..request(source, target) }, &Task::default())
    };
    assert!(refused(forced(&source, &target)).contains("in use by a VM"));
    assert!(refused(forced(&target, &source)).contains("must not be overwritten"));
    drop(writer);

    let _reader = open(&source, "readonly=on", READS);
    forced(&source, &target).unwrap();
    assert_same(&source, &target);
}
