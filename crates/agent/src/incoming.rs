//! VMs on their way to this host: the target's side of steps 2 to 5 and 9.
//!
//! The source leads; this side answers, and keeps two promises that hold through crashes of either
//! agent. What it has said it discarded never runs here. What it was told to run is never discarded.

mod arrived;
mod connect;
mod memory;
mod permit;
mod post_copy;
mod running;
mod silence;
mod strangers;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::facts::{HugePages, MemoryNeeds};
use drainpipe_engine::inbound::Inbound;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Protocol;
use drainpipe_hypervisor::migration;
use drainpipe_hypervisor::spec::{ResolvedSpec, VmSpec};
use drainpipe_hypervisor::{Role, Vmm};
use drainpipe_relay::Receiver;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinSet;
use tracing::warn;

pub(crate) use self::arrived::resume_recorded;
pub(crate) use self::connect::{connect, open_trials, watch_again};
pub(crate) use self::memory::{check_memory, huge_pages_free, memory_free_bytes, reserve_memory};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::permit::check_described;
pub(crate) use self::permit::permit;
pub(crate) use self::post_copy::{connect_again, end_part, take_up_parts};
use self::running::{already_runs, is_still_to_run};
pub(crate) use self::running::{run_by_order, stop_told, view, wait_received};
use self::silence::{GIVE_UP_AFTER, SILENCE_MAX};
use crate::agent::Agent;
use crate::api::types::TargetUse;
use crate::host;
use crate::journal::{IncomingRecord, IncomingState};
use crate::lock::lock;
use crate::proof::beside::{Beside, Way};
use crate::slots::Slots;
use crate::vm_end;
use crate::vms::{QEMU_DEADLINE, needs};

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
    // Agreed on in step 2; nothing after a restart of this agent, when it goes no further here.
    protocol: Option<Protocol>,
    reserved: Mutex<MemoryNeeds>,
    vmm: Mutex<Option<Arc<Vmm>>>,
    last_heard: Mutex<Instant>,
    // All of its state is here.
    is_received: AtomicBool,
    agent_cpu_at_start: Duration,
    // The relay of a compressed or encrypted migration, as long as it lasts.
    relay: Mutex<Option<Receiver>>,
    // Whether it is encrypted.
    is_encrypted: AtomicBool,
    // Whether it may run here before all its memory is.
    allows_post_copy: AtomicBool,
    // What it needs to run was here before the rest.
    came_in_parts: AtomicBool,
    // It is recorded that it runs here.
    is_told_to_run: AtomicBool,
    // And it is among the VMs of this host since: its QEMU has said that it runs, or how it has ended.
    is_let_run: AtomicBool,
    // Those who answer when the source tries the paths.
    answering: Mutex<JoinSet<()>>,
    // One step at a time, whatever the order in which requests arrive.
    stepping: AsyncMutex<()>,
    // One at a time takes hold of a skeleton that stood before the agent did: its QEMU listens to one client only.
    taking_hold: AsyncMutex<()>,
}

impl IncomingVm {
    fn new(id: String, source: String, definition: VmSpec) -> Self {
        Self {
            id,
            source,
            spec: None,
            definition,
            cores_taken: None,
            protocol: None,
            reserved: Mutex::default(),
            vmm: Mutex::default(),
            last_heard: Mutex::new(Instant::now()),
            is_received: AtomicBool::default(),
            agent_cpu_at_start: host::own_cpu(),
            relay: Mutex::default(),
            is_encrypted: AtomicBool::default(),
            allows_post_copy: AtomicBool::default(),
            came_in_parts: AtomicBool::default(),
            is_told_to_run: AtomicBool::default(),
            is_let_run: AtomicBool::default(),
            answering: Mutex::default(),
            stepping: AsyncMutex::default(),
            taking_hold: AsyncMutex::default(),
        }
    }

    /// The source tries no path any more.
    fn end_trials(&self) {
        *lock(&self.answering) = JoinSet::new();
    }

    fn heard(&self) {
        *lock(&self.last_heard) = Instant::now();
    }

