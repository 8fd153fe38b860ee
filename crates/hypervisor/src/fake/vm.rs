//! A VM in memory.

mod disks;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use tokio::sync::broadcast;
use tokio::time::timeout;

use self::disks::FakeMove;
use super::VERSION;
use super::faults::{Act, Fault, Faults};
use super::process::FakeProcess;
use crate::connections::{ConnectionUse, Connections, Pace, Paces};
use crate::directory::{SharedPath, VmDirectory};
use crate::disk_moves::DiskMoves;
use crate::disks::DiskCopies;
use crate::end::{End, Exit};
use crate::error::{VmError, VmErrorKind};
use crate::event::{Happening, VmEvent};
use crate::facts::Version;
use crate::memory::{Contents, MemorySample};
use crate::parcel::Parcel;
use crate::role::Role;
use crate::spec::{Disk, ResolvedSpec};
use crate::state::{Hold, MigrationStatus, RamStatus, RunState, TransferStatus};
use crate::transport::{Address, SourceSettings, Transport};
use crate::vm::{SourceVm, TargetVm, VcpuThrottle, VcpuTime, Vm};

/// How many events wait for a test that is slow to read them.
const EVENTS_KEPT: usize = 64;

/// A VM in memory.
///
/// As a source it goes to pre-switchover when the test says that it [converges](Self::converges), and completes with
/// [`SourceVm::switch_over`]. As a target it has what the test says that it [receives](Self::receives_all).
#[derive(Debug)]
pub struct FakeVm {
    spec: ResolvedSpec,
    directory: VmDirectory,
    role: Role,
    process: FakeProcess,
    faults: Faults,
    // Without a sender once the process has ended.
    events: Mutex<Option<broadcast::Sender<VmEvent>>>,
    inner: Mutex<Inner>,
    // Stopped by somebody, as with `SIGSTOP`.
    is_stopped: AtomicBool,
    // Whether its connections are left to the hypervisor.
    keeps_connections: AtomicBool,
    // A throttle may outlive whoever has a hold of the VM.
    throttle: Arc<Mutex<Option<u8>>>,
    disk_move: FakeMove,
}

#[derive(Debug)]
struct Inner {
    state: RunState,
    transfer: TransferStatus,
    is_post_copy_allowed: bool,
    // Paused by a command, so that its guest does not continue by itself.
    is_paused: bool,
    has_run: bool,
    listens_at: Option<Address>,
    sends_to: Option<Address>,
    bandwidth_mbps: Option<u64>,
    connections: Vec<ConnectionUse>,
    paces: Vec<Pace>,
    own_addresses: Vec<SocketAddr>,
    acts: Vec<Act>,
}

/// The use of a connection that sends as much as it can.
const IN_USE: ConnectionUse = ConnectionUse { is_in_use: true, has_unsent: true, link_bytes: 0 };

impl FakeVm {
    pub(super) fn started(spec: ResolvedSpec, directory: VmDirectory, role: Role) -> Self {
        let (state, has_run) = match role {
            Role::Fresh => (RunState::Running, true),
            Role::Incoming => (RunState::Inmigrate, false),
        };
        Self {
            spec,
            directory,
            role,
            process: FakeProcess::begin(),
            faults: Faults::default(),
            events: Mutex::new(Some(broadcast::channel(EVENTS_KEPT).0)),
            inner: Mutex::new(Inner {
                state,
                transfer: TransferStatus::of(MigrationStatus::None),
                is_post_copy_allowed: false,
                is_paused: false,
                has_run,
                listens_at: None,
                sends_to: None,
                bandwidth_mbps: None,
                connections: vec![IN_USE],
                paces: vec![],
                own_addresses: vec![],
                acts: vec![],
            }),
            is_stopped: AtomicBool::default(),
            keeps_connections: AtomicBool::default(),
            throttle: Arc::default(),
            disk_move: FakeMove::default(),
        }
    }

    /// From now on, acts of this kind fail this way.
    pub fn fails(&self, act: Act, fault: Fault) {
        self.faults.set(act, fault);
    }

