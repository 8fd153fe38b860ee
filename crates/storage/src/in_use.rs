//! Whether a QEMU has a disk open, by the locks that it takes on single bytes of an image (`block/file-posix.c` of
//! QEMU), and locks of our own that keep it from opening one meanwhile.

use std::fs::File;

use drainpipe_engine::problem::Problem;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{F_RDLCK, F_UNLCK, F_WRLCK, SEEK_SET, flock};

use crate::end::Disk;

/// One byte for each thing that who has it open does.
const DOES: i64 = 100;
/// One byte for each thing that others must not do meanwhile.
const FORBIDS: i64 = 200;
const END: i64 = 300;

/// The operations, as QEMU numbers them.
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// Nobody changes what is read, from now until the file is closed.
pub(crate) fn hold_still(disk: &Disk) -> Result<(), Problem> {
    for byte in [DOES + READ, FORBIDS + WRITE, FORBIDS + RESIZE] {
        // Where there are no locks, QEMU has none either.
        let _without_locks = fcntl(&disk.file, FcntlArg::F_OFD_SETLK(&range(F_RDLCK, byte, 1)));
    }
    let is_changed =
        [DOES + WRITE, DOES + RESIZE, FORBIDS + READ].iter().any(|byte| is_locked(&disk.file, *byte, 1));
    if is_changed { Err(in_use(disk, "a copy would be of no single moment")) } else { Ok(()) }
}

/// Nobody has open what is to be lost.
pub(crate) fn refuse_to_lose(disk: &Disk) -> Result<(), Problem> {
    if is_locked(&disk.file, DOES, END - DOES) {
        return Err(in_use(disk, "it must not be overwritten"));
    }
    Ok(())
}

fn in_use(disk: &Disk, why: &str) -> Problem {
    let path = disk.path.display();
    Problem::conflict(format!("{path} is in use by a VM: {why}; stop the VM first"))
}

/// Asks whether somebody's lock is in the way; takes none.
fn is_locked(file: &File, begin: i64, bytes: i64) -> bool {
    let mut lock = range(F_WRLCK, begin, bytes);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)).is_ok() && i32::from(lock.l_type) != F_UNLCK
}

fn range(kind: i32, begin: i64, bytes: i64) -> flock {
    let small = |number: i32| i16::try_from(number).expect("the kernel's numbers of locks are small");
    flock { l_type: small(kind), l_whence: small(SEEK_SET), l_start: begin, l_len: bytes, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn lock(path: &Path, byte: i64) -> File {
        let file = File::options().read(true).write(true).open(path).unwrap();
        fcntl(&file, FcntlArg::F_OFD_SETLK(&range(F_RDLCK, byte, 1))).unwrap();
        file
    }

    #[test]
    fn who_writes_is_in_the_way_and_who_reads_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let disk = || crate::end::source(file.path()).unwrap();
        {
            let _reader = [lock(file.path(), DOES + READ), lock(file.path(), FORBIDS + WRITE)];
            hold_still(&disk()).unwrap();
            refuse_to_lose(&disk()).unwrap_err();
        }
        for byte in [DOES + WRITE, DOES + RESIZE, FORBIDS + READ] {
            let _writer = lock(file.path(), byte);
            assert!(hold_still(&disk()).unwrap_err().message.contains("in use by a VM"));
            refuse_to_lose(&disk()).unwrap_err();
        }
        refuse_to_lose(&disk()).unwrap();
    }

    #[test]
    fn what_is_read_keeps_writers_away() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let disk = crate::end::source(file.path()).unwrap();
        hold_still(&disk).unwrap();
        let other = File::open(file.path()).unwrap();
        assert!(is_locked(&other, FORBIDS + WRITE, 1) && !is_locked(&other, FORBIDS + READ, 1));
    }
}
