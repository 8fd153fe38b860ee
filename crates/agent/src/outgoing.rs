//! Migrations from this host: begun, planned, taken up again after a crash, wound up.

mod connections;
mod disks;
mod executor;
mod hooks;
mod pause;
mod standstill;
mod target_watch;
mod tracked;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::Duration;

use drainpipe_engine::check::finding::Finding;
use drainpipe_engine::convergence::{self, Leaving};
use drainpipe_engine::facts::HostFacts;
use drainpipe_engine::migration::{Action, Migration, SourceState, Stage};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::plan::{Plan, Request, plan};
use drainpipe_engine::prediction;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::progress::{CompressionProgress, PathRate, Progress, ProgressMeter};
use drainpipe_engine::protocol::Protocol;
use drainpipe_engine::result::{MigrationResult, Outcome};
use drainpipe_engine::step::Step;
use drainpipe_hypervisor::{Machine, Manager};
use jiff::Timestamp;
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};
use tracing::{error, warn};
use uuid::Uuid;

pub(crate) use self::disks::{check_hosts, check_vm, disks_of, keep_all_left};
use self::executor::Executor;
pub(crate) use self::hooks::settle_left;
use crate::api_types::{HandOverView, HostView, MigrateRequest, MigrationView, PlanView};
use crate::beside::{Beside, Way};
use crate::check::{self, Checks};
use crate::client::ApiClient;
use crate::discovery::discover;
use crate::host::Host;
use crate::incoming::Incoming;
use crate::journal::{Journal, OpenMigration};
use crate::lock::lock;
use crate::memory_look;
use crate::path_history::{self, Learnt};
use crate::peers::Peers;
use crate::release::ask_host;
use crate::result;
use crate::source_state::source_state;
use crate::supervised;
use crate::transfer::Transfer;
use crate::vms::{Claim, Claimed, Vms, does_not_run};

/// How long an agent that is told to stop waits for its migrations to be undone. Well below the 90 s
/// after which systemd kills it.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(20);

/// How often it looks.
const SHUTDOWN_LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long it then still answers. Who follows a migration asks several times a second, and shall hear how
/// it has ended.
const TELL_RESULTS_FOR: Duration = Duration::from_secs(1);

/// How long a target that is said to be lost is asked once more, and all is undone.
const DECISION_DEADLINE: Duration = Duration::from_mins(1);

/// How often it is looked whether it is.
const DECISION_LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long the target may hold back its answer to whether all is there. It is asked again and again,
/// so that the VM does not stand still for long when the target's agent has gone.
const RECEIVED_WAIT: Duration = Duration::from_secs(1);

/// Between two questions to a target that did not answer, or at once.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Before a migration is taken up that has crashed though it was taken up already.
const TAKE_UP_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Migrations from this host.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// The host.
    pub(crate) host: Arc<Host>,
    /// Those to which they go.
    pub(crate) peers: Arc<Peers>,
    /// What must survive a crash.
    pub(crate) journal: Arc<Journal>,
    /// The VMs that are here.
    pub(crate) vms: Arc<Vms>,
    /// What migrations in either direction share.
    pub(crate) transfer: Arc<Transfer>,
    /// Migrations to here: a VM that leaves may have come by one.
    pub(crate) incoming: Arc<Incoming>,
    /// What is looked at before each of them.
    pub(crate) checks: Arc<Checks>,
    /// Those under way.
    pub(crate) migrations: OutgoingMigrations,
    // That this kernel tracks no connections is told once.
    untracked_said: Once,
}

impl Outgoing {
    /// None yet.
    pub(crate) fn new(incoming: &Arc<Incoming>, checks: &Arc<Checks>) -> Self {
        Self {
            host: Arc::clone(&incoming.host),
            peers: Arc::clone(&incoming.peers),
            journal: Arc::clone(&incoming.journal),
            vms: Arc::clone(&incoming.vms),
            transfer: Arc::clone(&incoming.transfer),
            incoming: Arc::clone(incoming),
            checks: Arc::clone(checks),
            migrations: OutgoingMigrations::default(),
            untracked_said: Once::new(),
        }
    }

    /// Whether a VM's memory is on its way from here or to here, or will be. Where it has arrived, and it is not known
    /// yet whose the VM is, that may take days.
    pub(crate) fn is_migrating(&self) -> bool {
        !self.migrations.under_way().is_empty() || self.incoming.entries.are_receiving()
    }
}

