//! Disks that move to another place on this host while their VMs run: begun, followed, cancelled, and continued after
//! a crash.
//!
//! ```text
//! recorded     that it is to move
//! made         the new file
//! copied       by the hypervisor, while the guest writes
//! held         both are the same; the guest's writes wait
//! recorded     that the VM has the new one        ── it decides
//! switched     the guest's writes go on, to the new one
//! kept         the old one, under another name
//! ```

mod course;
mod mover;
mod settling;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::plan::disks::copies;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskCopy, DiskMeter, DiskName, DiskState};
use drainpipe_hypervisor::{Machine, OwnersAct};
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedMutexGuard};
use tokio::time::timeout;
use tracing::{error, warn};
use uuid::Uuid;

use self::course::Begin;
use self::mover::Mover;
use crate::incoming::{Incoming, promised_disk_bytes};
use crate::outgoing::disks_of;
use crate::outgoing::supervised;
use crate::store::journal::{DiskFile, DiskMoveRecord};
use crate::store::lock::lock;
use crate::vms::{Claim, Claimed, check_own, does_not_run};
use drainpipe_api_types::{DiskMoveOutcome, DiskMoveResult, DiskMoveView, MoveDiskRequest};

/// How long a stopping agent waits for the moves that hold their guests' writes.
const SWITCHED_WITHIN: Duration = Duration::from_secs(20);

/// What a copy takes more than its disk does, before QEMU makes holes of zeroes.
const RESERVE_BYTES: u64 = 16 << 20;

/// Those of this host.
#[derive(Debug)]
pub(crate) struct DiskMoves {
    incoming: Arc<Incoming>,
    // The last of each VM.
    by_vm: Mutex<BTreeMap<String, Arc<DiskMove>>>,
    // Held by the move that holds a guest's writes.
    holding: Arc<AsyncMutex<()>>,
}

/// A disk that moves.
#[derive(Debug)]
pub(crate) struct DiskMove {
    id: String,
    vm: String,
    disk: DiskName,
    from: String,
    to: String,
    since: Instant,
    meter: Mutex<DiskMeter>,
    result: Mutex<Option<DiskMoveResult>>,
    cancel: Notify,
    is_cancelled: AtomicBool,
}

impl DiskMove {
    fn of(record: &DiskMoveRecord) -> Self {
        Self {
            id: record.id.clone(),
            vm: record.vm.clone(),
            disk: record.disk,
            from: record.old.path.clone(),
            to: record.new.path.clone(),
            since: Instant::now(),
            meter: Mutex::default(),
            result: Mutex::default(),
            cancel: Notify::new(),
            is_cancelled: AtomicBool::default(),
        }
    }

    fn now_ms(&self) -> f64 {
        self.since.elapsed().as_secs_f64() * 1e3
    }

    fn record(&self, state: DiskState) {
        lock(&self.meter).record(self.now_ms(), &[state]);
    }

    fn end(&self, outcome: DiskMoveOutcome, error: Option<Problem>, left: Option<String>) {
        let copied_bytes = lock(&self.meter).copied_bytes();
        let result = DiskMoveResult { outcome, error, total_ms: self.now_ms(), copied_bytes, left };
        *lock(&self.result) = Some(result);
    }

    fn is_over(&self) -> bool {
        lock(&self.result).is_some()
    }

    fn view(&self) -> DiskMoveView {
        DiskMoveView {
            id: self.id.clone(),
            vm: self.vm.clone(),
            disk: self.disk,
            from: self.from.clone(),
            to: self.to.clone(),
            progress: lock(&self.meter).progress().first().copied(),
            result: lock(&self.result).clone(),
        }
    }
}

impl DiskMoves {
    pub(crate) fn new(incoming: &Arc<Incoming>) -> Self {
        Self { incoming: Arc::clone(incoming), by_vm: Mutex::default(), holding: Arc::default() }
    }

    /// The last of a VM.
    pub(crate) fn view(&self, vm: &str) -> Result<DiskMoveView, Problem> {
        Ok(self.find(vm)?.view())
    }

    fn find(&self, vm: &str) -> Result<Arc<DiskMove>, Problem> {
        let found = lock(&self.by_vm).get(vm).cloned();
        found.ok_or_else(|| Problem::not_found(format!("this agent knows of no disk move of VM {vm}")))
    }

    /// Gives the one up that is under way, if it is not too late.
    pub(crate) fn cancel(&self, vm: &str) -> Result<DiskMoveView, Problem> {
        let one = self.find(vm)?;
        if one.is_over() {
            return Err(Problem::conflict(format!("{} of VM {vm} is no longer being moved", one.disk)));
        }
        one.is_cancelled.store(true, Ordering::Relaxed);
        one.cancel.notify_one();
        Ok(one.view())
    }

    fn add(&self, record: &DiskMoveRecord) -> Arc<DiskMove> {
        let one = Arc::new(DiskMove::of(record));
        lock(&self.by_vm).insert(record.vm.clone(), Arc::clone(&one));
        one
    }
}

