//! Carries out the engine's actions of one migration, and feeds it what happens.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::check::finding::Finding;
use drainpipe_engine::check::refusal;
use drainpipe_engine::facts::HostFacts;
use drainpipe_engine::migration::{Action, Event, Migration, Stage, TargetState, downtime_limit_ms};
use drainpipe_engine::path::Path;
use drainpipe_engine::plan::{PathTrial, Plan, Request, Spread};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::progress::{Progress, Transferred};
use drainpipe_engine::queue::unsent_limit_bytes;
use drainpipe_engine::result::{MigrationResult, Outcome};
use drainpipe_hypervisor::migration::{self as qemu, Convergence, MigrationStatus, TransferStatus};
use drainpipe_hypervisor::qmp::{self, QmpError};
use drainpipe_hypervisor::{RunState, Vmm};
use jiff::Timestamp;
use tokio::sync::{Notify, broadcast, mpsc, watch};
use tokio::time::timeout;
use tracing::{info, warn};

use super::connections::Setting;
use super::source_state::source_state;
use super::target_watch::TargetWatch;
use super::{
    ASK_AGAIN_AFTER, Meeting, RECEIVED_WAIT, Running, Turn, informed, known_target, meet, received_path,
};
use crate::agent::Agent;
use crate::api::types::{
    ConnectionRequest, Endpoint, IncomingPermit, IncomingRequest, IncomingView, MigrateRequest, TargetUse,
};
use crate::bandwidth::{Throttle, Valve};
use crate::check;
use crate::client::ApiClient;
use crate::guard::Guard;
use crate::link_socket::on_link;
use crate::measure::Measurements;
use crate::path_watch::{Beginning, Joining, News, WatchEnd};
use crate::precedence;
use crate::probe::{self, Load, ProbePorts, ProbeRequest};
use crate::relay::{OtherEnd, OutgoingRelay};
use crate::result;
use crate::transport::{connections, transport};
use crate::vms::{Claimed, QEMU_DEADLINE, QMP_DEADLINE, does_not_run, qemu_has_ended};

/// How often the transfer is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How long it is waited for QEMU's connections, and how often it is looked for them meanwhile.
const CONNECTED_WITHIN: Duration = Duration::from_millis(500);
const CONNECTED_LOOK_EVERY: Duration = Duration::from_millis(2);

/// How long the VM may stand still while the rest is sent. Past this the links have failed, and it
/// runs on here.
const SWITCH_OVER_DEADLINE: Duration = Duration::from_secs(15);

/// How much longer than that the answer may take. The VM stands still meanwhile.
const RECEIVED_ANSWER_DEADLINE: Duration = Duration::from_secs(3);

/// How long QEMU may take for an answer while the VM stands still and its transfer is to be stopped. After that it is
/// taken to wait for its target.
const MUTE_AFTER: Duration = Duration::from_secs(2);

/// Turns of paths that may wait for the log.
const NEWS_MAX: usize = 64;

/// How soon a target says what has happened to it, once its connections have failed.
const TARGET_SAYS_WITHIN: Duration = Duration::from_millis(500);

/// How often a target is asked once more that is said to be lost.
const LOST_QUESTIONS: u8 = 3;

/// Between two rounds of questions about a hand-over of which the outcome is not known.
const UNDECIDED_PAUSE: Duration = Duration::from_secs(5);

/// How often a target that takes no more VMs at a time is asked for a place. Well within the time after which it
/// forgets who waits.
const ASK_FOR_PLACE_EVERY: Duration = Duration::from_millis(500);

/// Between two attempts to record how a migration ended.
const RECORD_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// Carries out one migration. Decides nothing.
pub(super) struct Executor {
    agent: Arc<Agent>,
    pub(super) running: Arc<Running>,
    claimed: Claimed,
    request: Request,
    started_at: Timestamp,
    began: Instant,
    facts: Option<(HostFacts, HostFacts)>,
    // Until the migration is told.
    findings: Vec<Finding>,
    plan: Option<Plan>,
    endpoint: Option<Endpoint>,
    downtime_limit_ms: u64,
    short_queues: Setting,
    no_resets: Setting,
    // Told to send the last bytes of the VM, which is paused for them.
    is_switching_over: bool,
    // What has become of the VM there.
    target_asked_at: Option<Instant>,
    events: broadcast::Receiver<qmp::Event>,
    guard: Option<Guard>,
    throttle: Option<Throttle>,
    cpu_throttle_max_percent: u8,
    cpu_throttle_percent: Option<u8>,
    // Until the migration is told.
    cpu_throttle_news: Option<Event>,
    news: mpsc::Receiver<News>,
    relay: Option<OutgoingRelay>,
    target_watch: TargetWatch,
    measurements: Measurements,
    target_use: TargetUse,
}