/// Migrations under way from this host.
#[derive(Debug, Default)]
pub(crate) struct OutgoingMigrations {
    running: Mutex<BTreeMap<String, Arc<Running>>>,
}

/// One migration under way, as others see it.
#[derive(Debug)]
pub(crate) struct Running {
    id: String,
    vm: String,
    target: String,
    requested_option: RequestedOption,
    started_at: Timestamp,
    // Begun by an earlier life of the agent, or by a task that has crashed.
    is_taken_up: bool,
    cancel: Notify,
    cancel_requested: AtomicBool,
    progress: watch::Sender<Progress>,
    stage: watch::Sender<Stage>,
    turn: watch::Sender<Turn>,
    gives_way: watch::Sender<bool>,
    // By the operator's word, which is asked for only once the hand-over is recorded.
    target_lost: watch::Sender<bool>,
    // Only while the journal cannot have it: the outcome is open still, or the disk is full.
    result: Mutex<Option<MigrationResult>>,
    // Why its result is not in the journal, though it is over.
    unrecorded: Mutex<Option<Problem>>,
}

/// Whether a migration may send as soon as it can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It may.
    Now,
    /// After step 5 it waits for [`Running::release`].
    Held,
}

impl OutgoingMigrations {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Running>>> {
        // Insertion and removal leave the map whole.
        lock(&self.running)
    }

    /// One migration under way.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Running>> {
        self.lock().get(id).cloned()
    }

    /// How many others are sending.
    fn sending_beside(&self, id: &str) -> usize {
        let running = self.lock();
        let uses_links = |stage| matches!(stage, Stage::CopyingDisks | Stage::Sending);
        running.values().filter(|other| other.id != id && uses_links(*other.stage.borrow())).count()
    }

    /// Those that an earlier life of the agent, or a task that has crashed, has begun, but for those in doubt: these
    /// end when their target answers.
    pub(crate) fn taken_up(&self) -> Vec<Arc<Running>> {
        let running = self.lock();
        running.values().filter(|running| running.is_taken_up && !running.is_in_doubt()).cloned().collect()
    }

    /// Those of which the outcome is neither known nor left open.
    pub(crate) fn under_way(&self) -> Vec<Arc<Running>> {
        self.lock().values().filter(|running| !running.is_over()).cloned().collect()
    }

    /// Whether a VM is on its way to this host, or may be there.
    pub(crate) fn are_to(&self, host: &str) -> bool {
        self.lock().values().any(|running| running.target == host)
    }

    /// That of a VM which is on its way from here, or may have left.
    pub(crate) fn of_vm(&self, vm: &str) -> Option<Arc<Running>> {
        self.lock().values().find(|running| running.vm == vm).cloned()
    }

    /// All migrations that are not over, or of which the outcome is left open.
    pub(crate) fn all(&self) -> Vec<Arc<Running>> {
        self.lock().values().cloned().collect()
    }
}

impl Running {
    fn new(
        id: String,
        request: &MigrateRequest,
        started_at: Timestamp,
        turn: Turn,
        is_taken_up: bool,
    ) -> Self {
        let first = ProgressMeter::default().progress(Step::EstablishHosts, 0.0);
        Self {
            id,
            vm: request.vm.clone(),
            target: request.target.clone(),
            requested_option: request.option,
            started_at,
            is_taken_up,
            cancel: Notify::new(),
            cancel_requested: AtomicBool::new(false),
            result: Mutex::default(),
            unrecorded: Mutex::default(),
            progress: watch::Sender::new(first),
            stage: watch::Sender::new(Stage::Preparing),
            turn: watch::Sender::new(turn),
            gives_way: watch::Sender::new(false),
            target_lost: watch::Sender::new(false),
        }
    }

    /// Where it goes.
    pub(crate) fn target(&self) -> &str {
        &self.target
    }

    /// Lets it send: at once, or as soon as it can.
    pub(crate) fn release(&self) {
        self.turn.send_replace(Turn::Now);
    }

    /// Leaves the links to another one, until told otherwise and for some seconds at most.
    pub(crate) fn give_way(&self) {
        self.gives_way.send_replace(true);
    }