    fn note_received(&self) {
        self.is_received.store(true, Ordering::Relaxed);
    }

    /// Whether it was told to run here, and nobody has said yet that it does.
    fn is_told(&self) -> bool {
        self.is_told_to_run.load(Ordering::Relaxed) && !self.is_let_run.load(Ordering::Relaxed)
    }

    /// It is one of this host's VMs from now on.
    fn join(&self, agent: &Agent, vmm: Arc<Vmm>) {
        self.is_let_run.store(true, Ordering::Relaxed);
        agent.vms.adopt(self.definition.clone(), vmm, self.cores_taken);
    }

    /// Whether all of its state is known to be here.
    fn has_arrived(&self) -> bool {
        self.is_received.load(Ordering::Relaxed)
    }

    /// Whether more of its memory may come. Of a source that is gone for good nothing does, whether or not the VM could
    /// be given up.
    fn is_receiving(&self) -> bool {
        !self.has_arrived() && lock(&self.last_heard).elapsed() < GIVE_UP_AFTER
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
        let entry = self.find(id);
        entry.ok_or_else(|| Problem::not_found(format!("no migration {id} on its way here")))
    }

    fn find(&self, id: &str) -> Option<Arc<IncomingVm>> {
        lock(&self.entries).get(id).cloned()
    }

    /// A host has said something about a migration. Nobody but its source shows by that that the source is there.
    pub(crate) fn heard(&self, id: &str, host: &str) {
        if let Some(entry) = self.find(id).filter(|entry| entry.source == host) {
            entry.heard();
        }
    }

    /// Whether memory of one of them may still come.
    pub(crate) fn are_receiving(&self) -> bool {
        lock(&self.entries).values().any(|entry| entry.is_receiving())
    }

    /// The QEMUs that wait for the VMs on their way, and those that were told to run them.
    pub(crate) fn skeletons(&self) -> Vec<Arc<Vmm>> {
        lock(&self.entries).values().filter_map(|entry| entry.vmm().ok()).collect()
    }

    /// Whether a VM is on its way from this host.
    pub(crate) fn are_from(&self, host: &str) -> bool {
        lock(&self.entries).values().any(|entry| entry.source == host)
    }

    /// Whether a VM of this name is on its way.
    pub(crate) fn has(&self, vm: &str) -> bool {
        lock(&self.entries).values().any(|entry| entry.definition.name.as_str() == vm)
    }

    /// That of a VM which was told to run here, and of which nobody has said yet that it does.
    fn told(&self, vm: &str) -> Option<Arc<IncomingVm>> {
        let entries = lock(&self.entries);
        entries.values().find(|entry| entry.definition.name.as_str() == vm && entry.is_told()).cloned()
    }

