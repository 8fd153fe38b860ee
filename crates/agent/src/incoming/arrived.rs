//! VMs that were told to run here and whose source has not heard that they do, when the agent starts: carries out what the
//! engine decides of each.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::migration::target::IncomingState;
use drainpipe_engine::migration::target::resume::{AGAIN_AFTER_MS, Action, Event, Resumption};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::{Vmm, migration};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::silence::ask_source;
use crate::agent::Agent;
use crate::journal::Arrival;
use crate::vms::{Claim, QMP_DEADLINE};

/// How often what failed is tried again.
const AGAIN_AFTER: Duration = Duration::from_millis(AGAIN_AFTER_MS);

/// Lets run what the journal says runs here, but whose agent stopped between the record and the deed; of the VMs with
/// such names. Where its QEMU is gone, its source is asked whether it still belongs here. What is to be waited for goes on
/// beside.
pub(crate) async fn resume_recorded(
    agent: &Arc<Agent>,
    is_meant: impl Fn(&str) -> bool,
) -> Result<(), Problem> {
    for arrival in agent.journal.unfinished_arrivals()? {
        if !is_meant(&arrival.vm) {
            continue;
        }
        let (mut resumption, mut action) = Resumption::begin();
        while !matches!(action, Action::Pause | Action::AskSource | Action::Leave) {
            action = resumption.handle(perform(agent, &arrival, action).await);
        }
        tokio::spawn(go_on(Arc::clone(agent), arrival, resumption, action));
    }
    Ok(())
}

async fn go_on(agent: Arc<Agent>, arrival: Arrival, mut resumption: Resumption, mut action: Action) {
    while action != Action::Leave {
        action = resumption.handle(perform(&agent, &arrival, action).await);
    }
}

async fn perform(agent: &Agent, arrival: &Arrival, action: Action) -> Event {
    try_perform(agent, arrival, action).await.unwrap_or_else(|problem| {
        not_settled(arrival, &problem);
        Event::Failed
    })
}

fn not_settled(arrival: &Arrival, problem: &Problem) {
    debug!(vm = arrival.vm, %problem, "whether it runs here, and still is this host's, is not settled yet");
}

async fn try_perform(agent: &Agent, arrival: &Arrival, action: Action) -> Result<Event, Problem> {
    match action {
        Action::Recall => return recall(agent, arrival),
        Action::LetRun => return Ok(let_run(agent, arrival).await),
        Action::AskSource => {
            let (said, problem) = ask_source(agent, &arrival.source, &arrival.id).await;
            if let Some(problem) = problem {
                not_settled(arrival, &problem);
            }
            return Ok(Event::SourceSays(said));
        }
        Action::Finish => agent.journal.finish_incoming(&arrival.id)?,
        Action::Forget => forget(agent, arrival)?,
        Action::Pause => sleep(AGAIN_AFTER).await,
        Action::Leave => {}
    }
    Ok(Event::Done)
}

fn recall(agent: &Agent, Arrival { id, vm, .. }: &Arrival) -> Result<Event, Problem> {
    let state = agent.journal.incoming_state(id)?.map(|(_, state)| state);
    let is_open = state == Some(IncomingState::Running);
    // An older Drainpipe left the arrival open when the VM moved on.
    let is_here = agent.vms.contains(vm);
    // Then only that migration says where it may run.
    let moves_on = agent.journal.open_migrations()?.iter().any(|open| open.vm == *vm);
    Ok(match agent.vms.running(vm) {
        _ if !is_open || !is_here || moves_on => Event::Left,
        Some(vmm) if vmm.alive() => Event::Here,
        _ => Event::Gone,
    })
}

async fn let_run(agent: &Agent, Arrival { vm, .. }: &Arrival) -> Event {
    let Some(vmm) = agent.vms.running(vm) else { return Event::Failed };
    match migration::run(&vmm, QMP_DEADLINE).await {
        Ok(()) => {
            info!(vm, "runs here, as its source had handed it over");
            Event::Done
        }
        Err(error) => {
            warn!(vm, %error, "was handed over to this host, but does not run yet");
            Event::Failed
        }
    }
}

/// It was given back to its source, which took this host for lost.
fn forget(agent: &Agent, Arrival { id, vm, source }: &Arrival) -> Result<(), Problem> {
    let claimed = agent.vms.claim(vm, Claim::Changing)?;
    if claimed.vmm.is_some() || !agent.journal.take_back_run(id)? {
        warn!(
            vm,
            source, "was given back to its source, and was started here since: it may run on both hosts"
        );
        return Ok(());
    }
    let paths = agent.vms.paths(&claimed.definition)?;
    agent.vms.forget(vm);
    warn!(vm, source, "is this host's no more: it was given back to its source");
    Vmm::clear(&paths).map_err(Problem::failed)
}
