//! VMs on their way to this host: the target's side of steps 2 to 5 and 9.
//!
//! The source leads; this side answers, and keeps two promises that hold through crashes of either
//! agent. What it has said it discarded never runs here. What it was told to run is never discarded.

mod arrived;
mod connect;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::facts::{HugePages, MemoryNeeds};
use drainpipe_engine::inbound::Inbound;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::migration::{self, MigrationError, MigrationStatus};
use drainpipe_hypervisor::qmp::QmpError;
use drainpipe_hypervisor::spec::{ResolvedSpec, VmName, VmSpec};
use drainpipe_hypervisor::{Role, Vmm};
use drainpipe_relay::Receiver;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinSet;
use tracing::{debug, info, warn};

pub(crate) use self::arrived::resume_recorded;
pub(crate) use self::connect::{connect, open_trials, watch_again};
use crate::admission;
use crate::agent::Agent;
use crate::api::types::{HandOverView, IncomingPermit, IncomingRequest, IncomingView, TargetUse};
use crate::host;
use crate::journal::{IncomingRecord, IncomingState};
use crate::lock::lock;
use crate::precedence;
use crate::slots::Slots;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE, needs, qemu_has_ended};

/// Without a word from the source for this long, the target asks it what has become of the VM.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// QEMU closes its sockets a moment before its process has ended. Its source waits for an answer for half a second.
const EXIT_KNOWN_WITHIN: Duration = Duration::from_millis(300);

/// How often the target looks after the VMs on their way.
const WATCH_EVERY: Duration = Duration::from_secs(2);

/// A VM on its way holds no place any more when its source has not been heard of for this long, though it was
/// asked.
const HOLDS_PLACE: Duration = Duration::from_secs(30);

/// A VM of which not all state is here is given up when its source has not been heard of for this
/// long. All of it being here, it is kept: it may be the only copy that can run.
const GIVE_UP_AFTER: Duration = Duration::from_mins(2);

/// The VMs on their way to this host.
#[derive(Debug)]
pub(crate) struct IncomingVms {
    entries: Mutex<BTreeMap<String, Arc<IncomingVm>>>,
    // Who waits until more VMs are taken, by a clock that begins with the agent.
    places: Mutex<Inbound>,
    clock: Instant,
    trials: Slots,
}

impl Default for IncomingVms {
    fn default() -> Self {
        Self {
            entries: Mutex::default(),
            places: Mutex::default(),
            clock: Instant::now(),
            trials: connect::trials(),
        }
    }
}

/// One VM on its way.
#[derive(Debug)]
struct IncomingVm {
    id: String,
    source: String,
    // Absent once the agent has been started anew: the skeleton stands then, or never will.
    spec: Option<ResolvedSpec>,
    definition: VmSpec,
    // Where it comes from.
    cores_taken: Option<f64>,
    reserved: Mutex<MemoryNeeds>,
    vmm: Mutex<Option<Arc<Vmm>>>,
    last_heard: Mutex<Instant>,
    agent_cpu_at_start: Duration,
    // The relay of a compressed migration, as long as it lasts.
    relay: Mutex<Option<Receiver>>,
    // Whether it is encrypted. Not known any more once the agent was started anew, and not needed: the relay has ended
    // with the agent before.
    is_encrypted: AtomicBool,
    // Those who answer when the source tries the paths.
    answering: Mutex<JoinSet<()>>,
    // One step at a time, whatever the order in which requests arrive.
    stepping: AsyncMutex<()>,
    // One at a time takes hold of a skeleton that stood before the agent did: its QEMU listens to one client only.
    taking_hold: AsyncMutex<()>,
}

impl IncomingVm {
    /// The source tries no path any more.
    fn end_trials(&self) {
        *lock(&self.answering) = JoinSet::new();
    }

    fn heard(&self) {
        *lock(&self.last_heard) = Instant::now();
    }

    fn vmm(&self) -> Result<Arc<Vmm>, Problem> {
        lock(&self.vmm)
            .clone()
            .ok_or_else(|| Problem::conflict(format!("migration {} has no skeleton VM here yet", self.id)))
    }

    /// Whether it is among the VMs of this host, which it joins once it runs.
    fn is_adopted(&self, agent: &Agent) -> bool {
        agent.vms.contains(self.definition.name.as_str())
    }

