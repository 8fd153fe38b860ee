//! Steps 8 to 10 on the target: carries out what the engine decides about an order, one action after the other.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::migration::target::order::rest::{LAST_BYTES_WITHIN_MS, LOOK_EVERY_MS};
use drainpipe_engine::migration::target::order::{
    ComingVm, Order, OrderAction, OrderAnswer, OrderEvent, Task, VmState, Why,
};
use drainpipe_engine::migration::target::{
    Hypervisor, IncomingState, IncomingView, KnownMigration, MigrationFacts, Received,
};
use drainpipe_engine::migration::timing::RECEIVED_LOOK_MAX;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::{Machine, RunState, VmErrorKind};
use drainpipe_relay::RelayError;
use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tracing::{info, warn};

use super::connect::{Listening, listen};
use super::ending::{finish_incoming, remove};
use super::post_copy::{look_at_connection, look_at_rest, ordered_hypervisor};
use super::vm::{IncomingVm, WATCH_EVERY, not_built};
use super::{Incoming, insert_unless_there, no_migration, not_on_its_way};
use super::{disks, hooks};
use crate::host::hardware;
use crate::store::journal::IncomingRecord;
use crate::vms::cpu_priority;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE, qemu_has_ended};
use drainpipe_api_types::{ConnectionRequest, Endpoint, TargetUse};

/// QEMU closes its sockets a moment before its process has ended. Its source waits for an answer for half a second.
const EXIT_KNOWN_WITHIN: Duration = Duration::from_millis(300);

/// How long its source waits until it hears that the VM runs. It asks 5 s later at the latest.
const RUNS_WITHIN: Duration = Duration::from_secs(4);

/// Step 9, by its source's order. A source that hangs up, or a QEMU that says late that the VM runs, changes nothing of
/// what becomes of it.
pub(crate) async fn run_by_order(incoming: &Arc<Incoming>, id: &str) -> Result<(), Problem> {
    let (incoming, of) = (Arc::clone(incoming), id.to_owned());
    let name = incoming.host.name().to_owned();
    let running =
        tokio::spawn(async move { carry_out(&incoming, &of, Order::Run { is_sources: true }).await });
    match timeout(RUNS_WITHIN, running).await {
        Ok(Ok(ran)) => ran.map(drop),
        Ok(Err(crash)) => Err(Problem::failed(crash)),
        Err(_) => Err(runs_not_yet(&name)),
    }
}

/// The decision in the journal, and the decisions that are still possible.
pub(crate) async fn view(incoming: &Arc<Incoming>, id: &str) -> Result<IncomingView, Problem> {
    Ok(as_view(carry_out(incoming, id, Order::View).await?))
}

/// Waits until what it needs to run is here, for this long. A VM that is paused on its source goes first here from now on.
pub(crate) async fn wait_received(
    incoming: &Arc<Incoming>,
    id: &str,
    is_paused: bool,
    wait: Duration,
) -> Result<IncomingView, Problem> {
    let mut carrier = Carrier::of(incoming, id);
    (carrier.until, carrier.is_paused) = (Instant::now() + wait, is_paused);
    Ok(as_view(carrier.carry_out(Order::Receive).await?))
}

/// Listens for the rest of the memory of a VM that runs here, whose connection is broken. What has begun encrypted goes on
/// so, with the key that both QEMUs have; one that has begun in the clear cannot go back, whatever was configured since.
pub(crate) async fn connect_again(
    incoming: &Arc<Incoming>,
    id: &str,
    request: ConnectionRequest,
) -> Result<Endpoint, Problem> {
    let mut carrier = Carrier::of(incoming, id);
    carrier.request = Some(request);
    carrier.carry_out(Order::Reconnect).await?;
    carrier.endpoint.ok_or_else(|| Problem::failed("its QEMU does not report where it listens"))
}

/// Ends a VM that waits for memory which will never come.
pub(crate) async fn end_part(incoming: &Arc<Incoming>, id: &str) -> Result<(), Problem> {
    carry_out(incoming, id, Order::End).await.map(drop)
}

fn as_view(said: OrderAnswer) -> IncomingView {
    match said {
        OrderAnswer::View(view) => view,
        // No order that asks for a view ends so.
        OrderAnswer::Done => IncomingView::Waiting,
    }
}