    /// Whether a VM was told to run here, and nobody has said yet that it does.
    pub(crate) fn is_told(&self, vm: &str) -> bool {
        self.told(vm).is_some()
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

    fn ids_of(&self, vm: &str) -> Vec<String> {
        let entries = lock(&self.entries);
        let of_vm = entries.values().filter(|entry| entry.definition.name.as_str() == vm);
        of_vm.map(|entry| entry.id.clone()).collect()
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
                agent.journal.discard_incoming(&record.id)?;
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
            allows_post_copy: AtomicBool::new(record.post_copy),
            reserved: Mutex::new(reserved),
            vmm: Mutex::new(vmm),
            // Its source is asked at once.
            last_heard: Mutex::new(now.checked_sub(SILENCE_MAX).unwrap_or(now)),
            ..IncomingVm::new(record.id, record.source, record.spec)
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
        let is_remains = !agent.vms.contains(&record.vm) && coming.iter().all(|other| other.vm != record.vm);
        let cleared = if is_remains { clear(agent, &record.spec).await } else { Ok(()) };
        match cleared {
            Ok(()) => agent.journal.forget_skeleton(&record.id)?,
            // A QEMU that nobody needs and that hangs must not keep the agent from all others.
            Err(problem) => warn!(vm = record.vm, %problem, "its remains are removed at the next start"),
        }
    }
    Ok(())
}

/// Ends the skeleton of a VM that was discarded, whose QEMU was not taken hold of, and removes what is left.
async fn clear(agent: &Agent, definition: &VmSpec) -> Result<(), Problem> {
    let paths = agent.vms.paths(definition)?;
    Vmm::end_given_up(&paths, QEMU_DEADLINE).await.map_err(Problem::failed)
}

fn insert(agent: &Arc<Agent>, entry: IncomingVm) {
    let mut entries = lock(&agent.incoming.entries);
    insert_locked(agent, &mut entries, entry);
}

/// The one that is there, if one is.
fn insert_unless_there(agent: &Arc<Agent>, entry: IncomingVm) -> Arc<IncomingVm> {
    let id = entry.id.clone();
    let mut entries = lock(&agent.incoming.entries);
    if !entries.contains_key(&id) {
        insert_locked(agent, &mut entries, entry);
    }
    Arc::clone(&entries[&id])
}

fn insert_locked(agent: &Arc<Agent>, entries: &mut BTreeMap<String, Arc<IncomingVm>>, entry: IncomingVm) {
    let entry = Arc::new(entry);
    entries.insert(entry.id.clone(), Arc::clone(&entry));
    tokio::spawn(silence::watch(Arc::clone(agent), entry));
}

pub(crate) fn no_migration(agent: &Agent, id: &str) -> Problem {
    Problem::not_found(format!("{} has no record of a migration {id} to it", agent.name()))
}

fn name_taken(agent: &Agent, name: &str) -> Problem {
    Problem::conflict(format!("{} has a VM {name} already; rename or remove one of the two", agent.name()))
}

fn refused_here(agent: &Agent, error: &dyn std::fmt::Display) -> Problem {
    Problem::refused(format!("{} cannot run this VM: {error}", agent.name()))
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
    agent.vms.clear_remains(&entry.definition).await?;
    let spec = entry.spec.clone().ok_or_else(|| {
        Problem::conflict(format!(
            "the agent of {} was started anew since migration {id} began",
            agent.name()
        ))
    })?;
    let vmm =
        agent.vms.launch(spec, paths, Role::Incoming).await.map_err(|error| refused_here(agent, &error))?;
    let arrival = Way { id: id.into(), host: entry.source.clone() };
    Beside { arrival: Some(arrival), ..Beside::of(entry.definition.clone()) }.write(vmm.paths());
    let vmm = Arc::new(vmm);
    vm_end::watch(entry.definition.name.as_str(), &vmm);
    *lock(&entry.vmm) = Some(vmm);
    Ok(())
}

fn must_wait(agent: &Agent, entry: &IncomingVm) -> Result<(), Problem> {
    match agent.journal.incoming_state(&entry.id)? {
        Some((_, IncomingState::Waiting)) => Ok(()),
        _ => Err(Problem::conflict(format!("migration {} was given up here", entry.id))),
    }
}

/// The VM will not run here, which its source hears. Idempotent; refused once it runs, and where there is no record of it.
///
/// An order that comes later than this one finds nothing either. Should it be that of step 2, the VM is given up once
/// its source was asked ([`silence`]), which alone can have it run, and has given it up.
pub(crate) async fn discard(agent: &Agent, id: &str) -> Result<(), Problem> {
    give_up(agent, id).await?;
    Ok(agent.journal.source_knows(id)?)
}

async fn give_up(agent: &Agent, id: &str) -> Result<(), Problem> {
    let entry = agent.incoming.get(id).ok();
    let _stepping = match &entry {
        Some(entry) => Some(entry.stepping.lock().await),
        None => None,
    };
    match agent.journal.discard_incoming(id)? {
        Some(IncomingState::Running | IncomingState::Finished) => {
            return Err(Problem::conflict(format!("the VM of migration {id} runs on {}", agent.name())));
        }
        None if entry.is_none() => return Err(no_migration(agent, id)),
        Some(IncomingState::Waiting | IncomingState::Discarded) | None => {}
    }
    remove_skeleton(agent, id, entry.as_deref()).await
}

async fn remove_skeleton(agent: &Agent, id: &str, entry: Option<&IncomingVm>) -> Result<(), Problem> {
    if let Some(entry) = entry {
        entry.end_trials();
        let vmm = lock(&entry.vmm).clone();
        match vmm {
            // It was never told to run: that is recorded first, and what is so recorded is not discarded.
            Some(vmm) if !entry.is_told_to_run.load(Ordering::Relaxed) => {
                vmm.destroy_unrun(QEMU_DEADLINE).await.map_err(Problem::failed)?;
            }
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
        agent.journal.source_knows(id)?;
        return Ok(TargetUse::default());
    };
    if is_still_to_run(agent, id)? {
        return already_runs(agent, id).map(|()| TargetUse::default());
    }
    let vmm = entry.vmm()?;
    let used = TargetUse {
        vmm_cpu_seconds: vmm.cpu_seconds().unwrap_or(0.0),
        agent_cpu_seconds: host::own_cpu().saturating_sub(entry.agent_cpu_at_start).as_secs_f64(),
    };
    finish_arrival(agent, id).await?;
    agent.journal.source_knows(id)?;
    Ok(used)
}

/// A VM has left this host, or was removed. What its arrivals still hold here goes, though whoever sent it may not have
/// heard yet that it ran here.
pub(crate) async fn close_arrivals(agent: &Agent, vm: &str) {
    for id in agent.incoming.ids_of(vm) {
        match agent.journal.incoming_state(&id) {
            Ok(Some((_, IncomingState::Finished))) => {}
            Ok(_) => continue,
            Err(error) => {
                warn!(vm, migration = id, %error, "whether its arrival is closed is not known; looked at again soon");
                continue;
            }
        }
        if let Err(problem) = agent.watches.leave(agent, &id).await {
            warn!(vm, migration = id, %problem, "the network is put back at the next start");
        }
        lock(&agent.incoming.entries).remove(&id);
    }
}

async fn finish_arrival(agent: &Agent, id: &str) -> Result<(), Problem> {
    agent.watches.leave(agent, id).await?;
    agent.journal.finish_incoming(id)?;
    let entry = lock(&agent.incoming.entries).remove(id);
    if let Some(vmm) = entry.and_then(|entry| entry.vmm().ok())
        && let Err(error) = migration::forget_key(vmm.paths())
    {
        warn!(migration = id, %error, "the key with which its memory came stays until the VM ends or moves");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn coming() -> (IncomingVms, Arc<IncomingVm>) {
        let spec = "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-7.2\"\n";
        let definition = VmSpec::from_toml(spec, Path::new("web.toml")).unwrap();
        let entry = Arc::new(IncomingVm::new("1".into(), "a".into(), definition));
        let incoming = IncomingVms::default();
        lock(&incoming.entries).insert(entry.id.clone(), Arc::clone(&entry));
        (incoming, entry)
    }

    #[test]
    fn one_that_has_arrived_receives_no_more_though_it_is_not_known_whose_it_is() {
        let (incoming, entry) = coming();
        assert!(incoming.are_receiving());
        entry.note_received();
        assert!(!incoming.are_receiving());
        assert_eq!(incoming.definitions().len(), 1);
    }

    #[test]
    fn nothing_comes_from_a_source_that_is_gone() {
        let (incoming, entry) = coming();
        be_silent(&entry);
        assert!(!incoming.are_receiving());
    }

    #[test]
    fn what_another_host_says_is_no_sign_of_life_of_the_source() {
        let (incoming, entry) = coming();
        be_silent(&entry);
        incoming.heard("1", "c");
        assert!(!incoming.are_receiving());
        incoming.heard("1", "a");
        assert!(incoming.are_receiving());
    }

    /// Its source has not been heard of for long.
    fn be_silent(entry: &IncomingVm) {
        let gone = Instant::now().checked_sub(GIVE_UP_AFTER);
        *lock(&entry.last_heard) = gone.expect("the host has been up for minutes");
    }
}
