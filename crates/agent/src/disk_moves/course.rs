//! The course of a move, step by step.

use std::sync::atomic::Ordering;
use std::time::Duration;

use drainpipe_engine::format::seconds;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskCopy, DiskMeter, DiskState};
use drainpipe_hypervisor::spec::Disk;
use drainpipe_hypervisor::{DiskMoves as HypervisorsMoves, MoveState, VmError};
use tokio::time::timeout;
use tracing::info;

use super::mover::Mover;
use super::settling::Ended;
use crate::store::lock::lock;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE, qemu_has_ended};

/// How often it is asked how far the copy is.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long nothing may be copied, or what is left may not become less.
const SILENT_MS_MAX: f64 = 120_000.0;

/// How long it may take until both are the same and durable. The guest's writes wait for the last of it.
const HELD_WITHIN: Duration = Duration::from_secs(10);

/// Where a move begins.
#[derive(Debug)]
pub(super) enum Begin {
    /// With nothing there.
    Anew(DiskCopy),
    /// Where an earlier agent has left it.
    AsLeft,
}

impl Mover {
    /// To the end, whatever comes.
    pub(super) async fn run(self, begin: Begin) {
        if matches!(begin, Begin::AsLeft) && !self.settle(Ended::AsLeft).await {
            return;
        }
        let problem = self.copy_and_switch(&begin).await.err();
        self.settle(Ended::By(problem)).await;
    }

    async fn copy_and_switch(&self, begin: &Begin) -> Result<(), Problem> {
        match begin {
            Begin::Anew(copy) => self.begin(copy).await?,
            Begin::AsLeft => self.go_on().await?,
        }
        let moves = self.hypervisors()?;
        self.wait_until(|meter| meter.are_ready() || meter.are_outpaced()).await?;
        moves.synchronise(self.name(), QEMU_DEADLINE).await.map_err(|error| self.failed(error))?;
        lock(&self.one.meter).mirrored(self.one.now_ms());
        self.wait_until(DiskMeter::are_synchronised).await?;
        self.switch(moves).await
    }

    async fn begin(&self, copy: &DiskCopy) -> Result<(), Problem> {
        let incoming = &self.moves.incoming;
        let record = |file| Ok(incoming.journal.disk_move_made(&self.one.id, file)?);
        let empty = (copy.image, copy.size_bytes);
        let made = incoming.files.make(&copy.to, &self.one.id, empty, record).await;
        made.map_err(|not_made| not_made.problem)?;
        let disk = self.new_disk()?;
        let begun = self.hypervisors()?.begin(self.name(), &disk, QEMU_DEADLINE).await;
        begun.map_err(|error| self.failed(error))
    }

    async fn go_on(&self) -> Result<(), Problem> {
        let disk = self.new_disk()?;
        let goes_on = self.hypervisors()?.go_on(self.name(), &disk, QEMU_DEADLINE).await;
        goes_on.map_err(|error| self.failed(error))
    }

    async fn wait_until(&self, is_enough: impl Fn(&DiskMeter) -> bool) -> Result<(), Problem> {
        loop {
            self.check_cancel()?;
            self.look().await?;
            if is_enough(&lock(&self.one.meter)) {
                return Ok(());
            }
            let silent_ms = lock(&self.one.meter).silent_ms(self.one.now_ms());
            if silent_ms > SILENT_MS_MAX {
                return Err(Problem::failed(format!(
                    "nothing was copied for {}: look at the storage with {}",
                    seconds(silent_ms),
                    self.one.to
                )));
            }
            drop(timeout(LOOK_EVERY, self.cancelled()).await);
        }
    }

    async fn look(&self) -> Result<(), Problem> {
        match self.hypervisors()?.state(self.name(), QMP_DEADLINE).await {
            Ok(MoveState::Copying { copied_bytes, total_bytes, is_ready, is_synchronised }) => {
                let begun = DiskState::begun(self.one.disk);
                self.one.record(DiskState { copied_bytes, total_bytes, is_ready, is_synchronised, ..begun });
                Ok(())
            }
            Ok(MoveState::Failed(why)) => Err(self.failed(VmError::failed(why))),
            Ok(other) => Err(Problem::failed(format!("the copy has ended unexpectedly ({other:?})"))),
            Err(error) if error.is_mute() => Ok(()),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// From the hold to the switch the guest's writes wait. An agent that is to stop does not begin it: the next one does.
    async fn switch(&self, moves: &dyn HypervisorsMoves) -> Result<(), Problem> {
        let _holding = self.moves.holding.lock().await;
        moves.hold(self.name(), HELD_WITHIN).await.map_err(|error| self.failed(error))?;
        self.moves.incoming.journal.record_disk_move(&self.one.id, &self.definition(&self.one.to))?;
        moves.switch(self.name(), HELD_WITHIN).await.map_err(|error| self.failed(error))?;
        info!(vm = self.one.vm, disk = %self.one.disk, to = self.one.to, "its disk has moved");
        Ok(())
    }

    fn new_disk(&self) -> Result<Disk, Problem> {
        let mut disks = self.definition(&self.one.to).disks;
        let index = self.one.disk.index();
        if index < disks.len() {
            return Ok(disks.swap_remove(index));
        }
        Err(Problem::failed(format!("VM {} no longer has a disk {}", self.one.vm, self.one.disk)))
    }

    fn failed(&self, error: VmError) -> Problem {
        match self.claimed.vmm.as_ref().filter(|vmm| !vmm.alive()) {
            None => Problem::failed(error),
            Some(vmm) => {
                let host = self.moves.incoming.host.name();
                Problem::failed(format!("VM {}: {}", self.one.vm, qemu_has_ended(host, vmm.exit().as_ref())))
            }
        }
    }

    fn check_cancel(&self) -> Result<(), Problem> {
        if self.one.is_cancelled.load(Ordering::Relaxed) {
            return Err(Problem::conflict("cancelled"));
        }
        Ok(())
    }

    async fn cancelled(&self) {
        while !self.one.is_cancelled.load(Ordering::Relaxed) {
            self.one.cancel.notified().await;
        }
    }
}
