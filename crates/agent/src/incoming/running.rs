//! Steps 8 and 9: the last of the state arrives, and the VM runs here; and what is said to a source that asks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration::{self, MigrationError, MigrationStatus};
use drainpipe_hypervisor::qmp::QmpError;
use drainpipe_hypervisor::{RunState, Vmm};
use drainpipe_relay::{Receiver, RelayError};
use tokio::time::timeout;
use tracing::{info, warn};

use super::post_copy::{LOOK_WITHIN, how_it_runs, is_here_in_part, may_run_in_part};
use super::silence::{WATCH_EVERY, take_hold};
use super::{IncomingVm, remove_skeleton};
use crate::agent::Agent;
use crate::api::types::IncomingView;
use crate::journal::IncomingState;
use crate::lock::lock;
use crate::precedence;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE, qemu_has_ended};

/// QEMU closes its sockets a moment before its process has ended. Its source waits for an answer for half a second.
const EXIT_KNOWN_WITHIN: Duration = Duration::from_millis(300);

/// Waits until all state is here. A VM that is paused on its source goes first here from now on.
pub(crate) async fn wait_received(
    agent: &Agent,
    id: &str,
    is_paused: bool,
    deadline: Duration,
) -> Result<IncomingView, Problem> {
    let entry = agent.incoming.get(id)?;
    if let Err(problem) = take_hold(agent, &entry).await {
        warn!(migration = id, %problem, "the skeleton does not answer yet; the source asks again");
        tokio::time::sleep(WATCH_EVERY).await;
        return Ok(IncomingView::Waiting);
    }
    let vmm = entry.vmm()?;
    if is_paused {
        precedence::begin(agent, &vmm);
    }
    let mut events = vmm.events();
    let end = tokio::time::Instant::now() + deadline;
    loop {
        let status = match status_of(&entry, &vmm).await {
            Ok(status) => status,
            Err(error) if matches!(error, QmpError::Closed { .. }) || !vmm.alive() => {
                if let Some(why) = relay_error(&entry) {
                    return Err(could_not_take_the_state(agent, &why));
                }
                let exit = vmm.wait_exit(EXIT_KNOWN_WITHIN).await;
                return Err(Problem::failed(qemu_has_ended(agent.name(), exit.as_ref())));
            }
            // Its main thread waits for pages that are late. For how long they may be is the source's to say.
            Err(QmpError::Deadline { .. }) => return Ok(IncomingView::Waiting),
            Err(error) => return Err(Problem::failed(error)),
        };
        match status.status {
            MigrationStatus::Completed => return Ok(IncomingView::Ready),
            _ if is_here_in_part(&entry, &status, &vmm).await? => return Ok(IncomingView::ReadyInPart),
            MigrationStatus::Failed => {
                let why = relay_error(&entry).or(status.error_desc);
                let why = why.unwrap_or_else(|| "its QEMU does not say why".into());
                return Err(could_not_take_the_state(agent, &why));
            }
            _ => {}
        }
        // Any event, or a missed one, is a reason to look again; so is a closed connection, once.
        match tokio::time::timeout_at(end, events.recv()).await {
            Ok(_) => {}
            Err(_) => return Ok(IncomingView::Waiting),
        }
    }
}

/// Why the relay has broken off, which ends QEMU too. That QEMU's end is closed says less than how QEMU has ended.
fn relay_error(entry: &IncomingVm) -> Option<String> {
    let error = lock(&entry.relay).as_ref().and_then(Receiver::error)?;
    (!matches!(error, RelayError::Local(_))).then(|| error.to_string())
}

fn could_not_take_the_state(agent: &Agent, why: &str) -> Problem {
    Problem::failed(format!("{} could not take the state: {why}", agent.name()))
}

/// Whose word it is that a VM is to run here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Its source's, which knows that the rest follows if not all of it is here.
    Sources,
    /// This host's own, by what the journals say.
    Own,
}

/// How long its source waits until it hears that the VM runs. It asks 5 s later at the latest.
const RUNS_WITHIN: Duration = Duration::from_secs(4);

/// Step 9, by its source's order. A source that hangs up, or a QEMU that says late that the VM runs, changes nothing of
/// what becomes of it.
pub(crate) async fn run_by_order(agent: &Arc<Agent>, id: &str) -> Result<(), Problem> {
    let (agent, of) = (Arc::clone(agent), id.to_owned());
    let name = agent.name().to_owned();
    let running = tokio::spawn(async move { run(&agent, &of, Order::Sources).await });
    match timeout(RUNS_WITHIN, running).await {
        Ok(Ok(ran)) => ran,
        Ok(Err(crash)) => Err(Problem::failed(crash)),
        Err(_) => Err(runs_not_yet(&name)),
    }
}