impl Executor {
    pub(super) fn new(
        agent: &Arc<Agent>,
        id: String,
        claimed: Claimed,
        request: &MigrateRequest,
        started_at: Timestamp,
        turn: Turn,
        is_taken_up: bool,
    ) -> Self {
        let idle = drainpipe_engine::progress::ProgressMeter::default();
        let first = idle.progress(drainpipe_engine::step::Step::EstablishHosts, 0.0);
        let running = Arc::new(Running {
            id: id.clone(),
            vm: request.vm.clone(),
            target: request.target.clone(),
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
        });
        agent.outgoing.lock().insert(id, Arc::clone(&running));
        Self {
            agent: Arc::clone(agent),
            running,
            measurements: Measurements::begin(claimed.vmm.as_deref()),
            // Without a QEMU a channel that is closed already.
            events: claimed.vmm.as_ref().map_or_else(|| broadcast::channel(1).1, |vmm| vmm.events()),
            claimed,
            request: Request { encrypt: request.encrypt, ..request.option.into() },
            started_at,
            began: Instant::now(),
            facts: None,
            findings: vec![],
            plan: None,
            endpoint: None,
            downtime_limit_ms: downtime_limit_ms(0),
            short_queues: Setting::new("their queues stay long, so the VM's pause may too"),
            no_resets: Setting::new(
                "should the target's QEMU end meanwhile, this VM may have to be shut down before it can be \
                 migrated again",
            ),
            is_switching_over: false,
            target_asked_at: None,
            guard: None,
            throttle: None,
            cpu_throttle_max_percent: request
                .throttle_max_percent
                .unwrap_or(agent.config.limits.throttle_max_percent),
            cpu_throttle_percent: None,
            cpu_throttle_news: None,
            relay: None,
            target_watch: TargetWatch::default(),
            // Closed until paths are watched.
            news: mpsc::channel(1).1,
            target_use: TargetUse::default(),
        }
    }

    fn peer(&self) -> Result<&ApiClient, Problem> {
        known_target(&self.agent, &self.running.target)
    }

    /// The VM's QEMU, which may have ended.
    fn vmm(&self) -> Result<&Arc<Vmm>, Problem> {
        let vmm = self.claimed.vmm.as_ref();
        vmm.filter(|vmm| vmm.alive()).ok_or_else(|| {
            let exit = vmm.and_then(|vmm| vmm.exit());
            let ended = qemu_has_ended(self.agent.name(), exit.as_ref());
            Problem::failed(format!("{ended}; `drainpipe vm start {}` boots it anew", self.running.vm))
        })
    }

    fn memory_bytes(&self) -> u64 {
        self.claimed.definition.memory_mib << 20
    }

    fn now_ms(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1000.0
    }

    pub(super) async fn run(mut self, mut migration: Migration, mut first: Action) {
        let mut target_lost = self.running.target_lost.subscribe();
        loop {
            self.carry_out(&mut migration, first).await;
            let outcome = migration.outcome().unwrap_or(Outcome::Failed);
            let result = self.result(&migration, outcome);
            if outcome != Outcome::Undecided {
                self.conclude(result).await;
                return;
            }
            *self.running.result() = Some(result);
            self.running.stage.send_replace(Stage::Ended);
            // Both ends of the pause are good: the operator's word, and the time.
            drop(timeout(UNDECIDED_PAUSE, target_lost.changed()).await);
            let limits = self.agent.config.limits.of_migration(None);
            (migration, first) = Migration::recover(limits, true);
        }
    }

    async fn carry_out(&mut self, migration: &mut Migration, first: Action) {
        let mut next = Some(first);
        let mut cancel_delivered = false;
        while next != Some(Action::Finish) {
            let event = match next {
                Some(action) => self.perform(action).await.unwrap_or_else(Event::Failed),
                None => self.transfer_event().await,
            };
            // Before the event, so that no further step begins.
            let interrupted = if self.running.cancel_requested.load(Ordering::Relaxed) && !cancel_delivered {
                cancel_delivered = true;
                migration.handle(self.now_ms(), Event::CancelRequested)
            } else {
                None
            };
            next = interrupted.or_else(|| migration.handle(self.now_ms(), event));
            for finding in std::mem::take(&mut self.findings) {
                // Asks for nothing to be done.
                migration.handle(self.now_ms(), Event::Found(finding));
            }
            while let Ok((path, news)) = self.news.try_recv() {
                // Asks for nothing to be done.
                migration.handle(self.now_ms(), Event::PathTurned(path, news));
            }
            if let Some(limited) = self.throttle.as_mut().and_then(Throttle::news) {
                // Asks for nothing to be done.
                migration.handle(self.now_ms(), limited);
            }
            if let Some(throttled) = self.cpu_throttle_news.take() {
                // Asks for nothing to be done.
                migration.handle(self.now_ms(), throttled);
            }
            let compression = self.relay.as_ref().and_then(OutgoingRelay::progress);
            let progress = Progress { compression, ..migration.progress(self.now_ms()) };
            self.running.progress.send_replace(progress);
            self.tell_stage(migration.stage());
        }
    }

