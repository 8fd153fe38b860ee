//! Disks that are copied here with a VM: their place and room, the empty file, who may write to it, and when that
//! ends.
//!
//! A file that is made here belongs to the VM once that runs. If the VM is given up, the file is kept for a while, so
//! that the next copy can continue from it ([`kept`]), or is removed. The journal knows of it first.

mod kept;

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use drainpipe_engine::migration::target::steps::OrderNeed;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DISKS_MAX, DiskCopy, DiskImage, KeptPart};
use drainpipe_hypervisor::Machine;
use drainpipe_hypervisor::spec::DiskFormat;
use jiff::Timestamp;
use tracing::warn;
use uuid::Uuid;

pub(crate) use self::kept::keep_expiring;
#[cfg(test)]
pub(super) use self::kept::{bytes as kept_bytes, expire};
use super::free_port::bind_free_port;
use super::vm::IncomingVm;
use super::{Incoming, may_go_on, refused_here};
use crate::store::journal::{CopiedDisk, DiskFile, FileId, LeftFile, UnfinishedIncoming};
use crate::store::lock::lock;
use crate::transfer::disk_streams::DiskReceiver;
use crate::vms::QMP_DEADLINE;
use crate::vms::vm_files::NotMade;
use drainpipe_api_types::{ConnectionRequest, DiskEndpoint, IncomingRequest, LeftDisk};

/// A disk that is coming, and what of its room is not taken yet.
struct Promised {
    device: u64,
    path: PathBuf,
    bytes: u64,
}

impl Promised {
    fn outstanding_bytes(&self) -> u64 {
        const BLOCK_BYTES: u64 = 512;
        let taken = fs::metadata(&self.path).map_or(0, |metadata| metadata.blocks() * BLOCK_BYTES);
        self.bytes.saturating_sub(taken)
    }
}

/// Step 2: is there a place for each, and the room?
pub(super) async fn check(
    incoming: &Incoming,
    source: &str,
    request: &IncomingRequest,
) -> Result<(), Problem> {
    if request.disks.len() > DISKS_MAX {
        return Err(Problem::bad_input(format!("more than {DISKS_MAX} disks to be copied")));
    }
    for disk in &request.disks {
        check_described(request, disk)?;
    }
    if !request.disks.is_empty() && !takes_copies(incoming, request) {
        return Err(refused_here(incoming, &"its hypervisor cannot receive copies of disks"));
    }
    let vm = request.definition.name.as_str();
    check_room(incoming, &request.id, (vm, source), &request.disks).await
}

/// Whether who runs the VM here does.
fn takes_copies(incoming: &Incoming, request: &IncomingRequest) -> bool {
    incoming.vms.capabilities_for(&request.definition).is_some_and(|its| its.copies_disks)
}

/// What is made here must be what the VM's specification names.
fn check_described(request: &IncomingRequest, disk: &DiskCopy) -> Result<(), Problem> {
    let named = request.spec.spec().disks.get(disk.disk.index());
    let is_of = |format| {
        matches!(
            (format, disk.image),
            (DiskFormat::Raw, DiskImage::Raw) | (DiskFormat::Qcow2, DiskImage::Qcow2 { .. })
        )
    };
    let is_same = named
        .is_some_and(|named| named.path == Path::new(&disk.to) && is_of(named.format) && !named.read_only);
    let count = request.disks.iter().filter(|other| other.disk == disk.disk || other.to == disk.to).count();
    if is_same && count == 1 {
        return Ok(());
    }
    Err(Problem::bad_input(format!("the disk {} to copy is not in the specification", disk.disk)))
}

async fn check_room(
    incoming: &Incoming,
    id: &str,
    (vm, source): (&str, &str),
    disks: &[DiskCopy],
) -> Result<(), Problem> {
    let mut earlier_bytes = 0_u64;
    for disk in disks {
        if incoming.files.is_device_place(&disk.to) {
            incoming.files.check_device(disk, named_by_others(incoming, id)?).await?;
            continue;
        }
        let there_bytes = kept::bytes(incoming, (vm, source), disk).await?;
        let promised = promised_to_others(incoming, id);
        // As if all were on one file system: it may be asked for too much, never for too little.
        let own_bytes = earlier_bytes;
        let promised_bytes = move |device: u64| {
            let of_others = promised.iter().filter(|promised| promised.device == device);
            of_others.map(Promised::outstanding_bytes).fold(own_bytes, u64::saturating_add)
        };
        incoming.files.check_room(disk, there_bytes, promised_bytes).await?;
        earlier_bytes = earlier_bytes.saturating_add(disk.room_bytes().saturating_sub(there_bytes));
    }
    Ok(())
}

/// How much of each file system, by its device, is promised to VMs that come.
pub(crate) fn promised_bytes(incoming: &Incoming) -> impl FnOnce(u64) -> u64 + Send + use<> {
    let promised = promised_to_others(incoming, "");
    move |device| {
        let there = promised.iter().filter(|promised| promised.device == device);
        there.map(Promised::outstanding_bytes).fold(0, u64::saturating_add)
    }
}