fn runs_not_yet(host: &str) -> Problem {
    Problem::failed(format!("the VM's QEMU on {host} has not said yet that the VM runs"))
}

/// Step 9: the VM runs here. Idempotent.
pub(super) async fn run(agent: &Agent, id: &str, order: Order) -> Result<(), Problem> {
    let Ok(entry) = agent.incoming.get(id) else { return already_runs(agent, id) };
    let _stepping = entry.stepping.lock().await;
    // It may be paused by now, on its way to a third host, or have left for that: an order that is repeated, or late,
    // must not touch it.
    let is_closed = matches!(agent.journal.incoming_state(id)?, Some((_, IncomingState::Finished)));
    if is_closed || entry.is_adopted(agent) {
        return already_runs(agent, id);
    }
    let vmm = entry.vmm()?;
    if let Err(problem) = check_received(agent, &entry, &vmm, order).await {
        let was_told = matches!(agent.journal.incoming_state(id)?, Some((_, IncomingState::Running)));
        if was_told && !vmm.alive() {
            // Its QEMU ended just when it was told to run, which was not known then.
            entry.join(agent, vmm);
        }
        return Err(problem);
    }
    if !agent.journal.run_incoming(id)? {
        return Err(Problem::conflict(format!("{} discarded the VM of migration {id}", agent.name())));
    }
    entry.is_told_to_run.store(true, Ordering::Relaxed);
    precedence::begin(agent, &vmm);
    precedence::end_soon(&vmm);
    if let Err(error) = migration::run(&vmm, entry.answers_within()).await {
        return Err(does_not_run(agent, &entry, vmm, error).await);
    }
    entry.join(agent, vmm);
    info!(vm = %entry.definition.name, source = entry.source, "runs here");
    Ok(())
}

/// What becomes of a VM that was recorded to run here, and QEMU did not let it.
async fn does_not_run(agent: &Agent, entry: &IncomingVm, vmm: Arc<Vmm>, error: MigrationError) -> Problem {
    let problem = Problem::failed(format!("the VM does not run on {}: {error}", agent.name()));
    let refused =
        matches!(error, MigrationError::Qmp(QmpError::Command { .. }) | MigrationError::MemoryIncomplete(_));
    let state = match error {
        // It would not answer this either.
        MigrationError::Qmp(error @ QmpError::Deadline { .. }) => Err(error),
        _ => vmm.run_state(QMP_DEADLINE).await,
    };
    match state {
        // A refusal, as of a disk that another QEMU holds locked, means that the source can have it back, as long as it
        // is as it arrived; but with post-copy the source could not let it run.
        Ok(RunState::Paused | RunState::Prelaunch | RunState::Inmigrate)
            if refused && !entry.came_in_parts.load(Ordering::Relaxed) =>
        {
            if let Err(error) = take_back(agent, entry).await {
                return problem.context(error);
            }
        }
        // Without an answer it is not known; the source asks again.
        Ok(RunState::Paused | RunState::Prelaunch | RunState::Inmigrate) => {}
        Err(_) if vmm.alive() => {}
        // It may have run for a moment, before its QEMU ended, or before a vCPU failed, of which a second order to run
        // is refused. So its source must not let it run again; it has crashed here.
        Ok(_) | Err(_) => entry.join(agent, vmm),
    }
    problem
}

async fn take_back(agent: &Agent, entry: &IncomingVm) -> Result<(), Problem> {
    agent.journal.take_back_run(&entry.id)?;
    remove_skeleton(agent, &entry.id, Some(entry)).await
}

pub(super) fn already_runs(agent: &Agent, id: &str) -> Result<(), Problem> {
    match agent.journal.incoming_state(id)? {
        Some((_, IncomingState::Running)) if is_still_to_run(agent, id)? => Err(runs_not_yet(agent.name())),
        Some((_, IncomingState::Running | IncomingState::Finished)) => Ok(()),
        _ => Err(Problem::conflict(format!("{} discarded the VM of migration {id}", agent.name()))),
    }
}

impl IncomingVm {
    /// How long its QEMU may take for an answer. One that lacks a part of the VM is mute from when it is told to run it until
    /// the page comes that it waits for. Its source, which is to send that page by another connection, must not wait for
    /// that answer.
    pub(super) fn answers_within(&self) -> Duration {
        let may_wait_for_page = self.is_told() && self.came_in_parts.load(Ordering::Relaxed);
        if may_wait_for_page { LOOK_WITHIN } else { QMP_DEADLINE }
    }
}