    /// May have all of the links.
    pub(crate) fn take_all(&self) {
        self.gives_way.send_replace(false);
    }

    /// Whether it leaves the links to another one, now and from now on.
    pub(crate) fn way_given(&self) -> watch::Receiver<bool> {
        self.gives_way.subscribe()
    }

    /// Whether it waits, or will wait, to be released.
    pub(crate) fn is_held(&self) -> bool {
        *self.turn.borrow() == Turn::Held
    }

    /// What each of its paths carries.
    pub(crate) fn paths(&self) -> Vec<PathRate> {
        if *self.stage.borrow() == Stage::Ended { vec![] } else { self.progress.borrow().paths.clone() }
    }

    /// What compression does of late; none without it.
    pub(crate) fn compression(&self) -> Option<CompressionProgress> {
        self.progress.borrow().compression
    }

    /// How far it is, now and from now on. When it has [`Stage::Ended`], its result is recorded; of an
    /// outcome that is not known yet, [`Self::view`] has it.
    pub(crate) fn stages(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// Its identifier.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The VM.
    pub(crate) fn vm(&self) -> &str {
        &self.vm
    }

    /// What the target's host has confirmed so far.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.progress.borrow().sent_bytes
    }

    /// What of its disks was gone through so far; 0 where none is copied.
    pub(crate) fn copied_bytes(&self) -> u64 {
        self.progress.borrow().disks.iter().map(|disk| disk.copied_bytes).sum()
    }

    /// How it ended, once it has; also when that is not known until the target answers.
    pub(crate) fn end(&self, journal: &Journal) -> Result<Option<MigrationResult>, Problem> {
        let recorded = journal.result(&self.id)?;
        Ok(recorded.or_else(|| self.result().clone()))
    }

    /// Asks for it to be undone.
    pub(crate) fn cancel(&self) {
        self.cancel_requested.store(true, Ordering::Relaxed);
        self.cancel.notify_one();
    }

    fn is_in_doubt(&self) -> bool {
        self.result().as_ref().is_some_and(|result| result.outcome == Outcome::InDoubt)
    }

    fn is_over(&self) -> bool {
        self.result().is_some()
    }

    fn result(&self) -> MutexGuard<'_, Option<MigrationResult>> {
        lock(&self.result)
    }

    /// Why its result cannot be written down, if it cannot: it waits until it can.
    pub(crate) fn unrecorded(&self) -> MutexGuard<'_, Option<Problem>> {
        lock(&self.unrecorded)
    }

    /// The migration in the shape of the API.
    pub(crate) fn view(&self, source: &str) -> MigrationView {
        MigrationView {
            id: self.id.clone(),
            vm: self.vm.clone(),
            source: source.into(),
            target: self.target.clone(),
            started_at: Some(self.started_at.to_string()),
            requested_option: Some(self.requested_option),
            progress: Some(self.progress.borrow().clone()),
            result: self.result().clone(),
            waits_for: None,
        }
    }
}

/// The migrations that an earlier life of the agent left open, and that cannot be taken up yet.
pub(crate) fn left_open(outgoing: &Outgoing) -> Result<Vec<MigrationView>, Problem> {
    let mut open = outgoing.journal.open_migrations()?;
    open.retain(|open| outgoing.migrations.get(&open.id).is_none());
    let view = |open: OpenMigration| MigrationView {
        waits_for: outgoing.vms.why_unresponsive(&open.vm),
        id: open.id,
        vm: open.vm,
        source: outgoing.host.name().into(),
        target: open.target,
        started_at: Some(open.started_at.to_string()),
        requested_option: Some(open.requested_option),
        progress: None,
        result: None,
    };
    Ok(open.into_iter().map(view).collect())
}

