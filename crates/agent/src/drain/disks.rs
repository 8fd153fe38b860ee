//! The disks that would move with VMs: what is known about them here, and what a target has in their place.

use std::collections::BTreeMap;
use std::sync::Arc;

use drainpipe_engine::check::vm::{DiskRoom, VmCheck};
use drainpipe_engine::drain::disks::{DrainedDisk, FileSystemView};
use drainpipe_engine::plan::disks::{There, VmDisk, copies};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::DiskCopy;
use drainpipe_hypervisor::Machine;
use futures_util::future::join_all;
use rustix::fs::stat;

use crate::check::{self, DiskThere};
use crate::outgoing::{Meeting, check_hosts, check_vm, disks_of};
use drainpipe_api_types::DrainRequest;

/// The disks of all running VMs, in the order of these; none where there is no disk to copy.
pub(super) type OwnDisks = Vec<Result<Vec<OwnDisk>, Problem>>;

/// A disk of a VM here.
#[derive(Debug, Clone)]
pub(super) struct OwnDisk {
    disk: VmDisk,
    device: u64,
}

/// The disks that would be copied to a target.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// By the names of the VMs, of those that the target lacks a disk of.
    pub(super) of_vms: BTreeMap<String, Vec<DrainedDisk>>,
    /// Why a disk that is missing there cannot be copied, by the names of the VMs.
    pub(super) refusals: BTreeMap<String, String>,
    /// Where they would be made.
    pub(super) file_systems: Vec<FileSystemView>,
}

pub(super) async fn look(request: &DrainRequest, running: &[Arc<dyn Machine>]) -> OwnDisks {
    if !request.copy_storage {
        return vec![];
    }
    join_all(running.iter().map(|vmm| look_at(&**vmm))).await
}

async fn look_at(vmm: &dyn Machine) -> Result<Vec<OwnDisk>, Problem> {
    let disks = disks_of(vmm).await?;
    // One that cannot be looked at is open all the same.
    let device = |disk: &VmDisk| stat(&disk.path).map_or(0, |stat| stat.st_dev);
    Ok(disks.into_iter().map(|disk| OwnDisk { device: device(&disk), disk }).collect())
}

impl Copies {
    /// What this target has of these VMs' disks.
    pub(super) fn to(
        target: &str,
        meeting: &Meeting,
        running: &[Arc<dyn Machine>],
        disks: &OwnDisks,
        checked: &[VmCheck],
    ) -> Self {
        let mut all = Self::default();
        for ((vmm, disks), checked) in running.iter().zip(disks).zip(checked) {
            let name = vmm.spec().spec().name.to_string();
            let there = check::disks_of(checked, vmm.spec().spec().disks.len());
            if there.iter().all(|disk| disk.there == There::Other) {
                continue;
            }
            let copies = disks.as_ref().map_err(Clone::clone).and_then(|disks| {
                let copied = of_vm(&name, target, disks, &there)?;
                check_hosts(target, meeting)?;
                let of_disks: Vec<DiskCopy> = copied.iter().map(|(disk, _)| disk.copy.clone()).collect();
                check_vm(&**vmm, &of_disks)?;
                Ok(copied)
            });
            match copies {
                Ok(copies) => {
                    all.note_rooms(copies.iter().map(|(_, room)| *room));
                    all.of_vms.insert(name, copies.into_iter().map(|(disk, _)| disk).collect());
                }
                Err(problem) => drop(all.refusals.insert(name, problem.message)),
            }
        }
        all
    }

    fn note_rooms(&mut self, rooms: impl Iterator<Item = DiskRoom>) {
        for DiskRoom { device, free_bytes, .. } in rooms {
            match self.file_systems.iter_mut().find(|of| of.device == device) {
                // VMs are asked about some at a time, and others take room meanwhile.
                Some(of) => of.free_bytes = of.free_bytes.min(free_bytes),
                None => self.file_systems.push(FileSystemView { device, free_bytes }),
            }
        }
    }

    /// All of them.
    pub(super) fn disks(&self) -> Vec<DiskCopy> {
        self.of_vms.values().flatten().map(|disk| disk.copy.clone()).collect()
    }
}

/// The disks of one VM that are copied, and where they would be made.
fn of_vm(
    vm: &str,
    target: &str,
    disks: &[OwnDisk],
    there: &[DiskThere],
) -> Result<Vec<(DrainedDisk, DiskRoom)>, Problem> {
    let disks: Vec<(VmDisk, u64, Option<DiskRoom>)> = disks
        .iter()
        .zip(there)
        .map(|(own, DiskThere { there, place, room })| {
            (VmDisk { there: *there, place: place.clone(), ..own.disk.clone() }, own.device, *room)
        })
        .collect();
    let described: Vec<VmDisk> = disks.iter().map(|(disk, ..)| disk.clone()).collect();
    let copied = copies(vm, target, &described, &BTreeMap::new()).map_err(Problem::refused)?;
    let with_room = copied.into_iter().map(|copy| {
        let of = disks.iter().find(|(disk, ..)| disk.disk == copy.disk);
        let place = of.and_then(|(_, from_device, room)| Some((*from_device, (*room)?)));
        let (from_device, room) = place.ok_or_else(|| no_place(target, &copy))?;
        Ok((DrainedDisk { copy, from_device, to_device: room.device }, room))
    });
    with_room.collect()
}

fn no_place(target: &str, copy: &DiskCopy) -> Problem {
    Problem::refused(format!(
        "{target} has no directory for {}, or cannot tell how much is free there: create it, or look at the storage",
        copy.to
    ))
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::storage::{DiskDevice, DiskImage, DiskName};

    use super::*;

    fn own(index: usize) -> OwnDisk {
        let disk = VmDisk {
            disk: DiskName::at(index).unwrap(),
            path: format!("/srv/{index}"),
            is_read_only: false,
            device: None,
            has_data_file: false,
            has_backing: false,
            obstacle: None,
            image: DiskImage::Raw,
            size_bytes: 100,
            allocated_bytes: 50,
            there: There::Other,
            place: None,
        };
        OwnDisk { disk, device: 3 }
    }

    const PRESENT: DiskThere = DiskThere { there: There::Other, place: None, room: None };

    fn nothing(place: Option<&str>, room: Option<DiskRoom>) -> DiskThere {
        DiskThere { there: There::Nothing, place: place.map(str::to_owned), room }
    }

    fn room(index: usize) -> DiskRoom {
        DiskRoom { index, device: 7, free_bytes: 1_000 }
    }

    #[test]
    fn what_the_target_lacks_goes_from_one_device_to_another() {
        let copied = of_vm("web", "b", &[own(0), own(1)], &[PRESENT, nothing(None, Some(room(1)))]).unwrap();
        let [(disk, room)] = &copied[..] else { panic!("one is copied: {copied:?}") };
        assert_eq!((disk.copy.to.as_str(), disk.from_device, disk.to_device), ("/srv/1", 3, 7));
        assert_eq!(room.free_bytes, 1_000);
    }

    #[test]
    fn what_has_no_place_is_said() {
        let nowhere = of_vm("web", "b", &[own(0)], &[nothing(Some("/big/0"), None)]).unwrap_err();
        assert!(nowhere.message.contains("b has no directory for /big/0"), "{nowhere}");
        let mut device = own(0);
        device.disk.device = Some(DiskDevice { size_bytes: 100, identifier: None });
        let refused = of_vm("web", "b", &[device], &[nothing(None, Some(room(0)))]).unwrap_err();
        assert!(refused.message.contains("block device"), "{refused}");
    }
}