    /// That it has ended is told later, with its result.
    fn tell_stage(&self, stage: Stage) {
        self.running.stage.send_if_modified(|known| {
            let is_news = stage != *known && stage != Stage::Ended;
            if is_news {
                *known = stage;
            }
            is_news
        });
    }

    async fn perform(&mut self, action: Action) -> Result<Event, Problem> {
        match action {
            Action::EstablishHosts => return self.establish_hosts().await,
            Action::CheckPermissions => return self.check_permissions().await,
            Action::AllocateMemory => self.tell_target("memory", QMP_DEADLINE).await?,
            Action::BuildSkeleton => self.tell_target("skeleton", QEMU_DEADLINE + QMP_DEADLINE).await?,
            Action::ConnectHosts => return self.connect_hosts().await,
            Action::AwaitTurn => return self.await_turn().await,
            Action::StartTransfer => self.start_transfer().await?,
            Action::SwitchOver => self.switch_over().await?,
            Action::RecordHandOver => self.record_hand_over()?,
            Action::ResumeOnTarget => self.tell_target("run", QMP_DEADLINE).await?,
            Action::AskSource => {
                return source_state(self.claimed.vmm.as_deref()).await.map(Event::SourceSays);
            }
            Action::AskTarget => return self.ask_target().await,
            Action::EndOnSource => self.end_on_source().await?,
            Action::RevokeHandOver => self.revoke_hand_over()?,
            Action::CleanUp => self.clean_up().await?,
            Action::StopTransfer => self.stop_transfer().await?,
            Action::ResumeOnSource => self.resume_on_source().await?,
            Action::DiscardTarget => self.peer()?.delete(&self.incoming("")).await?,
            Action::PutBack => self.put_back().await?,
            Action::Finish => {}
        }
        Ok(Event::Done)
    }

    fn incoming(&self, what: &str) -> String {
        let id = &self.running.id;
        if what.is_empty() { format!("/v1/incoming/{id}") } else { format!("/v1/incoming/{id}/{what}") }
    }

    async fn tell_target(&self, what: &str, deadline: Duration) -> Result<(), Problem> {
        self.peer()?.post_within(&self.incoming(what), &(), deadline).await
    }

    async fn establish_hosts(&mut self) -> Result<Event, Problem> {
        let (agent, to, vmm) = (&self.agent, &self.running.target, self.claimed.vmm.as_deref());
        let asked = informed(agent, to, self.request, vmm).await?;
        let Meeting { source, target, plan } =
            meet(agent, self.peer()?, to, asked, self.memory_bytes()).await?;
        let vmm = self.claimed.vmm.as_ref().ok_or_else(|| does_not_run(&self.running.vm))?;
        let vms = std::slice::from_ref(vmm);
        self.findings =
            check::before_migration(&self.agent, self.peer()?, &self.running.target, vms, &plan).await?;
        self.facts = Some((source, target.facts));
        self.plan = Some(plan.clone());
        refusal(&self.findings).map_or(Ok(Event::Established(plan)), Err)
    }

    async fn check_permissions(&self) -> Result<Event, Problem> {
        let vmm = self.vmm()?;
        let state = vmm.run_state(QMP_DEADLINE).await.map_err(Problem::failed)?;
        if state != RunState::Running {
            return Err(Problem::refused(format!(
                "VM {} is {state}; only a running VM moves",
                self.running.vm
            )));
        }
        let request = IncomingRequest {
            id: self.running.id.clone(),
            spec: vmm.spec().clone(),
            definition: self.claimed.definition.clone(),
            may_wait: self.running.is_held(),
            cores_taken: self.agent.vms.cores_taken_by(&self.running.vm),
        };
        match self.peer()?.post("/v1/incoming", &request).await? {
            IncomingPermit::Granted => Ok(Event::Done),
            IncomingPermit::Crowded(why) => {
                tokio::select! {
                    () = self.running.cancel.notified() => {}
                    () = tokio::time::sleep(ASK_FOR_PLACE_EVERY) => {}
                }
                Ok(Event::Crowded(why))
            }
        }
    }

