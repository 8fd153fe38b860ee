//! The VMs of this host: defined in the journal and run by QEMU, or a manager's own; claimed by one task at a time.

pub(crate) mod beside;
pub(crate) mod cpu_priority;
pub(crate) mod hooks;
pub(crate) mod hypervisors;
mod managed;
pub(crate) mod session_weight;
#[cfg(test)]
mod tests;
pub(crate) mod throttles;
pub(crate) mod vm_cores;
pub(crate) mod vm_end;
pub(crate) mod vm_files;

pub(crate) use self::managed::check_own;
pub(crate) use self::managed::keep_looking as keep_looking_at_managed;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use drainpipe_engine::check::vm::Notice;
use drainpipe_engine::host::facts::MemoryNeeds;
use drainpipe_engine::migration::target::promises::Promise;
pub(crate) use drainpipe_engine::migration::timing::{QEMU_DEADLINE, QMP_DEADLINE};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::DiskName;
use drainpipe_hypervisor::spec::{VmName, VmSpec};
use drainpipe_hypervisor::{
    Exit, Hypervisor, HypervisorFacts, Machine, Manager, OwnersAct, ResolvedSpec, Role, RunState, Unmanaged,
    VmDirectory, VmError, VmErrorKind,
};
use futures_util::future::join_all;
use tracing::{info, warn};

use crate::host::hardware;
use crate::store::journal::Journal;
use crate::store::lock::lock;
use crate::vms::beside::Beside;
use drainpipe_api_types::{VmState, VmView};

/// How long a guest may take to power off when asked to.
const POWER_OFF_DEADLINE: Duration = Duration::from_mins(1);

/// How long it may take in a list of all VMs. A QEMU that is too busy to answer must not keep the others out of
/// it, so this is less than the agents wait for each other's lists.
const LISTED_DEADLINE: Duration = Duration::from_millis(1_500);

/// The VMs that this host holds.
#[derive(Debug)]
pub(crate) struct Vms {
    host: String,
    hypervisor: Arc<dyn Hypervisor>,
    facts: HypervisorFacts,
    // What the manager beside Drainpipe says, as long as it answers.
    facts_of_manager: Mutex<Option<HypervisorFacts>>,
    journal: Arc<Journal>,
    entries: Mutex<BTreeMap<String, Entry>>,
    // The manager's that no specification describes.
    unmanaged: Mutex<Vec<Unmanaged>>,
}

#[derive(Debug, Clone)]
struct Entry {
    definition: VmSpec,
    vmm: Option<Arc<dyn Machine>>,
    // Cores that its QEMU took recently, here or on the host that it came from. Absent until they were counted.
    cores_taken: Option<f64>,
    claim: Option<Claim>,
    // What keeps it here, by its manager.
    obstacles: Vec<Notice>,
}

impl Entry {
    fn of(definition: VmSpec) -> Self {
        Self { definition, vmm: None, cores_taken: None, claim: None, obstacles: vec![] }
    }

    fn unmovable(&self) -> Option<String> {
        let all: Vec<&str> = self.obstacles.iter().map(|obstacle| obstacle.what.as_str()).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    fn running(&self) -> Option<&Arc<dyn Machine>> {
        self.vmm.as_ref().filter(|vmm| vmm.alive())
    }

    fn is_unresponsive(&self) -> bool {
        matches!(self.claim, Some(Claim::Unresponsive(_)))
    }

    /// What of this host's memory is its own; none of one that is off.
    fn promise(&self) -> Option<Promise> {
        let needs = needs(&self.definition);
        let vmm = self.running();
        (vmm.is_some() || self.claim == Some(Claim::Changing))
            .then(|| promise(needs, vmm.map(|vmm| vmm.pid())))
    }
}

/// What work keeps others from a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Claim {
    /// It is being started, stopped or removed.
    Changing,
    /// It is being moved; the migration's identifier.
    Migrating(String),
    /// One of its disks is being moved on this host; which, and the move's identifier.
    MovingDisk(DiskName, String),
    /// Its QEMU lives and could not be taken hold of when the agent started; why.
    Unresponsive(String),
}

