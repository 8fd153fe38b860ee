//! One SCSI device copies to another of its target, by `sg_xcopy` of sg3-utils: it speaks EXTENDED COPY, and this program
//! need not.

use std::io;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_engine::format::bound;
use rustix::fs::{Advice, fadvise};

use crate::attempt::Attempt;
use crate::end::Disk;
use crate::error::DiskError;
use crate::task::Task;
use crate::threads::Fault;

const TOOL: &str = "sg_xcopy";

/// What is asked for at once.
const STEP_BYTES: u64 = 1 << 30;
const BLOCK_BYTES: u64 = 512;

/// A target that needs longer for one step does it no better than this host.
const DEADLINE: Duration = Duration::from_mins(2);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Copies a disk whose size is one of whole blocks.
pub(crate) fn extended_copy(source: &Disk, target: &Disk, task: &Task) -> Result<Attempt, Fault> {
    // The kernel knows nothing of it: what it still has to write goes first, what it has read before is out of date.
    source.file.sync_all().map_err(Fault::Reading)?;
    target.file.sync_all().map_err(Fault::Writing)?;
    let tried = copy_steps(source, target, task);
    fadvise(&target.file, 0, None, Advice::DontNeed).map_err(|error| Fault::Writing(error.into()))?;
    tried
}

fn copy_steps(source: &Disk, target: &Disk, task: &Task) -> Result<Attempt, Fault> {
    let mut at = 0;
    while at < source.size_bytes {
        task.go_on().map_err(|_: DiskError| Fault::Cancelled)?;
        let step = STEP_BYTES.min(source.size_bytes - at);
        if let Attempt::Unable(why) = copy_step(source, target, at, step, task)? {
            return Ok(Attempt::Unable(why));
        }
        task.is_done(step);
        at += step;
    }
    Ok(Attempt::Done)
}

fn copy_step(source: &Disk, target: &Disk, at: u64, step: u64, task: &Task) -> Result<Attempt, Fault> {
    let blocks = |bytes: u64| bytes / BLOCK_BYTES;
    let begun = Command::new(TOOL)
        .arg(format!("if={}", source.path.display()))
        .arg(format!("of={}", target.path.display()))
        .arg(format!("bs={BLOCK_BYTES}"))
        .arg(format!("skip={}", blocks(at)))
        .arg(format!("seek={}", blocks(at)))
        .arg(format!("count={}", blocks(step)))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    match begun {
        Ok(child) => until_ended(child, task),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Ok(Attempt::Unable(format!("{TOOL} is not installed; it is in sg3-utils")))
        }
        Err(error) => Err(Fault::Writing(error)),
    }
}

fn until_ended(mut child: Child, task: &Task) -> Result<Attempt, Fault> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(Fault::Writing)? {
            return Ok(if status.success() {
                Attempt::Done
            } else {
                Attempt::Unable(format!("{TOOL} ends with {status}"))
            });
        }
        let is_cancelled = task.go_on().is_err();
        if is_cancelled || begun.elapsed() > DEADLINE {
            child.kill().and_then(|()| child.wait()).map_err(Fault::Writing)?;
            let late = format!("{TOOL} took more than {} for 1 GiB", bound(DEADLINE));
            return if is_cancelled { Err(Fault::Cancelled) } else { Ok(Attempt::Unable(late)) };
        }
        thread::sleep(LOOK_EVERY);
    }
}
