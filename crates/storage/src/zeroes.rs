//! Zeroes, without anybody writing them where that can be had.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};

use crate::attempt::{Attempt, unable};
use crate::error::DiskError;
use crate::task::Task;
use crate::threads::Fault;

/// `FALLOC_FL_WRITE_ZEROES` of Linux 6.17.
const WRITE_ZEROES: FallocateFlags = FallocateFlags::from_bits_retain(0x80);

/// What is asked for at once: so long nobody hears that it is cancelled.
const STEP_BYTES: u64 = 4 << 30;

/// The storage writes zeroes and sets the blocks aside.
pub(crate) fn write_zeroes(file: &File, size_bytes: u64, task: &Task) -> Result<Attempt, Fault> {
    in_steps(file, WRITE_ZEROES, size_bytes, task)
}

/// The file system sets blocks aside.
pub(crate) fn allocate(file: &File, size_bytes: u64, task: &Task) -> Result<Attempt, Fault> {
    in_steps(file, FallocateFlags::empty(), size_bytes, task)
}

/// The device frees its blocks; the kernel says so only of one whose freed blocks read as zeroes.
pub(crate) fn unmap(device: &File, size_bytes: u64, task: &Task) -> Result<Attempt, Fault> {
    in_steps(device, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, size_bytes, task)
}

/// The device writes zeroes. For one that cannot, the kernel would do it, by one thread.
pub(crate) fn device_zeroes(
    device: &File,
    sysfs: &Path,
    size_bytes: u64,
    task: &Task,
) -> Result<Attempt, Fault> {
    let at_once = fs::read_to_string(sysfs.join("queue/write_zeroes_max_bytes"));
    let can = at_once.is_ok_and(|bytes| bytes.trim().parse::<u64>().is_ok_and(|bytes| bytes > 0));
    if !can {
        return Ok(Attempt::Unable("the device does not write zeroes by itself".into()));
    }
    in_steps(device, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, size_bytes, task)
}

fn in_steps(file: &File, how: FallocateFlags, size_bytes: u64, task: &Task) -> Result<Attempt, Fault> {
    let mut at = 0;
    while at < size_bytes {
        task.go_on().map_err(|_: DiskError| Fault::Cancelled)?;
        let step = STEP_BYTES.min(size_bytes - at);
        match fallocate(file, how, at, step) {
            Ok(()) => task.is_done(step),
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return unable(io::Error::from(error)).map_err(Fault::Writing),
        }
        at += step;
    }
    Ok(Attempt::Done)
}