impl Claim {
    /// Why nobody else may work on the VM.
    fn describe(&self, name: &str) -> String {
        match self {
            Self::Changing => format!("VM {name} is being started, stopped or removed; try again"),
            Self::Migrating(id) => {
                format!("VM {name} is already being moved (migration {id}): wait, or `drainpipe cancel {id}`")
            }
            Self::MovingDisk(disk, _) => {
                format!(
                    "{disk} of VM {name} is being moved to another place on its host: wait, or `drainpipe vm move-disk {name} \
                     --cancel`"
                )
            }
            Self::Unresponsive(why) => {
                format!(
                    "{why}; the agent keeps trying; if it does not answer again, `drainpipe vm stop {name} \
                    --force` ends that process"
                )
            }
        }
    }
}

/// A VM that has a QEMU here, or may have one in a moment.
#[derive(Debug)]
pub(crate) struct PresentVm {
    /// Its definition.
    pub(crate) definition: VmSpec,
    /// Its QEMU.
    pub(crate) vmm: Option<Arc<dyn Machine>>,
    /// Why it cannot be claimed.
    pub(crate) busy: Option<String>,
}

/// The right to change a VM; given back when dropped. That of a migration or a disk's move which crashes is kept: how it has left the VM
/// nobody knows.
#[derive(Debug)]
pub(crate) struct Claimed {
    vms: Arc<Vms>,
    name: String,
    /// The VM's definition.
    pub(crate) definition: VmSpec,
    /// Its QEMU, if it runs.
    pub(crate) vmm: Option<Arc<dyn Machine>>,
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if let Some(entry) = self.vms.lock().get_mut(&self.name) {
            let is_kept = matches!(entry.claim, Some(Claim::Migrating(_) | Claim::MovingDisk(..)));
            let crashes = std::thread::panicking() && is_kept;
            if !crashes {
                entry.claim = None;
            }
        }
    }
}

impl Vms {
    /// The VMs that the journal knows, those that still run taken hold of.
    pub(crate) async fn open(
        host: &str,
        hypervisor: Arc<dyn Hypervisor>,
        facts: HypervisorFacts,
        journal: Arc<Journal>,
    ) -> Result<Arc<Self>, Problem> {
        let vms = Self {
            host: host.into(),
            hypervisor,
            facts,
            facts_of_manager: Mutex::default(),
            journal,
            entries: Mutex::default(),
            unmanaged: Mutex::default(),
        };
        let definitions = vms.journal.vms()?;
        // All at once: each that hangs takes until the deadline.
        let found = join_all(definitions.iter().map(|definition| vms.find_own(definition))).await;
        for (definition, found) in definitions.into_iter().zip(found) {
            let name = definition.name.to_string();
            // One QEMU that hangs must not keep the agent from the other VMs, nor be started twice.
            let (vmm, claim) = match found {
                Ok(vmm) => (vmm, None),
                Err(problem) => {
                    warn!(vm = name, %problem, "unresponsive; tried again");
                    (None, Some(Claim::Unresponsive(problem.message)))
                }
            };
            vms.lock().insert(name, Entry { vmm, claim, ..Entry::of(definition) });
        }
        Ok(Arc::new(vms))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        // Each critical section leaves the map whole, so a panic elsewhere does not spoil it.
        lock(&self.entries)
    }

    /// The runtime files of a VM.
    pub(crate) fn directory(&self, definition: &VmSpec) -> Result<VmDirectory, Problem> {
        self.hypervisor.directory(&definition.name).map_err(Problem::refused)
    }

    /// Takes hold of a VM's QEMU, if it has one; removes the remains of one that has ended.
    pub(crate) async fn find_running(
        &self,
        definition: &VmSpec,
    ) -> Result<Option<Arc<dyn Machine>>, Problem> {
        match self.hypervisor.attach(&definition.name, QMP_DEADLINE).await {
            Ok(vmm) => {
                vm_end::watch(definition.name.as_str(), &vmm);
                Ok(Some(vmm))
            }
            Err(error) if error.kind == VmErrorKind::NotRunning => {
                self.hypervisor.clear(&definition.name).map_err(Problem::failed)?;
                Ok(None)
            }
            Err(error) => Err(Problem::failed(format!("VM {}: {error}", definition.name))),
        }
    }