/// The VM will not run here, which its source hears. Idempotent; refused once it runs, and where there is no record of it.
///
/// An order that comes later than this one finds nothing either. Should it be that of step 2, the VM is given up once
/// its source was asked ([`super::silence`]), which alone can have it run, and has given it up.
pub(crate) async fn discard(incoming: &Arc<Incoming>, id: &str) -> Result<(), Problem> {
    carry_out(incoming, id, Order::Discard { is_sources: true }).await.map(drop)
}

/// The source has nothing more to ask: put the network back, say what was used.
pub(crate) async fn finish(incoming: &Arc<Incoming>, id: &str) -> Result<TargetUse, Problem> {
    let entry = incoming.entries.find(id);
    carry_out(incoming, id, Order::Finish).await?;
    let Some((entry, vmm)) = entry.and_then(|entry| entry.built().map(|vmm| (entry, vmm))) else {
        return Ok(TargetUse::default());
    };
    Ok(TargetUse {
        vmm_cpu_seconds: vmm.cpu_seconds().unwrap_or(0.0),
        agent_cpu_seconds: hardware::own_cpu().saturating_sub(entry.agent_cpu_at_start).as_secs_f64(),
    })
}

/// Carries an order out.
pub(super) async fn carry_out(
    incoming: &Arc<Incoming>,
    id: &str,
    order: Order,
) -> Result<OrderAnswer, Problem> {
    Carrier::of(incoming, id).carry_out(order).await
}

fn runs_not_yet(host: &str) -> Problem {
    Problem::failed(format!("the VM's QEMU on {host} has not said yet that the VM runs"))
}

/// Carries one order out.
struct Carrier<'a> {
    incoming: &'a Arc<Incoming>,
    id: &'a str,
    entry: Option<Arc<IncomingVm>>,
    // Held from when other orders about it wait for this one.
    turn: Option<OwnedMutexGuard<()>>,
    since: Instant,
    // What is waited for may come until then.
    until: Instant,
    is_paused: bool,
    // Why the last action that did not do did not.
    problem: Option<Problem>,
    // The QEMU of a VM that was told to run here, while it lives.
    ordered: Option<Arc<dyn Machine>>,
    // How the rest is to come, and where it does.
    request: Option<ConnectionRequest>,
    endpoint: Option<Endpoint>,
}

impl<'a> Carrier<'a> {
    fn of(incoming: &'a Arc<Incoming>, id: &'a str) -> Self {
        let now = Instant::now();
        Self {
            incoming,
            id,
            entry: incoming.entries.find(id),
            turn: None,
            since: now,
            until: now,
            is_paused: false,
            problem: None,
            ordered: None,
            request: None,
            endpoint: None,
        }
    }

    async fn carry_out(&mut self, order: Order) -> Result<OrderAnswer, Problem> {
        if let Some(entry) = &self.entry
            && matches!(order, Order::Run { .. } | Order::Discard { .. })
        {
            self.turn = Some(entry.take_turn().await);
        }
        // It may have been removed meanwhile, and may have come again.
        self.entry = self.entry.take().filter(|entry| self.incoming.entries.is_there(entry));
        let on_its_way = self.entry.as_ref().map(|entry| ComingVm {
            came_in_parts: entry.memory().came_in_parts(),
            obeys_others: entry.definition.is_defined_elsewhere(),
        });
        let (mut task, mut action) = Task::begin(order, on_its_way);
        loop {
            if let OrderAction::Answer(answer) = action {
                return answer.map_err(|why| self.tell(why));
            }
            let event = self.perform(action).await;
            action = task.handle(event);
        }
    }

    async fn perform(&mut self, action: OrderAction) -> OrderEvent {
        match self.try_perform(action).await {
            Ok(event) => event,
            Err(problem) => self.note(OrderEvent::Failed, problem),
        }
    }

    /// Why it came to this; said if nothing else does.
    fn note(&mut self, event: OrderEvent, problem: Problem) -> OrderEvent {
        self.problem = Some(match self.problem.take() {
            Some(earlier) => earlier.context(problem),
            None => problem,
        });
        event
    }

