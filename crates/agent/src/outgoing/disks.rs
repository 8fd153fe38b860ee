//! Which disks go with a VM, by what both hosts say of them.

use std::path::PathBuf;
use std::sync::Arc;

use drainpipe_engine::plan::disks::{There, VmDisk, copies};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskCopy, DiskName};
use drainpipe_hypervisor::spec::Disk;
use drainpipe_hypervisor::{Machine, OpenDisk};
use rustix::fs::{FileType, stat};

use super::{Meeting, Outgoing};
use crate::api_types::MigrateRequest;
use crate::check::disks_there;
use crate::client::ApiClient;
use crate::vms::QMP_DEADLINE;

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
            "disks are not copied together with post-copy yet: ask for one of the two",
        ));
    }
    let target = &request.target;
    if let Some(why) = meeting.protocol.obstacle_to_disks(target) {
        return Err(Problem::refused(why));
    }
    for facts in [&meeting.source, &meeting.target.facts] {
        if !facts.hypervisor.capabilities.copies_disks {
            let (name, host) = (&facts.hypervisor.name, &facts.name);
            return Err(Problem::refused(format!(
                "{name} of {host} does not copy disks: VM {} moves with shared disks only",
                request.vm
            )));
        }
    }
    let none = || Problem::refused("the VM's hypervisor does not copy disks");
    let hypervisor = vmm.disk_copies().ok_or_else(none)?;
    let open = hypervisor.disks(QMP_DEADLINE).await.map_err(Problem::failed)?;
    let there = disks_there(&outgoing.checks, peer, target, vmm).await?;
    let disks = vmm.spec().spec().disks.iter().zip(open).zip(there).enumerate();
    let disks: Vec<VmDisk> = disks
        .map(|(index, ((disk, open), there))| describe(index, disk, open, there))
        .collect::<Result<_, _>>()?;
    let copied = copies(&request.vm, target, &disks, &request.disks).map_err(Problem::refused)?;
    if !copied.is_empty() {
        hypervisor.check().map_err(Problem::refused)?;
        refuse_limit(outgoing)?;
    }
    Ok(copied)
}

/// A limit that holds for memory alone would be none.
fn refuse_limit(outgoing: &Outgoing) -> Result<(), Problem> {
    match outgoing.transfer.bandwidth.limit_mbps() {
        None => Ok(()),
        Some(mbps) => Err(Problem::refused(format!(
            "a bandwidth limit of {mbps} Mb/s holds on {}, and copies of disks are not limited yet: lift it \
             (`drainpipe limit`) for as long as they take",
            outgoing.host.name()
        ))),
    }
}

fn describe(index: usize, disk: &Disk, open: OpenDisk, there: There) -> Result<VmDisk, Problem> {
    let name =
        DiskName::at(index).ok_or_else(|| Problem::refused("a VM with more disks than there are names"))?;
    let path = disk.path.to_str().ok_or_else(|| {
        Problem::refused(format!(
            "the path {} is no text, and such disks are not copied",
            disk.path.display()
        ))
    })?;
    Ok(VmDisk {
        disk: name,
        path: path.to_owned(),
        is_read_only: disk.read_only,
        is_block_device: is_block_device(disk.path.clone()),
        has_data_file: open.has_data_file,
        has_backing: open.has_backing,
        image: open.image,
        size_bytes: open.size_bytes,
        allocated_bytes: open.allocated_bytes,
        there,
    })
}

fn is_block_device(path: PathBuf) -> bool {
    // One that cannot be looked at is open all the same, and is told elsewhere.
    stat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice)
}