    /// As [`Self::find_running`], of a VM of this host. A QEMU that never was told to run its guest, because the agent
    /// that started it ended before, is ended: nobody else would tell it, and no drain would move it.
    async fn find_own(&self, definition: &VmSpec) -> Result<Option<Arc<dyn Machine>>, Problem> {
        let Some(vmm) = self.find_running(definition).await? else { return Ok(None) };
        let name = definition.name.as_str();
        if !self.never_ran(name, &*vmm).await? {
            return Ok(Some(vmm));
        }
        if let Err(error) = vmm.destroy(QEMU_DEADLINE).await {
            warn!(vm = name, %error, "never got the order to run, and does not end: `drainpipe vm stop \
                --force {name}`");
            return Ok(Some(vmm));
        }
        warn!(
            vm = name,
            "was being started when the agent ended, and never ran; its QEMU is ended, and the VM is stopped: \
             `drainpipe vm start {name}` starts it"
        );
        Ok(None)
    }

    /// Whether a QEMU of a VM of this host was started to boot a guest and never ran it, so that nothing is lost with
    /// it. In doubt it is not: a target's QEMU may say the same of itself (`prelaunch`), and have the only copy of a VM.
    async fn never_ran(&self, name: &str, vmm: &dyn Machine) -> Result<bool, Problem> {
        let is_on_its_way = self.journal.open_migrations()?.iter().any(|open| open.vm == name)
            || self.journal.unfinished_incoming()?.iter().any(|unfinished| unfinished.vm == name);
        // QEMU is asked last: one whose target died may not answer for long.
        Ok(!is_on_its_way
            && matches!(vmm.role(), Ok(Role::Fresh))
            && matches!(vmm.run_state(QMP_DEADLINE).await, Ok(RunState::Prelaunch)))
    }

    /// Removes what is left of a VM that has no QEMU here by what is known. One that lives is ended only if the journal
    /// says that its VM was given up.
    pub(crate) async fn clear_remains(&self, definition: &VmSpec) -> Result<(), Problem> {
        let name = definition.name.as_str();
        let was_given_up = self.journal.discarded_incoming_vms()?.iter().any(|record| record.vm == name);
        let cleared = if was_given_up {
            self.hypervisor.end_given_up(&definition.name, QEMU_DEADLINE).await
        } else {
            self.hypervisor.clear(&definition.name)
        };
        cleared.map_err(|error| Problem::conflict(format!("VM {name}: {error}")))
    }

    /// The VMs whose QEMU lives and has not answered since the agent started.
    pub(crate) fn unresponsive(&self) -> Vec<String> {
        let entries = self.lock();
        let mut names: Vec<String> = entries.keys().cloned().collect();
        names.retain(|name| entries[name].is_unresponsive());
        names
    }

    /// Why a VM is unresponsive, if it is.
    pub(crate) fn why_unresponsive(&self, name: &str) -> Option<String> {
        let entries = self.lock();
        let claim = entries.get(name).and_then(|entry| entry.claim.as_ref());
        claim.filter(|claim| matches!(claim, Claim::Unresponsive(_))).map(|claim| claim.describe(name))
    }

    /// Connects to a VM that was unresponsive, or removes its remains, and claims it.
    pub(crate) async fn reach(self: &Arc<Self>, name: &str, claim: Claim) -> Result<Claimed, Problem> {
        let definition = self.lock().get(name).map(|entry| entry.definition.clone());
        let vmm = self.find_own(&definition.ok_or_else(|| self.unknown(name))?).await?;
        if let Some(entry) = self.lock().get_mut(name).filter(|entry| entry.is_unresponsive()) {
            (entry.vmm, entry.claim) = (vmm, None);
            return self.claim_locked(entry, name, claim);
        }
        Err(Problem::conflict(format!("VM {name} answers again")))
    }

    /// What this host's hypervisor can do.
    pub(crate) fn facts(&self) -> &HypervisorFacts {
        &self.facts
    }

