//! Interrupted copies on this host: kept under a name that no VM uses, continued by the next copy of the same disk of
//! the same VM from the same host, and removed when their time is over. A disk that its VM has left is continued by
//! the copy that comes back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskCopy, DiskImage, KeptPart};
use drainpipe_hypervisor::spec::DiskFormat;
use jiff::Timestamp;
use tokio::time::sleep;
use tracing::{info, warn};

use super::{named_by_others, remove_one_left};
use crate::incoming::Incoming;
use crate::incoming::vm::IncomingVm;
use crate::store::journal::{CopiedDisk, DiskFile, FileId, LeftFile};
use crate::vms::vm_files::{FileAtPath, VmFiles};
use drainpipe_api_types::LeftDisk;

/// How often it is looked for those whose time is over.
const EXPIRE_EVERY: Duration = Duration::from_mins(10);

/// What there is for a copy to go on from.
struct Kept {
    path: String,
    file: FileId,
    /// A VM's disk that it has left, and no part of one.
    is_whole: bool,
}

fn find(incoming: &Incoming, (vm, source): (&str, &str), copy: &DiskCopy) -> Result<Option<Kept>, Problem> {
    let is_of = |disk: &LeftDisk| disk.vm == vm && disk.target == source && disk.was == copy.to;
    let may_go_on = |part: &KeptPart| part.is_like(copy);
    let left = incoming.journal.left_disks()?;
    let mut fitting =
        left.into_iter().filter(|left| is_of(&left.disk) && left.part.as_ref().is_some_and(may_go_on));
    // The newest has most of it.
    Ok(fitting.next_back().and_then(|LeftFile { disk, file, until_s, .. }| {
        Some(Kept { path: disk.path, file: file?, is_whole: until_s.is_none() })
    }))
}

/// What there is already of a disk that is to be copied from `source`.
pub(in crate::incoming) async fn bytes(
    incoming: &Incoming,
    of: (&str, &str),
    copy: &DiskCopy,
) -> Result<u64, Problem> {
    let Some(Kept { path, file, .. }) = find(incoming, of, copy)? else { return Ok(0) };
    Ok(incoming.files.file_room(&path, file).await?.map_or(0, |room| room.taken_bytes))
}

/// Whether there is what QEMU may open: others may have written since to what had its name all the time, or is a VM's old disk.
async fn is_usable(incoming: &Incoming, path: &str, copy: &DiskCopy) -> bool {
    let is_image = copy.image != DiskImage::Raw;
    let format = is_image.then_some(DiskFormat::Qcow2);
    match incoming.files.look(Path::new(path), format).await {
        FileAtPath::Present(found) => is_image || found.size_bytes == copy.size_bytes,
        FileAtPath::Missing | FileAtPath::Silent | FileAtPath::NotAllowed(_) => false,
    }
}

/// Gives what there is of a disk its place. Whether there was any.
///
/// All of it is durable then: QEMU may flush nothing where it writes nothing.
pub(super) async fn take_up(
    incoming: &Incoming,
    entry: &IncomingVm,
    copy: &DiskCopy,
) -> Result<bool, Problem> {
    let of = (entry.definition.name.as_str(), entry.source.as_str());
    let Some(Kept { path, file, is_whole }) = find(incoming, of, copy)? else { return Ok(false) };
    if (is_whole || file.is_device()) && !is_usable(incoming, &path, copy).await {
        return Ok(false);
    }
    match incoming.files.settle(&path, file).await {
        Ok(true) => {}
        Ok(false) => {
            incoming.journal.forget_left_disk(&path)?;
            return Ok(false);
        }
        Err(problem) => {
            warn!(%problem, path, "an interrupted copy cannot be continued: it stays until its time is over");
            return Ok(false);
        }
    }
    // While both are recorded, it is found under either name.
    incoming.journal.make_disk(&entry.id, &copy.to)?;
    incoming.journal.disk_made(&entry.id, &copy.to, file)?;
    if is_whole || copy.image == DiskImage::Raw {
        // Before QEMU has opened a part of an image, nobody knows whether it is a valid one.
        incoming.journal.disk_opens(&entry.id, &copy.to, &KeptPart::of(copy))?;
    }
    let kept = DiskFile { path, file: Some(file) };
    let has_place =
        incoming.files.rename_left(&kept, &copy.to, named_by_others(incoming, &entry.id)?).await?;
    incoming.journal.forget_left_disk(&kept.path)?;
    if has_place {
        info!(path = copy.to, from = kept.path, "a copy continues from what is there already");
    } else {
        incoming.journal.forget_made_disk(&entry.id, &copy.to)?;
    }
    Ok(has_place)
}