    /// What is still to come of its memory: QEMU's share of it that is resident counts as used already. Once
    /// it is adopted, it counts among the VMs of this host.
    fn outstanding_bytes(&self, agent: &Agent) -> u64 {
        if self.is_adopted(agent) {
            return 0;
        }
        let resident = lock(&self.vmm).as_ref().map_or(0, |vmm| host::resident_bytes(vmm.pid()));
        lock(&self.reserved).bytes.saturating_sub(resident)
    }

    /// Those that its QEMU has not reserved yet.
    fn outstanding_huge_pages(&self) -> Option<HugePages> {
        lock(&self.reserved).huge_pages.filter(|_| lock(&self.vmm).is_none())
    }
}

impl IncomingVms {
    fn get(&self, id: &str) -> Result<Arc<IncomingVm>, Problem> {
        let entry = lock(&self.entries).get(id).cloned();
        let entry = entry.ok_or_else(|| Problem::not_found(format!("no migration {id} on its way here")))?;
        entry.heard();
        Ok(entry)
    }

    /// The VMs on their way.
    pub(crate) fn definitions(&self) -> Vec<VmSpec> {
        self.definitions_but_from(None)
    }

    /// The VMs on their way from other hosts than this one, where one is named.
    pub(crate) fn definitions_but_from(&self, source: Option<&str>) -> Vec<VmSpec> {
        let entries = lock(&self.entries);
        let others = entries.values().filter(|entry| Some(entry.source.as_str()) != source);
        others.map(|entry| entry.definition.clone()).collect()
    }

    /// The names of those that come from this host.
    pub(crate) fn names_from(&self, source: &str) -> Vec<String> {
        let entries = lock(&self.entries);
        let of_source = entries.values().filter(|entry| entry.source == source);
        of_source.map(|entry| entry.definition.name.to_string()).collect()
    }

    /// The source from which a migration comes, if it is under way.
    pub(crate) fn source_of(&self, id: &str) -> Option<String> {
        lock(&self.entries).get(id).map(|entry| entry.source.clone())
    }
}

/// Takes up the VMs that were on their way when the agent stopped.
pub(crate) async fn recover(agent: &Arc<Agent>, records: Vec<IncomingRecord>) -> Result<(), Problem> {
    for record in records {
        let vmm = match agent.vms.find_running(&record.spec).await {
            Ok(Some(vmm)) => Some(vmm),
            Ok(None) => {
                warn!(vm = record.vm, "its skeleton is gone; given up");
                agent.journal.discard_incoming(&record.id, &record.source)?;
                agent.watches.leave(agent, &record.id).await?;
                continue;
            }
            // It is tried again (`take_hold`), and the source says whether it is to be waited for. Seen with
            // QEMU 7.2 after its source broke off, and on slow links: its main thread waits for multifd's channels.
            Err(problem) => {
                warn!(vm = record.vm, %problem, "its skeleton does not answer");
                None
            }
        };
        // Its QEMU lives, so the kernel knows of its huge pages.
        let reserved = MemoryNeeds { huge_pages: None, ..needs(&record.spec) };
        let now = Instant::now();
        let entry = IncomingVm {
            id: record.id.clone(),
            source: record.source,
            spec: None,
            definition: record.spec,
            cores_taken: None,
            reserved: Mutex::new(reserved),
            vmm: Mutex::new(vmm),
            // Its source is asked at once.
            last_heard: Mutex::new(now.checked_sub(SILENCE_MAX).unwrap_or(now)),
            agent_cpu_at_start: host::own_cpu(),
            answering: Mutex::default(),
            relay: Mutex::default(),
            is_encrypted: AtomicBool::default(),
            stepping: AsyncMutex::default(),
            taking_hold: AsyncMutex::default(),
        };
        insert(agent, entry);
    }
    Ok(())
}

/// Removes what is left of the VMs that were discarded, should the agent have stopped half-way.
pub(crate) async fn clear_discarded(agent: &Agent) -> Result<(), Problem> {
    let coming = agent.journal.waiting_incoming()?;
    for record in agent.journal.discarded_skeletons()? {
        // The VM may have come back since, and then its files are no remains.
        if !agent.vms.contains(&record.vm) && coming.iter().all(|other| other.vm != record.vm) {
            clear(agent, &record.spec).await?;
        }
        agent.journal.forget_skeleton(&record.id)?;
    }
    Ok(())
}

