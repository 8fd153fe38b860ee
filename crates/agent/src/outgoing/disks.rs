//! Which disks move with a VM, by the facts of both hosts.

use std::path::PathBuf;
use std::sync::Arc;

use drainpipe_engine::plan::disks::{There, VmDisk, copies};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskCopy, DiskName};
use drainpipe_hypervisor::spec::Disk;
use drainpipe_hypervisor::{DiskCopies, Machine, OpenDisk};
use jiff::Timestamp;
use tracing::{info, warn};

use super::{Meeting, Outgoing};
use crate::check::{DiskThere, disks_there};
use crate::incoming::named_disks;
use crate::peers::client::ApiClient;
use crate::store::journal::{CopiedDisk, FileId, LeftFile, Unrenamed};
use crate::vms::QMP_DEADLINE;
use crate::vms::vm_files::{VmFiles, device_at};
use drainpipe_api_types::{LeftDisk, MigrateRequest};

/// The disks that are copied; none where nobody asks for it.
pub(super) async fn to_copy(
    outgoing: &Outgoing,
    peer: &ApiClient,
    request: &MigrateRequest,
    meeting: &Meeting,
    vmm: &Arc<dyn Machine>,
) -> Result<Vec<DiskCopy>, Problem> {
    if !request.copy_storage && request.disks.is_empty() {
        return Ok(vec![]);
    }
    if request.post_copy {
        return Err(Problem::refused(
            "disks cannot be copied together with post-copy yet: use one of the two",
        ));
    }
    let target = &request.target;
    check_hosts(target, meeting)?;
    let disks = disks_of(&**vmm).await?;
    let there = disks_there(&outgoing.checks, peer, target, vmm).await?;
    let with = |(disk, DiskThere { there, place, .. })| VmDisk { there, place, ..disk };
    let disks: Vec<VmDisk> = disks.into_iter().zip(there).map(with).collect();
    let copied = copies(&request.vm, target, &disks, &request.disks).map_err(Problem::refused)?;
    if !copied.is_empty() {
        check_vm(&**vmm, &copied)?;
    }
    Ok(copied)
}

/// Refuses two hosts if either copies no disks.
pub(crate) fn check_hosts(target: &str, meeting: &Meeting) -> Result<(), Problem> {
    if let Some(why) = meeting.protocol.obstacle_to_disks(target) {
        return Err(Problem::refused(why));
    }
    for facts in [&meeting.source, &meeting.target.facts] {
        if !facts.hypervisor.capabilities.copies_disks {
            let (name, host) = (&facts.hypervisor.name, &facts.name);
            return Err(Problem::refused(format!(
                "{name} of {host} does not copy disks: VMs move with shared disks only"
            )));
        }
    }
    Ok(())
}

/// Refuses what the VM's hypervisor does not copy.
pub(crate) fn check_vm(vmm: &dyn Machine, copied: &[DiskCopy]) -> Result<(), Problem> {
    disk_copies(vmm)?.check(copied).map_err(Problem::refused)
}

fn disk_copies(vmm: &dyn Machine) -> Result<&dyn DiskCopies, Problem> {
    vmm.disk_copies().ok_or_else(|| Problem::refused("the VM's hypervisor does not copy disks"))
}

/// The disks of a running VM, as its host knows them; what a target has under their paths is not asked.
pub(crate) async fn disks_of(vmm: &dyn Machine) -> Result<Vec<VmDisk>, Problem> {
    let open = disk_copies(vmm)?.disks(QMP_DEADLINE).await.map_err(Problem::failed)?;
    let disks = vmm.spec().spec().disks.iter().zip(open).enumerate();
    disks.map(|(index, (disk, open))| describe(index, disk, &open)).collect()
}

/// Gives the disks that a VM has left here names that no VM has.
pub(crate) async fn keep_left(outgoing: &Outgoing, of: &Unrenamed, named: &[PathBuf]) -> Result<(), Problem> {
    let Unrenamed { migration, vm, target } = of;
    let (journal, files) = (&outgoing.journal, &outgoing.incoming.files);
    for CopiedDisk { disk, part } in journal.leaving_disks(migration)? {
        let is_device = disk.file.is_some_and(FileId::is_device);
        let was = disk.path.clone();
        let path = if is_device { was.clone() } else { VmFiles::left_path(&was, migration) };
        if files.rename_left(&disk, &path, named.to_vec()).await? {
            info!(was, path, "kept a disk of a VM that has left");
            let left_at = Timestamp::now().to_string();
            let (vm, target) = (vm.clone(), target.clone());
            let left = LeftDisk { path, was, vm, target, left_at, kept_until: None, is_device };
            journal.disk_left(&LeftFile { disk: left, file: disk.file, part, until_s: None })?;
        } else {
            warn!(vm, was, "a disk of a VM that has left is gone, or is another file now: left as it is");
        }
        journal.forget_leaving_disk(migration, &disk.path)?;
    }
    Ok(())
}

/// Does so for VMs that left when it could not be done.
pub(crate) async fn keep_all_left(outgoing: Arc<Outgoing>) {
    if let Err(problem) = try_keep_all_left(&outgoing).await {
        warn!(%problem, "disks of VMs that have left are not renamed yet; tried again when the agent restarts");
    }
}

async fn try_keep_all_left(outgoing: &Outgoing) -> Result<(), Problem> {
    for of in outgoing.journal.unrenamed_disks()? {
        let named = named_disks(&outgoing.incoming)?;
        if let Err(problem) = keep_left(outgoing, &of, &named).await {
            warn!(vm = of.vm, %problem, "a disk that it has left is not renamed yet; tried again when the \
                agent restarts");
        }
    }
    Ok(())
}

fn describe(index: usize, disk: &Disk, open: &OpenDisk) -> Result<VmDisk, Problem> {
    let name =
        DiskName::at(index).ok_or_else(|| Problem::refused("a VM with more disks than there are names"))?;
    let path = disk.path.to_str().ok_or_else(|| {
        Problem::refused(format!(
            "the path {} is not valid text, so its disk cannot be copied",
            disk.path.display()
        ))
    })?;
    Ok(VmDisk {
        disk: name,
        path: path.to_owned(),
        is_read_only: disk.read_only,
        // A disk that cannot be examined is open nevertheless, and is reported elsewhere.
        device: device_at(&disk.path),
        has_data_file: open.has_data_file,
        has_backing: open.has_backing,
        obstacle: open.obstacle.clone(),
        image: open.image,
        size_bytes: open.size_bytes,
        allocated_bytes: open.allocated_bytes,
        there: There::Other,
        place: None,
    })
}