    async fn try_perform(&mut self, action: OrderAction) -> Result<OrderEvent, Problem> {
        let (incoming, id) = (self.incoming, self.id);
        match action {
            OrderAction::Recall => return Ok(OrderEvent::Known(self.known()?)),
            OrderAction::TakeHold => return Ok(self.take_hold().await),
            OrderAction::Look => return self.look().await,
            OrderAction::LookAtRest => return Ok(self.look_at_rest().await),
            OrderAction::Wait => return self.wait().await,
            OrderAction::TakeLast => return self.take_last().await,
            OrderAction::LetRun => return self.let_run().await,
            OrderAction::LookAtVm => return self.look_at_vm().await,
            OrderAction::EndUnrun => return self.end_unrun().await,
            // Before anything is cut for it.
            OrderAction::TakeUpPart if !self.is_for_post_copy() => {
                return Err(Problem::bad_input("only post-copy can connect again"));
            }
            OrderAction::TakeUpPart => return self.take_up_part().await,
            // A connection over which nothing comes any more may look whole from here.
            OrderAction::CutConnection => self.ordered()?.cut_migration(QMP_DEADLINE).await,
            OrderAction::ListenAgain => self.listen_again().await?,
            OrderAction::LookAtConnection => return self.look_at_connection().await,
            OrderAction::AwaitLastBytes => return Ok(self.await_last_bytes().await),
            OrderAction::EndVm => self.end_vm().await?,
            OrderAction::RecordRun if !incoming.journal.run_incoming(id)? => return Ok(OrderEvent::Refused),
            OrderAction::RecordRun => self.entry()?.memory().order_to_run(),
            OrderAction::CheckRoom => incoming.journal.check_room()?,
            OrderAction::Adopt => self.adopt()?,
            OrderAction::TakeBackRun => drop(incoming.journal.take_back_run(id)?),
            OrderAction::RecordDiscard => {
                return Ok(OrderEvent::State(incoming.journal.discard_incoming(id)?));
            }
            OrderAction::Remove => remove(incoming, id, self.entry.as_deref()).await?,
            OrderAction::Close => finish_incoming(incoming, id).await?,
            OrderAction::NoteSourceKnows => incoming.journal.source_knows(id)?,
            // Those who carry out are given no answer to carry out.
            OrderAction::Answer(_) => {}
        }
        Ok(OrderEvent::Done)
    }

    fn tell(&mut self, why: Why) -> Problem {
        let (own, id) = (self.incoming.host.name(), self.id);
        let text = match why {
            Why::NoRecord => return no_migration(self.incoming, id),
            Why::NotOnItsWay => return not_on_its_way(id),
            Why::NotBuilt => return not_built(id),
            Why::RunsNotYet => return runs_not_yet(own),
            Why::NothingToCome => format!("nothing more of migration {id} is to come to {own}"),
            Why::Overtaken => {
                format!(
                    "the source of migration {id} has connected to {own} again since it sent this request"
                )
            }
            Why::Discarded => format!("{own} discarded the VM of migration {id}"),
            Why::RunsHere => self
                .problem
                .take()
                .map_or_else(|| format!("the VM of migration {id} runs on {own}"), |problem| problem.message),
            Why::Incomplete | Why::TransferFailed | Why::DoesNotRun | Why::Mute | Why::Failed => {
                if let Some(problem) = self.problem.take() {
                    return problem;
                }
                format!("migration {id} cannot continue on {own}")
            }
        };
        Problem::new(why.kind(), text)
    }

    fn entry(&self) -> Result<&Arc<IncomingVm>, Problem> {
        self.entry.as_ref().ok_or_else(|| not_on_its_way(self.id))
    }

    fn vmm(&self) -> Result<Arc<dyn Machine>, Problem> {
        self.entry()?.vmm()
    }

    fn known(&mut self) -> Result<KnownMigration, Problem> {
        let (incoming, id) = (self.incoming, self.id);
        let Some(record) = incoming.journal.incoming_record(id)? else {
            // For a settled one, only the decision may be left.
            let state = incoming.journal.incoming_state(id)?.map(|(_, state)| state);
            return Ok(KnownMigration::by_decision_alone(state));
        };
        let memory = self.entry.as_ref().map(|entry| *entry.memory());
        let known = KnownMigration::of(found(incoming, &record, self.entry.as_deref())?, memory);
        if was_ordered_to_run(&record) {
            self.ordered = ordered_hypervisor(incoming, &record);
        }
        if known.hypervisor == Hypervisor::Unresponsive {
            let why = incoming.vms.why_unresponsive(&record.vm).filter(|_| was_ordered_to_run(&record));
            self.problem = Some(why.map_or_else(|| self.is_mute(), Problem::failed));
        }
        Ok(known)
    }

