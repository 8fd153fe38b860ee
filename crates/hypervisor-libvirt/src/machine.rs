//! A domain as every hypervisor's VM.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use drainpipe_hypervisor::{
    Address, Connections, Contents, Demands, End, Event, Exit, Hold, MemorySample, MigrationStatus, Parcel,
    RamStatus, ResolvedSpec, Role, RunState, SharedPath, SourceSettings, SourceVm, TargetVm, TransferStatus,
    Transport, VcpuThrottle, VcpuTime, Version, Vm, VmDirectory, VmError, VmErrorKind,
};
use drainpipe_hypervisor_qemu::{Process, VcpuThrottle as Throttle, VcpuTime as Time, vcpu_threads_by_name};
use drainpipe_libvirt::{
    Connection, Domain, DomainEvent, DomainState, Error, JobStats, JobStatsOf, State, UndefineFlags,
    migrate_flags,
};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::coming::Coming;
use crate::daemon::Daemon;
use crate::errors::{failed, is_libvirts};
use crate::files::ComingHere;
use crate::leaving::Leaving;
use crate::meeting::Meeting;
use crate::monitor::Monitor;
use crate::phases::Handed;
use crate::protection::Protection;
use crate::{demands, files, qemu_process, states};

/// Events that wait for whoever is slow to read them.
const EVENTS_KEPT: usize = 64;

/// How often libvirt is asked again for what it will say in a moment.
const ASK_EVERY: Duration = Duration::from_millis(5);

/// How long libvirt may take to say goodbye to a connection.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// How long libvirt may take to be done with a job of which it says that there is none, and how often it is tried.
const ENDED_WITHIN: Duration = Duration::from_secs(3);
const BEGIN_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// How long a transfer may take to stop before QEMU's connections are cut.
const CUT_AFTER: Duration = Duration::from_secs(1);

/// How long the pause may be longer so that it is known what was sent.
const COUNTED_WITHIN: Duration = Duration::from_millis(10);

/// MiB/s for no limit (`QEMU_DOMAIN_MIG_BANDWIDTH_MAX` in libvirt).
const UNLIMITED_MIB_PER_S: u64 = (i64::MAX as u64) / (1 << 20);

/// A domain that is active here, or is to come here.
#[derive(Debug)]
pub struct DomainVm {
    daemon: Arc<Daemon>,
    spec: ResolvedSpec,
    directory: VmDirectory,
    meeting: Meeting,
    role: Role,
    version: Version,
    // None until libvirt has started one for a domain that is to come.
    process: watch::Sender<Option<Arc<Process>>>,
    events: Arc<broadcast::Sender<Event>>,
    // Ends with this.
    listening: JoinHandle<()>,
    leaving: Mutex<Option<Arc<Leaving>>>,
    coming: Mutex<Option<Arc<Coming>>>,
    // Where its QEMU sends to, if that is no relay.
    peer: Mutex<Option<SocketAddr>>,
    // What libvirt counted last of its memory that goes: once all has gone, it counts no more.
    counted: Mutex<Option<RamStatus>>,
    // For what its QEMU has to answer: one that hangs keeps no other domain's questions waiting.
    asking: tokio::sync::Mutex<Option<Connection>>,
    // For its protection: while the guest stands still there is no time to open it.
    spare: Mutex<Option<Connection>>,
    // While it stands still for its hand-over.
    protection: Mutex<Option<Protection>>,
    is_switched_over: AtomicBool,
    is_ending: AtomicBool,
}

