//! What this host's record of a hand-over means: to the target that asks, to an operator who knows that the target is
//! lost, and to a request to stop the VM here.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::format::bound;
use drainpipe_engine::migration::SourceState;
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_engine::problem::Problem;
use tokio::time::{sleep, timeout};

use super::{Outgoing, Running};
use crate::guard::source_state::source_state;
use drainpipe_api_types::HandOverView;

/// How long it may take to ask once more a target that is said to be lost, and to undo all.
const DECISION_DEADLINE: Duration = Duration::from_mins(1);

/// How often it is looked whether it is.
const DECISION_LOOK_EVERY: Duration = Duration::from_millis(50);

/// Gives a VM back to this host that was handed over to one which does not answer, because the operator says
/// that that one is lost with all that ran there. Does not believe it while it answers. The VM is to be booted
/// again: it may have run there for a while, and its disks would not fit its memory here.
pub(crate) async fn reclaim(outgoing: &Outgoing, vm: &str, lost: &str) -> Result<MigrationResult, Problem> {
    let running = handed_over(outgoing, vm)?.ok_or_else(|| {
        Problem::conflict(format!(
            "{vm} is not in doubt: {} has no hand-over of it that waits for its target",
            outgoing.host.name()
        ))
    })?;
    if running.target != lost {
        return Err(Problem::bad_input(format!("{vm} was handed over to {}, not to {lost}", running.target)));
    }
    let _word = Word::given(&running);
    let decided = async {
        loop {
            if let Some(result) = outgoing.journal.result(&running.id)? {
                return Ok(result);
            }
            sleep(DECISION_LOOK_EVERY).await;
        }
    };
    timeout(DECISION_DEADLINE, decided).await.unwrap_or_else(|_| {
        Err(Problem::failed(format!(
            "{vm} is still in doubt after {}; see the log of {}",
            bound(DECISION_DEADLINE),
            outgoing.host.name()
        )))
    })
}

/// The migration by which a VM was handed over to another host, which has not said yet what has become of it.
fn handed_over(outgoing: &Outgoing, vm: &str) -> Result<Option<Arc<Running>>, Problem> {
    let Some(running) = outgoing.migrations.of_vm(vm) else { return Ok(None) };
    let open = outgoing.journal.open_migration(&running.id)?;
    Ok(open.is_some_and(|open| open.handed_over).then_some(running))
}

/// Refuses to stop a VM here that is another host's: what is left of it here that host may need.
pub(crate) fn check_own(outgoing: &Outgoing, vm: &str) -> Result<(), Problem> {
    let Some(running) = handed_over(outgoing, vm)? else { return Ok(()) };
    let Running { id, target, .. } = &*running;
    Err(Problem::conflict(format!(
        "VM {vm} was handed over to {target} (migration {id}), and is stopped there: `drainpipe vm stop {vm}`, with \
         `--force` if its QEMU there does not answer, asked of the agent of {target}; if {target} is lost for good, \
         `drainpipe vm reclaim {vm} --lost {target}` gives it back to {own}",
        own = outgoing.host.name(),
    )))
}

/// The operator's word that a target is lost, which holds only as long as somebody waits for what follows.
struct Word<'a>(&'a Running);

impl<'a> Word<'a> {
    fn given(running: &'a Running) -> Self {
        running.target_lost.send_replace(true);
        Self(running)
    }
}

impl Drop for Word<'_> {
    fn drop(&mut self) {
        self.0.target_lost.send_replace(false);
    }
}

/// What the journal says of a hand-over, for the target that asks; and to which target it goes.
pub(crate) async fn hand_over_view(
    outgoing: &Outgoing,
    id: &str,
) -> Result<(Option<String>, HandOverView), Problem> {
    if let Some(open) = outgoing.journal.open_migration(id)? {
        let goes_on = outgoing.migrations.get(id).is_some_and(|running| !running.is_over());
        let view = match (open.handed_over, goes_on) {
            (true, _) if has_let_go(outgoing, &open.vm).await => HandOverView::HandedOver,
            // The VM has run on here, so it is about to be revoked.
            (true, _) | (false, true) => HandOverView::Pending,
            (false, false) => HandOverView::Refused,
        };
        return Ok((Some(open.target), view));
    }
    let result = outgoing.journal.result(id)?;
    let view = match result.as_ref().map(MigrationResult::has_left) {
        Some(true) => HandOverView::HandedOver,
        Some(_) => HandOverView::Refused,
        None => HandOverView::Unknown,
    };
    Ok((result.map(|result| result.target), view))
}

/// Whether this host is known to have let go of a VM.
async fn has_let_go(outgoing: &Outgoing, vm: &str) -> bool {
    let is_in_reach = outgoing.vms.why_unresponsive(vm).is_none();
    is_in_reach && source_state(outgoing.vms.running(vm).as_deref()).await == Ok(SourceState::LetGo)
}