    fn is_mute(&self) -> Problem {
        Problem::failed(format!("its QEMU on {} does not answer", self.incoming.host.name()))
    }

    async fn take_hold(&mut self) -> OrderEvent {
        let Some(entry) = self.entry.clone() else { return OrderEvent::Gone };
        let until = self.until + RECEIVED_LOOK_MAX;
        match timeout_at(until, entry.take_hold(&self.incoming.vms)).await {
            Ok(Ok(())) if entry.built().is_some() => OrderEvent::Done,
            Ok(Ok(())) => OrderEvent::Gone,
            Ok(Err(problem)) => {
                warn!(migration = self.id, %problem, "its QEMU does not answer yet; the source asks again");
                sleep_until(until.min(Instant::now() + WATCH_EVERY)).await;
                OrderEvent::Mute
            }
            Err(_) => OrderEvent::Mute,
        }
    }

    async fn look(&mut self) -> Result<OrderEvent, Problem> {
        let (entry, vmm) = (Arc::clone(self.entry()?), self.vmm()?);
        let own = self.incoming.host.name();
        Ok(match entry.look(&*vmm).await {
            Ok((received, _)) if received.is_enough() => OrderEvent::Received(received),
            Ok((received, status)) => {
                let why = format!("{own} lacks part of the VM's state: {}", status.status);
                self.note(OrderEvent::Received(received), Problem::failed(why))
            }
            Err(error) if !vmm.alive() => self.note(OrderEvent::Gone, Problem::failed(error)),
            Err(error) if error.is_mute() => self.note(OrderEvent::Mute, self.is_mute()),
            Err(error) => self.note(OrderEvent::Failed, Problem::failed(error)),
        })
    }

    async fn look_at_rest(&mut self) -> OrderEvent {
        let Some(vmm) = self.ordered.clone() else { return OrderEvent::Gone };
        match look_at_rest(&*vmm).await {
            Ok(received) => OrderEvent::Received(received),
            Err(_) if !vmm.alive() => OrderEvent::Gone,
            Err(error) if error.is_mute() => self.note(OrderEvent::Mute, Problem::failed(error)),
            Err(error) => self.note(OrderEvent::Failed, Problem::failed(error)),
        }
    }

    async fn wait(&mut self) -> Result<OrderEvent, Problem> {
        let (entry, vmm) = (Arc::clone(self.entry()?), self.vmm()?);
        if self.is_paused {
            self.incoming.transfer.first_sessions.begin(&*vmm);
        }
        let mut events = vmm.events();
        loop {
            let Ok(looked) = timeout_at(self.until + RECEIVED_LOOK_MAX, entry.look(&*vmm)).await else {
                return Ok(OrderEvent::Mute);
            };
            match looked {
                Ok((received, _)) if received.is_enough() => return Ok(OrderEvent::Received(received)),
                Ok((Received::Failed, status)) => {
                    let why = relay_error(&entry).or(status.error_desc);
                    let why = why.unwrap_or_else(|| "its QEMU gives no reason".into());
                    let problem = could_not_take_the_state(self.incoming, &why);
                    return Ok(self.note(OrderEvent::Received(Received::Failed), problem));
                }
                Ok(_) => {}
                Err(error) if error.kind == VmErrorKind::Gone || !vmm.alive() => {
                    let problem = how_it_ended(self.incoming, &entry, &*vmm).await;
                    return Ok(self.note(OrderEvent::Gone, problem));
                }
                Err(error) if error.is_mute() => return Ok(OrderEvent::Mute),
                Err(error) => return Err(Problem::failed(error)),
            }
            // Any event, or a missed one, is a reason to look again; so is a closed connection, once.
            if timeout_at(self.until, events.recv()).await.is_err() {
                return Ok(OrderEvent::Received(Received::Incomplete));
            }
        }
    }

    async fn take_last(&mut self) -> Result<OrderEvent, Problem> {
        let vmm = self.vmm()?;
        let Err(error) = vmm.take_last(QEMU_DEADLINE).await else { return Ok(OrderEvent::Done) };
        let event = if vmm.alive() { OrderEvent::Failed } else { OrderEvent::Gone };
        Ok(self.note(event, could_not_take_the_state(self.incoming, &error.to_string())))
    }

