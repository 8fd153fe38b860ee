//! VMs that were told to run here and whose source has not heard that they do, when the agent starts.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Vmm;
use drainpipe_hypervisor::migration;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::agent::Agent;
use crate::api::types::HandOverView;
use crate::journal::Arrival;
use crate::vms::{Claim, QMP_DEADLINE};

/// How often the source of a VM that is gone is asked, and how many times: an hour. After that the agent's next
/// start asks again.
const ASK_EVERY: Duration = Duration::from_secs(5);
const QUESTIONS_MAX: u32 = 720;

/// Lets run what the journal says runs here, but whose agent stopped between the record and the deed; of the VMs with
/// such names. Where its QEMU is gone, its source is asked whether it still belongs here.
pub(crate) async fn resume_recorded(
    agent: &Arc<Agent>,
    is_meant: impl Fn(&str) -> bool,
) -> Result<(), Problem> {
    for arrival in agent.journal.unfinished_arrivals()? {
        if !is_meant(&arrival.vm) {
            continue;
        }
        match agent.vms.running(&arrival.vm) {
            _ if has_left(agent, &arrival) || moves_on(agent, &arrival)? => {
                agent.journal.finish_incoming(&arrival.id)?;
            }
            Some(vmm) => {
                if !resume(agent, &arrival, &vmm).await? {
                    tokio::spawn(resume_later(Arc::clone(agent), arrival, vmm));
                }
            }
            None => drop(tokio::spawn(ask_for(Arc::clone(agent), arrival))),
        }
    }
    Ok(())
}

/// Whether it runs.
async fn resume(agent: &Agent, arrival: &Arrival, vmm: &Vmm) -> Result<bool, Problem> {
    match migration::run(vmm, QMP_DEADLINE).await {
        Ok(()) => {
            info!(vm = arrival.vm, "runs here, as its source had handed it over");
            agent.journal.finish_incoming(&arrival.id)?;
            Ok(true)
        }
        Err(error) => {
            warn!(vm = arrival.vm, %error, "was handed over to this host, but does not run yet");
            Ok(false)
        }
    }
}

/// While its QEMU lives, which may have no time to answer.
async fn resume_later(agent: Arc<Agent>, arrival: Arrival, vmm: Arc<Vmm>) {
    for _ in 0..QUESTIONS_MAX {
        sleep(ASK_EVERY).await;
        if !vmm.alive() || moves_on(&agent, &arrival).unwrap_or(true) {
            return;
        }
        if matches!(resume(&agent, &arrival, &vmm).await, Ok(true)) {
            return;
        }
    }
}

/// Whether it is none of this host's VMs any more: an older Drainpipe left the arrival open when the VM moved on.
fn has_left(agent: &Agent, arrival: &Arrival) -> bool {
    !agent.vms.contains(&arrival.vm)
}

/// Whether it is on its way to a third host. Then only that migration says where it may run.
fn moves_on(agent: &Agent, arrival: &Arrival) -> Result<bool, Problem> {
    Ok(agent.journal.open_migrations()?.iter().any(|open| open.vm == arrival.vm))
}

async fn ask_for(agent: Arc<Agent>, arrival: Arrival) {
    for _ in 0..QUESTIONS_MAX {
        match settle(&agent, &arrival).await {
            Ok(true) => return,
            Ok(false) => {}
            Err(problem) => {
                debug!(vm = arrival.vm, %problem, "whether it still is this host's is not known yet");
            }
        }
        sleep(ASK_EVERY).await;
    }
}

/// Whether it is settled whose the VM is.
async fn settle(agent: &Agent, arrival: &Arrival) -> Result<bool, Problem> {
    let Arrival { id, vm, source } = arrival;
    let peer =
        agent.peer(source).ok_or_else(|| Problem::not_found(format!("{source} is no peer any more")))?;
    match peer.get::<HandOverView>(&format!("/v1/handovers/{id}")).await? {
        // A source that has lost its record knows nothing of it.
        HandOverView::Pending | HandOverView::Unknown => return Ok(false),
        HandOverView::HandedOver => agent.journal.finish_incoming(id)?,
        HandOverView::Refused => forget(agent, arrival)?,
    }
    info!(vm, source, "its source was asked whose it is");
    Ok(true)
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
