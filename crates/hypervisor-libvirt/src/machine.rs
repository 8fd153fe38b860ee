//! A domain as every hypervisor's VM.

mod disks;
mod ending;
mod snapshots;
mod source;
mod target;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use drainpipe_hypervisor::{
    Connections, Contents, Demands, End, Exit, MemorySample, MigrationStatus, RamStatus, ResolvedSpec, Role,
    RunState, SharedPath, TransferStatus, VcpuThrottle, VcpuTime, Version, Vm, VmDirectory, VmError,
    VmErrorKind, VmEvent,
};
use drainpipe_hypervisor_qemu::{Process, VcpuThrottle as Throttle, VcpuTime as Time, vcpu_threads_by_name};
use drainpipe_libvirt::{
    Connection, Domain, DomainEvent, DomainState, DomainStatus, Error, JobStats, JobStatsOf, Lifecycle,
};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use self::disks::Copies;
use crate::daemon::Daemon;
use crate::errors::{failed, is_libvirts};
use crate::incoming::IncomingMigration;
use crate::lock::lock;
use crate::meeting::Meeting;
use crate::monitor::Monitor;
use crate::outgoing::OutgoingMigration;
use crate::protection::Protection;
use crate::snapshots::SnapshotFile;
use crate::{announcing, demands, files, states};

/// Events that wait for whoever is slow to read them.
const EVENTS_KEPT: usize = 64;

/// How often libvirt is asked again for what it will say in a moment.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// How long libvirt may take to say goodbye to a connection.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// A domain that is active here, or is to come here.
#[derive(Debug)]
pub struct DomainVm {
    daemon: Arc<Daemon>,
    spec: ResolvedSpec,
    directory: VmDirectory,
    meeting: Meeting,
    snapshot_file: SnapshotFile,
    role: Role,
    version: Version,
    // None until libvirt has started one for a domain that is to come.
    process: watch::Sender<Option<Arc<Process>>>,
    events: Arc<broadcast::Sender<VmEvent>>,
    // Ends with this.
    listening: JoinHandle<()>,
    leaving: Leaving,
    coming: Mutex<Option<Arc<IncomingMigration>>>,
    // For what its QEMU has to answer: one that hangs keeps no other domain's questions waiting.
    asking: tokio::sync::Mutex<Option<Connection>>,
    protecting: Protecting,
    is_ending: AtomicBool,
    is_guards: bool,
}

/// What is kept of it while it leaves.
#[derive(Debug, Default)]
struct Leaving {
    migration: Mutex<Option<Arc<OutgoingMigration>>>,
    // Where its QEMU sends to, if that is no relay.
    peer: Mutex<Option<SocketAddr>>,
    copies: Mutex<Copies>,
    // What libvirt counted last of its memory that goes: once all has gone, it counts no more.
    counted: Mutex<Option<RamStatus>>,
    is_switched_over: AtomicBool,
}

/// What keeps others from letting its guest run, while that stands still for its hand-over.
#[derive(Debug, Default)]
struct Protecting {
    // While the guest stands still there is no time to open it.
    standby: Mutex<Option<Connection>>,
    protection: Mutex<Option<Protection>>,
}

impl Drop for DomainVm {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl DomainVm {
    /// The machine of a domain that has a process here, or will have one.
    pub(crate) fn new(
        daemon: &Arc<Daemon>,
        spec: ResolvedSpec,
        directory: VmDirectory,
        role: Role,
        version: Version,
        process: Option<Process>,
    ) -> Self {
        let events = Arc::new(broadcast::channel(EVENTS_KEPT).0);
        let note_let_run = (role == Role::Incoming).then(|| directory.clone());
        let uuid = *spec.uuid().as_bytes();
        let listening = tokio::spawn(listen(daemon.events(), uuid, note_let_run, Arc::clone(&events)));
        let peer = files::read_peer(&directory);
        Self {
            daemon: Arc::clone(daemon),
            meeting: daemon.meeting(&spec),
            snapshot_file: daemon.snapshot_file(spec.uuid()),
            spec,
            directory,
            role,
            version,
            process: watch::Sender::new(process.map(Arc::new)),
            events,
            listening,
            leaving: Leaving { peer: Mutex::new(peer), ..Leaving::default() },
            coming: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
            protecting: Protecting::default(),
            is_ending: AtomicBool::default(),
            is_guards: false,
        }
    }