async fn clear(agent: &Agent, definition: &VmSpec) -> Result<(), Problem> {
    let paths = agent.vms.paths(definition)?;
    Vmm::clear(&paths, QEMU_DEADLINE).await.map_err(Problem::failed)
}

fn insert(agent: &Arc<Agent>, entry: IncomingVm) {
    let mut entries = lock(&agent.incoming.entries);
    insert_locked(agent, &mut entries, entry);
}

fn insert_locked(agent: &Arc<Agent>, entries: &mut BTreeMap<String, Arc<IncomingVm>>, entry: IncomingVm) {
    let entry = Arc::new(entry);
    entries.insert(entry.id.clone(), Arc::clone(&entry));
    tokio::spawn(watch(Arc::clone(agent), entry));
}

/// Step 2: may this VM come?
pub(crate) fn permit(
    agent: &Arc<Agent>,
    source: &str,
    request: IncomingRequest,
) -> Result<IncomingPermit, Problem> {
    agent.check_not_stopping()?;
    let name = request.definition.name.to_string();
    if agent.peer(source).is_none() {
        return Err(Problem::refused(format!(
            "{} does not know {source}: add a [[peer]] to its agent.toml",
            agent.name()
        )));
    }
    check_described(&request)?;
    request.spec.check_host(agent.vms.hypervisor()).map_err(|error| refused_here(agent, &error))?;
    // Held until it is entered, so that two hosts cannot both send a VM of that name, and so that a drain
    // that begins meanwhile finds it.
    let mut entries = lock(&agent.incoming.entries);
    admission::check_cordon(agent, Some(source))?;
    if agent.vms.contains(&name) || entries.values().any(|other| other.definition.name.as_str() == name) {
        return Err(name_taken(agent, &name));
    }
    if request.may_wait
        && let Some(why) = crowded(agent, &entries, source)
    {
        return Ok(IncomingPermit::Crowded(why));
    }
    if !agent.journal.begin_incoming(&request.id, source, &request.definition)? {
        return Err(Problem::conflict(format!("migration {} was here before", request.id)));
    }
    let entry = IncomingVm {
        id: request.id,
        source: source.into(),
        spec: Some(request.spec),
        definition: request.definition,
        cores_taken: request.cores_taken.filter(|cores| *cores >= 0.0),
        reserved: Mutex::new(MemoryNeeds::default()),
        vmm: Mutex::new(None),
        last_heard: Mutex::new(Instant::now()),
        agent_cpu_at_start: host::own_cpu(),
        answering: Mutex::default(),
        relay: Mutex::default(),
        is_encrypted: AtomicBool::default(),
        stepping: AsyncMutex::default(),
        taking_hold: AsyncMutex::default(),
    };
    insert_locked(agent, &mut entries, entry);
    Ok(IncomingPermit::Granted)
}

/// Refuses a VM that is described as one that cannot be, or as two: its memory is promised by its definition, and
/// taken by its specification.
pub(crate) fn check_described(request: &IncomingRequest) -> Result<(), Problem> {
    let IncomingRequest { spec, definition, .. } = request;
    definition.validate().map_err(Problem::bad_input)?;
    if spec.spec().name != definition.name {
        return Err(Problem::bad_input("the specification and the definition name different VMs"));
    }
    if needs(spec.spec()) != needs(definition) {
        return Err(Problem::bad_input("the specification and the definition have different memory"));
    }
    Ok(())
}

/// Why no further VM of this source may come for now, if so: this host takes so many at a time, of all hosts that
/// are drained to it.
fn crowded(agent: &Agent, entries: &BTreeMap<String, Arc<IncomingVm>>, source: &str) -> Option<String> {
    let mut on_way = BTreeMap::<String, usize>::new();
    let holds_place = |entry: &&Arc<IncomingVm>| {
        !entry.is_adopted(agent) && lock(&entry.last_heard).elapsed() < HOLDS_PLACE
    };
    for entry in entries.values().filter(holds_place) {
        *on_way.entry(entry.source.clone()).or_default() += 1;
    }
    let limit = agent.config.drain.inbound;
    let now_ms = agent.incoming.clock.elapsed().as_secs_f64() * 1_000.0;
    if lock(&agent.incoming.places).admits(now_ms, limit, &on_way, source) {
        return None;
    }
    let of_each: Vec<String> =
        on_way.iter().map(|(source, count)| format!("{count} from {source}")).collect();
    let host = agent.name();
    let of_each = if of_each.is_empty() { "others wait for longer".into() } else { of_each.join(", ") };
    Some(format!("{host} takes {limit} VMs at a time from hosts that are drained; on their way: {of_each}"))
}