/// Begins a migration; it runs on by itself.
pub(crate) fn begin(
    outgoing: &Arc<Outgoing>,
    request: &MigrateRequest,
    turn: Turn,
) -> Result<Arc<Running>, Problem> {
    outgoing.host.check_not_stopping()?;
    outgoing.peers.target(&request.target)?;
    let id = Uuid::new_v4().to_string();
    let claimed = outgoing.vms.claim(&request.vm, Claim::Migrating(id.clone()))?;
    if claimed.vmm.is_none() {
        return Err(does_not_run(&request.vm));
    }
    let started_at = Timestamp::now();
    outgoing.vms.note_managed(&claimed.definition)?;
    outgoing.journal.begin_migration(&id, request, started_at)?;
    if let Some(vmm) = &claimed.vmm {
        let departure = Way { id: id.clone(), host: request.target.clone() };
        Beside::note_departure(&claimed.definition, vmm.directory(), Some(departure));
    }
    let (migration, first) = Migration::begin(
        outgoing.host.config.limits.of_migration(request.deadline_s, request.throttle_max_percent),
    );
    let executor = Executor::new(outgoing, id, claimed, request, started_at, turn, false);
    Ok(run(outgoing, executor, migration, first))
}

fn run(outgoing: &Arc<Outgoing>, executor: Executor, migration: Migration, first: Action) -> Arc<Running> {
    let running = Arc::clone(&executor.running);
    let crashed = crashed(Arc::clone(outgoing), Arc::clone(&running));
    supervised::spawn(executor.run(migration, first), crashed);
    running
}

/// How far a migration is whose task has crashed, nobody knows. It keeps its claim of the VM, and is taken up under that
/// as at the agent's next start.
async fn crashed(outgoing: Arc<Outgoing>, running: Arc<Running>) {
    let Running { id, vm, .. } = &*running;
    error!(migration = id, vm, "has crashed, which is an error in Drainpipe; it is undone or finished now");
    if running.is_taken_up {
        // It may crash again and again.
        sleep(TAKE_UP_AGAIN_AFTER).await;
    }
    let open = loop {
        match outgoing.journal.open_migration(id) {
            Ok(open) => break open,
            Err(error) => warn!(%error, migration = id, "how far it is cannot be read; tried again soon"),
        }
        sleep(TAKE_UP_AGAIN_AFTER).await;
    };
    let claimed = open.as_ref().and_then(|_| outgoing.vms.claim_of_crashed(vm, id));
    if let (Some(open), Some(claimed)) = (open, claimed) {
        take_up(&outgoing, open, claimed);
    } else {
        // Its result is recorded. The VM stays claimed: what was left to do, the next start does.
        outgoing.migrations.lock().remove(id);
    }
    running.stage.send_replace(Stage::Ended);
}

/// Gives a VM back to this host that was handed over to one which does not answer, because the operator says
/// that that one is lost with all that ran there. Does not believe it while it answers. The VM is to be booted
/// anew: it may have run there for a while, and its disks would not fit its memory here.
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
            "{vm} is still in doubt after {} s; see the log of {}",
            DECISION_DEADLINE.as_secs(),
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

/// The plan of a migration that is not begun.
pub(crate) async fn dry_run(outgoing: &Outgoing, request: &MigrateRequest) -> Result<PlanView, Problem> {
    let peer = outgoing.peers.target(&request.target)?;
    let definition = outgoing.vms.definition(&request.vm)?;
    let memory_bytes = definition.memory_mib << 20;
    let vmm = outgoing.vms.running(&request.vm);
    let asked = asked_for(request);
    let asked = informed(outgoing, &request.target, asked, vmm.as_deref()).await?;
    let meeting = meet(outgoing, &peer, &request.target, definition.manager, asked, memory_bytes);
    let (meeting, zero_share) = tokio::join!(meeting, zero_share(asked, vmm.as_deref()));
    let mut meeting = meeting?;
    if let Some(vmm) = &vmm {
        meeting.plan.disks = disks::to_copy(outgoing, &peer, request, &meeting, vmm).await?;
    }
    let Meeting { source, target, plan, .. } = meeting;
    let asked = Request { zero_share, ..asked };
    let predicted_total_ms = prediction::total_ms(&source, &target.facts, &plan, &asked, memory_bytes);
    let limits = source.limits_to(&target.facts);
    let findings = match vmm {
        Some(vmm) => {
            let outpaced = outpaced(outgoing, request, &*vmm, memory_bytes, &plan).await;
            let found =
                check::before_migration(&outgoing.checks, &peer, &request.target, &[vmm], &plan).await?;
            outpaced.into_iter().chain(found).collect()
        }
        None => vec![],
    };
    Ok(PlanView {
        vm: request.vm.clone(),
        source: source.name,
        target: target.facts.name,
        plan,
        predicted_total_ms: predicted_total_ms.map(result::tenth),
        bandwidth_limit_mbps: limits.all_mbps,
        storage_limit_mbps: limits.storage_mbps,
        findings,
    })
}