    /// What runs them.
    pub(crate) fn hypervisor(&self) -> &dyn Hypervisor {
        &*self.hypervisor
    }

    /// Runs a QEMU.
    pub(crate) async fn launch(
        &self,
        spec: ResolvedSpec,
        beside: &Beside,
        role: Role,
    ) -> Result<Arc<dyn Machine>, VmError> {
        self.hypervisor.start(spec, &beside.as_json(), role, QEMU_DEADLINE).await
    }

    /// Defines a VM.
    pub(crate) fn create(&self, definition: VmSpec) -> Result<(), Problem> {
        definition.resolve(&self.facts).map_err(Problem::bad_input)?;
        check_own(&definition, OwnersAct::Define)?;
        let name = definition.name.to_string();
        self.directory(&definition)?;
        let mut entries = self.lock();
        if entries.contains_key(&name) {
            return Err(Problem::conflict(format!(
                "{} has a VM {name} already: `drainpipe vm rm {name}` removes it, or choose another name",
                self.host
            )));
        }
        // A VM that somebody forgot, and that runs.
        if let Some(pid) = self.hypervisor.living(&definition.name).map_err(Problem::failed)? {
            return Err(Problem::conflict(format!(
                "a QEMU of a VM {name} runs on {} (process {pid}), and the journal does not know it: choose \
                another name, or end that process if you are sure that nobody needs it",
                self.host
            )));
        }
        self.journal.define_vm(&definition)?;
        entries.insert(name, Entry::of(definition));
        Ok(())
    }

    /// Takes over a VM that arrived and runs, and that took so many cores where it was; the journal has it already.
    pub(crate) fn adopt(&self, definition: VmSpec, vmm: Arc<dyn Machine>, cores_taken: Option<f64>) {
        if vmm.alive() {
            Beside::note_run(&definition, vmm.directory());
        }
        let entry = Entry { vmm: Some(vmm), cores_taken, ..Entry::of(definition) };
        self.lock().insert(entry.definition.name.to_string(), entry);
    }

    /// It is this from now on; the journal has it already.
    pub(crate) fn redefine(&self, definition: VmSpec) {
        if let Some(entry) = self.lock().get_mut(definition.name.as_str()) {
            entry.definition = definition;
        }
    }

    /// Forgets a VM that has left; the journal has forgotten it already.
    pub(crate) fn forget(&self, name: &str) {
        self.lock().remove(name);
    }

    /// The QEMU of a VM, if it has one.
    pub(crate) fn running(&self, name: &str) -> Option<Arc<dyn Machine>> {
        self.lock().get(name).and_then(|entry| entry.vmm.clone())
    }

    /// The QEMUs of all VMs that run here, by their names.
    pub(crate) fn all_running(&self) -> Vec<Arc<dyn Machine>> {
        self.lock().values().filter_map(Entry::running).cloned().collect()
    }

    /// Where the disks of all VMs are, also of those that do not run.
    pub(crate) fn disk_paths(&self) -> Vec<PathBuf> {
        let entries = self.lock();
        let disks = entries.values().flat_map(|entry| &entry.definition.disks);
        disks.map(|disk| disk.path.clone()).collect()
    }

    /// The names of all VMs, including unresponsive ones.
    pub(crate) fn names(&self) -> Vec<VmName> {
        self.lock().values().map(|entry| entry.definition.name.clone()).collect()
    }

    /// Notes how many cores VMs took, by the process ids of their QEMUs.
    pub(crate) fn count_cores(&self, taken: &BTreeMap<u32, f64>) {
        for entry in self.lock().values_mut() {
            let counted = entry.running().and_then(|vmm| taken.get(&vmm.pid()).copied());
            entry.cores_taken = counted.or(entry.cores_taken);
        }
    }

    /// Cores that the VMs that run here took recently, as far as they were counted.
    pub(crate) fn cores_taken(&self) -> f64 {
        let entries = self.lock();
        let running = entries.values().filter(|entry| entry.running().is_some());
        running.filter_map(|entry| entry.cores_taken).fold(0.0, |sum, cores| sum + cores)
    }