impl Drop for DomainVm {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl DomainVm {
    /// Of one that has a process here, or will have one.
    pub(crate) fn new(
        daemon: &Arc<Daemon>,
        spec: ResolvedSpec,
        directory: VmDirectory,
        role: Role,
        version: Version,
        process: Option<Process>,
    ) -> Self {
        let events = Arc::new(broadcast::channel(EVENTS_KEPT).0);
        let listening = tokio::spawn(listen(daemon.events(), *spec.uuid().as_bytes(), Arc::clone(&events)));
        Self {
            daemon: Arc::clone(daemon),
            meeting: daemon.meeting(&spec),
            spec,
            directory,
            role,
            version,
            process: watch::Sender::new(process.map(Arc::new)),
            events,
            listening,
            leaving: Mutex::default(),
            coming: Mutex::default(),
            peer: Mutex::default(),
            counted: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
            spare: Mutex::default(),
            protection: Mutex::default(),
            is_switched_over: AtomicBool::default(),
            is_ending: AtomicBool::default(),
        }
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

    fn leaving(&self) -> Option<Arc<Leaving>> {
        lock(&self.leaving).clone()
    }

    fn coming(&self) -> Option<Arc<Coming>> {
        lock(&self.coming).clone()
    }

    fn is_protected(&self) -> bool {
        lock(&self.protection).is_some()
    }

    /// From now on nobody lets it run but [`Vm::run`].
    async fn protect(&self, domain: &Domain, deadline: Duration) -> Result<(), VmError> {
        let spare = lock(&self.spare).take().filter(|spare| !spare.is_closed());
        let connection = match spare {
            Some(spare) => spare,
            None => self.daemon.lasting(deadline).await.map_err(failed)?,
        };
        let protection = Protection::begin(connection, domain, deadline).await?;
        *lock(&self.protection) = Some(protection);
        Ok(())
    }

    async fn prepare_protection(&self, deadline: Duration) -> Result<(), VmError> {
        let spare = self.daemon.lasting(deadline).await.map_err(failed)?;
        *lock(&self.spare) = Some(spare);
        Ok(())
    }

    async fn unprotect(&self) {
        lock(&self.spare).take();
        let protection = lock(&self.protection).take();
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
    async fn look(&self, deadline: Duration) -> Result<(DomainState, JobStats), VmError> {
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
    fn found_status(&self, state: DomainState, has_job: bool) -> MigrationStatus {
        let is_complete =
            || matches!(files::read_coming(&self.directory), Ok(Some(coming)) if coming.is_complete);
        match (self.role, has_job) {
            (Role::Fresh, true) if state.state == State::Paused => MigrationStatus::PreSwitchover,
            (_, true) => MigrationStatus::Active,
            (Role::Incoming, false) if is_complete() => MigrationStatus::Completed,
            // libvirt ends it with the connection of that agent.
            (Role::Incoming, false) => MigrationStatus::Failed,
            (Role::Fresh, false) if state.is_paused_by_migration() => MigrationStatus::Completed,
            (Role::Fresh, false) => MigrationStatus::None,
        }
    }

    /// A guest that its owner has suspended goes on being sent, and stays suspended wherever it then is.
    async fn leaving_status(
        &self,
        leaving: &Leaving,
        state: DomainState,
        job: &JobStats,
        deadline: Duration,
    ) -> Result<(MigrationStatus, Option<String>), VmError> {
        let is_switched_over = self.is_switched_over.load(Ordering::Relaxed);
        if !is_switched_over && states::is_suspended_in_flight(state, job) {
            // What was counted before it was paused says nothing.
            let (state, job) = self.look(deadline).await?;
            if leaving.is_performing() && states::is_suspended_in_flight(state, &job) {
                files::write_suspended(&self.directory)?;
            }
        }
        let is_paused = state.is_paused_by_migration() && !files::is_suspended(&self.directory);
        Ok(leaving.status(is_paused, is_switched_over))
    }

    /// With what was counted last, where libvirt counts no more.
    fn counting(&self, status: TransferStatus, has_job: bool) -> TransferStatus {
        let mut counted = lock(&self.counted);
        // What protects it counts nothing.
        *counted = status.ram.filter(|_| has_job).or(*counted);
        TransferStatus { ram: *counted, ..status }
    }

    /// libvirt says that an aborted migration has no job any more a while before it begins another.
    async fn begin_leaving(
        &self,
        transport: Transport,
        deadline: Duration,
    ) -> Result<(Leaving, Parcel), VmError> {
        let end = Instant::now() + ENDED_WITHIN.min(deadline);
        loop {
            let (_, domain) = self.domain(deadline).await?;
            match Leaving::begin(&self.daemon, &domain, transport, deadline).await {
                Err(error)
                    if error.kind == VmErrorKind::Refused
                        && Instant::now() < end
                        && !self.look(deadline).await?.1.kind.may_be_under_way() =>
                {
                    tracing::debug!(vm = %self.spec.spec().name, %error, "not begun yet");
                    sleep(BEGIN_AGAIN_AFTER).await;
                }
                begun => return begun,
            }
        }
    }

    /// Gives up what libvirt does with it for a migration of ours.
    async fn close_leaving(&self) {
        let leaving = lock(&self.leaving).take();
        if let Some(leaving) = leaving {
            leaving.close(CLOSED_WITHIN).await;
        }
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

    /// QEMU's threads may wait for a target that is silent, of which libvirt cannot tell them.
    async fn cancel_leaving(
        &self,
        leaving: &Leaving,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<bool, VmError> {
        let mut cancelling = pin!(leaving.cancel(domain, deadline));
        if let Ok(cancelled) = timeout(CUT_AFTER.min(deadline / 2), &mut cancelling).await {
            return cancelled;
        }
        if let (Some(process), Some(peer)) = (self.process(), *lock(&self.peer))
            && let Err(error) = process.cut(peer)
        {
            tracing::warn!(%error, "QEMU may wait for its target for as long as that is silent");
        }
        cancelling.await
    }

    async fn cancel_by_libvirt(&self, deadline: Duration) -> Result<MigrationStatus, VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        let was_sent = if let Some(leaving) = self.leaving() {
            self.cancel_leaving(&leaving, &domain, deadline).await?
        } else {
            let (state, job) = self.look(deadline).await?;
            if job.kind.may_be_under_way() {
                connection.abort_job(&domain, deadline).await.map_err(failed)?;
                self.end_performed(&connection, &domain, deadline).await?;
            }
            !job.kind.may_be_under_way() && state.is_paused_by_migration()
        };
        self.close_leaving().await;
        let state = self.wait_without_job(deadline).await?;
        if files::is_suspended(&self.directory) && state.state.may_run() {
            // libvirt lets a guest run that ran before its migration.
            connection.suspend(&domain, deadline).await.map_err(failed)?;
        }
        Ok(if was_sent { MigrationStatus::Completed } else { MigrationStatus::Cancelled })
    }

    /// A job that has sent all is not aborted: it waits for the agent that has begun it, which may stand still. Another
    /// connection may confirm that the domain stays.
    async fn end_performed(
        &self,
        connection: &Connection,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let (state, job) = self.look(deadline).await?;
        if !job.kind.may_be_under_way() || !state.is_paused_by_migration() {
            return Ok(());
        }
        let flags = migrate_flags::LIVE | migrate_flags::CHANGE_PROTECTION;
        match connection.migrate_confirm(domain, &[], &[], flags, true, deadline).await {
            // It has ended by itself.
            Err(error) if error.is_operation_invalid() => Ok(()),
            confirmed => confirmed.map_err(failed),
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

    /// Ends it here, and forgets its definition where it is not to stay.
    async fn end_domain(&self, keeps_definition: bool, deadline: Duration) -> Result<(), VmError> {
        self.expect_end();
        let (connection, domain) = match self.domain(deadline).await {
            Err(error) if error.kind == VmErrorKind::NotRunning => return Ok(()),
            found => found?,
        };
        let is_persistent = connection.is_persistent(&domain, deadline).await.map_err(failed)?;
        match connection.destroy(&domain, false, deadline).await {
            // It is off already.
            Err(error) if error.is_operation_invalid() || error.is_no_domain() => {}
            ended => ended.map_err(failed)?,
        }
        if !is_persistent || keeps_definition {
            return Ok(());
        }
        let flags = UndefineFlags {
            managed_save: true,
            snapshots_metadata: true,
            checkpoints_metadata: true,
            // It may be the one that the domain uses where it runs now.
            keep_nvram: true,
            keep_tpm: true,
            nvram: false,
        };
        match connection.undefine(&domain, flags, deadline).await {
            // Before libvirt 8.9, which keeps it always.
            Err(error) if error.is_invalid_argument() => {
                let flags = UndefineFlags { keep_tpm: false, ..flags };
                connection.undefine(&domain, flags, deadline).await.map_err(failed)
            }
            Err(error) if error.is_no_domain() => Ok(()),
            undefined => undefined.map_err(failed),
        }
    }

    /// libvirt starts it no more when this host has booted: it is about to be another host's.
    async fn end_autostart(&self, deadline: Duration) -> Result<(), VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        let is_persistent = connection.is_persistent(&domain, deadline).await.map_err(failed)?;
        if is_persistent && connection.autostart(&domain, deadline).await.map_err(failed)? {
            files::write_autostart(&self.directory)?;
            connection.set_autostart(&domain, false, deadline).await.map_err(failed)?;
        }
        Ok(())
    }

    /// It runs here, and stays: started when this host has booted, if it was so where it came from, or before it was to
    /// leave.
    async fn begin_autostart(&self, deadline: Duration) -> Result<(), VmError> {
        let coming = files::read_coming(&self.directory)?;
        if files::is_to_autostart(&self.directory) || coming.is_some_and(|coming| coming.autostart) {
            let (connection, domain) = self.domain(deadline).await?;
            connection.set_autostart(&domain, true, deadline).await.map_err(failed)?;
        }
        files::has_autostart(&self.directory)?;
        files::has_come(&self.directory)
    }

    /// What is known of it until it runs.
    fn note_coming(&self, note: impl FnOnce(&mut ComingHere)) -> Result<(), VmError> {
        let coming = files::read_coming(&self.directory)?;
        let mut coming = coming.ok_or_else(|| VmError::failed("it is not on its way here"))?;
        note(&mut coming);
        files::write_coming(&self.directory, coming)
    }

    async fn wait_without_job(&self, deadline: Duration) -> Result<DomainState, VmError> {
        let end = Instant::now() + deadline;
        loop {
            let (state, job) = self.look(deadline).await?;
            if !job.kind.may_be_under_way() {
                return Ok(state);
            }
            if Instant::now() >= end {
                return Err(VmError::failed("libvirt goes on with the domain's job"));
            }
            sleep(ASK_EVERY).await;
        }
    }
}

fn is_busy(error: &Error) -> bool {
    error.is_operation_timeout() || error.is_operation_invalid()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each is set whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Passes on what happens to one domain.
async fn listen(
    mut from: broadcast::Receiver<DomainEvent>,
    uuid: [u8; 16],
    to: Arc<broadcast::Sender<Event>>,
) {
    loop {
        let what = match from.recv().await {
            Ok(DomainEvent::Lifecycle { domain, change, detail }) if domain.uuid == uuid => {
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
        let _unheard = to.send(Event { what, at: Some(std::time::SystemTime::now()) });
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

    fn events(&self) -> broadcast::Receiver<Event> {
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
        if self.coming().is_some_and(|coming| !coming.is_complete()) {
            return Err(VmError::new(VmErrorKind::MemoryIncomplete, "not all of the domain is here"));
        }
        self.close_leaving().await;
        self.unprotect().await;
        if files::is_suspended(&self.directory) {
            tracing::info!(vm = %self.spec.spec().name, "its owner has suspended it on its way: it stays so");
        } else if let Err(error) = self.resume(deadline).await {
            self.orphaned(error, deadline).await?.run().await?;
            return Ok(());
        }
        // Of its migration to here nothing more is asked.
        let coming = lock(&self.coming).take();
        if let Some(coming) = coming {
            coming.close(CLOSED_WITHIN).await;
        }
        if let Err(error) = self.begin_autostart(deadline).await {
            tracing::warn!(vm = %self.spec.spec().name, %error, "runs, and is not started when its host has booted");
        }
        Ok(())
    }

    async fn stop_guest(&self, _deadline: Duration) -> Result<(), VmError> {
        Err(is_libvirts("`virsh shutdown` ends its guest"))
    }

    /// Of one that has left, or that came and was given up. Its definition goes too, unless this host had it before.
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
        files::remove(&self.directory)
    }

    async fn power_off(&self, deadline: Duration) -> Result<(), VmError> {
        self.close_leaving().await;
        self.end_domain(true, deadline).await?;
        self.unprotect().await;
        self.begin_autostart(deadline).await
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
        Err(VmError::failed("the memory of libvirt's domains is not looked at"))
    }

    async fn sample_contents(&self) -> Result<(f64, Contents), VmError> {
        Err(VmError::failed("the memory of libvirt's domains is not looked at"))
    }

    async fn demands(&self, deadline: Duration) -> Result<Demands, VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        demands::ask(&connection, &domain, deadline).await
    }
}

#[async_trait]
impl SourceVm for DomainVm {
    async fn begin(&self, transport: Transport, deadline: Duration) -> Result<Parcel, VmError> {
        self.close_leaving().await;
        self.is_switched_over.store(false, Ordering::Relaxed);
        lock(&self.counted).take();
        files::is_not_suspended(&self.directory)?;
        let (leaving, parcel) = self.begin_leaving(transport, deadline).await?;
        *lock(&self.leaving) = Some(Arc::new(leaving));
        self.prepare_protection(deadline).await?;
        Ok(parcel)
    }

    async fn start_transfer(
        &self,
        _transport: Transport,
        address: Address,
        settings: SourceSettings,
        parcel: Parcel,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let leaving = self.leaving().ok_or_else(|| VmError::failed("libvirt was not asked to begin"))?;
        let handed = Handed::of(&parcel)?;
        let (connection, domain) = self.asked(deadline).await?;
        // QEMU keeps it until libvirt puts back what it had before the migration.
        let limit_ms = settings.downtime_limit_ms;
        connection.migrate_set_max_downtime(&domain, limit_ms, deadline).await.map_err(failed)?;
        let speed = settings.bandwidth_mbps.map(mib_per_s);
        *lock(&self.peer) = match &address {
            Address::Tcp(peer) => Some(*peer),
            Address::Unix(_) => None,
        };
        leaving.perform(&domain, &address, speed, &handed, Arc::clone(&self.events));
        Ok(())
    }

    async fn start_post_copy(&self, _deadline: Duration) -> Result<bool, VmError> {
        Err(VmError::failed("a domain does not move by post-copy yet"))
    }

    /// libvirt goes on by itself.
    async fn switch_over(&self, _deadline: Duration) -> Result<(), VmError> {
        self.is_switched_over.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn sent(&self, deadline: Duration) -> Result<Option<Parcel>, VmError> {
        let leaving = self.leaving().ok_or_else(|| VmError::failed("libvirt was not asked to begin"))?;
        let sent = Handed::cookie(leaving.sent(deadline).await?)?;
        if lock(&self.counted).is_none() {
            // It has gone so fast that nobody has looked. What is not known then is no reason to go back.
            drop(timeout(COUNTED_WITHIN, self.migration(deadline)).await);
        }
        Ok(Some(Handed { is_suspended: files::is_suspended(&self.directory), ..sent }.parcel(None)))
    }

    /// libvirt's daemon, ended while it holds the job, lets the guest run by itself when it is started anew.
    async fn let_go(&self, deadline: Duration) -> Result<(), VmError> {
        self.close_leaving().await;
        self.wait_without_job(deadline).await?;
        self.end_autostart(deadline).await?;
        let (connection, domain) = self.domain(deadline).await?;
        self.protect(&domain, deadline).await?;
        // Not before: somebody may have waited to let it run.
        if connection.state(&domain, deadline).await.map_err(failed)?.is_paused_by_migration() {
            return Ok(());
        }
        Err(VmError::failed(
            "the domain does not stand still here any more: somebody has let it run, or ended it",
        ))
    }

    /// libvirt lets nobody change the domain as long as it is ready to leave.
    async fn stay(&self) {
        self.close_leaving().await;
    }

    async fn cancel(&self, deadline: Duration) -> Result<MigrationStatus, VmError> {
        self.unprotect().await;
        match self.cancel_by_libvirt(deadline).await {
            Err(error) => {
                let cancelled = self.orphaned(error, deadline).await?.cancel().await;
                self.close_leaving().await;
                cancelled
            }
            cancelled => cancelled,
        }
    }

    async fn interrupt(&self, _deadline: Duration) -> Result<(), VmError> {
        Err(VmError::failed("a domain does not move by post-copy yet"))
    }

    async fn resume_transfer(&self, _address: Address, _deadline: Duration) -> Result<(), VmError> {
        Err(VmError::failed("a domain does not move by post-copy yet"))
    }

    async fn set_downtime_limit(&self, downtime_limit_ms: u64, deadline: Duration) -> Result<(), VmError> {
        let (connection, domain) = self.asked(deadline).await?;
        connection.migrate_set_max_downtime(&domain, downtime_limit_ms, deadline).await.map_err(failed)
    }

    async fn set_bandwidth(&self, limit_mbps: Option<u64>, deadline: Duration) -> Result<(), VmError> {
        let (connection, domain) = self.asked(deadline).await?;
        let speed = limit_mbps.map_or(UNLIMITED_MIB_PER_S, mib_per_s);
        connection.migrate_set_max_speed(&domain, speed, deadline).await.map_err(failed)
    }

    async fn hold(&self, deadline: Duration) -> Result<Hold, VmError> {
        let (state, job) = match self.look(deadline).await {
            Err(error) => return self.orphaned(error, deadline).await?.hold().await,
            looked => looked?,
        };
        match (state.is_paused_by_migration(), self.has_job(&job)) {
            (true, true) => Err(VmError::failed("libvirt's migration has the domain still")),
            (true, false) => Ok(Hold::LetGo),
            (false, _) => Ok(Hold::Kept),
        }
    }

    fn connections(&self) -> Option<&dyn Connections> {
        Some(self)
    }

    fn outgoing_relay(&self) -> SharedPath {
        if let Err(error) = self.meeting.make() {
            // Who listens there fails, and says where.
            tracing::warn!(%error, "no directory for QEMU to meet the agent in");
        }
        shared(self.meeting.outgoing())
    }
}

/// libvirt's QEMUs see the host's files, except for `/dev`.
fn shared(path: PathBuf) -> SharedPath {
    SharedPath { of_hypervisor: path.clone(), path }
}

fn no_meeting(meeting: &Meeting, error: &io::Error) -> VmError {
    let socket = meeting.incoming();
    VmError::failed(format!("cannot make a directory for QEMU to listen at {}: {error}", socket.display()))
}

/// libvirt knows whole MiB/s, and takes 0 for no limit.
fn mib_per_s(mbps: u64) -> u64 {
    ((mbps * 1_000_000 / 8) >> 20).max(1)
}

#[async_trait]
impl TargetVm for DomainVm {
    async fn listen(
        &self,
        transport: Transport,
        address: Address,
        parcel: &Parcel,
        deadline: Duration,
    ) -> Result<Parcel, VmError> {
        let is_relayed = matches!(address, Address::Unix(_));
        if is_relayed {
            self.meeting.open().map_err(|error| no_meeting(&self.meeting, &error))?;
        }
        let prepared = Coming::prepare(&self.daemon, &self.spec, transport, &address, parcel, deadline).await;
        if is_relayed {
            self.meeting.close().map_err(|error| no_meeting(&self.meeting, &error))?;
        }
        let (coming, answer) = prepared?;
        self.note_coming(|known| (known.is_prepared, known.autostart) = (true, coming.autostart()))?;
        let process =
            qemu_process::find_started(self.spec.uuid(), deadline).await.map_err(VmError::failed)?;
        self.process.send_replace(Some(Arc::new(process)));
        *lock(&self.coming) = Some(Arc::new(coming));
        self.prepare_protection(deadline).await?;
        Ok(answer)
    }

    async fn complete(&self, parcel: Parcel, deadline: Duration) -> Result<(), VmError> {
        let coming = self.coming().ok_or_else(|| VmError::failed("nothing was prepared for it here"))?;
        let finished = match coming.finish(&parcel, deadline).await {
            Ok(domain) => {
                if Handed::of(&parcel)?.is_suspended {
                    files::write_suspended(&self.directory)?;
                }
                self.note_coming(|known| known.is_complete = true)?;
                self.protect(&domain, deadline).await
            }
            Err(error) => Err(error),
        };
        let status = if finished.is_ok() { MigrationStatus::Completed } else { MigrationStatus::Failed };
        // Nobody may listen.
        let happening = drainpipe_hypervisor::Happening::Migration(status);
        let _unheard = self.events.send(Event { what: happening, at: None });
        finished
    }

    async fn recover_listen(&self, _address: Address, _deadline: Duration) -> Result<(), VmError> {
        Err(VmError::failed("a domain does not move by post-copy yet"))
    }

    async fn cut_migration(&self, _deadline: Duration) {
        let coming = lock(&self.coming).clone();
        if let Some(coming) = coming.filter(|coming| !coming.is_complete()) {
            coming.close(CLOSED_WITHIN).await;
        }
    }

    fn forget_key(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn incoming_relay(&self) -> SharedPath {
        shared(self.meeting.incoming())
    }
}

/// Of the process that libvirt has started, once it has.
impl Connections for DomainVm {
    fn limit_unsent(&self, peer: SocketAddr, bytes: u32) -> io::Result<usize> {
        self.known_process()?.limit_unsent(peer, bytes)
    }

    fn limit_received(&self, own: SocketAddr, bytes: u32) -> io::Result<usize> {
        self.known_process()?.limit_received(own, bytes)
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