/// Whether what is there of a disk is kept. If not, it is of no use any more.
pub(super) async fn keep(incoming: &Incoming, id: &str, made: &CopiedDisk, named: Vec<PathBuf>) -> bool {
    let path = &made.disk.path;
    match try_keep(incoming, id, made, named).await {
        Ok(Some(until)) => {
            info!(path, until, "an interrupted copy is kept: see `drainpipe disk left`");
            true
        }
        Ok(None) => false,
        Err(problem) => {
            warn!(%problem, path, "an interrupted copy cannot be kept");
            false
        }
    }
}

/// Until when.
async fn try_keep(
    incoming: &Incoming,
    id: &str,
    made: &CopiedDisk,
    named: Vec<PathBuf>,
) -> Result<Option<String>, Problem> {
    let CopiedDisk { disk: DiskFile { path: was, file: Some(file) }, part: Some(part) } = made else {
        return Ok(None);
    };
    let Some(record) = incoming.journal.incoming_record(id)? else { return Ok(None) };
    let Some(room) = incoming.files.file_room(was, *file).await? else { return Ok(None) };
    let now = Timestamp::now();
    let keep_h = incoming.host.config.disks.keep_interrupted_h;
    let until_s = match part.until_s(now.as_second().cast_unsigned(), keep_h, room) {
        Ok(until_s) => until_s,
        Err(why) => {
            info!(path = was, %why, "nothing is kept of an interrupted copy");
            return Ok(None);
        }
    };
    let kept_until = Timestamp::from_second(until_s.cast_signed()).map_err(Problem::failed)?.to_string();
    let disk = LeftDisk {
        path: if file.is_device() { was.clone() } else { VmFiles::kept_path(was, id) },
        was: was.clone(),
        vm: record.vm,
        target: record.source,
        left_at: now.to_string(),
        kept_until: Some(kept_until.clone()),
        is_device: file.is_device(),
    };
    let left = LeftFile { disk, file: Some(*file), part: Some(*part), until_s: Some(until_s) };
    incoming.journal.disk_left(&left)?;
    if incoming.files.rename_left(&made.disk, &left.disk.path, named).await? {
        settle_soon(incoming, left.disk.path, *file);
        return Ok(Some(kept_until));
    }
    incoming.journal.forget_left_disk(&left.disk.path)?;
    Ok(None)
}

/// Beside, as it may take long: the next copy waits the less for it.
fn settle_soon(incoming: &Incoming, path: String, file: FileId) {
    let files = Arc::clone(&incoming.files);
    tokio::spawn(async move {
        if let Err(problem) = files.settle(&path, file).await {
            warn!(%problem, path, "an interrupted copy is not durable yet");
        }
    });
}

/// Removes those whose time is over, as long as the agent lives.
pub(crate) async fn keep_expiring(incoming: Arc<Incoming>) {
    loop {
        if let Err(problem) = expire(&incoming, Timestamp::now()).await {
            warn!(%problem, "interrupted copies cannot be removed although their time is over; tried again soon");
        }
        sleep(EXPIRE_EVERY).await;
    }
}

pub(in crate::incoming) async fn expire(incoming: &Incoming, now: Timestamp) -> Result<(), Problem> {
    let now_s = now.as_second().cast_unsigned();
    for left in incoming.journal.left_disks()? {
        if left.until_s.is_some_and(|until_s| until_s <= now_s) && remove_one_left(incoming, &left).await? {
            info!(path = left.disk.path, "an interrupted copy is removed: its time is over");
        }
    }
    Ok(())
}