/// Whether the VM's memory gets dirty faster than it would be sent.
async fn outpaced(
    outgoing: &Outgoing,
    request: &MigrateRequest,
    vmm: &dyn Machine,
    memory_bytes: u64,
    plan: &Plan,
) -> Option<Finding> {
    let memory = memory_look::sample(vmm).await?;
    let throttle_max_percent =
        request.throttle_max_percent.unwrap_or(outgoing.host.config.limits.throttle_max_percent);
    let (vm, source) = (request.vm.as_str(), outgoing.host.name());
    convergence::foreseen(&Leaving { vm, source, memory_bytes, memory, throttle_max_percent }, plan)
}

/// What a request asks of the plan.
fn asked_for(request: &MigrateRequest) -> Request {
    let MigrateRequest { encrypt, post_copy, .. } = *request;
    Request { encrypt, post_copy, ..request.option.into() }
}

/// Where a target tells whether all of a VM's state has arrived.
fn received_path(migration: &str, is_paused: bool) -> String {
    format!("/v1/incoming/{migration}/received?wait_ms={}&is_paused={is_paused}", RECEIVED_WAIT.as_millis())
}

/// What a caller asks for, with what is known of the VM's memory and of earlier migrations where that may decide
/// whether it is compressed.
async fn informed(
    outgoing: &Outgoing,
    target: &str,
    request: Request,
    vmm: Option<&dyn Machine>,
) -> Result<Request, Problem> {
    if !request.option.may_compress() || request.post_copy {
        return Ok(request);
    }
    let (zero_share, memory) = match vmm {
        Some(vmm) => memory_look::contents(vmm, request.option).await,
        None => (None, None),
    };
    let free_cores = outgoing.host.idle_cores.known();
    let Learnt { saved_mbps, compressed_slower, .. } =
        path_history::of_target(&outgoing.journal, free_cores, target, request.option)?;
    Ok(Request { memory, zero_share, saved_mbps, compressed_slower, ..request })
}

/// What of a VM's memory is zero, where the plan does not ask: for the prediction alone.
async fn zero_share(asked: Request, vmm: Option<&dyn Machine>) -> Option<f64> {
    match vmm.filter(|_| asked.zero_share.is_none() && !asked.post_copy) {
        Some(vmm) => memory_look::zero_share(vmm).await,
        None => asked.zero_share,
    }
}

/// What step 1 has shown.
pub(crate) struct Meeting {
    /// What the two hosts speak.
    pub(crate) protocol: Protocol,
    /// What this host has.
    pub(crate) source: HostFacts,
    /// What the target is.
    pub(crate) target: HostView,
    /// How a VM would go there.
    pub(crate) plan: Plan,
}

/// Step 1: what the hosts speak, what each has, which links reach which, and the plan that follows.
pub(crate) async fn meet(
    outgoing: &Outgoing,
    peer: &ApiClient,
    target: &str,
    manager: Option<Manager>,
    request: impl Into<Request>,
    memory_bytes: u64,
) -> Result<Meeting, Problem> {
    let (view, protocol): (HostView, _) = ask_host(outgoing.host.name(), peer, target, "/v1/host").await?;
    if view.facts.name != target {
        return Err(Problem::refused(format!(
            "the agent that should be {target} calls itself {}: correct the [[peer]] entries of {}",
            view.facts.name,
            outgoing.host.name()
        )));
    }
    let (source, mut target) = (outgoing.incoming.facts().await?, view);
    let source = facts_for(manager, source)?;
    target.facts = facts_for(manager, target.facts)?;
    let request = request.into();
    let reaches = discover(&outgoing.host, peer, [&source, &target.facts], request.option).await;
    let plan = plan(&source, &target.facts, request, &reaches, memory_bytes).map_err(Problem::refused)?;
    if let Some(why) = protocol.obstacle(plan.post_copy(), plan.encryption.is_encrypted, &target.facts.name) {
        return Err(Problem::refused(why));
    }
    Ok(Meeting { protocol, source, target, plan })
}

