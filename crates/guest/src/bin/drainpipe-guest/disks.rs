//! The guest's own disks, and what writes them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_guest::writers::Writers;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

/// The driver finds its devices while its module is loaded; this is for a slow machine.
const DISK_PATIENCE: Duration = Duration::from_secs(5);
const DISK_POLL: Duration = Duration::from_millis(10);

#[derive(Debug, thiserror::Error)]
pub(crate) enum DisksError {
    #[error("cannot mount /dev: {0}")]
    Dev(Errno),
    #[error("cannot open {path}: {source}; give the VM as many disks as drainpipe.disks says")]
    Open { path: String, source: io::Error },
    #[error("cannot write disks: {0}")]
    Writers(#[from] io::Error),
}

/// The writers of the first `count` disks. They wait for a rate.
pub(crate) fn writers(count: usize) -> Result<Arc<Writers>, DisksError> {
    mount(c"devtmpfs", c"/dev", c"devtmpfs", MountFlags::empty(), None).map_err(DisksError::Dev)?;
    let disks = ('a'..='z').take(count).map(open).collect::<Result<_, _>>()?;
    let writers = Arc::new(Writers::new(disks)?);
    writers.start()?;
    Ok(writers)
}

/// Past the kernel's cache.
fn open(letter: char) -> Result<File, DisksError> {
    let path = format!("/dev/vd{letter}");
    let direct = i32::try_from(OFlags::DIRECT.bits()).expect("flags are an int");
    let end = Instant::now() + DISK_PATIENCE;
    loop {
        match OpenOptions::new().read(true).write(true).custom_flags(direct).open(&path) {
            Ok(disk) => return Ok(disk),
            Err(_) if Instant::now() < end => thread::sleep(DISK_POLL),
            Err(source) => return Err(DisksError::Open { path, source }),
        }
    }
}