    async fn let_run(&mut self) -> Result<OrderEvent, Problem> {
        let (entry, vmm) = (Arc::clone(self.entry()?), self.vmm()?);
        let own = self.incoming.host.name();
        if !vmm.alive() {
            let ended = Problem::failed(format!("the VM does not run on {own}: its QEMU has ended"));
            // Others may have let it run before.
            let has_run = vmm.bar_others(QMP_DEADLINE).await.map_err(Problem::failed)?;
            return Ok(self.note(if has_run { OrderEvent::Failed } else { OrderEvent::Gone }, ended));
        }
        disks::close_before_it_runs(self.incoming, &entry, &*vmm).await?;
        self.incoming.transfer.first_sessions.begin(&*vmm);
        cpu_priority::end_soon(&vmm);
        let Err(error) = vmm.run(entry.answers_within()).await else { return Ok(OrderEvent::Done) };
        let event = match error.kind {
            VmErrorKind::Refused | VmErrorKind::MemoryIncomplete => OrderEvent::Refused,
            // It would not answer anything else either.
            VmErrorKind::Mute => OrderEvent::Mute,
            _ => OrderEvent::Failed,
        };
        // Otherwise it ended after the order.
        let event = if event == OrderEvent::Mute && !vmm.alive() { OrderEvent::Failed } else { event };
        Ok(self.note(event, Problem::failed(format!("the VM does not run on {own}: {error}"))))
    }

    async fn look_at_vm(&self) -> Result<OrderEvent, Problem> {
        let vmm = self.vmm()?;
        match vmm.bar_others(QMP_DEADLINE).await {
            Ok(false) => {}
            Ok(true) => return Ok(OrderEvent::Vm(VmState::HasRun)),
            Err(_) => return Ok(OrderEvent::Mute),
        }
        Ok(match vmm.run_state(QMP_DEADLINE).await {
            Ok(RunState::Paused | RunState::Prelaunch | RunState::Inmigrate) => {
                OrderEvent::Vm(VmState::AsArrived)
            }
            Ok(_) => OrderEvent::Vm(VmState::HasRun),
            Err(_) if vmm.alive() => OrderEvent::Mute,
            Err(_) => OrderEvent::Gone,
        })
    }

    /// One that does not answer, or did not when the agent started, may have been let run.
    async fn end_unrun(&mut self) -> Result<OrderEvent, Problem> {
        let entry = Arc::clone(self.entry()?);
        entry.take_hold(&self.incoming.vms).await?;
        let has_run = match entry.built() {
            Some(vmm) => vmm.end_unrun(QEMU_DEADLINE).await.map_err(Problem::failed)?,
            None => {
                self.incoming.vms.hypervisor().was_let_run(&entry.definition.name).map_err(Problem::failed)?
            }
        };
        if !has_run {
            return Ok(OrderEvent::Done);
        }
        let own = self.incoming.host.name();
        warn!(vm = %entry.definition.name, source = entry.source, "others have let it run here: it is not given up");
        let why = format!(
            "others have let the VM run on {own}, for example by `virsh resume`, before its source's order: its disks are newer \
             than what its source has of it, so it stays on {own}"
        );
        Ok(self.note(OrderEvent::Vm(VmState::HasRun), Problem::failed(why)))
    }

    fn ordered(&self) -> Result<Arc<dyn Machine>, Problem> {
        self.ordered.clone().ok_or_else(|| not_built(self.id))
    }

