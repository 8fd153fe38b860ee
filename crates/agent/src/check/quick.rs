//! The quick form, before each migration and drain: everything that needs neither traffic on the paths nor seconds.

use std::sync::Arc;

use drainpipe_engine::check::vm::{DiskRoom, FilePurpose, FileState, VmCheck, VmFile};
use drainpipe_engine::check::{Pair, check, worth_telling};
use drainpipe_engine::finding::Finding;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::plan::disks::There;
use drainpipe_engine::plan::{Plan, Spread};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Machine;

use super::{Checks, facts, vms};
use crate::peers::client::ApiClient;

/// What a person should know before these VMs go to `target`. What refuses a migration is among it.
pub(crate) async fn before_migration(
    checks: &Checks,
    peer: &ApiClient,
    target: &str,
    running: &[Arc<dyn Machine>],
    plan: &Plan,
) -> Result<Vec<Finding>, Problem> {
    let vms = vms::ask(checks, peer, target, running).await?;
    judge(checks, peer, target, vms, plan).await
}

/// The same of VMs that both hosts were asked about.
pub(crate) async fn judge(
    checks: &Checks,
    peer: &ApiClient,
    target: &str,
    mut vms: Vec<VmCheck>,
    plan: &Plan,
) -> Result<Vec<Finding>, Problem> {
    let (target_facts, clock) = facts::ask(checks, peer, target).await?;
    let source_facts = facts::read(checks).await?;
    let is_copied = |file: &VmFile| plan.disks.iter().any(|disk| disk.from == file.path);
    for file in vms.iter_mut().flat_map(|checked| &mut checked.vm.files).filter(|file| is_copied(file)) {
        file.purpose = FilePurpose::CopiedDisk;
    }
    let pair = Pair {
        source: &source_facts,
        target: &target_facts,
        paths: &plan.paths,
        trials: None,
        vms: &vms,
        multichannel: plan.spread() == Spread::Routed,
        may_use_all: plan.requested_option != RequestedOption::Tcp && !plan.post_copy(),
        clock,
    };
    Ok(worth_telling(check(pair)))
}

/// What a target has instead of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskThere {
    /// Under its path.
    pub(crate) there: There,
    /// Where the target wants it, if it is copied; absent for the same path.
    pub(crate) place: Option<String>,
    /// What is free where it would be made, if that is known.
    pub(crate) room: Option<DiskRoom>,
}

/// What `target` has instead of each disk of a VM.
pub(crate) async fn disks_there(
    checks: &Checks,
    peer: &ApiClient,
    target: &str,
    vm: &Arc<dyn Machine>,
) -> Result<Vec<DiskThere>, Problem> {
    let checked = vms::ask(checks, peer, target, std::slice::from_ref(vm)).await?.remove(0);
    Ok(disks_of(&checked, vm.spec().spec().disks.len()))
}

/// What the target has instead of each of a VM's disks, which are so many.
pub(crate) fn disks_of(checked: &VmCheck, count: usize) -> Vec<DiskThere> {
    let fit = &checked.fit;
    // What it boots from stands before them.
    let first = fit.files.len().saturating_sub(count);
    let there = |(index, state): (usize, &FileState)| {
        let place = fit.disk_places.iter().find(|place| place.index == index).map(|place| place.path.clone());
        let may_be_there = fit.files_not_allowed.iter().all(|refused| refused.index != index);
        let is_nothing = *state == FileState::Missing && (may_be_there || place.is_some());
        let room = fit.disk_rooms.iter().find(|room| room.index == index).copied();
        DiskThere { there: if is_nothing { There::Nothing } else { There::Other }, place, room }
    };
    fit.files.iter().enumerate().skip(first).map(there).collect()
}
