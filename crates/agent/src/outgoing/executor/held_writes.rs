//! Holds the VM's writes back as the engine says, if they cannot wait for the target.

use std::time::{Duration, Instant};

use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskState, WriteLimit};
use tracing::warn;

use super::{Executor, hypervisor_failed};
use crate::vms::QMP_DEADLINE;

/// How soon QEMU gets the same limit again.
const HELD_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// How they are held back now.
#[derive(Debug, Default)]
pub(super) struct HeldWrites {
    /// Whether they are, as far as is necessary.
    pub(super) is_begun: bool,
    limit: Option<(WriteLimit, Instant)>,
    /// Why they are not as they should be.
    pub(super) problem: Option<Problem>,
    /// How far the copies were when they were looked at last, while memory is sent; none that the engine knows already.
    pub(super) states: Option<Vec<DiskState>>,
}

impl Executor {
    /// Now and then again, for a guard that has taken this agent for dead has let them go; but not often: QEMU forgets each time
    /// what it has let pass just now.
    pub(super) async fn follow_write_limit(&mut self, limit: Option<WriteLimit>) {
        let is_held =
            |(held, since): (WriteLimit, Instant)| Some(held) == limit && since.elapsed() < HELD_AGAIN_AFTER;
        if self.copying.held_writes.limit.is_some_and(is_held) {
            return;
        }
        let Some(limit) = limit else { return };
        match self.hold_writes(limit).await {
            Ok(true) => self.copying.held_writes.limit = Some((limit, Instant::now())),
            // QEMU is too busy to answer: at the next look.
            Ok(false) => {}
            Err(problem) => {
                warn!(vm = self.running.vm, %problem, "its writes cannot be limited as planned");
                self.copying.held_writes.limit = Some((limit, Instant::now()));
                self.copying.held_writes.problem = Some(problem);
            }
        }
    }

    async fn hold_writes(&self, limit: WriteLimit) -> Result<bool, Problem> {
        match self.disk_copies()?.hold_writes(&self.copied_disks(), limit, QMP_DEADLINE).await {
            Ok(()) => Ok(true),
            Err(error) if error.is_mute() => Ok(false),
            Err(error) => Err(hypervisor_failed(error)),
        }
    }

    /// What helps where a copy has not ended in the pause.
    pub(super) fn tell_of_held(&self, problem: Problem) -> Problem {
        if !self.copying.held_writes.is_begun {
            return problem;
        }
        problem.context(
            "the VM's last writes were not on the target soon enough after its pause; let it write less \
            meanwhile, or boot it in QEMU 8.2 or newer, where writes wait for the target",
        )
    }
}
