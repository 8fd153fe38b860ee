//! The end of a move, whatever has become of it: which disk the VM has, and what happens to the other one.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{FoundMove, Settlement, settle};
use drainpipe_hypervisor::MoveState;
use jiff::Timestamp;
use tokio::time::sleep;
use tracing::{info, warn};

use super::mover::Mover;
use crate::incoming::named_disks;
use crate::store::journal::{DiskFile, DiskMoveRecord, FileId, LeftFile};
use crate::vms::beside::Beside;
use crate::vms::vm_files::VmFiles;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};
use drainpipe_api_types::{DiskMoveOutcome, LeftDisk};

/// How often it is tried, and how many times: a day.
const TRY_EVERY: Duration = Duration::from_secs(2);
const TRIES_MAX: u32 = 43_200;

/// How a move has come to be settled.
#[derive(Debug)]
pub(super) enum Ended {
    /// An earlier agent has left it, and it may go on.
    AsLeft,
    /// All was done, or this has ended it.
    By(Option<Problem>),
}

/// What has come of a try.
enum Settled {
    /// The VM has the old disk.
    Undone,
    /// The VM has the new disk; where the old one is kept.
    Moved(Option<String>),
    /// The copy goes on.
    GoesOn,
}

impl Mover {
    /// Tries until it is known which disk the VM has, which is claimed as long. Whether the copy goes on: only of one that an
    /// earlier agent has left.
    pub(super) async fn settle(&self, ended: Ended) -> bool {
        let (is_left, mut problem) = match ended {
            Ended::AsLeft => (true, None),
            Ended::By(problem) => (false, problem),
        };
        for tried in 0..TRIES_MAX {
            match self.try_settle(is_left).await {
                Ok(Settled::GoesOn) => return true,
                Ok(settled) => {
                    self.tell(settled, problem);
                    return false;
                }
                Err(why) => {
                    if tried == 0 {
                        warn!(vm = self.one.vm, disk = %self.one.disk, %why, "it is not settled yet how its \
                            move has ended: tried again");
                    }
                    problem.get_or_insert(why);
                }
            }
            sleep(TRY_EVERY).await;
        }
        warn!(vm = self.one.vm, disk = %self.one.disk, "the move is not settled until the agent restarts");
        // The VM stays claimed.
        std::future::pending().await
    }

    async fn try_settle(&self, is_left: bool) -> Result<Settled, Problem> {
        let moves = self.moves.incoming.journal.disk_moves()?;
        let Some(record) = moves.into_iter().find(|record| record.id == self.one.id) else {
            return Err(Problem::failed("the journal no longer knows the move"));
        };
        match settle(record.is_recorded, self.found().await?) {
            Settlement::GoOn if is_left => Ok(Settled::GoesOn),
            Settlement::GoOn | Settlement::Undo => self.undo(&record).await,
            Settlement::RevokeAndUndo => {
                let definition = self.definition(&self.one.from);
                self.moves.incoming.journal.revoke_disk_move(&record.id, &definition)?;
                self.undo(&record).await
            }
            Settlement::SwitchAndFinish => {
                let switched = self.hypervisors()?.switch(self.name(), QEMU_DEADLINE).await;
                switched.map_err(Problem::failed)?;
                self.finish(&record).await
            }
            Settlement::Finish => self.finish(&record).await,
            Settlement::RecordAndFinish => {
                let definition = self.definition(&self.one.to);
                self.moves.incoming.journal.record_disk_move(&record.id, &definition)?;
                self.finish(&record).await
            }
        }
    }

    /// Whether the VM has a process that may still do something.
    fn runs(&self) -> bool {
        self.claimed.vmm.as_ref().is_some_and(|vmm| vmm.alive())
    }

    async fn found(&self) -> Result<FoundMove, Problem> {
        if !self.runs() {
            return Ok(FoundMove::Off);
        }
        match self.hypervisors()?.state(self.name(), QMP_DEADLINE).await {
            Ok(MoveState::None) => Ok(FoundMove::OnOld),
            Ok(MoveState::Copying { .. }) => Ok(FoundMove::Copying),
            Ok(MoveState::Held) => Ok(FoundMove::Held),
            Ok(MoveState::Switched) => Ok(FoundMove::OnNew),
            Ok(MoveState::Failed(why)) => {
                info!(vm = self.one.vm, why, "the copy of its disk has failed");
                Ok(FoundMove::OnOld)
            }
            // Not before it has answered, or is seen to have ended, is it known what it did last.
            Err(error) => Err(Problem::failed(error)),
        }
    }