    /// Those that each VM which runs here took, by the process id of its QEMU; none until they were counted.
    pub(crate) fn cores_taken_by_process(&self) -> BTreeMap<u32, Option<f64>> {
        let entries = self.lock();
        let taken = |entry: &Entry| Some((entry.running()?.pid(), entry.cores_taken));
        entries.values().filter_map(taken).collect()
    }

    /// Those that one VM took; none until they were counted.
    pub(crate) fn cores_taken_by(&self, name: &str) -> Option<f64> {
        self.lock().get(name)?.cores_taken
    }

    /// What is promised of this host's memory, also to VMs that are just being started; without one VM.
    pub(crate) fn promises(&self, but: Option<&VmName>) -> Vec<Promise> {
        let entries = self.lock();
        let others = entries.values().filter(|entry| Some(&entry.definition.name) != but);
        others.filter_map(Entry::promise).collect()
    }

    /// The VMs that have a QEMU here or are claimed, by name.
    pub(crate) fn present(&self) -> Vec<PresentVm> {
        let entries = self.lock();
        let present = entries.iter().map(|(name, entry)| PresentVm {
            definition: entry.definition.clone(),
            vmm: entry.vmm.clone().filter(|vmm| vmm.alive()),
            busy: entry.claim.as_ref().map(|claim| claim.describe(name)),
        });
        present.filter(|vm| vm.vmm.is_some() || vm.busy.is_some()).collect()
    }

    /// The QEMU of a VM that must run here.
    pub(crate) fn get_running(&self, name: &str) -> Result<Arc<dyn Machine>, Problem> {
        let definition = self.definition(name)?;
        self.running(name).filter(|vmm| vmm.alive()).ok_or_else(|| does_not_run(&definition))
    }

    /// Whether a VM of that name is here.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Whether a VM of that name is here, or one that is only shown.
    pub(crate) fn is_there(&self, name: &str) -> bool {
        self.contains(name) || self.why_unmanaged(name).is_some()
    }

    /// Claims a VM, so that nobody else changes it meanwhile.
    pub(crate) fn claim(self: &Arc<Self>, name: &str, claim: Claim) -> Result<Claimed, Problem> {
        let mut entries = self.lock();
        let entry = entries.get_mut(name).ok_or_else(|| self.unknown(name))?;
        self.claim_locked(entry, name, claim)
    }

    /// The claim that a migration has kept which has crashed.
    pub(crate) fn claim_of_crashed(self: &Arc<Self>, name: &str, migration: &str) -> Option<Claimed> {
        let mut entries = self.lock();
        let entry = entries.get_mut(name)?;
        let claim = entry.claim.take_if(|claim| *claim == Claim::Migrating(migration.into()))?;
        self.claim_locked(entry, name, claim).ok()
    }

    fn claim_locked(
        self: &Arc<Self>,
        entry: &mut Entry,
        name: &str,
        claim: Claim,
    ) -> Result<Claimed, Problem> {
        if let Some(busy) = &entry.claim {
            return Err(Problem::conflict(busy.describe(name)));
        }
        entry.claim = Some(claim);
        Ok(Claimed {
            vms: Arc::clone(self),
            name: name.into(),
            definition: entry.definition.clone(),
            vmm: entry.running().cloned(),
        })
    }

    fn unknown(&self, name: &str) -> Problem {
        self.why_unmanaged(name).unwrap_or_else(|| {
            Problem::not_found(format!("no VM {name} on {}; `drainpipe vms` lists all", self.host))
        })
    }

    fn set_vmm(&self, name: &str, vmm: Option<Arc<dyn Machine>>) {
        if let Some(entry) = self.lock().get_mut(name) {
            (entry.vmm, entry.cores_taken) = (vmm, None);
        }
    }