    /// The next act of this kind fails this way.
    pub fn fails_once(&self, act: Act, fault: Fault) {
        self.faults.set_once(act, fault);
    }

    /// Acts of this kind succeed again.
    pub fn succeeds(&self, act: Act) {
        self.faults.clear(act);
    }

    /// From now on it answers no question, and obeys no order.
    pub fn is_mute(&self) {
        for act in [Act::RunState, Act::Migration, Act::Hold, Act::Run, Act::Cancel] {
            self.fails(act, Fault::Mute);
        }
    }

    /// Everything that it was asked to do, in order, without questions.
    pub fn acts(&self) -> Vec<Act> {
        self.lock().acts.clone()
    }

    /// What its guest does, even while it does not say so.
    pub fn state(&self) -> RunState {
        self.lock().state.clone()
    }

    /// Whether its guest has run here.
    pub fn has_run(&self) -> bool {
        self.lock().has_run
    }

    /// The address on which it listens, if it does.
    pub fn listens_at(&self) -> Option<Address> {
        self.lock().listens_at.clone()
    }

    /// The address to which it sends, if it does.
    pub fn sends_to(&self) -> Option<Address> {
        self.lock().sends_to.clone()
    }

    /// For what share of their time its vCPUs are held back, in percent.
    pub fn held_back_percent(&self) -> Option<u8> {
        *self.throttle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its process ends.
    pub fn ends(&self, exit: Exit) {
        self.process.end(exit);
        self.events.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Somebody stops its process, or lets it go on.
    pub fn is_stopped_by_somebody(&self, is_stopped: bool) {
        self.is_stopped.store(is_stopped, Ordering::Relaxed);
    }

    /// Its connections are not ours to deal with, as those of a hypervisor that lets nobody have a hold of its process.
    pub fn keeps_connections_to_itself(&self) {
        self.keeps_connections.store(true, Ordering::Relaxed);
    }

    /// It has so many connections from now on, each of which it uses.
    pub fn has_connections(&self, count: usize) {
        self.lock().connections = vec![IN_USE; count];
    }

    /// A connection from there is its own.
    pub fn connects_from(&self, own: SocketAddr) {
        self.lock().own_addresses.push(own);
    }

    /// How each of its connections was paced last; nothing if none was.
    pub fn paces(&self) -> Vec<Pace> {
        self.lock().paces.clone()
    }

    /// The limit that it keeps by itself.
    pub fn bandwidth_mbps(&self) -> Option<u64> {
        self.lock().bandwidth_mbps
    }

    /// A source has little left to send: it pauses its guest and waits.
    pub fn converges(&self) {
        self.lock().state = RunState::FinishMigrate;
        self.goes_to(MigrationStatus::PreSwitchover);
    }

    /// A target has all that its guest is.
    pub fn receives_all(&self) {
        let mut inner = self.lock();
        if inner.state == RunState::Inmigrate {
            inner.state = RunState::Paused;
        }
        drop(inner);
        self.goes_to(MigrationStatus::Completed);
    }

    /// A target has all but the last, which it takes only when it is told to.
    pub fn receives_all_but_the_last(&self) {
        self.receives_all();
        self.goes_to(MigrationStatus::PreSwitchover);
    }

    /// A target has what its guest needs to run, and the rest is to follow.
    pub fn receives_a_part(&self) {
        self.lock().state = RunState::Paused;
        self.goes_to(MigrationStatus::PostcopyActive);
    }

    /// Its transfer has failed.
    pub fn transfer_fails(&self, why: &str) {
        self.lock().transfer.error_desc = Some(why.into());
        self.goes_to(MigrationStatus::Failed);
    }

    /// Its transfer stands there from now on, and its guest stays as it is.
    pub fn goes_to(&self, status: MigrationStatus) {
        self.lock().transfer.status = status.clone();
        self.happens(Happening::Migration(status));
    }

    /// Its guest does this from now on, and its transfer stays as it is.
    pub fn guest_is(&self, state: RunState) {
        let mut inner = self.lock();
        inner.has_run |= state == RunState::Running;
        inner.state = state;
    }

    pub(super) fn hold_back(&self, percent: Option<u8>) {
        *self.throttle.lock().unwrap_or_else(PoisonError::into_inner) = percent;
    }

    /// Cuts it off without asking it.
    pub(super) fn cut_off(&self) -> io::Result<usize> {
        let found = self.on_connections(Act::Cut)?;
        if self.is_stopped() { Err(io::Error::other("somebody has stopped it")) } else { Ok(found) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn happens(&self, what: Happening) {
        if let Some(events) = &*self.events.lock().unwrap_or_else(PoisonError::into_inner) {
            // Nobody may listen.
            let _unheard = events.send(VmEvent { what, at: None });
        }
    }

    /// Does it, or fails as the test wants.
    fn act<T>(&self, act: Act, deed: impl FnOnce(&mut Inner) -> Result<T, VmError>) -> Result<T, VmError> {
        if !act.is_question() {
            self.lock().acts.push(act);
        }
        if !self.alive() {
            return Err(Fault::Ends.error(act));
        }
        match self.faults.of(act) {
            None => deed(&mut self.lock()),
            Some(fault) => {
                if fault == Fault::MuteAndDone {
                    deed(&mut self.lock())?;
                }
                if fault == Fault::Ends {
                    self.ends(Exit::Signal(9));
                }
                Err(fault.error(act))
            }
        }
    }

    /// Like [`Self::act`], without access to its memory and its transfer.
    pub(super) fn does<T>(&self, act: Act, deed: impl FnOnce() -> Result<T, VmError>) -> Result<T, VmError> {
        self.act(act, |_| deed())
    }

    pub(super) fn disk_files(&self) -> &[Disk] {
        &self.spec.spec().disks
    }

    fn on_connections(&self, act: Act) -> io::Result<usize> {
        self.lock().acts.push(act);
        match self.faults.of(act) {
            None => Ok(usize::from(self.lock().sends_to.is_some())),
            Some(fault) => Err(io::Error::other(fault.error(act))),
        }
    }

    fn remove_files(&self) -> Result<(), VmError> {
        match fs::remove_dir_all(self.directory.path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(VmError::failed(error)),
            _ => Ok(()),
        }
    }

    fn end_as(&self, act: Act) -> Result<(), VmError> {
        self.lock().acts.push(act);
        // A VM that has ended can be ended again.
        if let Some(fault) = self.faults.of(act).filter(|_| self.alive()) {
            return Err(fault.error(act));
        }
        self.expect_end();
        self.ends(Exit::Code(0));
        self.remove_files()
    }

    fn shared(&self, name: &str) -> SharedPath {
        let path = self.directory.path().join(name);
        SharedPath { of_hypervisor: path.clone(), path }
    }
}

#[async_trait]
impl Vm for FakeVm {
    fn spec(&self) -> &ResolvedSpec {
        &self.spec
    }

    fn directory(&self) -> &VmDirectory {
        &self.directory
    }

    /// 0 while its process is still to be started.
    fn pid(&self) -> u32 {
        let is_to_start =
            self.starts_to_listen() && self.role == Role::Incoming && self.listens_at().is_none();
        if is_to_start { 0 } else { self.process.pid }
    }

    fn version(&self) -> Version {
        VERSION
    }

    fn role(&self) -> io::Result<Role> {
        Ok(self.role)
    }

    fn obeys_others(&self) -> bool {
        self.spec.spec().is_defined_elsewhere()
    }

    fn events(&self) -> broadcast::Receiver<VmEvent> {
        match &*self.events.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(events) => events.subscribe(),
            None => broadcast::channel(1).1,
        }
    }

    fn alive(&self) -> bool {
        self.process.exit().is_none()
    }

    fn exit(&self) -> Option<Exit> {
        self.process.exit()
    }

    fn is_ending(&self) -> bool {
        self.process.is_ending.load(Ordering::Relaxed)
    }

    fn expect_end(&self) {
        self.process.is_ending.store(true, Ordering::Relaxed);
    }

    fn log_tail(&self) -> String {
        String::new()
    }

    fn end(&self) -> BoxFuture<'static, End> {
        let exited = self.process.exited();
        Box::pin(async move { End { exit: exited.await, log_tail: String::new() } })
    }

    async fn wait_exit(&self, deadline: Duration) -> Option<Exit> {
        timeout(deadline, self.process.exited()).await.ok()
    }

    fn cpu_seconds(&self) -> io::Result<f64> {
        if self.alive() { Ok(0.0) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    async fn run_state(&self, _deadline: Duration) -> Result<RunState, VmError> {
        self.act(Act::RunState, |inner| Ok(inner.state.clone()))
    }

    async fn migration(&self, _deadline: Duration) -> Result<TransferStatus, VmError> {
        self.act(Act::Migration, |inner| Ok(inner.transfer.clone()))
    }

    fn owes_answer_since(&self) -> Option<Instant> {
        None
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    async fn read_console(&self, _deadline: Duration) -> Result<String, VmError> {
        Ok(String::new())
    }

    async fn run(&self, _deadline: Duration) -> Result<(), VmError> {
        self.act(Act::Run, |inner| {
            let incomplete =
                || Err(VmError::new(VmErrorKind::MemoryIncomplete, "its memory is not complete"));
            match inner.state {
                RunState::Running => return Ok(()),
                RunState::Inmigrate => return incomplete(),
                RunState::FinishMigrate if inner.transfer.has_left_for_post_copy() => {
                    return Err(VmError::failed("it has left for post-copy"));
                }
                _ => {}
            }
            (inner.state, inner.has_run, inner.is_paused) = (RunState::Running, true, false);
            Ok(())
        })?;
        self.happens(Happening::Resumed);
        Ok(())
    }

    async fn stop_guest(&self, _deadline: Duration) -> Result<(), VmError> {
        self.end_as(Act::StopGuest)
    }

    async fn destroy(&self, _deadline: Duration) -> Result<(), VmError> {
        self.end_as(Act::Destroy)
    }

    async fn destroy_unrun(&self, _deadline: Duration) -> Result<(), VmError> {
        assert!(!self.has_run(), "{} has run, and would lose what it has not written", self.spec.spec().name);
        self.end_as(Act::DestroyUnrun)
    }

    fn go_first(&self) -> io::Result<()> {
        Ok(())
    }

    fn take_turns(&self) -> io::Result<()> {
        Ok(())
    }

    async fn vcpu_time(&self, _deadline: Duration) -> Result<Box<dyn VcpuTime>, VmError> {
        Ok(Box::new(NoTime))
    }

    async fn vcpu_throttle(&self, _deadline: Duration) -> Result<Box<dyn VcpuThrottle>, VmError> {
        Ok(Box::new(FakeThrottle(Arc::clone(&self.throttle))))
    }

    async fn sample_memory(&self) -> Result<MemorySample, VmError> {
        Ok(MemorySample {
            zero_share: 1.0,
            dirty_bytes_per_s: 0,
            dirty_set_bytes: 0,
            dirty_share_of_pages: 1.0,
            contents: Contents::new(vec![]),
        })
    }

    async fn sample_contents(&self) -> Result<(f64, Contents), VmError> {
        Ok((1.0, Contents::new(vec![])))
    }
}

#[async_trait]
impl SourceVm for FakeVm {
    async fn start_transfer(
        &self,
        transport: Transport,
        address: Address,
        _settings: SourceSettings,
        _parcel: Parcel,
        _deadline: Duration,
    ) -> Result<(), VmError> {
        self.act(Act::StartTransfer, |inner| {
            inner.sends_to = Some(address);
            inner.is_post_copy_allowed = transport.is_post_copy();
            inner.transfer = TransferStatus::of(MigrationStatus::Active);
            Ok(())
        })
    }

    async fn start_post_copy(&self, _deadline: Duration) -> Result<bool, VmError> {
        self.act(Act::StartPostCopy, |inner| {
            if inner.state != RunState::Running {
                return Ok(false);
            }
            (inner.state, inner.is_paused) = (RunState::FinishMigrate, true);
            inner.transfer.status = MigrationStatus::PreSwitchover;
            Ok(true)
        })
    }

    async fn switch_over(&self, _deadline: Duration) -> Result<(), VmError> {
        self.act(Act::SwitchOver, |inner| {
            if inner.transfer.status != MigrationStatus::PreSwitchover {
                return Err(VmError::new(VmErrorKind::Refused, "it does not wait for that"));
            }
            if inner.is_paused {
                inner.transfer.status = MigrationStatus::PostcopyActive;
                inner.transfer.ram = Some(RamStatus { post_copy_bytes: 1, ..RamStatus::default() });
            } else {
                (inner.transfer.status, inner.state) = (MigrationStatus::Completed, RunState::Postmigrate);
            }
            Ok(())
        })
    }

    async fn cancel(&self, _deadline: Duration) -> Result<MigrationStatus, VmError> {
        self.act(Act::Cancel, |inner| {
            if inner.transfer.has_left_for_post_copy() {
                return Err(VmError::failed("it has left for post-copy"));
            }
            if !inner.transfer.status.is_final() {
                inner.transfer.status = MigrationStatus::Cancelled;
                if inner.state == RunState::FinishMigrate {
                    let goes_on = !inner.is_paused;
                    inner.state = if goes_on { RunState::Running } else { RunState::Paused };
                }
            }
            inner.sends_to = None;
            Ok(inner.transfer.status.clone())
        })
    }

    async fn interrupt(&self, _deadline: Duration) -> Result<(), VmError> {
        self.act(Act::Interrupt, |inner| {
            inner.transfer.status = MigrationStatus::PostcopyPaused;
            Ok(())
        })
    }

    async fn resume_transfer(&self, address: Address, _deadline: Duration) -> Result<(), VmError> {
        self.act(Act::ResumeTransfer, |inner| {
            inner.sends_to = Some(address);
            inner.transfer.status = MigrationStatus::PostcopyActive;
            Ok(())
        })
    }

    async fn set_downtime_limit(&self, _downtime_limit_ms: u64, _deadline: Duration) -> Result<(), VmError> {
        self.act(Act::SetDowntimeLimit, |_| Ok(()))
    }

    async fn set_bandwidth(&self, limit_mbps: Option<u64>, _deadline: Duration) -> Result<(), VmError> {
        self.act(Act::SetBandwidth, |inner| {
            inner.bandwidth_mbps = limit_mbps;
            Ok(())
        })
    }

    async fn hold(&self, _deadline: Duration) -> Result<Hold, VmError> {
        use MigrationStatus::{Cancelled, Failed, PreSwitchover};
        self.act(Act::Hold, |inner| match (&inner.transfer.status, &inner.state) {
            (Failed | Cancelled, _) if inner.is_post_copy_allowed => Ok(Hold::Astray),
            (PreSwitchover, _) => Ok(Hold::Kept),
            (_, RunState::Postmigrate) => Ok(Hold::LetGo),
            (_, RunState::FinishMigrate) if inner.transfer.has_let_go() => Ok(Hold::LetGo),
            (_, RunState::FinishMigrate | RunState::Inmigrate | RunState::Prelaunch) => {
                Err(VmError::failed("it does not say whose the VM is"))
            }
            _ => Ok(Hold::Kept),
        })
    }

    fn connections(&self) -> Option<&dyn Connections> {
        let are_ours = !self.keeps_connections.load(Ordering::Relaxed);
        are_ours.then_some(self)
    }

    fn disk_copies(&self) -> Option<&dyn DiskCopies> {
        Some(self)
    }

    fn disk_moves(&self) -> Option<&dyn DiskMoves> {
        // Another manager of VMs moves its disks itself.
        (!self.spec.spec().is_defined_elsewhere()).then_some(self)
    }

    fn outgoing_relay(&self) -> SharedPath {
        self.shared("relay-out")
    }
}

#[async_trait]
impl TargetVm for FakeVm {
    async fn listen(
        &self,
        _transport: Transport,
        address: Address,
        _parcel: &Parcel,
        _deadline: Duration,
    ) -> Result<Parcel, VmError> {
        self.act(Act::Listen, |inner| {
            inner.listens_at = Some(address);
            Ok(Parcel::default())
        })
    }

    fn starts_to_listen(&self) -> bool {
        self.spec.spec().is_defined_elsewhere()
    }

    async fn complete(&self, _parcel: Parcel, _deadline: Duration) -> Result<(), VmError> {
        if !self.obeys_others() {
            return Err(VmError::failed("it needs nothing but what its source sends"));
        }
        self.receives_all_but_the_last();
        Ok(())
    }

    async fn take_last(&self, _deadline: Duration) -> Result<(), VmError> {
        self.act(Act::TakeLast, |inner| {
            inner.transfer.status = MigrationStatus::Completed;
            Ok(())
        })
    }

    async fn bar_others(&self, _deadline: Duration) -> Result<bool, VmError> {
        if self.alive() { self.act(Act::BarOthers, |inner| Ok(inner.has_run)) } else { Ok(self.has_run()) }
    }

    async fn end_unrun(&self, _deadline: Duration) -> Result<bool, VmError> {
        if self.has_run() { Ok(true) } else { self.end_as(Act::EndUnrun).map(|()| false) }
    }

    async fn recover_listen(&self, address: Address, _deadline: Duration) -> Result<(), VmError> {
        self.act(Act::RecoverListen, |inner| {
            if inner.transfer.status != MigrationStatus::PostcopyPaused {
                return Err(VmError::new(VmErrorKind::Refused, "its connection is not broken"));
            }
            inner.listens_at = Some(address);
            Ok(())
        })
    }

    async fn cut_migration(&self, _deadline: Duration) {
        // It is no failure if there is nothing to cut.
        let _not_cut = self.act(Act::CutMigration, |inner| {
            if inner.transfer.status == MigrationStatus::PostcopyActive {
                inner.transfer.status = MigrationStatus::PostcopyPaused;
            }
            Ok(())
        });
    }

    fn forget_key(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn incoming_relay(&self) -> SharedPath {
        self.shared("relay-in")
    }
}

impl Connections for FakeVm {
    fn limit_unsent(&self, _peer: SocketAddr, _bytes: u32) -> io::Result<usize> {
        Ok(1)
    }

    fn limit_received(&self, _own: SocketAddr, _bytes: u32) -> io::Result<usize> {
        Ok(1)
    }

    fn pace(&self, _peer: SocketAddr, paces: Paces<'_>) -> io::Result<usize> {
        let mut inner = self.lock();
        inner.paces = paces(&inner.connections);
        Ok(inner.connections.len())
    }

    fn has(&self, own: SocketAddr, _peer: SocketAddr) -> io::Result<bool> {
        Ok(self.lock().own_addresses.contains(&own))
    }

    fn ignore_resets(&self, _peer: SocketAddr) -> io::Result<usize> {
        Ok(1)
    }

    fn discard_unsent(&self, _peer: SocketAddr) -> io::Result<usize> {
        self.on_connections(Act::DiscardUnsent)
    }

    fn cut(&self, _peer: SocketAddr) -> io::Result<usize> {
        self.cut_off()
    }
}

/// The vCPUs of a guest that does nothing.
#[derive(Debug)]
struct NoTime;

impl VcpuTime for NoTime {
    fn used(&self) -> io::Result<Duration> {
        Ok(Duration::ZERO)
    }
}

#[derive(Debug)]
struct FakeThrottle(Arc<Mutex<Option<u8>>>);

impl VcpuThrottle for FakeThrottle {
    fn hold(&self, percent: u8) -> Result<(), VmError> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(percent);
        Ok(())
    }

    fn lift(&self) -> Result<(), VmError> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }
}
