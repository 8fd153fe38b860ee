//! One VM on its way to this host.

use std::collections::BTreeSet;
use std::mem;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use drainpipe_engine::host::facts::MemoryNeeds;
use drainpipe_engine::migration::target::promises::Promise;
use drainpipe_engine::migration::target::silence::{GIVE_UP_AFTER_MS, SILENCE_MS, WATCH_EVERY_MS};
use drainpipe_engine::migration::target::{LOOK_WITHIN_MS, Memory, Received};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Protocol;
use drainpipe_engine::storage::{DiskCopy, DiskName};
use drainpipe_engine::tracked::TrackedConnection;
use drainpipe_hypervisor::spec::{ResolvedSpec, VmSpec};
use drainpipe_hypervisor::{Machine, MigrationStatus, RunState, TransferStatus, VmError};
use drainpipe_relay::{Receiver, RelayError};
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio::task::JoinSet;

use crate::host::hardware;
use crate::store::journal::IncomingRecord;
use crate::store::lock::lock;
use crate::transfer::disk_streams::DiskReceiver;
use crate::vms::{QMP_DEADLINE, Vms, needs, promise};
use drainpipe_api_types::IncomingRequest;

/// How long a QEMU that may wait for a page may take for an answer. Its source, which is to send that page, waits for it.
pub(super) const LOOK_WITHIN: Duration = Duration::from_millis(LOOK_WITHIN_MS);

/// How often the target looks after the VMs on their way.
pub(super) const WATCH_EVERY: Duration = Duration::from_millis(WATCH_EVERY_MS);

/// One VM on its way.
#[derive(Debug)]
pub(super) struct IncomingVm {
    pub(super) id: String,
    pub(super) source: String,
    /// Absent once the agent has been restarted: its QEMU stands then, or never will.
    pub(super) spec: Option<ResolvedSpec>,
    pub(super) definition: VmSpec,
    /// Where it comes from.
    pub(super) cores_taken: Option<f64>,
    /// Agreed on in step 2; nothing after a restart of this agent, when it goes no further here.
    pub(super) protocol: Option<Protocol>,
    /// The disks that are copied here; none of those of an earlier run of this agent.
    pub(super) disks: Vec<DiskCopy>,
    pub(super) agent_cpu_at_start: Duration,
    /// What the firewall here tracks for it since this was loaded; one request at a time, and none once it is given up.
    pub(super) tracked: AsyncMutex<Vec<TrackedConnection>>,
    /// One step at a time, whatever the order in which requests arrive.
    pub(super) stepping: Arc<AsyncMutex<()>>,
    /// One at a time takes hold of a QEMU that stood before the agent did: it listens to one client only.
    pub(super) taking_hold: AsyncMutex<()>,
    // Given back before anything is waited for: only what is below takes it, and within it no other lock but the relay's.
    resources: Mutex<Resources>,
    // By a clock that begins with this.
    memory: Mutex<Memory>,
    clock: Instant,
}

/// What the steps have taken and begun here for a VM.
#[derive(Debug, Default)]
struct Resources {
    reserved: MemoryNeeds,
    vmm: Option<Arc<dyn Machine>>,
    /// Those who answer when the source tries the paths.
    answering: JoinSet<()>,
    is_encrypted: bool,
    /// The relay of a compressed or encrypted migration, as long as it lasts.
    relay: Option<Receiver>,
    /// The address for copies of its disks, as long as they come.
    disk_receiver: Option<DiskReceiver>,
    /// The TCP port with the number of its RDMA port.
    port: Option<TcpListener>,
    /// The disks that were here already in part.
    begun_disks: BTreeSet<DiskName>,
}

impl IncomingVm {
    pub(super) fn new(id: String, source: String, definition: VmSpec) -> Self {
        Self {
            id,
            source,
            spec: None,
            definition,
            cores_taken: None,
            protocol: None,
            disks: vec![],
            agent_cpu_at_start: hardware::own_cpu(),
            tracked: AsyncMutex::default(),
            stepping: Arc::default(),
            taking_hold: AsyncMutex::default(),
            resources: Mutex::default(),
            memory: Mutex::new(Memory::new(0.0)),
            clock: Instant::now(),
        }
    }