fn promised_to_others(incoming: &Incoming, id: &str) -> Vec<Promised> {
    let entries = lock(&incoming.entries.by_id);
    let others = entries.values().filter(|entry| entry.id != id && !entry.is_adopted(&incoming.vms));
    let disks = others.flat_map(|entry| &entry.disks);
    let promised = disks.filter_map(|disk| {
        let path = PathBuf::from(&disk.to);
        let device = fs::metadata(path.parent()?).ok()?.dev();
        Some(Promised { device, path, bytes: disk.room_bytes() })
    });
    promised.collect()
}

/// Step 3: makes the empty disks, on block devices too, or takes up what there is of them.
pub(crate) async fn make(incoming: &Incoming, id: &str) -> Result<(), Problem> {
    let entry = incoming.entries.get(id)?;
    let _stepping = entry.stepping.lock().await;
    may_go_on(incoming, &entry, OrderNeed::Prepare)?;
    check_room(incoming, id, (entry.definition.name.as_str(), &entry.source), &entry.disks).await?;
    for disk in &entry.disks {
        if kept::take_up(incoming, &entry, disk).await? {
            entry.note_begun_disk(disk.disk);
        } else {
            make_one(incoming, &entry, disk).await?;
        }
    }
    Ok(())
}

async fn make_one(incoming: &Incoming, entry: &IncomingVm, disk: &DiskCopy) -> Result<(), Problem> {
    let (id, DiskCopy { to, image, size_bytes, .. }) = (&entry.id, disk);
    incoming.journal.make_disk(id, to)?;
    // What another VM left on this device is gone from now on.
    let record = |file| -> Result<(), Problem> {
        incoming.journal.forget_left_disk(to)?;
        Ok(incoming.journal.disk_made(id, to, file)?)
    };
    let made = if incoming.files.is_device_place(to) {
        let overwritten = incoming.files.overwrite(disk, named_by_others(incoming, id)?).await;
        overwritten.and_then(|file| Ok(record(file)?))
    } else {
        incoming.files.make(to, id, (*image, *size_bytes), record).await
    };
    match made {
        Ok(()) => Ok(()),
        Err(NotMade { problem, may_come }) => {
            // What may still come is reported when the VM is given up.
            if !may_come {
                incoming.journal.forget_made_disk(id, to)?;
            }
            Err(problem)
        }
    }
}

/// Step 5: lets the source write to them.
pub(super) async fn open(
    incoming: &Incoming,
    entry: &IncomingVm,
    vmm: &dyn Machine,
    request: &ConnectionRequest,
    address: IpAddr,
) -> Result<Option<DiskEndpoint>, Problem> {
    if request.plan.disks != entry.disks {
        return Err(Problem::bad_input("the plan names other disks to copy than step 2 did"));
    }
    if entry.disks.is_empty() {
        return Ok(None);
    }
    let takes_none = || refused_here(incoming, &"its hypervisor cannot receive copies of disks");
    let (exports, program) = vmm.disk_exports().zip(vmm.incoming_disks()).ok_or_else(takes_none)?;
    let disks: Vec<usize> = entry.disks.iter().map(|disk| disk.disk.index()).collect();
    // Should the source ask again.
    exports.close(QMP_DEADLINE).await.map_err(Problem::failed)?;
    let names = exports.open(&disks, QMP_DEADLINE).await.map_err(Problem::failed)?;
    let offered: Vec<(DiskCopy, String)> = entry.disks.iter().cloned().zip(names).collect();
    for disk in &entry.disks {
        incoming.journal.disk_opens(&entry.id, &disk.to, &KeptPart::of(disk))?;
    }
    let (listener, port) = bind_free_port(incoming, request, address).await?;
    let token = Uuid::new_v4();
    let is_encrypted = request.plan.is_encrypted();
    let tls = is_encrypted.then(|| incoming.peers.identity.server_config_for(&entry.source));
    let receiver = DiskReceiver::start(listener, &program.path, &offered, token, tls)?;
    entry.receive_disks_by(receiver);
    let begun = entry.begun_disks();
    let is_overwritten =
        |disk: &&DiskCopy| incoming.files.is_device_place(&disk.to) && !begun.contains(&disk.disk);
    let overwritten = entry.disks.iter().filter(is_overwritten).map(|disk| disk.disk).collect();
    Ok(Some(DiskEndpoint { port, token, begun, overwritten, unpacks: true }))
}

/// Step 8: nobody writes to them any more.
pub(crate) async fn close(incoming: &Incoming, id: &str) -> Result<(), Problem> {
    let entry = incoming.entries.get(id)?;
    let _stepping = entry.stepping.lock().await;
    may_go_on(incoming, &entry, OrderNeed::UseHypervisor)?;
    shut(&entry, &*entry.vmm()?).await
}

async fn shut(entry: &IncomingVm, vmm: &dyn Machine) -> Result<(), Problem> {
    if let Some(receiver) = entry.take_disk_receiver() {
        receiver.close().await?;
    }
    match vmm.disk_exports() {
        Some(exports) => exports.close(QMP_DEADLINE).await.map_err(Problem::failed),
        None => Ok(()),
    }
}