    /// Boots a VM, if it may once it is claimed.
    pub(crate) async fn start(
        self: &Arc<Self>,
        name: &str,
        check: impl AsyncFnOnce(VmSpec) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        let claimed = self.claim(name, Claim::Changing)?;
        check_own(&claimed.definition, OwnersAct::Start)?;
        if claimed.vmm.is_some() {
            return Err(Problem::conflict(format!("VM {name} is already running")));
        }
        check(claimed.definition.clone()).await?;
        let spec = claimed.definition.resolve(&self.facts).map_err(Problem::refused)?;
        self.clear_remains(&claimed.definition).await?;
        self.journal.finish_incoming_of(name)?;
        let vmm = self
            .launch(spec, &Beside::of(claimed.definition.clone()), Role::Fresh)
            .await
            .map_err(|error| Problem::failed(format!("VM {name} does not start: {error}")))?;
        info!(vm = name, pid = vmm.pid(), "started");
        vm_end::watch(name, &vmm);
        self.set_vmm(name, Some(vmm));
        Ok(())
    }

    /// Powers a VM off; with `force`, pulls the plug.
    pub(crate) async fn stop(self: &Arc<Self>, name: &str, force: bool) -> Result<(), Problem> {
        let act = if force { OwnersAct::Destroy } else { OwnersAct::ShutDown };
        check_own(&self.definition(name)?, act)?;
        if force && self.why_unresponsive(name).is_some() {
            return self.kill_unresponsive(name).await;
        }
        let claimed = self.claim(name, Claim::Changing)?;
        let vmm = claimed.vmm.clone().ok_or_else(|| Problem::conflict(format!("VM {name} does not run")))?;
        let stopped =
            if force { vmm.destroy(QEMU_DEADLINE).await } else { vmm.stop_guest(POWER_OFF_DEADLINE).await };
        stopped.map_err(|error| match error.kind {
            VmErrorKind::GuestIgnores => {
                Problem::failed(format!("{error}; `drainpipe vm stop --force {name}` pulls the plug"))
            }
            _ => Problem::failed(error),
        })?;
        self.set_vmm(name, None);
        Ok(())
    }

    /// A QEMU that has what another host may need is left alone: only its migration says who has the VM.
    async fn kill_unresponsive(&self, name: &str) -> Result<(), Problem> {
        if let Some(open) = self.journal.open_migrations()?.into_iter().find(|open| open.vm == name) {
            return Err(Problem::conflict(format!(
                "VM {name} does not answer, and it is not known yet whether it is here or on {} (migration \
                {}): wait, or end its QEMU by hand if you are sure that nobody needs it",
                open.target, open.id
            )));
        }
        if self.journal.disk_moves()?.iter().any(|open| open.vm == name) {
            return Err(Problem::conflict(format!(
                "VM {name} does not answer, and it is not known yet which of two disks it has: wait, or end \
                its QEMU by hand if you are sure that nobody needs it"
            )));
        }
        let definition = self.lock().get(name).map(|entry| entry.definition.clone());
        let definition = definition.ok_or_else(|| self.unknown(name))?;
        warn!(vm = name, "its QEMU, which does not answer, is killed on request");
        self.hypervisor.kill_found(&definition.name, QEMU_DEADLINE).await.map_err(Problem::failed)?;
        if let Some(entry) = self.lock().get_mut(name).filter(|entry| entry.is_unresponsive()) {
            (entry.vmm, entry.claim, entry.cores_taken) = (None, None, None);
        }
        Ok(())
    }

    /// Removes a VM that does not run. Its disks stay.
    pub(crate) async fn remove(self: &Arc<Self>, name: &str) -> Result<(), Problem> {
        let claimed = self.claim(name, Claim::Changing)?;
        check_own(&claimed.definition, OwnersAct::Undefine)?;
        if claimed.vmm.is_some() {
            return Err(Problem::conflict(format!("VM {name} runs: `drainpipe vm stop {name}` first")));
        }
        self.clear_remains(&claimed.definition).await?;
        self.journal.forget_vm(name)?;
        self.forget(name);
        Ok(())
    }

    /// All VMs that are here, by name.
    pub(crate) async fn list(&self) -> Vec<VmView> {
        let entries: Vec<Entry> = self.lock().values().cloned().collect();
        let states = join_all(entries.iter().map(|entry| state_of(entry, LISTED_DEADLINE))).await;
        let managed = entries.iter().zip(states).map(|(entry, state)| self.view(entry, state));
        let unmanaged = self.unmanaged().into_iter().map(|one| managed::describe_unmanaged(&self.host, one));
        managed.chain(unmanaged).collect()
    }