    /// One that may come.
    pub(super) fn permitted(source: &str, request: IncomingRequest, protocol: Protocol) -> Self {
        Self {
            spec: Some(request.spec),
            cores_taken: request.cores_taken.filter(|cores| *cores >= 0.0),
            protocol: Some(protocol),
            disks: request.disks,
            ..Self::new(request.id, source.into(), request.definition)
        }
    }

    /// One that was on its way when an earlier run of this agent ended. Its source is asked at once.
    pub(super) fn taken_up(record: IncomingRecord, vmm: Option<Arc<dyn Machine>>) -> Self {
        let mut memory = Memory::new(-SILENCE_MS);
        if record.post_copy {
            memory.allow_post_copy();
        }
        let reserved = needs(&record.spec);
        Self {
            resources: Mutex::new(Resources { reserved, vmm, ..Resources::default() }),
            memory: Mutex::new(memory),
            ..Self::new(record.id, record.source, record.spec)
        }
    }

    /// One that runs here and lacks a part, since an earlier run of this agent.
    pub(super) fn in_parts(record: IncomingRecord, vmm: Arc<dyn Machine>) -> Self {
        Self {
            resources: Mutex::new(Resources { vmm: Some(vmm), ..Resources::default() }),
            memory: Mutex::new(Memory::of_part(0.0)),
            ..Self::new(record.id, record.source, record.spec)
        }
    }