/// Whatever its source has said: with a disk that others write to, no VM runs.
pub(super) async fn close_before_it_runs(
    incoming: &Incoming,
    entry: &IncomingVm,
    vmm: &dyn Machine,
) -> Result<(), Problem> {
    let has_copies = !entry.disks.is_empty() || !incoming.journal.made_disks(&entry.id)?.is_empty();
    if has_copies { shut(entry, vmm).await } else { Ok(()) }
}

/// An earlier run of this agent has recorded that the VM runs here, and may have ended before it closed them.
pub(super) async fn close_left_open(incoming: &Incoming, id: &str, vmm: &dyn Machine) -> Result<(), Problem> {
    if incoming.journal.made_disks(id)?.is_empty() {
        return Ok(());
    }
    match vmm.disk_exports() {
        Some(exports) => exports.close(QMP_DEADLINE).await.map_err(Problem::failed),
        None => Ok(()),
    }
}

/// The VM goes on where it came from, with its disks there. It may have written to these: they stay until an operator
/// removes them.
pub(super) fn keep_given_back(incoming: &Incoming, unfinished: &UnfinishedIncoming) -> Result<(), Problem> {
    let UnfinishedIncoming { id, vm, source } = unfinished;
    for CopiedDisk { disk: DiskFile { path, file }, part } in incoming.journal.made_disks(id)? {
        warn!(
            vm,
            source,
            path,
            "a disk's copy stays here although its VM was given back: see `drainpipe disk left`"
        );
        let left_at = Timestamp::now().to_string();
        let (was, vm, target) = (path.clone(), vm.clone(), source.clone());
        let is_device = file.is_some_and(FileId::is_device);
        let disk = LeftDisk { path, was, vm, target, left_at, kept_until: None, is_device };
        incoming.journal.disk_left(&LeftFile { disk, file, part, until_s: None })?;
    }
    Ok(incoming.journal.forget_made_disks(id)?)
}

/// Keeps what is there of the disks that were made for a VM which never runs here, or removes it.
pub(super) async fn remove(incoming: &Incoming, id: &str) -> Result<(), Problem> {
    for made in incoming.journal.made_disks(id)? {
        let named = named_by_others(incoming, id)?;
        if kept::keep(incoming, id, &made, named.clone()).await {
            continue;
        }
        let disk = made.disk;
        incoming.files.remove(&disk, id, named).await.inspect_err(|problem| {
            warn!(%problem, path = disk.path, "a disk that was made for a VM is not removed yet; tried \
                again when the agent restarts");
        })?;
    }
    Ok(incoming.journal.forget_made_disks(id)?)
}

/// The VM is here since: what was made for it then may be its own by now, and stays whatever it is.
pub(super) fn leave(incoming: &Incoming, id: &str) -> Result<(), Problem> {
    for made in incoming.journal.made_disks(id)? {
        warn!(
            path = made.disk.path,
            "a disk stays that was made for a VM which has come again since; it may be useless"
        );
    }
    Ok(incoming.journal.forget_made_disks(id)?)
}

/// The disks of all VMs that are here, or on their way here by another migration than this one.
fn named_by_others(incoming: &Incoming, id: &str) -> Result<Vec<PathBuf>, Problem> {
    let coming = incoming.journal.waiting_incoming()?;
    let coming = coming.into_iter().filter(|record| record.id != id).flat_map(|record| record.spec.disks);
    Ok(coming.map(|disk| disk.path).chain(incoming.vms.disk_paths()).collect())
}

/// The disks of all VMs that are here, or on their way here.
pub(crate) fn named(incoming: &Incoming) -> Result<Vec<PathBuf>, Problem> {
    named_by_others(incoming, "")
}

/// The disks that stayed here when their VMs left with copies of them, and what is kept of interrupted copies.
pub(crate) fn left(incoming: &Incoming) -> Result<Vec<LeftDisk>, Problem> {
    Ok(incoming.journal.left_disks()?.into_iter().map(|left| left.disk).collect())
}

/// Removes them, as an operator asks for it. Refused of one that a VM names since. Block devices are forgotten only.
pub(crate) async fn remove_left(incoming: &Incoming) -> Result<Vec<LeftDisk>, Problem> {
    let mut gone = vec![];
    for left in incoming.journal.left_disks()? {
        if remove_one_left(incoming, &left).await? {
            gone.push(left.disk);
        }
    }
    Ok(gone)
}

/// Whether it was there; a block device is taken to be, and stays as it is.
async fn remove_one_left(incoming: &Incoming, left: &LeftFile) -> Result<bool, Problem> {
    let LeftFile { disk: LeftDisk { path, .. }, file, .. } = left;
    let was_there = match file {
        Some(file) if file.is_device() => true,
        Some(file) => incoming.files.remove_left(path, *file, named(incoming)?).await?,
        None => false,
    };
    if !was_there {
        warn!(path, "a disk that stayed behind is gone, or is another file now: left as it is");
    }
    incoming.journal.forget_left_disk(path)?;
    Ok(was_there)
}
