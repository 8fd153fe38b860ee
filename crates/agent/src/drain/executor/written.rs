//! The journal's record of a drain.

use std::collections::BTreeMap;
use std::time::Instant;

use drainpipe_engine::drain::status::{DisksProgress, DrainStatus, MoveStatus};
use drainpipe_engine::journal::RECORD_AGAIN_AFTER;
use drainpipe_engine::problem::Problem;
use tracing::warn;

use crate::store::journal::Journal;

pub(super) struct Written {
    status: DrainStatus,
    // Why the journal could not be written, and when that is tried again.
    failed: Option<(Problem, Instant)>,
}

impl Written {
    /// It has this.
    pub(super) fn of(status: &DrainStatus) -> Self {
        Self { status: status.clone(), failed: None }
    }

    /// Why it could not be written last.
    pub(super) fn problem(&self) -> Option<&Problem> {
        self.failed.as_ref().map(|(problem, _)| problem)
    }

    /// Whether it is time to write.
    pub(super) fn may_be_tried(&self) -> bool {
        self.failed.as_ref().is_none_or(|(_, again_at)| Instant::now() >= *again_at)
    }

    /// Whether it was.
    pub(super) fn note(&mut self, drain: &str, recorded: Result<(), Problem>) {
        self.failed = recorded.err().map(|problem| {
            warn!(%problem, drain, "it waits until its journal can be written");
            (problem, Instant::now() + RECORD_AGAIN_AFTER)
        });
    }

    /// All VMs are written again: what changes all the time counts in the end.
    pub(super) fn forget_moves(&mut self) {
        self.status.moves.clear();
    }

    /// Writes down what has changed, but for what changes all the time.
    pub(super) fn record(
        &mut self,
        journal: &Journal,
        drain: &str,
        status: &DrainStatus,
    ) -> Result<(), Problem> {
        let known: BTreeMap<&str, &MoveStatus> =
            self.status.moves.iter().map(|one| (one.vm.as_str(), one)).collect();
        let is_news = |one: &MoveStatus| known.get(one.vm.as_str()).is_none_or(|known| differ(one, known));
        let changed: Vec<(usize, &MoveStatus)> =
            status.moves.iter().enumerate().filter(|(_, one)| is_news(one)).collect();
        let is_gone = |vm: &&str| status.moves.iter().all(|one| one.vm != **vm);
        let gone: Vec<&str> = known.keys().copied().filter(is_gone).collect();
        let is_same = changed.is_empty()
            && gone.is_empty()
            && (status.state, &status.stays, status.transfers, &status.warnings)
                == (self.status.state, &self.status.stays, self.status.transfers, &self.status.warnings);
        if is_same {
            return Ok(());
        }
        journal.record_drain(drain, status, &changed, &gone)?;
        self.status = status.clone();
        Ok(())
    }
}

/// Whether they differ in more than the bytes that have arrived.
fn differ(one: &MoveStatus, other: &MoveStatus) -> bool {
    let without_bytes = |one: &MoveStatus| {
        let disks = one.disks.map(|disks| DisksProgress { copied_bytes: 0, ..disks });
        MoveStatus { sent_bytes: 0, disks, ..one.clone() }
    };
    without_bytes(one) != without_bytes(other)
}