    async fn connect_hosts(&mut self) -> Result<Event, Problem> {
        let no_plan = || Problem::failed("connecting before there is a plan");
        let (source, target) = self.facts.as_ref().ok_or_else(no_plan)?;
        let plan = self.plan.clone().ok_or_else(no_plan)?;
        let request = ProbeRequest { paths: plan.paths.iter().map(Path::reversed).collect() };
        let ports: ProbePorts = self.peer()?.post(&self.incoming("probe"), &request).await?;
        let trials = probe::try_paths(&self.agent.network, &plan.paths, &ports, Load::Large).await;
        let trials: Vec<PathTrial> = trials.into_iter().map(|trial| trial.map(drop)).collect();
        let plan = plan.narrow(&trials, &source.name, &target.name).map_err(Problem::failed)?;
        let endpoint = match (plan.spread, target.migration_address) {
            (Spread::Routed, Some(address)) => self.connect_routed(&plan, address).await?,
            _ => self.ask_to_listen(&plan, None).await?,
        };
        self.endpoint = Some(endpoint);
        self.plan = Some(plan.clone());
        Ok(Event::Connected(plan))
    }

    async fn connect_routed(&mut self, plan: &Plan, target: IpAddr) -> Result<Endpoint, Problem> {
        let (tell, news) = mpsc::channel(NEWS_MAX);
        let joining = Joining {
            migration: &self.running.id,
            peer: &self.running.target,
            address: target,
            paths: &plan.paths,
            absent: &[],
            news: Some(tell),
        };
        let own = self.agent.watches.join(&self.agent, joining).await?;
        let endpoint = self.ask_to_listen(plan, Some(own)).await?;
        let other = endpoint.watch.as_ref().ok_or_else(|| Problem::failed("the target watches no paths"))?;
        self.agent.watches.meet(&self.running.target, &plan.paths, other).await?;
        self.news = news;
        Ok(endpoint)
    }

    async fn ask_to_listen(&self, plan: &Plan, watch: Option<WatchEnd>) -> Result<Endpoint, Problem> {
        let reversed = plan.paths.iter().map(Path::reversed).collect();
        let request = ConnectionRequest {
            plan: Plan { paths: reversed, ..plan.clone() },
            migration_address: self.facts.as_ref().and_then(|(source, _)| source.migration_address),
            watch,
        };
        self.peer()?.post(&self.incoming("connection"), &request).await
    }

    /// Puts this host's network back, and keeps it so.
    async fn put_back(&self) -> Result<(), Problem> {
        self.agent.watches.leave(&self.agent, &self.running.id).await
    }

    /// Its turn, or a reason to look whether it still is to wait.
    async fn await_turn(&self) -> Result<Event, Problem> {
        self.vmm()?;
        let mut turn = self.running.turn.subscribe();
        Ok(tokio::select! {
            // The sender is this migration's own, so there is always an answer.
            _ = turn.wait_for(|turn| *turn == Turn::Now) => Event::Done,
            () = self.running.cancel.notified() => Event::Tick,
            () = tokio::time::sleep(LOOK_EVERY) => Event::Tick,
        })
    }

    async fn start_transfer(&mut self) -> Result<(), Problem> {
        let (Some(plan), Some(endpoint)) = (&self.plan, &self.endpoint) else {
            return Err(Problem::failed("a transfer before the hosts are connected"));
        };
        let address = listening_at(plan, endpoint).map_err(Problem::failed)?;
        let (transport, now_ms) = (transport(plan), self.now_ms());
        self.measurements.transfer_begins(&self.agent.network, plan, address, now_ms).await?;
        let vmm = self.vmm()?;
        let own_peer = (!plan.is_relayed()).then_some(address);
        let guard = Guard::start(&self.agent, &self.running.id, vmm, own_peer).await?;
        let (relay, send_to) = self.relay_to(plan, endpoint, address, &guard)?;
        self.tell_watch(plan, address.port()).await;
        let convergence = Convergence {
            downtime_limit_ms: self.downtime_limit_ms,
            throttle_max_percent: self.cpu_throttle_max_percent,
        };
        qemu::start(vmm, transport, send_to, convergence, QMP_DEADLINE).await.map_err(Problem::failed)?;
        (self.guard, self.relay) = (Some(guard), relay);
        self.target_watch = TargetWatch::start(&self.agent, &self.running);
        let valve = match &self.relay {
            Some(relay) => Some(Valve::Relay(relay.limiter())),
            None => self.claimed.vmm.as_ref().map(|vmm| Valve::Qemu(Arc::clone(vmm))),
        };
        self.throttle = valve.map(|valve| Throttle::start(&self.agent, &self.running, plan, valve));
        self.keep_resets_from_qemu().await;
        Ok(())
    }