    /// One VM.
    pub(crate) async fn get(&self, name: &str) -> Result<VmView, Problem> {
        let entry = self.lock().get(name).cloned().ok_or_else(|| self.unknown(name))?;
        Ok(self.view(&entry, state_of(&entry, QMP_DEADLINE).await))
    }

    /// The specification of a VM, as its owner wrote it.
    pub(crate) fn definition(&self, name: &str) -> Result<VmSpec, Problem> {
        let entries = self.lock();
        entries.get(name).map(|entry| entry.definition.clone()).ok_or_else(|| self.unknown(name))
    }

    fn view(&self, entry: &Entry, state: VmState) -> VmView {
        let migration = match &entry.claim {
            Some(Claim::Migrating(id)) => Some(id.clone()),
            _ => None,
        };
        let ended = entry.vmm.as_deref().and_then(vm_end::cause_of_death);
        VmView {
            migration,
            ended,
            unmovable: entry.unmovable(),
            ..describe(&self.host, &entry.definition, state)
        }
    }
}

/// The problem that a VM's QEMU has ended on this host, and how, if that is known.
pub(crate) fn qemu_has_ended(host: &str, exit: Option<&Exit>) -> String {
    match exit {
        None | Some(Exit::Unknown) => format!("its QEMU on {host} has ended"),
        Some(exit) => format!("its QEMU on {host} has ended by {exit}"),
    }
}

/// A VM that was to be moved.
pub(crate) fn does_not_run(definition: &VmSpec) -> Problem {
    is_off(definition.manager, definition.name.as_str())
}

/// The same of a VM of this owner's.
pub(crate) fn is_off(owner: Option<Manager>, vm: &str) -> Problem {
    let start = Manager::start_command(owner, vm);
    Problem::conflict(format!("VM {vm} does not run: start it first, by `{start}`"))
}

/// What a VM needs of a host's memory.
pub(crate) fn needs(definition: &VmSpec) -> MemoryNeeds {
    MemoryNeeds::of(definition.memory_mib << 20, definition.huge_page_mib)
}

/// What of such needs one with this process has. Some have none before they listen: theirs is 0.
pub(crate) fn promise(needs: MemoryNeeds, pid: Option<u32>) -> Promise {
    let pid = pid.filter(|pid| *pid != 0);
    // Memory in huge pages is not counted as resident, and is none of what is needed there.
    Promise { needs, resident_bytes: pid.map(hardware::resident_bytes) }
}

/// A VM in the shape of the API.
pub(crate) fn describe(host: &str, definition: &VmSpec, state: VmState) -> VmView {
    let guest = definition.guest.as_ref();
    VmView {
        name: definition.name.to_string(),
        host: host.into(),
        state,
        memory_mib: definition.memory_mib,
        huge_page_mib: definition.huge_page_mib,
        vcpus: definition.vcpus,
        migration: None,
        ended: None,
        placement: definition.placement.clone(),
        manager: definition.manager,
        unmovable: None,
        heartbeat: guest.map(|guest| guest.heartbeat.to_string()),
        control: guest.map(|guest| guest.control.to_string()),
    }
}

async fn state_of(entry: &Entry, deadline: Duration) -> VmState {
    if entry.is_unresponsive() {
        return VmState::Unknown;
    }
    let Some(vmm) = entry.vmm.as_deref().filter(|vmm| vmm.alive()) else { return VmState::Stopped };
    match vmm.run_state(deadline).await {
        Ok(state) => shown_state(&state),
        Err(_) if !vmm.alive() => VmState::Stopped,
        Err(error) => {
            warn!(vm = %vmm.spec().spec().name, %error, "QEMU does not answer");
            VmState::Unknown
        }
    }
}

fn shown_state(state: &RunState) -> VmState {
    match state {
        RunState::Running => VmState::Running,
        RunState::Inmigrate => VmState::Incoming,
        _ => VmState::Paused,
    }
}