    /// A guard has it, which leaves once the guest runs: the agent's next run sees to its snapshots, and nobody to what
    /// goes on beside it.
    pub(crate) fn be_guards(&mut self) {
        self.is_guards = true;
    }

    fn process(&self) -> Option<Arc<Process>> {
        self.process.borrow().clone()
    }

    fn known_process(&self) -> io::Result<Arc<Process>> {
        self.process()
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "libvirt has not started it yet"))
    }

    /// libvirt may say for a while yet that it goes on with one that has ended.
    fn must_live(&self) -> Result<(), VmError> {
        if self.alive() { Ok(()) } else { Err(VmError::new(VmErrorKind::Gone, "its QEMU has ended")) }
    }

    fn leaving(&self) -> Option<Arc<OutgoingMigration>> {
        lock(&self.leaving.migration).clone()
    }

    fn coming(&self) -> Option<Arc<IncomingMigration>> {
        lock(&self.coming).clone()
    }

    fn is_protected(&self) -> bool {
        lock(&self.protecting.protection).is_some()
    }

    /// From now on nobody lets it run but [`Vm::run`].
    async fn protect(&self, domain: &Domain, deadline: Duration) -> Result<(), VmError> {
        let standby = lock(&self.protecting.standby).take().filter(|standby| !standby.is_closed());
        let connection = match standby {
            Some(standby) => standby,
            None => self.daemon.lasting(deadline).await.map_err(failed)?,
        };
        let protection = Protection::begin(connection, domain, deadline).await?;
        *lock(&self.protecting.protection) = Some(protection);
        Ok(())
    }

    async fn prepare_protection(&self, deadline: Duration) -> Result<(), VmError> {
        let standby = self.daemon.lasting(deadline).await.map_err(failed)?;
        *lock(&self.protecting.standby) = Some(standby);
        Ok(())
    }

    async fn unprotect(&self) {
        lock(&self.protecting.standby).take();
        let protection = lock(&self.protecting.protection).take();
        if let Some(protection) = protection {
            protection.end(CLOSED_WITHIN).await;
        }
    }

    async fn shared(&self, deadline: Duration) -> Result<Connection, VmError> {
        self.daemon.shared(deadline).await.map_err(failed)
    }

    async fn domain(&self, deadline: Duration) -> Result<(Connection, Domain), VmError> {
        let connection = self.shared(deadline).await?;
        let domain = connection.domain_by_uuid(*self.spec.uuid().as_bytes(), deadline).await;
        Ok((connection, domain.map_err(failed)?))
    }

    /// As [`Self::domain`], for what its QEMU has to answer.
    async fn asked(&self, deadline: Duration) -> Result<(Connection, Domain), VmError> {
        let (_, domain) = self.domain(deadline).await?;
        let mut asking = self.asking.lock().await;
        let connection = match asking.as_ref().filter(|connection| !connection.is_closed()) {
            Some(connection) => connection.clone(),
            None => self.daemon.own(deadline).await.map_err(failed)?,
        };
        *asking = Some(connection.clone());
        Ok((connection, domain))
    }

    /// Whether its guest runs, or is about to.
    pub(crate) async fn may_run(&self, deadline: Duration) -> Result<bool, VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        Ok(connection.state(&domain, deadline).await.map_err(failed)?.state.may_run())
    }

    /// What it does, whether a job has it, and what libvirt counts of that.
    async fn look(&self, deadline: Duration) -> Result<(DomainStatus, JobStats), VmError> {
        let (connection, domain) = self.asked(deadline).await?;
        // In this order: a job that ends lets the guest run first.
        let job = connection.job_stats(&domain, JobStatsOf::UnderWay, deadline).await.map_err(failed)?;
        let state = connection.state(&domain, deadline).await.map_err(failed)?;
        Ok((state, job))
    }

    /// Whether a job has it beside what keeps others from it.
    fn has_job(&self, job: &JobStats) -> bool {
        job.kind.may_be_under_way() && !self.is_protected()
    }

    /// As a migration of an earlier agent has left it.
    fn found_status(&self, state: DomainStatus, has_job: bool) -> MigrationStatus {
        // libvirt keeps its job until it has finished.
        let is_complete = || matches!(files::is_taken(&self.directory), Ok(true));
        match (self.role, has_job) {
            (Role::Fresh, true) if state.state == DomainState::Paused => MigrationStatus::PreSwitchover,
            (_, true) => MigrationStatus::Active,
            (Role::Incoming, false) if is_complete() => MigrationStatus::Completed,
            // libvirt ends it with the connection of that agent.
            (Role::Incoming, false) => MigrationStatus::Failed,
            (Role::Fresh, false) if state.is_paused_by_migration() => MigrationStatus::Completed,
            (Role::Fresh, false) => MigrationStatus::None,
        }
    }

    /// With what was counted last, where libvirt counts no more.
    fn counting(&self, status: TransferStatus, has_job: bool) -> TransferStatus {
        let mut counted = lock(&self.leaving.counted);
        // What protects it counts nothing.
        *counted = status.ram.filter(|_| has_job).or(*counted);
        TransferStatus { ram: *counted, ..status }
    }

    /// Its QEMU itself, where libvirt has not done what was asked because it has ended; fails as that did otherwise.
    async fn orphaned(&self, why: VmError, deadline: Duration) -> Result<Monitor, VmError> {
        match self.process() {
            Some(process) if why.kind == VmErrorKind::Gone && self.daemon.has_ended().await => {
                Monitor::open(&process, deadline).await
            }
            _ => Err(why),
        }
    }

    /// Tells the network where its guest is, beside what else is to be done. A guard does nothing else.
    async fn announce(&self, deadline: Duration) {
        let daemon = Arc::clone(&self.daemon);
        let vm = self.spec.spec().name.clone();
        let announcing = tokio::spawn(announcing::announce(daemon, vm, self.spec.uuid(), deadline));
        if self.is_guards {
            // What went wrong has been said.
            let _ended = announcing.await;
        }
    }

    async fn resume(&self, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        loop {
            let (connection, domain) = self.domain(deadline).await?;
            if connection.state(&domain, deadline).await.map_err(failed)?.state.may_run() {
                return Ok(());
            }
            match connection.resume(&domain, deadline).await {
                Ok(()) => return Ok(()),
                // The job that had it is just ending.
                Err(error) if is_busy(&error) && Instant::now() < end => sleep(ASK_EVERY).await,
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

/// libvirt's QEMUs see the host's files, except for `/dev`.
fn shared(path: PathBuf) -> SharedPath {
    SharedPath { of_hypervisor: path.clone(), path }
}

fn is_busy(error: &Error) -> bool {
    error.is_operation_timeout() || error.is_operation_invalid()
}

/// Passes on what happens to one domain. That others let one on its way here run is noted, for whoever might give it up.
async fn listen(
    mut from: broadcast::Receiver<DomainEvent>,
    uuid: [u8; 16],
    coming: Option<VmDirectory>,
    to: Arc<broadcast::Sender<VmEvent>>,
) {
    loop {
        let what = match from.recv().await {
            Ok(DomainEvent::Lifecycle { domain, change, detail }) if domain.uuid == uuid => {
                if let (Lifecycle::Resumed, Some(directory)) = (change, &coming)
                    && let Err(error) = files::write_let_run(directory)
                {
                    tracing::warn!(vm = domain.name, %error, "has been let run, which cannot be noted");
                }
                states::happening(change, detail)
            }
            Ok(_) => continue,
            // The state tells.
            Err(broadcast::error::RecvError::Lagged(_)) => {
                drainpipe_hypervisor::Happening::Other("LAGGED".into())
            }
            Err(broadcast::error::RecvError::Closed) => return,
        };
        // Nobody may listen.
        let _unheard = to.send(VmEvent { what, at: Some(std::time::SystemTime::now()) });
    }
}

#[async_trait]
impl Vm for DomainVm {
    fn spec(&self) -> &ResolvedSpec {
        &self.spec
    }

    fn directory(&self) -> &VmDirectory {
        &self.directory
    }

    /// 0 until libvirt has started one.
    fn pid(&self) -> u32 {
        self.process().map_or(0, |process| process.pid())
    }

    fn version(&self) -> Version {
        self.version
    }

    fn role(&self) -> io::Result<Role> {
        Ok(self.role)
    }

    fn daemon(&self) -> Option<&Path> {
        Some(self.daemon.socket())
    }

    fn obeys_others(&self) -> bool {
        true
    }

    fn events(&self) -> broadcast::Receiver<VmEvent> {
        self.events.subscribe()
    }

    fn alive(&self) -> bool {
        match self.process() {
            Some(process) => process.alive(),
            None => !self.is_ending(),
        }
    }

    fn exit(&self) -> Option<Exit> {
        self.process().and_then(|process| process.exit())
    }

    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    fn expect_end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// libvirt keeps the log, and says where (`virsh domlogs`, libvirt's documents).
    fn log_tail(&self) -> String {
        String::new()
    }

    fn end(&self) -> BoxFuture<'static, End> {
        let mut process = self.process.subscribe();
        async move {
            let exit = match process.wait_for(Option::is_some).await.map(|process| process.clone()) {
                Ok(Some(process)) => process.exited().await,
                // It never had one.
                _ => Exit::Code(0),
            };
            End { exit, log_tail: String::new() }
        }
        .boxed()
    }

    async fn wait_exit(&self, deadline: Duration) -> Option<Exit> {
        timeout(deadline, self.end()).await.ok().map(|end| end.exit)
    }

    fn cpu_seconds(&self) -> io::Result<f64> {
        self.known_process()?.cpu_seconds()
    }

    async fn run_state(&self, deadline: Duration) -> Result<RunState, VmError> {
        let is_incomplete = match self.coming() {
            Some(coming) => !coming.is_complete(),
            None => self.role == Role::Incoming && self.process().is_none(),
        };
        if is_incomplete {
            return Ok(RunState::Inmigrate);
        }
        match self.look(deadline).await {
            Ok((state, job)) => Ok(states::run_state(state, self.has_job(&job))),
            Err(error) => self.orphaned(error, deadline).await?.run_state().await,
        }
    }

    async fn migration(&self, deadline: Duration) -> Result<TransferStatus, VmError> {
        if let Some(coming) = self.coming().filter(|_| self.leaving().is_none()) {
            self.must_live()?;
            if coming.is_unsaid() {
                self.await_finish(&coming, deadline).await?;
            }
            return Ok(coming.status());
        }
        if self.role == Role::Incoming && self.process().is_none() {
            return Ok(TransferStatus::of(MigrationStatus::None));
        }
        let (state, job) = self.look(deadline).await?;
        let (status, error_desc) = match self.leaving() {
            Some(leaving) => self.leaving_status(&leaving, state, &job, deadline).await?,
            None => (self.found_status(state, self.has_job(&job)), None),
        };
        let transfer = TransferStatus { error_desc, ..states::transfer(status, &job) };
        Ok(self.counting(transfer, self.has_job(&job)))
    }

    fn owes_answer_since(&self) -> Option<Instant> {
        None
    }

    fn is_stopped(&self) -> bool {
        self.process().is_some_and(|process| process.is_stopped().unwrap_or(false))
    }

    async fn read_console(&self, _deadline: Duration) -> Result<String, VmError> {
        Err(is_libvirts("`virsh console` shows its console"))
    }

    async fn run(&self, deadline: Duration) -> Result<(), VmError> {
        let is_incomplete = self.coming().is_some_and(|coming| !coming.is_complete());
        // Others cannot let one run that is not all here.
        if is_incomplete && !files::was_let_run(&self.directory)? {
            return Err(VmError::new(VmErrorKind::MemoryIncomplete, "not all of the domain is here"));
        }
        self.close_leaving().await;
        self.unprotect().await;
        if files::is_suspended(&self.directory) {
            tracing::info!(vm = %self.spec.spec().name, "its owner has suspended it on its way: it stays suspended");
        } else if let Err(error) = self.resume(deadline).await {
            let monitor = self.orphaned(error, deadline).await?;
            monitor.run().await?;
            monitor.announce().await;
            return Ok(());
        } else {
            self.announce(deadline).await;
        }
        // Nothing more is asked about its migration to this host.
        let coming = lock(&self.coming).take();
        if let Some(coming) = coming {
            coming.close(CLOSED_WITHIN).await;
        }
        if let Err(error) = self.begin_autostart(deadline).await {
            tracing::warn!(vm = %self.spec.spec().name, %error, "runs, but is not started when its host boots");
        }
        self.return_snapshots().await;
        Ok(())
    }

    async fn stop_guest(&self, _deadline: Duration) -> Result<(), VmError> {
        Err(is_libvirts("`virsh shutdown` ends its guest"))
    }

    /// Ends a domain that has left, or that came and was given up. Its definition goes too, unless this host had it before.
    async fn destroy(&self, deadline: Duration) -> Result<(), VmError> {
        self.close_leaving().await;
        files::write_to_end(&self.directory)?;
        match files::read_coming(&self.directory)? {
            // What libvirt has of its UUID is not what was to come.
            Some(coming) if !coming.is_prepared => self.expect_end(),
            coming => self.end_domain(coming.is_some_and(|coming| coming.was_defined), deadline).await?,
        }
        // Not before: others might have let it run meanwhile.
        self.unprotect().await;
        self.snapshot_file.remove()?;
        self.daemon.leaving().await.remove(&self.spec.uuid());
        files::remove(&self.directory)
    }

    async fn power_off(&self, deadline: Duration) -> Result<(), VmError> {
        self.close_leaving().await;
        self.end_domain(true, deadline).await?;
        self.unprotect().await;
        let begun = self.begin_autostart(deadline).await;
        self.return_snapshots().await;
        begun
    }

    async fn destroy_unrun(&self, deadline: Duration) -> Result<(), VmError> {
        self.expect_end();
        let coming = lock(&self.coming).take();
        if let Some(coming) = coming {
            coming.close(CLOSED_WITHIN).await;
        }
        self.destroy(deadline).await
    }

    fn go_first(&self) -> io::Result<()> {
        self.known_process()?.go_first()
    }

    fn take_turns(&self) -> io::Result<()> {
        self.process().map_or(Ok(()), |process| process.take_turns())
    }

    async fn vcpu_time(&self, _deadline: Duration) -> Result<Box<dyn VcpuTime>, VmError> {
        let pid = self.known_process().map_err(VmError::failed)?.pid();
        Ok(Box::new(Time::of_threads(pid, &vcpu_threads_by_name(pid).map_err(VmError::failed)?)))
    }

    async fn vcpu_throttle(&self, _deadline: Duration) -> Result<Box<dyn VcpuThrottle>, VmError> {
        let pid = self.known_process().map_err(VmError::failed)?.pid();
        let threads = vcpu_threads_by_name(pid).map_err(VmError::failed)?;
        Ok(Box::new(Throttle::of_threads(pid, threads).map_err(VmError::failed)?))
    }

    async fn sample_memory(&self) -> Result<MemorySample, VmError> {
        Err(VmError::failed("the memory of libvirt's domains is not sampled"))
    }

    async fn sample_contents(&self) -> Result<(f64, Contents), VmError> {
        Err(VmError::failed("the memory of libvirt's domains is not sampled"))
    }

    async fn demands(&self, deadline: Duration) -> Result<Demands, VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        demands::ask(&connection, &domain, deadline).await
    }
}

/// The connections of the process that libvirt has started, once it has.
impl Connections for DomainVm {
    fn limit_unsent(&self, peer: SocketAddr, bytes: u32) -> io::Result<usize> {
        self.known_process()?.limit_unsent(peer, bytes)
    }

    fn limit_received(&self, own: SocketAddr, bytes: u32) -> io::Result<usize> {
        self.known_process()?.limit_received(own, bytes)
    }

    fn has(&self, own: SocketAddr, peer: SocketAddr) -> io::Result<bool> {
        self.known_process()?.has(own, peer)
    }

    fn pace(&self, peer: SocketAddr, paces: drainpipe_hypervisor::Paces<'_>) -> io::Result<usize> {
        self.known_process()?.pace(peer, paces)
    }

    fn ignore_resets(&self, peer: std::net::SocketAddr) -> io::Result<usize> {
        self.known_process()?.ignore_resets(peer)
    }

    fn discard_unsent(&self, peer: std::net::SocketAddr) -> io::Result<usize> {
        self.known_process()?.discard_unsent(peer)
    }

    fn cut(&self, peer: std::net::SocketAddr) -> io::Result<usize> {
        self.known_process()?.cut(peer)
    }
}