    /// As soon as there are connections, since a target may end at any time. Those that are not there by then are
    /// looked for with the transfer.
    async fn keep_resets_from_qemu(&mut self) {
        let end = Instant::now() + CONNECTED_WITHIN;
        while self.ignore_resets() && Instant::now() < end {
            tokio::time::sleep(CONNECTED_LOOK_EVERY).await;
        }
    }

    /// Whether there are connections of multifd to come for which it is to be done again.
    fn ignore_resets(&mut self) -> bool {
        let Some((vmm, address, connections)) = self.own_multifd() else { return false };
        self.no_resets.attempt(connections, || vmm.ignore_resets(address));
        !self.no_resets.is_over()
    }

    /// Multifd's connections must not come before the one that QEMU makes first, where the target's QEMU goes
    /// by that. The relay tells it by itself.
    async fn tell_watch(&self, plan: &Plan, port: u16) {
        let apart =
            self.facts.as_ref().is_some_and(|(_, target)| target.hypervisor.tells_connections_apart());
        let connections = connections(plan);
        let in_order = (!apart && !plan.is_relayed() && connections > 1).then_some(connections);
        let beginning = Beginning { migration: &self.running.id, port, in_order };
        self.agent.watches.begin_transfer(&self.running.target, beginning).await;
    }

    /// What stands between QEMU and the target's `address`, if anything does, and where QEMU sends to.
    fn relay_to(
        &self,
        plan: &Plan,
        endpoint: &Endpoint,
        address: SocketAddr,
        guard: &Guard,
    ) -> Result<(Option<OutgoingRelay>, qemu::Address), Problem> {
        if !plan.is_relayed() {
            return Ok((None, address.into()));
        }
        let vmm = self.vmm()?;
        let token = endpoint.relay_token.ok_or_else(|| {
            Problem::refused(format!(
                "the agent of {} does not compress or encrypt as this one: run the same Drainpipe on both hosts",
                self.running.target
            ))
        })?;
        let other = OtherEnd { identity: &self.agent.identity, host: &self.running.target, token };
        let compression = &self.agent.config.compression;
        let page_cache_mib = endpoint.relay_page_cache_mib.min(compression.page_cache_mib);
        let relay = OutgoingRelay::start(vmm, plan, address, &other, guard, compression, page_cache_mib)?;
        Ok((Some(relay), vmm.paths().relay_socket().into()))
    }

    /// The next thing that happens to the transfer.
    async fn transfer_event(&mut self) -> Event {
        let look = tokio::time::sleep(LOOK_EVERY);
        tokio::pin!(look);
        loop {
            tokio::select! {
                problem = self.target_watch.trouble() => return Event::TransferFailed(problem),
                event = self.events.recv() => match event.as_ref().map(MigrationStatus::from_event) {
                    Ok(Some(MigrationStatus::PreSwitchover)) => return Event::Paused,
                    Ok(Some(status)) if status.is_final() => return self.look().await,
                    Ok(_) => {}
                    // Events were missed, or the connection is gone: the state tells.
                    Err(_) => break,
                },
                () = self.running.cancel.notified() => return Event::Tick,
                () = &mut look => break,
            }
        }
        look.await;
        self.look().await
    }

    async fn look(&mut self) -> Event {
        if let Some(relay) = &self.relay
            && let Some(problem) = relay.problem()
        {
            let is_cut_off = relay.is_cut_off();
            return if is_cut_off {
                self.failed_beside_target(problem).await
            } else {
                Event::TransferFailed(problem)
            };
        }
        let status = match self.status().await {
            Ok(Some(status)) => status,
            Ok(None) => return Event::Tick,
            Err(problem) => return Event::TransferFailed(problem),
        };
        match status.status {
            MigrationStatus::PreSwitchover => Event::Paused,
            MigrationStatus::Cancelled if self.guard_has_acted() => Event::TransferFailed(guard_acted()),
            MigrationStatus::Failed | MigrationStatus::Cancelled | MigrationStatus::None => {
                let why = status.error_desc.unwrap_or_else(|| format!("QEMU calls it {}", status.status));
                // A connection that is reset before resets are kept from QEMU is all that QEMU can tell.
                self.failed_beside_target(Problem::failed(format!("QEMU: {why}"))).await
            }
            _ => {
                let now_ms = self.now_ms();
                if let Some(relay) = &self.relay {
                    self.measurements.relayed(relay);
                }
                if let Err(problem) = self.measurements.sample(&self.agent.network, now_ms).await {
                    warn!(%problem, "no reading of the links");
                }
                let losing = self.measurements.losing();
                if !losing.is_empty() {
                    self.agent.watches.suspect(&self.running.target, &losing).await;
                }
                // In its last moments the next one of a drain is there already.
                if *self.running.stage.borrow() == Stage::Sending {
                    self.measurements.beside(self.agent.outgoing.sending_beside(&self.running.id));
                }
                self.note_cpu_throttle(status.throttle_percent);
                let transferred = self.transferred(&status);
                self.follow_downtime_limit(transferred.rounds).await;
                if let Some(relay) = &mut self.relay {
                    relay.read(now_ms);
                }
                self.set_on_connections(&status, transferred.remaining_bytes);
                Event::Progress(transferred, self.measurements.arrivals())
            }
        }
    }