    fn is_for_post_copy(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.plan.post_copy())
    }

    async fn take_up_part(&mut self) -> Result<OrderEvent, Problem> {
        let (record, vmm) = (self.record()?, self.ordered()?);
        let entry = insert_unless_there(self.incoming, IncomingVm::in_parts(record, vmm));
        self.turn = Some(entry.take_turn().await);
        let attempt = self.request.as_ref().and_then(|request| request.attempt);
        let is_taken_up = entry.memory().take_up_attempt(attempt);
        self.entry = Some(entry);
        Ok(if is_taken_up { OrderEvent::Done } else { OrderEvent::Refused })
    }

    fn record(&self) -> Result<IncomingRecord, Problem> {
        let record = self.incoming.journal.incoming_record(self.id)?;
        record.ok_or_else(|| no_migration(self.incoming, self.id))
    }

    async fn listen_again(&mut self) -> Result<(), Problem> {
        let (entry, vmm) = (Arc::clone(self.entry()?), self.ordered()?);
        let Some(request) = &self.request else { return Ok(()) };
        info!(vm = %entry.definition.name, source = entry.source, "waits for the rest of its memory");
        let address = request.plan.paths.first().address;
        let listening = listen(self.incoming, &entry, &*vmm, request, address, Listening::Again);
        self.endpoint = Some(listening.await?);
        Ok(())
    }

    async fn look_at_connection(&mut self) -> Result<OrderEvent, Problem> {
        let vmm = self.ordered()?;
        let (event, error) = look_at_connection(&*vmm).await;
        if let Some(error) = error {
            let (own, vm) = (self.incoming.host.name(), self.record()?.vm);
            self.problem = Some(Problem::failed(format!(
                "the VM's QEMU on {own} does not say whether all of the VM is there: {error}; if this goes on, `drainpipe \
                 vm stop {vm} --force` ends it"
            )));
        }
        Ok(event)
    }

    async fn await_last_bytes(&self) -> OrderEvent {
        sleep(Duration::from_millis(LOOK_EVERY_MS)).await;
        let is_late = self.since.elapsed() >= Duration::from_millis(LAST_BYTES_WITHIN_MS);
        if is_late { OrderEvent::Late } else { OrderEvent::Done }
    }

    async fn end_vm(&mut self) -> Result<(), Problem> {
        let IncomingRecord { vm, source, .. } = self.record()?;
        warn!(vm, source, "ended: part of its memory was lost with its source");
        self.ordered()?.destroy(QEMU_DEADLINE).await.map_err(Problem::failed)
    }

    fn adopt(&mut self) -> Result<(), Problem> {
        let (entry, vmm) = (self.entry()?, self.vmm()?);
        entry.join(&self.incoming.vms, vmm);
        hooks::tell_it_runs(self.incoming, self.id);
        if self.problem.is_none() {
            info!(vm = %entry.definition.name, source = entry.source, "runs here");
        }
        Ok(())
    }
}

fn was_ordered_to_run(record: &IncomingRecord) -> bool {
    matches!(record.state, IncomingState::Running | IncomingState::Finished)
}

/// What there is of a migration here, besides what the agent keeps in memory about it.
pub(super) fn found(
    incoming: &Incoming,
    record: &IncomingRecord,
    entry: Option<&IncomingVm>,
) -> Result<MigrationFacts, Problem> {
    let vms = &incoming.vms;
    let of_vm = match vms.running(&record.vm) {
        _ if vms.why_unresponsive(&record.vm).is_some() => Hypervisor::Unresponsive,
        Some(vmm) if vmm.alive() => Hypervisor::There,
        Some(_) | None => Hypervisor::None,
    };
    let on_its_way = match (entry, entry.and_then(IncomingVm::built)) {
        (_, Some(vmm)) if vmm.alive() => Hypervisor::There,
        (_, Some(_)) => Hypervisor::Ended,
        // It stood before this agent did.
        (Some(entry), None) if entry.spec.is_none() && !entry.is_adopted(vms) => Hypervisor::Unresponsive,
        (_, None) => Hypervisor::None,
    };
    Ok(MigrationFacts {
        state: Some(record.state),
        is_adopted: vms.contains(&record.vm),
        allows_post_copy: record.post_copy,
        is_last: incoming.journal.is_last_incoming(record)?,
        of_vm,
        on_its_way,
    })
}

async fn how_it_ended(incoming: &Incoming, entry: &IncomingVm, vmm: &dyn Machine) -> Problem {
    if let Some(why) = relay_error(entry) {
        return could_not_take_the_state(incoming, &why);
    }
    let exit = vmm.wait_exit(EXIT_KNOWN_WITHIN).await;
    Problem::failed(qemu_has_ended(incoming.host.name(), exit.as_ref()))
}

/// Why the relay has broken off, which ends QEMU too. That QEMU's end is closed says less than how QEMU has ended.
fn relay_error(entry: &IncomingVm) -> Option<String> {
    let error = entry.relay_error()?;
    (!matches!(error, RelayError::Local(_))).then(|| error.to_string())
}

fn could_not_take_the_state(incoming: &Incoming, why: &str) -> Problem {
    Problem::failed(format!("{} could not take the state: {why}", incoming.host.name()))
}