    /// What this run of the agent knows of it.
    pub(super) fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }

    /// From now on other steps wait.
    pub(super) async fn take_turn(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.stepping).lock_owned().await
    }

    /// By the clock of its memory.
    pub(super) fn now_ms(&self) -> f64 {
        self.clock.elapsed().as_secs_f64() * 1_000.0
    }

    /// For how long its source has said nothing, in ms.
    pub(super) fn silent_for_ms(&self) -> f64 {
        self.memory().silent_for_ms(self.now_ms())
    }

    /// Its source has said something.
    pub(super) fn hear(&self) {
        self.memory().hear(self.now_ms());
    }

    fn resources(&self) -> MutexGuard<'_, Resources> {
        lock(&self.resources)
    }

    /// What was there is dropped without the lock.
    fn put<T>(&self, resource: impl FnOnce(&mut Resources) -> &mut T, value: T) {
        let _before = mem::replace(resource(&mut self.resources()), value);
    }

    pub(super) fn reserve(&self, needs: MemoryNeeds) {
        self.resources().reserved = needs;
    }

    pub(super) fn set_vmm(&self, vmm: Option<Arc<dyn Machine>>) {
        self.put(|resources| &mut resources.vmm, vmm);
    }

    /// From now on these answer when the source tries the paths.
    pub(super) fn answer_trials_by(&self, answering: JoinSet<()>) {
        self.put(|resources| &mut resources.answering, answering);
    }

    /// The source tries no path any more.
    pub(super) fn end_trials(&self) {
        self.answer_trials_by(JoinSet::new());
    }

    pub(super) fn set_encrypted(&self, is_encrypted: bool) {
        self.resources().is_encrypted = is_encrypted;
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.resources().is_encrypted
    }

    pub(super) fn relay_by(&self, receiver: Receiver) {
        self.put(|resources| &mut resources.relay, Some(receiver));
    }

    /// No other migration takes this port.
    pub(super) fn keep_port(&self, listener: Option<TcpListener>) {
        self.put(|resources| &mut resources.port, listener);
    }

    /// Why its relay has broken off.
    pub(super) fn relay_error(&self) -> Option<RelayError> {
        self.resources().relay.as_ref().and_then(Receiver::error)
    }

    pub(super) fn receive_disks_by(&self, receiver: DiskReceiver) {
        self.put(|resources| &mut resources.disk_receiver, Some(receiver));
    }

    pub(super) fn take_disk_receiver(&self) -> Option<DiskReceiver> {
        self.resources().disk_receiver.take()
    }

    /// A part of this disk was here already.
    pub(super) fn note_begun_disk(&self, disk: DiskName) {
        self.resources().begun_disks.insert(disk);
    }

    pub(super) fn begun_disks(&self) -> Vec<DiskName> {
        self.resources().begun_disks.iter().copied().collect()
    }

    /// Whether it was ordered to run here, and nobody has said yet that it does.
    pub(super) fn awaits_run(&self) -> bool {
        self.memory().awaits_run()
    }

    /// Takes hold of a QEMU that stood before this agent did, if it did not answer when the agent started.
    pub(super) async fn take_hold(&self, vms: &Vms) -> Result<(), Problem> {
        let stood_before = self.spec.is_none();
        let _taking_hold = self.taking_hold.lock().await;
        // One that is among the VMs of this host may have another QEMU by now.
        if stood_before && self.built().is_none() && !self.is_adopted(vms) {
            self.set_vmm(vms.find_running(&self.definition).await?);
        }
        Ok(())
    }

    /// It is one of this host's VMs from now on.
    pub(super) fn join(&self, vms: &Vms, vmm: Arc<dyn Machine>) {
        self.memory().let_run();
        vms.adopt(self.definition.clone(), vmm, self.cores_taken);
    }

    /// Whether more of its memory may come. Of a source that is gone for good nothing does, whether or not the VM could
    /// be given up.
    pub(super) fn is_receiving(&self) -> bool {
        !self.memory().is_whole() && self.silent_for_ms() < GIVE_UP_AFTER_MS
    }

    /// Its QEMU, if one was built.
    pub(super) fn built(&self) -> Option<Arc<dyn Machine>> {
        self.resources().vmm.clone()
    }

    pub(super) fn vmm(&self) -> Result<Arc<dyn Machine>, Problem> {
        self.built().ok_or_else(|| not_built(&self.id))
    }

    /// Whether it is among the VMs of this host, which it joins once it runs.
    pub(super) fn is_adopted(&self, vms: &Vms) -> bool {
        vms.contains(self.definition.name.as_str())
    }

    /// What it was promised of this host's memory. Once it is adopted, it counts among the VMs of this host.
    pub(super) fn promise(&self, vms: &Vms) -> Option<Promise> {
        if self.is_adopted(vms) {
            return None;
        }
        let (needs, vmm) = {
            let resources = self.resources();
            (resources.reserved, resources.vmm.clone())
        };
        let pid = match vmm {
            Some(vmm) => Some(vmm.pid()),
            None if self.spec.is_some() => None,
            // It stood before this agent did, and does not answer: what it has is missing from what is free all the same.
            None => match vms.hypervisor().living(&self.definition.name) {
                Ok(pid) => Some(pid?),
                Err(_) => None,
            },
        };
        Some(promise(needs, pid))
    }

    /// How long its QEMU may take for an answer. A QEMU that lacks a part of the VM does not answer from
    /// the order to run it until the page comes that it waits for. The source, which is to send that page over another
    /// connection, must not wait for that answer.
    pub(super) fn answers_within(&self) -> Duration {
        if self.memory().may_wait_for_page() { LOOK_WITHIN } else { QMP_DEADLINE }
    }

    /// What its QEMU has. That is noted.
    pub(super) async fn look(&self, vmm: &dyn Machine) -> Result<(Received, TransferStatus), VmError> {
        let status = vmm.migration(self.answers_within()).await?;
        let received = match &status.status {
            MigrationStatus::Completed => Received::Whole,
            MigrationStatus::PreSwitchover => Received::Untaken,
            MigrationStatus::Failed => Received::Failed,
            in_parts if in_parts.is_post_copy() => {
                let state = vmm.run_state(self.answers_within()).await?;
                // A QEMU that did not answer when it was told to run the VM may run it by now.
                let runs = self.awaits_run() && matches!(state, RunState::Running | RunState::Suspended);
                let is_here = runs || in_parts.lets_run(&state);
                if is_here { Received::InPart } else { Received::Incomplete }
            }
            _ => Received::Incomplete,
        };
        self.memory().note(received);
        Ok((received, status))
    }
}

pub(super) fn not_built(id: &str) -> Problem {
    Problem::conflict(format!("migration {id} has no incoming VM here yet"))
}