fn name_taken(agent: &Agent, name: &str) -> Problem {
    Problem::conflict(format!("{} has a VM {name} already; rename or remove one of the two", agent.name()))
}

fn refused_here(agent: &Agent, error: &dyn std::fmt::Display) -> Problem {
    Problem::refused(format!("{} cannot run this VM: {error}", agent.name()))
}

/// Step 3: is there the memory?
pub(crate) fn reserve_memory(agent: &Agent, id: &str) -> Result<(), Problem> {
    let entry = agent.incoming.get(id)?;
    // Held while it is decided, so that two VMs cannot both be promised the last of it.
    let entries = lock(&agent.incoming.entries);
    check_room(agent, &entries, &entry.definition)?;
    *lock(&entry.reserved) = needs(&entry.definition);
    Ok(())
}

/// Memory that is free here and promised to nobody: neither to VMs on their way nor to those that are here and
/// have not touched all of theirs yet.
pub(crate) fn memory_free_bytes(agent: &Agent) -> Result<u64, Problem> {
    free_bytes(agent, &lock(&agent.incoming.entries), None)
}

/// Huge pages that are free here and promised to nobody.
pub(crate) fn huge_pages_free(agent: &Agent) -> Vec<HugePages> {
    free_huge_pages(agent, &lock(&agent.incoming.entries), None)
}

/// What QEMUs have, they have reserved: the kernel knows of it.
fn free_huge_pages(
    agent: &Agent,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    but: Option<&VmName>,
) -> Vec<HugePages> {
    let mut promised = agent.vms.outstanding_huge_pages(but);
    promised.extend(entries.values().filter_map(|entry| entry.outstanding_huge_pages()));
    let left = |free: HugePages| {
        let of_size = promised.iter().filter(|pages| pages.size_mib == free.size_mib);
        let taken: u64 = of_size.map(|pages| pages.count).sum();
        HugePages { count: free.count.saturating_sub(taken), ..free }
    };
    host::huge_pages_free().into_iter().map(left).collect()
}

fn free_bytes(
    agent: &Agent,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    but: Option<&VmName>,
) -> Result<u64, Problem> {
    let promised: u64 = entries.values().map(|entry| entry.outstanding_bytes(agent)).sum();
    let taken = promised.saturating_add(agent.vms.outstanding_bytes(but));
    Ok(host::memory_available_bytes()?.saturating_sub(taken))
}

/// Whether there is the memory for a VM that is not on its way, beside what is promised to those that are.
pub(crate) fn check_memory(agent: &Agent, definition: &VmSpec) -> Result<(), Problem> {
    check_room(agent, &lock(&agent.incoming.entries), definition)
}

fn check_room(
    agent: &Agent,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    definition: &VmSpec,
) -> Result<(), Problem> {
    let MemoryNeeds { bytes: needed, huge_pages } = needs(definition);
    if let Some(pages) = huge_pages {
        check_huge_pages(agent, entries, definition, pages)?;
    }
    let available = free_bytes(agent, entries, Some(&definition.name))?;
    if available >= needed {
        return Ok(());
    }
    Err(Problem::refused(format!(
        "{} is short of memory for VM {}: {} MiB needed, {} MiB available; stop or move VMs there first",
        agent.name(),
        definition.name,
        needed >> 20,
        available >> 20
    )))
}

fn check_huge_pages(
    agent: &Agent,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    definition: &VmSpec,
    needed: HugePages,
) -> Result<(), Problem> {
    let HugePages { size_mib, count } = needed;
    let free = free_huge_pages(agent, entries, Some(&definition.name));
    let free = free.iter().find(|pages| pages.size_mib == size_mib).map_or(0, |pages| pages.count);
    if free >= count {
        return Ok(());
    }
    Err(Problem::refused(format!(
        "{} is short of huge pages for VM {}: {count} of {size_mib} MiB needed, {free} free; set more aside in \
         /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
        agent.name(),
        definition.name,
        size_mib << 10
    )))
}