    /// The transfer has failed, of which this host knows the connections' end only: for what the target says, if it
    /// does.
    async fn failed_beside_target(&mut self, problem: Problem) -> Event {
        let said = timeout(TARGET_SAYS_WITHIN, self.target_watch.trouble()).await;
        Event::TransferFailed(said.unwrap_or(problem))
    }

    fn transferred(&self, status: &TransferStatus) -> Transferred {
        let ram = status.ram.unwrap_or_default();
        Transferred {
            sent_bytes: self.measurements.arrived_bytes().unwrap_or(ram.transferred_bytes),
            remaining_bytes: ram.remaining_bytes,
            total_bytes: ram.total_bytes,
            rounds: ram.rounds,
        }
    }

    fn note_cpu_throttle(&mut self, percent: Option<u8>) {
        if percent != self.cpu_throttle_percent {
            self.cpu_throttle_percent = percent;
            self.cpu_throttle_news = Some(Event::Throttled(percent));
        }
    }

    async fn follow_downtime_limit(&mut self, rounds: u64) {
        let limit = downtime_limit_ms(rounds);
        if limit == self.downtime_limit_ms {
            return;
        }
        match self.set_downtime_limit(limit).await {
            Ok(()) => self.downtime_limit_ms = limit,
            Err(error) => warn!(%error, "the downtime limit stays at {} ms", self.downtime_limit_ms),
        }
    }

    async fn set_downtime_limit(&self, limit_ms: u64) -> Result<(), Problem> {
        qemu::set_downtime_limit(self.vmm()?, limit_ms, QMP_DEADLINE).await.map_err(Problem::failed)
    }

    /// Nothing while QEMU is too busy to answer: looking for changed memory it has been seen to be so
    /// for 5 s (7.2, without KVM). How long it may stand still is the engine's to say.
    async fn status(&self) -> Result<Option<TransferStatus>, Problem> {
        match qemu::status(self.vmm()?, QMP_DEADLINE).await {
            Ok(status) => Ok(Some(status)),
            // When QEMU ends, its answer fails first; that it ended tells more.
            Err(error) => match self.vmm() {
                Ok(_) if matches!(error, QmpError::Deadline { .. }) => Ok(None),
                Ok(_) => Err(Problem::failed(error)),
                Err(problem) => Err(problem),
            },
        }
    }

    /// Sets on QEMU's connections what QEMU does not. The relay does so by itself.
    fn set_on_connections(&mut self, status: &TransferStatus, remaining_bytes: u64) {
        let Some(plan) = &self.plan else { return };
        let Some(channels) = plan.multifd_channels else { return };
        let unsent_bytes = unsent_limit_bytes(&plan.paths, channels, remaining_bytes);
        if let Some(relay) = &self.relay {
            return unsent_bytes.map_or((), |_| relay.shorten());
        }
        if status.status == MigrationStatus::Active {
            self.ignore_resets();
        }
        let (Some(bytes), Some((vmm, address, connections))) = (unsent_bytes, self.own_multifd()) else {
            return;
        };
        self.short_queues.attempt(connections, || vmm.limit_unsent(address, bytes));
    }

    /// The source's QEMU and where it is connected to; none if it is the relay that is.
    fn own_connections(&self) -> Option<(Arc<Vmm>, SocketAddr)> {
        let address = listening_at(self.plan.as_ref()?, self.endpoint.as_ref()?).ok()?;
        let vmm = self.claimed.vmm.clone()?;
        self.relay.is_none().then_some((vmm, address))
    }

    /// With how many connections multifd makes of them; none if there is no multifd.
    fn own_multifd(&self) -> Option<(Arc<Vmm>, SocketAddr, usize)> {
        let plan = self.plan.as_ref().filter(|plan| plan.multifd_channels.is_some())?;
        let (vmm, address) = self.own_connections()?;
        Some((vmm, address, connections(plan)))
    }

    fn guard_has_acted(&self) -> bool {
        self.agent.journal.is_hand_over_forbidden(&self.running.id).unwrap_or(false)
    }

