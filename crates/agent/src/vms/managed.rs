//! VMs that another manager of VMs owns: they come and go as it decides.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::check::vm::Notice;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::{Placement, VmName, VmSpec};
use drainpipe_hypervisor::{HypervisorFacts, Machine, Managed, ManagedVm, OwnersAct, Unmanaged};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{Entry, QEMU_DEADLINE, QMP_DEADLINE, Vms, shown_state};
use crate::store::lock::lock;
use drainpipe_api_types::{VmState, VmView};

/// How often the manager is asked for its VMs where it says nothing by itself.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// How soon one that did not answer is asked again.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What comes together is looked at once.
const LOOK_AFTER: Duration = Duration::from_millis(100);

impl Vms {
    /// What the manager beside Drainpipe can do; none where none answers.
    pub(crate) fn facts_of_manager(&self) -> Option<HypervisorFacts> {
        lock(&self.facts_of_manager).clone()
    }

    /// Takes in what VMs the manager has now. One that does not answer has those that it had.
    pub(crate) async fn look_at_managed(self: &Arc<Self>) -> Result<(), Problem> {
        let probed = self.hypervisor.probe_manager(QEMU_DEADLINE).await;
        let now = probed.as_ref().ok().cloned().flatten();
        let was_there = std::mem::replace(&mut *lock(&self.facts_of_manager), now).is_some();
        let Some(facts) = probed.map_err(Problem::failed)? else { return Ok(()) };
        if !was_there {
            info!(manager = facts.name, version = %facts.version, "answers: its VMs can be moved");
        }
        let Managed { found, unmanaged } =
            self.hypervisor.managed(QMP_DEADLINE).await.map_err(Problem::failed)?;
        let coming = self.coming()?;
        let (found, namesakes): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|vm| !self.is_own(vm.definition.name.as_str()));
        let unmanaged =
            unmanaged.into_iter().chain(namesakes.iter().filter_map(ManagedVm::as_namesake)).collect();
        for vm in &found {
            if !coming.contains(vm.definition.name.as_str()) {
                self.take_in(vm).await;
            }
        }
        self.show(unmanaged, &coming);
        let names: BTreeSet<&str> = found.iter().map(|vm| vm.definition.name.as_str()).collect();
        self.drop_gone(&names)
    }

    /// Whether one of Drainpipe's VMs has this name.
    fn is_own(&self, name: &str) -> bool {
        self.lock().get(name).is_some_and(|entry| !entry.definition.is_defined_elsewhere())
    }

    /// Those on their way here: they become this host's with the order to run.
    fn coming(&self) -> Result<BTreeSet<String>, Problem> {
        let waiting = self.journal.waiting_incoming()?;
        // What is left of these is about to be ended.
        let discarded = self.journal.discarded_incoming_vms()?;
        Ok(waiting.into_iter().chain(discarded).map(|record| record.vm).collect())
    }

    async fn take_in(&self, found: &ManagedVm) {
        let ManagedVm { definition, is_active, obstacles } = found;
        if !self.is_news(found) {
            return;
        }
        let name = definition.name.as_str();
        let noted = self.hypervisor.note_managed(definition).map_err(Problem::failed);
        let vmm = match noted {
            Ok(()) if *is_active => self.find_running(definition).await,
            noted => noted.map(|()| None),
        };
        let vmm = match vmm {
            Ok(vmm) => vmm,
            Err(problem) => return debug!(vm = name, %problem, "not connected yet"),
        };
        let mut entries = self.lock();
        if entries.get(name).is_none_or(|entry| is_free(entry, vmm.as_ref())) {
            let entry = Entry { vmm, obstacles: obstacles.clone(), ..Entry::of(definition.clone()) };
            entries.insert(name.into(), entry);
        }
    }

    /// Whether something is to be done about it. What has changed of its definition is noted.
    fn is_news(&self, ManagedVm { definition, is_active, obstacles }: &ManagedVm) -> bool {
        let name = definition.name.as_str();
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(name) else { return true };
        if entry.claim.is_some() {
            return false;
        }
        (entry.definition, entry.obstacles) = (definition.clone(), obstacles.clone());
        entry.running().is_some() != *is_active
    }

    /// Shows those that stay. One that could move until now, and that runs, is still one of the others.
    fn show(&self, mut unmanaged: Vec<Unmanaged>, coming: &BTreeSet<String>) {
        let mut entries = self.lock();
        unmanaged.retain(|one| {
            let entry = entries.get_mut(&one.name);
            if let Some(entry) = entry.filter(|entry| entry.definition.is_defined_elsewhere()) {
                entry.obstacles = vec![Notice { what: one.why.clone(), remedy: String::new() }];
                return false;
            }
            !coming.contains(&one.name)
        });
        *lock(&self.unmanaged) = unmanaged;
    }

    /// Forgets those that the manager has no more.
    fn drop_gone(&self, found: &BTreeSet<&str>) -> Result<(), Problem> {
        let mut entries = self.lock();
        let is_gone = |name: &str, entry: &Entry| {
            entry.definition.is_defined_elsewhere()
                && entry.claim.is_none()
                && entry.running().is_none()
                && !found.contains(name)
        };
        let gone = entries.iter().filter(|(name, entry)| is_gone(name, entry));
        let gone: Vec<VmName> = gone.map(|(_, entry)| entry.definition.name.clone()).collect();
        for name in gone {
            self.journal.forget_vm(name.as_str())?;
            self.hypervisor.clear(&name).map_err(Problem::failed)?;
            entries.remove(name.as_str());
        }
        Ok(())
    }

    /// The journal has a managed VM from its migration on, so that this is taken up also where its manager comes later
    /// than the agent.
    pub(crate) fn note_managed(&self, definition: &VmSpec) -> Result<(), Problem> {
        if definition.is_defined_elsewhere() {
            self.journal.define_vm(definition)?;
        }
        Ok(())
    }
}