/// Step 4: the skeleton.
pub(crate) async fn build_skeleton(agent: &Agent, id: &str) -> Result<(), Problem> {
    let entry = agent.incoming.get(id)?;
    let _stepping = entry.stepping.lock().await;
    must_wait(agent, &entry)?;
    // What is cleared below are the files of this name; they must not be those of another VM.
    if agent.vms.contains(entry.definition.name.as_str()) {
        return Err(name_taken(agent, entry.definition.name.as_str()));
    }
    let paths = agent.vms.paths(&entry.definition)?;
    Vmm::clear(&paths, QEMU_DEADLINE).await.map_err(Problem::failed)?;
    let binary = &agent.vms.hypervisor().binary;
    let spec = entry.spec.clone().ok_or_else(|| {
        Problem::conflict(format!(
            "the agent of {} was started anew since migration {id} began",
            agent.name()
        ))
    })?;
    let vmm = Vmm::start(binary, spec, paths, Role::Incoming, QEMU_DEADLINE)
        .await
        .map_err(|error| refused_here(agent, &error))?;
    *lock(&entry.vmm) = Some(Arc::new(vmm));
    Ok(())
}

fn must_wait(agent: &Agent, entry: &IncomingVm) -> Result<(), Problem> {
    match agent.journal.incoming_state(&entry.id)? {
        Some((_, IncomingState::Waiting)) => Ok(()),
        _ => Err(Problem::conflict(format!("migration {} was given up here", entry.id))),
    }
}

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
        precedence::begin(&vmm);
    }
    let mut events = vmm.events();
    let end = tokio::time::Instant::now() + deadline;
    loop {
        let status = match migration::status(&vmm, QMP_DEADLINE).await {
            Ok(status) => status,
            Err(error) if matches!(error, QmpError::Closed { .. }) || !vmm.alive() => {
                let exit = vmm.wait_exit(EXIT_KNOWN_WITHIN).await;
                return Err(Problem::failed(qemu_has_ended(agent.name(), exit.as_ref())));
            }
            // Its main thread waits for pages that are late. For how long they may be is the source's to say.
            Err(QmpError::Deadline { .. }) => return Ok(IncomingView::Waiting),
            Err(error) => return Err(Problem::failed(error)),
        };
        match status.status {
            MigrationStatus::Completed => return Ok(IncomingView::Ready),
            MigrationStatus::Failed => {
                let relay = lock(&entry.relay).as_ref().and_then(Receiver::error);
                let why = relay.map(|error| error.to_string()).or(status.error_desc);
                let why = why.unwrap_or_else(|| "its QEMU does not say why".into());
                return Err(Problem::failed(format!("{} could not take the state: {why}", agent.name())));
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

/// Step 9: the VM runs here. Idempotent.
pub(crate) async fn run(agent: &Agent, id: &str) -> Result<(), Problem> {
    let Ok(entry) = agent.incoming.get(id) else { return already_runs(agent, id) };
    let _stepping = entry.stepping.lock().await;
    // It may be paused by now, on its way to a third host: an order that is repeated, or late, must
    // not touch it.
    if entry.is_adopted(agent) {
        return already_runs(agent, id);
    }
    let vmm = entry.vmm()?;
    if let Err(problem) = check_received(agent, &vmm).await {
        let was_told = matches!(agent.journal.incoming_state(id)?, Some((_, IncomingState::Running)));
        if was_told && !vmm.alive() {
            // Its QEMU ended just when it was told to run, which was not known then.
            agent.vms.adopt(entry.definition.clone(), vmm, entry.cores_taken);
        }
        return Err(problem);
    }
    if !agent.journal.run_incoming(id)? {
        return Err(Problem::conflict(format!("{} discarded the VM of migration {id}", agent.name())));
    }
    precedence::begin(&vmm);
    precedence::end_soon(&vmm);
    if let Err(error) = migration::run(&vmm, QMP_DEADLINE).await {
        return Err(does_not_run(agent, &entry, vmm, error).await);
    }
    agent.vms.adopt(entry.definition.clone(), vmm, entry.cores_taken);
    info!(vm = %entry.definition.name, source = entry.source, "runs here");
    Ok(())
}

/// What becomes of a VM that was recorded to run here, and QEMU did not let it.
async fn does_not_run(agent: &Agent, entry: &IncomingVm, vmm: Arc<Vmm>, error: MigrationError) -> Problem {
    let problem = Problem::failed(format!("the VM does not run on {}: {error}", agent.name()));
    if !vmm.alive() {
        // It may have run for a moment. So its source must not let it run again; it has crashed here.
        agent.vms.adopt(entry.definition.clone(), vmm, entry.cores_taken);
        return problem;
    }
    let refused =
        matches!(error, MigrationError::Qmp(QmpError::Command { .. }) | MigrationError::MemoryIncomplete(_));
    // Without an answer it is not known; the source asks again. A refusal, as of a disk that another
    // QEMU holds locked, means that the source can have it back.
    if refused && let Err(error) = take_back(agent, entry).await {
        return problem.context(error);
    }
    problem
}

async fn take_back(agent: &Agent, entry: &IncomingVm) -> Result<(), Problem> {
    agent.journal.take_back_run(&entry.id)?;
    remove_skeleton(agent, &entry.id, Some(entry)).await
}

fn already_runs(agent: &Agent, id: &str) -> Result<(), Problem> {
    match agent.journal.incoming_state(id)? {
        Some((_, IncomingState::Running)) if is_still_to_run(agent, id)? => {
            Err(Problem::failed(format!("its QEMU on {} has not said yet that the VM runs", agent.name())))
        }
        Some((_, IncomingState::Running | IncomingState::Finished)) => Ok(()),
        _ => Err(Problem::conflict(format!("{} discarded the VM of migration {id}", agent.name()))),
    }
}

async fn check_received(agent: &Agent, vmm: &Vmm) -> Result<(), Problem> {
    let status = migration::status(vmm, QMP_DEADLINE).await.map_err(Problem::failed)?;
    if status.status == MigrationStatus::Completed {
        return Ok(());
    }
    Err(Problem::failed(format!("not all state of the VM is on {}: {}", agent.name(), status.status)))
}

/// What was decided here, by the journal; and what could be decided.
pub(crate) async fn view(agent: &Agent, id: &str) -> Result<IncomingView, Problem> {
    let Some((_, state)) = agent.journal.incoming_state(id)? else { return Ok(IncomingView::Waiting) };
    Ok(match state {
        // The source must not let its copy go.
        IncomingState::Running if is_still_to_run(agent, id)? => IncomingView::Ready,
        IncomingState::Running | IncomingState::Finished => IncomingView::Running,
        IncomingState::Discarded => IncomingView::Discarded,
        IncomingState::Waiting => match agent.incoming.get(id) {
            Ok(entry) => how_far(agent, &entry).await?,
            Err(_) => IncomingView::Waiting,
        },
    })
}

/// Whether it is recorded that the VM runs here, but QEMU has not said yet that it does.
fn is_still_to_run(agent: &Agent, id: &str) -> Result<bool, Problem> {
    if let Ok(entry) = agent.incoming.get(id) {
        return Ok(!entry.is_adopted(agent));
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
        Some(vmm) => match migration::status(&vmm, QMP_DEADLINE).await {
            Ok(status) if status.status == MigrationStatus::Completed => Ok(IncomingView::Ready),
            Err(QmpError::Deadline { .. }) if vmm.alive() => Err(mute()),
            Ok(_) | Err(_) => Ok(IncomingView::Waiting),
        },
        // It stood before this agent did.
        None if entry.spec.is_none() => Err(mute()),
        None => Ok(IncomingView::Waiting),
    }
}

/// The VM will not run here. Idempotent; refused once it runs.
pub(crate) async fn discard(agent: &Agent, id: &str, source: &str) -> Result<(), Problem> {
    let entry = agent.incoming.get(id).ok();
    let _stepping = match &entry {
        Some(entry) => Some(entry.stepping.lock().await),
        None => None,
    };
    if !agent.journal.discard_incoming(id, source)? {
        return Err(Problem::conflict(format!("the VM of migration {id} runs on {}", agent.name())));
    }
    remove_skeleton(agent, id, entry.as_deref()).await
}

async fn remove_skeleton(agent: &Agent, id: &str, entry: Option<&IncomingVm>) -> Result<(), Problem> {
    if let Some(entry) = entry {
        entry.end_trials();
        let vmm = lock(&entry.vmm).clone();
        match vmm {
            Some(vmm) => vmm.destroy(QEMU_DEADLINE).await.map_err(Problem::failed)?,
            // None was built, or it did not answer when the agent started.
            None if entry.is_adopted(agent) => {}
            None => clear(agent, &entry.definition).await?,
        }
    }
    let put_back = agent.watches.leave(agent, id).await;
    lock(&agent.incoming.entries).remove(id);
    put_back?;
    Ok(agent.journal.forget_skeleton(id)?)
}

/// The source has nothing more to ask: put the network back, say what was used.
pub(crate) async fn finish(agent: &Agent, id: &str) -> Result<TargetUse, Problem> {
    let Ok(entry) = agent.incoming.get(id) else {
        already_runs(agent, id)?;
        return Ok(TargetUse::default());
    };
    let vmm = entry.vmm()?;
    let used = TargetUse {
        vmm_cpu_seconds: vmm.cpu_seconds().unwrap_or(0.0),
        agent_cpu_seconds: host::own_cpu().saturating_sub(entry.agent_cpu_at_start).as_secs_f64(),
    };
    finish_arrival(agent, id).await?;
    Ok(used)
}

async fn finish_arrival(agent: &Agent, id: &str) -> Result<(), Problem> {
    agent.watches.leave(agent, id).await?;
    agent.journal.finish_incoming(id)?;
    lock(&agent.incoming.entries).remove(id);
    Ok(())
}

/// Looks after one VM on its way for as long as it is: should its source fall silent, asks; should
/// the source be gone, gives up what it may give up.
async fn watch(agent: Arc<Agent>, entry: Arc<IncomingVm>) {
    loop {
        tokio::time::sleep(WATCH_EVERY).await;
        if !lock(&agent.incoming.entries).contains_key(&entry.id) {
            return;
        }
        if let Err(problem) = take_hold(&agent, &entry).await {
            debug!(migration = entry.id, %problem, "the skeleton does not answer yet");
        }
        let silence = lock(&entry.last_heard).elapsed();
        if silence < SILENCE_MAX {
            continue;
        }
        if let Err(problem) = settle(&agent, &entry, silence).await {
            warn!(migration = entry.id, %problem, "a VM on its way here cannot be settled; tried again soon");
        }
    }
}

async fn settle(agent: &Agent, entry: &IncomingVm, silence: Duration) -> Result<(), Problem> {
    // Looked at without `get`, which would count as a word from the source.
    let state = agent.journal.incoming_state(&entry.id)?.map(|(_, state)| state);
    match state {
        // QEMU has not answered yet when it was told to let it run.
        Some(IncomingState::Running) if !entry.is_adopted(agent) => {
            take_hold(agent, entry).await?;
            return run(agent, &entry.id).await;
        }
        Some(IncomingState::Running | IncomingState::Finished) => {
            return finish_arrival(agent, &entry.id).await;
        }
        _ => {}
    }
    let source =
        agent.peer(&entry.source).ok_or_else(|| Problem::not_found("its source is no peer any more"))?;
    match source.get::<HandOverView>(&format!("/v1/handovers/{}", entry.id)).await {
        Ok(HandOverView::Pending) => entry.heard(),
        Ok(HandOverView::HandedOver) => {
            take_hold(agent, entry).await?;
            run(agent, &entry.id).await?;
        }
        Ok(HandOverView::Refused | HandOverView::Unknown) => discard(agent, &entry.id, &entry.source).await?,
        Err(problem) if silence > GIVE_UP_AFTER && !has_all_state(agent, entry).await => {
            warn!(migration = entry.id, %problem, "given up: its source is gone");
            discard(agent, &entry.id, &entry.source).await?;
        }
        Err(problem) => return Err(problem),
    }
    Ok(())
}

/// Takes hold of a skeleton that stood before this agent did, if it did not answer when the agent started.
async fn take_hold(agent: &Agent, entry: &IncomingVm) -> Result<(), Problem> {
    let stood_before = entry.spec.is_none();
    let _taking_hold = entry.taking_hold.lock().await;
    if stood_before && lock(&entry.vmm).is_none() {
        let found = agent.vms.find_running(&entry.definition).await?;
        *lock(&entry.vmm) = found;
    }
    Ok(())
}

async fn has_all_state(agent: &Agent, entry: &IncomingVm) -> bool {
    let vmm = lock(&entry.vmm).clone();
    match vmm {
        Some(vmm) => check_received(agent, &vmm).await.is_ok(),
        None => false,
    }
}