    async fn switch_over(&mut self) -> Result<(), Problem> {
        // Nothing more is sent that a limit holds for.
        (self.throttle, self.target_watch) = (None, TargetWatch::default());
        self.measurements.transfer_is_ending();
        self.is_switching_over = true;
        let vmm = self.vmm()?;
        precedence::begin(vmm);
        let here = async { qemu::switch_over(vmm, QMP_DEADLINE).await.map_err(Problem::failed) };
        tokio::try_join!(self.wait_received(), here).map(drop)
    }

    async fn wait_received(&self) -> Result<(), Problem> {
        let path = received_path(&self.running.id, true);
        let end = Instant::now() + SWITCH_OVER_DEADLINE;
        while Instant::now() < end {
            let answer_deadline = RECEIVED_WAIT + RECEIVED_ANSWER_DEADLINE;
            if self.peer()?.get_within::<IncomingView>(&path, answer_deadline).await? == IncomingView::Ready {
                return Ok(());
            }
        }
        let seconds = SWITCH_OVER_DEADLINE.as_secs();
        Err(Problem::failed(format!(
            "the last of the state did not arrive within {seconds} s; look at the links"
        )))
    }

    fn record_hand_over(&self) -> Result<(), Problem> {
        if self.agent.journal.hand_over(&self.running.id)? {
            return Ok(());
        }
        Err(guard_acted())
    }

    async fn ask_target(&mut self) -> Result<Event, Problem> {
        // Also one that answers at once may answer the same for long, as while it cannot write down that the VM runs.
        if let Some(asked_at) = self.target_asked_at {
            tokio::time::sleep(ASK_AGAIN_AFTER.saturating_sub(asked_at.elapsed())).await;
        }
        self.target_asked_at = Some(Instant::now());
        // Of a host that the configuration does not name any more nobody can say whether it answers.
        self.peer().map_err(Problem::failed)?;
        let view = self.target_view().await;
        if let Err(problem) = &view
            && is_like_lost(problem)
            && *self.running.target_lost.borrow()
            && self.stays_silent().await
        {
            return Ok(Event::TargetSays(TargetState::Lost));
        }
        let state = match view {
            Ok(IncomingView::Running) => TargetState::Running,
            Ok(IncomingView::Ready) => TargetState::Ready,
            Ok(IncomingView::Discarded) => TargetState::Discarded,
            // Its QEMU does not say how much it has. That may be the only copy, if there is none here.
            Err(problem) if problem.kind != ProblemKind::Failed || self.vmm().is_err() => {
                return Err(problem);
            }
            Ok(IncomingView::Waiting) | Err(_) => {
                self.peer()?.delete::<()>(&self.incoming("")).await?;
                TargetState::Discarded
            }
        };
        Ok(Event::TargetSays(state))
    }

    async fn target_view(&self) -> Result<IncomingView, Problem> {
        self.peer()?.get(&self.incoming("")).await
    }

    async fn end_on_source(&mut self) -> Result<(), Problem> {
        self.guard = None;
        self.destroy().await
    }

    /// Whether a target that is said to be lost does not answer again and again.
    async fn stays_silent(&self) -> bool {
        for _ in 0..LOST_QUESTIONS {
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
            if !matches!(self.target_view().await, Err(problem) if is_like_lost(&problem)) {
                return false;
            }
        }
        true
    }

    fn revoke_hand_over(&self) -> Result<(), Problem> {
        self.agent.journal.revoke_hand_over(&self.running.id)?;
        Ok(())
    }

    async fn clean_up(&mut self) -> Result<(), Problem> {
        if let Err(error) = self.read_final_counters().await {
            warn!(%error, "no final counters");
        }
        let path = self.incoming("finish");
        let there = async { self.peer()?.post::<TargetUse>(&path, &()).await };
        let here = self.destroy();
        let network = self.put_back();
        let (used, destroyed, put_back) = tokio::join!(there, here, network);
        (self.guard, self.relay) = (None, None);
        // A target that does not answer puts its network back by itself when it hears nothing more.
        self.target_use = used.unwrap_or_default();
        destroyed.and(put_back)
    }

    async fn destroy(&self) -> Result<(), Problem> {
        match &self.claimed.vmm {
            Some(vmm) => vmm.destroy(QEMU_DEADLINE).await.map_err(Problem::failed),
            None => Ok(()),
        }
    }

    async fn read_final_counters(&mut self) -> Result<(), Problem> {
        // First: it is known also of a QEMU that does not answer.
        if let Some(relay) = &self.relay {
            self.measurements.relayed(relay);
        }
        if let (Some(status), Some(vmm)) = (self.status().await?, &self.claimed.vmm) {
            self.measurements.transfer_ends(vmm, &status);
        }
        let now_ms = self.now_ms();
        self.measurements.sample(&self.agent.network, now_ms).await
    }