/// How far QEMU is with what comes. That all of it is here is noted.
pub(super) async fn status_of(entry: &IncomingVm, vmm: &Vmm) -> Result<migration::TransferStatus, QmpError> {
    let status = migration::status(vmm, entry.answers_within()).await?;
    if status.status == MigrationStatus::Completed {
        entry.note_received();
    }
    Ok(status)
}

pub(super) async fn check_received(
    agent: &Agent,
    entry: &IncomingVm,
    vmm: &Vmm,
    order: Order,
) -> Result<(), Problem> {
    let status = status_of(entry, vmm).await.map_err(Problem::failed)?;
    let may_be_in_part = order == Order::Sources;
    if status.status == MigrationStatus::Completed
        || may_be_in_part && is_here_in_part(entry, &status, vmm).await?
    {
        return Ok(());
    }
    Err(Problem::failed(format!("not all state of the VM is on {}: {}", agent.name(), status.status)))
}

/// What was decided here, by the journal; and what could be decided.
pub(crate) async fn view(agent: &Agent, id: &str) -> Result<IncomingView, Problem> {
    let Some((_, state)) = agent.journal.incoming_state(id)? else { return Ok(IncomingView::Unknown) };
    Ok(match state {
        // The source must not let its copy go.
        IncomingState::Running if is_still_to_run(agent, id)? => {
            if may_run_in_part(agent, id).await {
                IncomingView::RunningInPart
            } else {
                IncomingView::Ready
            }
        }
        IncomingState::Running | IncomingState::Finished => how_it_runs(agent, id).await?,
        IncomingState::Discarded => IncomingView::Discarded,
        IncomingState::Waiting => match agent.incoming.get(id) {
            Ok(entry) => how_far(agent, &entry).await?,
            Err(_) => IncomingView::Waiting,
        },
    })
}

/// Of a VM that is recorded to run here: whether QEMU has not said yet that it does.
pub(super) fn is_still_to_run(agent: &Agent, id: &str) -> Result<bool, Problem> {
    // Also in the moment after the record in which it has not been told yet.
    if let Ok(entry) = agent.incoming.get(id) {
        return Ok(!entry.is_let_run.load(Ordering::Relaxed));
    }
    // An earlier life of this agent has recorded it, and QEMU has not obeyed this one yet.
    let lives = |vm: &str| {
        agent.vms.out_of_reach_for(vm).is_some() || agent.vms.running(vm).is_some_and(|vmm| vmm.alive())
    };
    let mut arrivals = agent.journal.unfinished_arrivals()?.into_iter();
    Ok(arrivals.any(|arrival| arrival.id == id && lives(&arrival.vm)))
}

/// An error where QEMU does not say: what it has may be the only copy of the VM.
async fn how_far(agent: &Agent, entry: &IncomingVm) -> Result<IncomingView, Problem> {
    let mute = || Problem::failed(format!("its QEMU on {} does not answer", agent.name()));
    let vmm = lock(&entry.vmm).clone();
    match vmm {
        Some(vmm) => match status_of(entry, &vmm).await {
            Ok(status) if status.status == MigrationStatus::Completed => Ok(IncomingView::Ready),
            Ok(status) if is_here_in_part(entry, &status, &vmm).await? => Ok(IncomingView::ReadyInPart),
            Err(QmpError::Deadline { .. }) if vmm.alive() => Err(mute()),
            Ok(_) | Err(_) => Ok(IncomingView::Waiting),
        },
        // It stood before this agent did.
        None if entry.spec.is_none() => Err(mute()),
        None => Ok(IncomingView::Waiting),
    }
}

/// Ends the QEMU of a VM that was told to run here, and of which nobody has said that it does, as somebody wants it. What
/// the VM had in memory is lost, here and on its source. False if there is no such VM.
pub(crate) async fn stop_told(agent: &Arc<Agent>, vm: &str, force: bool) -> Result<bool, Problem> {
    let Some(entry) = agent.incoming.told(vm) else { return Ok(false) };
    let Some(vmm) = lock(&entry.vmm).clone() else { return Ok(false) };
    if !force {
        return Err(Problem::conflict(format!(
            "VM {vm} was handed over to {own} and may run there, but its QEMU does not say so yet (migration {id} from \
             {source}): wait, or `drainpipe vm stop {vm} --force`, with which all is lost that it has in memory",
            own = agent.name(),
            id = entry.id,
            source = entry.source,
        )));
    }
    warn!(vm, migration = entry.id, "its QEMU, which does not answer, is ended as somebody wants it");
    vmm.destroy(QEMU_DEADLINE).await.map_err(Problem::failed)?;
    // As any VM that has ended where it ran.
    entry.join(agent, vmm);
    Ok(true)
}