impl Vms {
    /// Those that stay where they are, as no specification describes them.
    pub(crate) fn unmanaged(&self) -> Vec<Unmanaged> {
        lock(&self.unmanaged).clone()
    }

    /// Whether it is one of these, and why it stays.
    pub(super) fn why_unmanaged(&self, name: &str) -> Option<Problem> {
        let one = lock(&self.unmanaged).iter().find(|one| one.name == name).cloned()?;
        Some(Problem::refused(format!("VM {name} cannot move: {}", one.why)))
    }
}

/// One in the shape of the API.
pub(super) fn describe_unmanaged(host: &str, one: Unmanaged) -> VmView {
    VmView {
        name: one.name,
        host: host.into(),
        state: one.run_state.as_ref().map_or(VmState::Stopped, shown_state),
        memory_mib: one.memory_mib,
        huge_page_mib: None,
        vcpus: one.vcpus,
        migration: None,
        ended: None,
        placement: Placement::default(),
        manager: Some(one.manager),
        unmovable: Some(one.why),
        heartbeat: None,
        control: None,
    }
}

/// Whether another hold may take the place of the one that it has.
fn is_free(entry: &Entry, vmm: Option<&Arc<dyn Machine>>) -> bool {
    let is_same = entry.running().map(|one| one.pid()) == vmm.map(|other| other.pid());
    entry.definition.is_defined_elsewhere() && entry.claim.is_none() && !(is_same && vmm.is_some())
}

/// Looks at the manager's VMs whenever it says that something has changed, and now and then.
pub(crate) async fn keep_looking(vms: Arc<Vms>) {
    let mut has_warned = false;
    loop {
        match vms.look_at_managed().await {
            Ok(()) => has_warned = false,
            Err(problem) if !has_warned => {
                has_warned = true;
                warn!(%problem, "the manager beside Drainpipe does not answer: its VMs stay where they are until it does");
            }
            Err(_) => {}
        }
        let look_after = if has_warned { LOOK_AGAIN_AFTER } else { LOOK_EVERY };
        if timeout(look_after, vms.hypervisor.managed_changed()).await.is_ok() {
            sleep(LOOK_AFTER).await;
        }
    }
}

/// Refuses to do to a manager's VM what is the manager's to do.
pub(crate) fn check_own(definition: &VmSpec, act: OwnersAct) -> Result<(), Problem> {
    definition.left_to_owner(act).map_or(Ok(()), |why| Err(Problem::refused(why)))
}