    async fn stop_transfer(&mut self) -> Result<(), Problem> {
        (self.throttle, self.target_watch) = (None, TargetWatch::default());
        if self.vmm().is_err() {
            return Ok(());
        }
        self.on_own_connections(Vmm::discard_unsent, "the kernel goes on trying to send what QEMU has left");
        if self.is_switching_over {
            self.cut_if_mute().await;
        }
        if let Err(error) = self.read_final_counters().await {
            warn!(%error, "no final counters: its connections are cut, lest it wait for them");
            self.cut();
        }
        let cancelled = qemu::cancel(self.vmm()?, QEMU_DEADLINE).await;
        // QEMU 7.2 may call it over while some of its threads still wait in `send`, and its main thread for them,
        // for as long as the target is silent. It answers nothing meanwhile.
        self.cut();
        // Not before: QEMU would call the migration failed.
        self.relay = None;
        cancelled.map(drop).map_err(Problem::failed)
    }

    /// Where nobody takes the last bytes, QEMU waits with the lock that each command needs: asked to cancel, it would
    /// say nothing, and the VM would stand still for as long as that is waited for.
    async fn cut_if_mute(&mut self) {
        let Ok(vmm) = self.vmm() else { return };
        if matches!(qemu::status(vmm, MUTE_AFTER).await, Err(QmpError::Deadline { .. })) {
            warn!(vm = self.running.vm, "its QEMU waits for the target: its connections are cut");
            self.cut();
            self.relay = None;
        }
    }

    fn cut(&self) {
        self.on_own_connections(Vmm::cut, "the VM may stand still for as long as QEMU waits for its target");
    }

    /// What is left of the memory is not sent by whatever way there is once the network is put back, and nobody
    /// waits for it. The relay sees to it by itself.
    fn on_own_connections(&self, act: fn(&Vmm, SocketAddr) -> io::Result<usize>, else_what: &str) {
        if let Some(Err(error)) = self.own_connections().map(|(vmm, address)| act(&vmm, address)) {
            warn!(%error, "{else_what}");
        }
    }

    async fn resume_on_source(&mut self) -> Result<(), Problem> {
        let vmm = self.vmm()?;
        precedence::end_soon(vmm);
        qemu::run(vmm, QMP_DEADLINE).await.map_err(Problem::failed)?;
        self.guard = None;
        Ok(())
    }

    fn result(&self, migration: &Migration, outcome: Outcome) -> MigrationResult {
        let measured = self.measurements.finish(self.claimed.vmm.as_deref(), self.target_use);
        let plan = self.plan.as_ref();
        result::assemble(
            result::Identity {
                id: self.running.id.clone(),
                vm: self.running.vm.clone(),
                source: self.agent.name().into(),
                target: self.running.target.clone(),
                memory_bytes: self.memory_bytes(),
                requested_option: self.request.option,
                started_at: self.started_at,
            },
            migration,
            outcome,
            plan,
            measured,
        )
    }

    /// Records the result and gives the VM free, in this order: what the journal still calls open,
    /// the next start would undo, and nobody else may have changed the VM by then.
    async fn conclude(mut self, result: MigrationResult) {
        let left = result.outcome == Outcome::Completed;
        self.guard = None;
        let error = result.error.as_deref();
        info!(migration = result.id, vm = result.vm, outcome = ?result.outcome, error, "over");
        while let Err(error) = self.agent.journal.end_migration(&result, left, Timestamp::now()) {
            warn!(%error, migration = result.id, "its result is not recorded yet; tried again soon");
            *self.running.result() = Some(result.clone());
            *self.running.unrecorded() = Some(error.into());
            tokio::time::sleep(RECORD_AGAIN_AFTER).await;
        }
        *self.running.unrecorded() = None;
        // Once more: what could not be recorded to be put back would stay until the next start.
        if let Err(problem) = self.put_back().await {
            warn!(%problem, migration = result.id, "the network is put back at the next start");
        }
        if left {
            self.agent.vms.forget(&result.vm);
        }
        self.agent.outgoing.lock().remove(&self.running.id);
        // Who hears that it has ended may want to begin it anew.
        drop(self.claimed);
        self.running.stage.send_replace(Stage::Ended);
    }
}

/// Where the target's QEMU listens, as seen from here.
fn listening_at(plan: &Plan, endpoint: &Endpoint) -> io::Result<SocketAddr> {
    let link = plan.paths.first().map_or("", |path| &path.link);
    on_link(link, endpoint.address, endpoint.port)
}

fn guard_acted() -> Problem {
    Problem::failed("this agent stood still for so long that its guard let the VM run on here")
}

/// A host that answers anything else is not lost.
fn is_like_lost(problem: &Problem) -> bool {
    matches!(problem.kind, ProblemKind::Unreachable | ProblemKind::NotFound)
}