    /// The VM has the old disk.
    async fn undo(&self, record: &DiskMoveRecord) -> Result<Settled, Problem> {
        let incoming = &self.moves.incoming;
        if self.runs() {
            let abandoned = self.hypervisors()?.abandon(self.name(), QEMU_DEADLINE).await;
            abandoned.map_err(Problem::failed)?;
            self.note(&self.one.from)?;
        }
        incoming.vms.redefine(self.definition(&self.one.from));
        let removed = incoming.files.remove(&record.new, &record.id, named_disks(incoming)?).await;
        let left = removed.err().and_then(|problem| self.stays(&record.new, &problem));
        incoming.journal.end_disk_move(&record.id, left.as_ref())?;
        Ok(Settled::Undone)
    }

    /// The VM has the new disk.
    async fn finish(&self, record: &DiskMoveRecord) -> Result<Settled, Problem> {
        let incoming = &self.moves.incoming;
        if self.runs() {
            self.note(&self.one.to)?;
            let tidied = self.hypervisors()?.tidy(self.name(), QEMU_DEADLINE).await;
            tidied.map_err(Problem::failed)?;
        }
        incoming.vms.redefine(self.definition(&self.one.to));
        let left = self.keep_old(record).await?;
        incoming.journal.end_disk_move(&record.id, left.as_ref())?;
        Ok(Settled::Moved(left.map(|left| left.disk.path)))
    }

    /// Records the VM's new definition, for agents that come later.
    fn note(&self, path: &str) -> Result<(), Problem> {
        let noted = self.hypervisors()?.note(self.one.disk.index(), Path::new(path));
        noted.map_err(Problem::failed)?;
        if let Some(vmm) = &self.claimed.vmm {
            Beside::note_definition(&self.definition(path), vmm.directory());
        }
        Ok(())
    }

    /// Gives the old disk a name that no VM has.
    async fn keep_old(&self, record: &DiskMoveRecord) -> Result<Option<LeftFile>, Problem> {
        let incoming = &self.moves.incoming;
        let (was, file) = (record.old.path.clone(), record.old.file);
        let is_device = file.is_some_and(FileId::is_device);
        let path = if is_device { was.clone() } else { VmFiles::moved_path(&was, &record.id) };
        match incoming.files.rename_left(&record.old, &path, named_disks(incoming)?).await {
            Ok(true) => Ok(Some(self.left(path, was, file))),
            Ok(false) => {
                warn!(vm = record.vm, was, "its old disk is gone, or is another file now: left as it is");
                Ok(None)
            }
            Err(problem) => Ok(self.stays(&record.old, &problem)),
        }
    }

    /// The VM does not have it, and its storage does not do what it should: it keeps its name, and nobody waits for that.
    fn stays(&self, disk: &DiskFile, problem: &Problem) -> Option<LeftFile> {
        let DiskFile { path, file } = disk.clone();
        warn!(vm = self.one.vm, path, %problem, "a disk that the VM does not use stays as it is: see \
            `drainpipe disk left`");
        file.map(|file| self.left(path.clone(), path, Some(file)))
    }

    fn left(&self, path: String, was: String, file: Option<FileId>) -> LeftFile {
        let (vm, target) = (self.one.vm.clone(), self.moves.incoming.host.name().to_owned());
        let left_at = Timestamp::now().to_string();
        let is_device = file.is_some_and(FileId::is_device);
        let disk = LeftDisk { path, was, vm, target, left_at, kept_until: None, is_device };
        LeftFile { disk, file, part: None, until_s: None }
    }

    fn tell(&self, settled: Settled, problem: Option<Problem>) {
        let is_cancelled = self.one.is_cancelled.load(Ordering::Relaxed);
        match settled {
            Settled::Moved(left) => self.one.end(DiskMoveOutcome::Completed, None, left),
            Settled::Undone | Settled::GoesOn if is_cancelled => {
                self.one.end(DiskMoveOutcome::Cancelled, None, None);
            }
            Settled::Undone | Settled::GoesOn => {
                let ended = || Problem::failed("the agent ended before the VM used the new disk");
                self.one.end(DiskMoveOutcome::Failed, Some(problem.unwrap_or_else(ended)), None);
            }
        }
    }
}
