//! The target's report, while memory is copied to it, that it cannot take the VM.
//!
//! The source's QEMU learns nothing of that, or too little: resets are kept from it
//! ([`drainpipe_hypervisor::Connections::ignore_resets`]), and only the target knows why it failed.

use std::future::pending;
use std::sync::Arc;

use drainpipe_engine::migration::timing::{ASK_AGAIN_AFTER, RECEIVED_WAIT};
use drainpipe_engine::problem::{Problem, ProblemKind};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{Outgoing, Running, received_path};
use crate::vms::QMP_DEADLINE;
use drainpipe_api_types::IncomingView;

/// Asks the target until it is dropped; by default it asks nobody.
#[derive(Debug, Default)]
pub(super) struct TargetWatch(JoinSet<Problem>);

impl TargetWatch {
    pub(super) fn start(outgoing: &Arc<Outgoing>, running: &Arc<Running>) -> Self {
        let mut task = JoinSet::new();
        task.spawn(watch(Arc::clone(outgoing), Arc::clone(running)));
        Self(task)
    }

    /// Why the target cannot take the VM, as soon as it says so.
    pub(super) async fn trouble(&mut self) -> Problem {
        match self.0.join_next().await {
            Some(Ok(problem)) => problem,
            // It has answered already, or nobody is asked.
            _ => pending().await,
        }
    }
}

/// A target that does not answer may be well: its agent restarts, and the links are watched by others.
async fn watch(outgoing: Arc<Outgoing>, running: Arc<Running>) -> Problem {
    let path = received_path(&running.id, false);
    loop {
        let view = match outgoing.peers.target(&running.target) {
            Ok(target) => target.get_within(&path, RECEIVED_WAIT + 2 * QMP_DEADLINE).await,
            Err(problem) => Err(Problem::new(ProblemKind::Unreachable, problem)),
        };
        match view {
            Ok(IncomingView::Waiting) => {}
            Err(problem) if matches!(problem.kind, ProblemKind::Failed | ProblemKind::NotFound) => {
                return problem;
            }
            Ok(_) | Err(_) => sleep(ASK_AGAIN_AFTER).await,
        }
    }
}