/// Begins to move a disk, and returns at once.
pub(crate) async fn begin(
    moves: &Arc<DiskMoves>,
    vm: &str,
    request: &MoveDiskRequest,
) -> Result<DiskMoveView, Problem> {
    let incoming = &moves.incoming;
    incoming.host.check_not_stopping()?;
    check_own(&incoming.vms.definition(vm)?, OwnersAct::MoveDisk)?;
    let id = Uuid::new_v4().to_string();
    let claimed = incoming.vms.claim(vm, Claim::MovingDisk(request.disk, id.clone()))?;
    let vmm = claimed.vmm.clone().ok_or_else(|| does_not_run(&claimed.definition))?;
    let copy = to_copy(moves, vm, request, &*vmm).await?;
    let old = incoming.files.identify(&copy.from).await?;
    let new = DiskFile { path: copy.to.clone(), file: None };
    let record = DiskMoveRecord { id, vm: vm.into(), disk: request.disk, old, new, is_recorded: false };
    incoming.journal.begin_disk_move(&record)?;
    let one = moves.add(&record);
    let view = one.view();
    spawn(moves, one, claimed, Begin::Anew(copy));
    Ok(view)
}

fn spawn(moves: &Arc<DiskMoves>, one: Arc<DiskMove>, claimed: Claimed, begin: Begin) {
    let (vm, disk) = (one.vm.clone(), one.disk);
    let carrier = Mover { moves: Arc::clone(moves), one, claimed };
    let crashed = async move {
        error!(vm, %disk, "an error in Drainpipe has ended the move of a disk: the agent settles it when it restarts");
    };
    supervised::spawn(carrier.run(begin), crashed);
}

/// What is to be copied; refused where it cannot be.
async fn to_copy(
    moves: &DiskMoves,
    vm: &str,
    request: &MoveDiskRequest,
    vmm: &dyn Machine,
) -> Result<DiskCopy, Problem> {
    let incoming = &moves.incoming;
    let MoveDiskRequest { disk, to } = request;
    check_hypervisor(vmm)?;
    let disks = disks_of(vmm).await?;
    if let Some(own) = disks.iter().find(|own| own.disk == *disk) {
        if own.is_read_only {
            return Err(Problem::refused(format!(
                "{disk} of VM {vm} ({}) is read-only: nothing writes to it, so copy the file, and name the \
                copy when you define the VM again",
                own.path
            )));
        }
        if Path::new(&own.path) == Path::new(to) {
            return Err(Problem::refused(format!("{disk} of VM {vm} is already at {to}")));
        }
    }
    let host = incoming.host.name();
    if incoming.files.is_device_place(to) {
        return Err(Problem::refused(format!(
            "{to} is among block devices, and while its VM stays on {host}, a disk can move only to a file: \
            name a file, or use `migrate --disk` to write to a device on another host"
        )));
    }
    let places = [(*disk, to.clone())].into();
    let copied = copies(vm, host, &disks, &places).map_err(Problem::refused)?;
    let copy = copied.into_iter().next().ok_or_else(|| Problem::failed("there is no disk to copy"))?;
    let most_bytes = copy.size_bytes.max(copy.allocated_bytes);
    let room = DiskCopy {
        allocated_bytes: copy.allocated_bytes.saturating_add(RESERVE_BYTES).min(most_bytes),
        ..copy.clone()
    };
    incoming.files.check_room(&room, 0, promised_disk_bytes(incoming)).await?;
    Ok(copy)
}

fn check_hypervisor(vmm: &dyn Machine) -> Result<(), Problem> {
    let moves = vmm.disk_moves().ok_or_else(|| Problem::refused("the VM's hypervisor cannot move disks"))?;
    moves.check().map_err(Problem::refused)
}

/// Goes on with what an earlier run of this agent has left, before anybody else has the VMs.
pub(crate) fn recover(moves: &Arc<DiskMoves>) -> Result<(), Problem> {
    for record in moves.incoming.journal.disk_moves()? {
        let (vm, id) = (record.vm.clone(), record.id.clone());
        match moves.incoming.vms.claim(&vm, Claim::MovingDisk(record.disk, id)) {
            Ok(claimed) => take_up(moves, &record, claimed),
            Err(problem) => warn!(vm, %problem, "the move of a disk waits until its VM answers"),
        }
    }
    Ok(())
}

/// Goes on with one whose VM is claimed.
pub(crate) fn take_up(moves: &Arc<DiskMoves>, record: &DiskMoveRecord, claimed: Claimed) {
    let one = moves.add(record);
    spawn(moves, one, claimed, Begin::AsLeft);
}

/// Waits for those that hold their guests' writes, and lets no other begin to.
pub(crate) async fn shut_down(moves: &DiskMoves) -> Option<OwnedMutexGuard<()>> {
    let holding = timeout(SWITCHED_WITHIN, Arc::clone(&moves.holding).lock_owned()).await;
    holding
        .inspect_err(|_| warn!("the move of a disk is interrupted: the agent continues it when it restarts"))
        .ok()
}
