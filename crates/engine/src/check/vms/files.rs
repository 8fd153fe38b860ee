//! Whether the target sees the VM's disks, and exactly the same ones.

use super::there;
use crate::check::Pair;
use crate::check::vm::{FileIdentity, FilePurpose, FileState, VmCheck, VmFile};
use crate::finding::code::FindingCode;
use crate::finding::{Finding, on};
use crate::format::exact_bytes;
use crate::host::vm_resources::NotAllowed;

pub(super) fn check(pair: Pair<'_>, checked: &VmCheck) -> Vec<Finding> {
    let files = checked.vm.files.iter().zip(&checked.fit.files).enumerate();
    let found = files.filter_map(|(index, (file, there))| {
        if file.purpose == FilePurpose::CopiedDisk {
            return None;
        }
        let refused = checked.fit.files_not_allowed.iter().find(|refused| refused.index == index);
        match refused {
            Some(refused) => Some(not_allowed(pair, checked, file, &refused.why)),
            None => of_file(pair, checked, file, there),
        }
    });
    found.collect()
}

fn not_allowed(pair: Pair<'_>, checked: &VmCheck, file: &VmFile, why: &NotAllowed) -> Finding {
    let host = pair.target.name();
    Finding::new(FindingCode::VmFileNotAllowed, there(pair, &checked.vm))
        .what(format!("{} of VM {} {}", file.path, checked.vm.name, why.what(host)))
        .effect("the VM is refused there")
        .remedy(why.cure(host))
}

fn of_file(pair: Pair<'_>, checked: &VmCheck, file: &VmFile, found: &FileState) -> Option<Finding> {
    let (vm, host, path) = (&checked.vm, pair.target.name(), &file.path);
    let finding = |code| Finding::new(code, there(pair, vm));
    let look = on(host, format!("ls -lid {path}; findmnt --target {path}"));
    match found {
        FileState::Missing => Some(
            finding(FindingCode::VmFileMissing)
                .what(format!(
                    "{host} does not see {path} of VM {}; both hosts must see it under the same path",
                    vm.name
                ))
                .effect("the VM cannot be started there")
                .remedy(format!("mount the shared storage there too ({look}); or move the disk with the VM: --copy-storage")),
        ),
        FileState::Silent => Some(
            finding(FindingCode::VmStorageSilent)
                .what(format!("the storage with {path} of VM {} does not answer on {host}", vm.name))
                .effect("the VM would hang there")
                .remedy(format!("look at the storage's server and network; {look}")),
        ),
        FileState::Present(there) => {
            let FileState::Present(here) = &file.state else { return None };
            let why = difference(file.purpose, here, there)?;
            Some(
                finding(FindingCode::VmDiskDiffers)
                    .what(format!(
                        "{path} of VM {} is not the same on {} and {host}: {why}",
                        vm.name,
                        pair.source.name()
                    ))
                    .effect("the guest would continue with another disk, and destroy what is on it")
                    .remedy(format!(
                        "put the disk on storage that both hosts see, under one path; {look}; the same on {}",
                        pair.source.name()
                    )),
            )
        }
    }
}

/// Why two are not the same; `None` also if that cannot be determined.
fn difference(purpose: FilePurpose, here: &FileIdentity, there: &FileIdentity) -> Option<String> {
    if purpose == FilePurpose::Boot {
        return None;
    }
    if here.block_device != there.block_device {
        return Some("a file on one, a block device on the other".into());
    }
    // The size of a file that is being written to is another at every look.
    let fixed_size = here.block_device || purpose == FilePurpose::ReadOnlyDisk;
    if fixed_size && here.size_bytes != there.size_bytes {
        return Some(format!("{} and {}", exact_bytes(here.size_bytes), exact_bytes(there.size_bytes)));
    }
    if purpose == FilePurpose::ReadOnlyDisk {
        return None;
    }
    if here.block_device {
        let (one, other) = (here.device.as_ref()?, there.device.as_ref()?);
        let differ = one.kind == other.kind && one.value != other.value;
        return differ.then(|| "the devices have different identifiers".into());
    }
    let seen_in_use = there.locked == Some(true);
    let inodes_differ = here.inode != there.inode;
    // Some network file systems number files again on each host, but all show a lock everywhere.
    if inodes_differ && (there.local_filesystem || !seen_in_use) {
        return Some(format!("inode {} and inode {}", here.inode, there.inode));
    }
    let own_copy = there.local_filesystem && here.locked == Some(true) && there.locked == Some(false);
    own_copy.then(|| "each host has its own file there, on its own file system".into())
}