/// What a host is to VMs of this manager.
fn facts_for(manager: Option<Manager>, facts: HostFacts) -> Result<HostFacts, Problem> {
    match manager {
        None => Ok(facts),
        Some(Manager::Libvirt) => facts.for_domain().map_err(Problem::refused),
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
            // Of a VM that has run on here, it is about to be revoked.
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

/// Takes up the migrations that an earlier life of the agent left open.
///
/// Also those of which the VM has no QEMU here any more, or the target is no peer: until it is known
/// where the VM belongs, the claim keeps everybody from starting it here a second time.
pub(crate) fn recover(outgoing: &Arc<Outgoing>) -> Result<(), Problem> {
    for open in outgoing.journal.open_migrations()? {
        match outgoing.vms.claim(&open.vm, Claim::Migrating(open.id.clone())) {
            Ok(claimed) => take_up(outgoing, open, claimed),
            Err(problem) => {
                warn!(migration = open.id, vm = open.vm, %problem, "cannot be taken up yet; left open");
            }
        }
    }
    Ok(())
}

/// Takes up one of them.
pub(crate) fn take_up(outgoing: &Arc<Outgoing>, open: OpenMigration, claimed: Claimed) {
    let limits = outgoing.host.config.limits.of_migration(None, None);
    let (migration, first) = Migration::recover(limits, open.handed_over);
    let request = MigrateRequest {
        vm: open.vm,
        target: open.target,
        option: open.requested_option,
        encrypt: false,
        post_copy: false,
        copy_storage: false,
        disks: BTreeMap::new(),
        deadline_s: None,
        throttle_max_percent: None,
    };
    let executor = Executor::new(outgoing, open.id, claimed, &request, open.started_at, Turn::Now, true);
    run(outgoing, executor, migration, first);
}

/// Before the agent stops: has what can be undone undone, and waits for it, so that the VMs run on
/// here and nothing is left to guards and to the next start. Then waits until those have heard of it who
/// ask.
pub(crate) async fn shut_down(outgoing: &Outgoing) {
    if outgoing.migrations.under_way().is_empty() {
        return;
    }
    let over = async {
        loop {
            let mut running = outgoing.migrations.under_way();
            // Their QEMUs go on by themselves, or wait for the next start.
            running.retain(|running| *running.stage.borrow() != Stage::SendingRest);
            if running.is_empty() {
                return;
            }
            for running in running {
                running.cancel();
            }
            tokio::time::sleep(SHUTDOWN_LOOK_EVERY).await;
        }
    };
    if tokio::time::timeout(SHUTDOWN_DEADLINE, over).await.is_err() {
        warn!("migrations are under way still; their guards and the next start see to them");
    }
    tokio::time::sleep(TELL_RESULTS_FOR).await;
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::migration::Limits;

    use super::*;
    use crate::api_types::TargetUse;
    use crate::measure::Measurements;
    use crate::result::{Identity, Pauses, assemble};

    fn in_doubt() -> MigrationResult {
        let (migration, _) = Migration::begin(Limits::default());
        let measured = Measurements::begin(None).finish(None, TargetUse::default());
        let identity = Identity {
            id: "1".into(),
            vm: "web".into(),
            source: "a".into(),
            target: "b".into(),
            memory_bytes: 1 << 30,
            requested_option: RequestedOption::Auto,
            started_at: Timestamp::UNIX_EPOCH,
        };
        let pauses = Pauses { timings: migration.timings(), standstill_ms: None };
        assemble(identity, &migration, pauses, Outcome::InDoubt, None, measured)
    }

    #[test]
    fn one_that_waits_for_its_targets_word_is_not_under_way() {
        let outgoing = OutgoingMigrations::default();
        let request = MigrateRequest {
            vm: "web".into(),
            target: "b".into(),
            option: RequestedOption::Auto,
            encrypt: false,
            post_copy: false,
            copy_storage: false,
            disks: BTreeMap::new(),
            deadline_s: None,
            throttle_max_percent: None,
        };
        let running = Arc::new(Running::new("1".into(), &request, Timestamp::UNIX_EPOCH, Turn::Now, false));
        outgoing.lock().insert("1".into(), Arc::clone(&running));
        assert_eq!(outgoing.under_way().len(), 1);
        *running.result() = Some(in_doubt());
        assert_eq!((outgoing.under_way().len(), outgoing.all().len()), (0, 1));
    }
}
