//! Carries out the engine's actions of one migration, and feeds it what happens.

mod disks;
mod ending;
mod held_writes;
mod hooks;
mod limiting;
mod post_copy;
mod preparing;
#[cfg(test)]
mod tests;
mod throttling;
mod tracked;
mod transferring;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drainpipe_engine::finding::Finding;
use drainpipe_engine::journal::RECORD_AGAIN_AFTER;
use drainpipe_engine::migration::progress::Progress;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::migration::timing::IN_DOUBT_PAUSE;
use drainpipe_engine::migration::{Migration, SourceAction, SourceEvent, Stage};
use drainpipe_engine::plan::PlanRequest;
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::protocol::Protocol;
use drainpipe_hypervisor::{Machine, Vm, VmError, VmErrorKind, VmEvent};
use jiff::Timestamp;
use tokio::sync::{broadcast, mpsc};
use tokio::time::timeout;
use tracing::{info, warn};

use self::held_writes::HeldWrites;
use self::hooks::DowntimeLimit;
use self::post_copy::PostCopy;
use self::preparing::Agreed;
use self::throttling::CpuThrottle;
use super::connections::{Setting, UnsentLimit};
use super::meeting::asked_for;
use super::pause::Pause;
use super::standstill::StandstillWatch;
use super::target_watch::TargetWatch;
use super::tracked::{Gone, OnWay};
use super::{Outgoing, Running, SendStart};
use crate::guard::Guard;
use crate::guard::source_state::settled_source_state;
use crate::incoming;
use crate::outgoing::measure::Measurements;
use crate::outgoing::result;
use crate::paths::path_watch::News;
use crate::peers::client::ApiClient;
use crate::transfer::bandwidth::{DiskPace, Throttle, Valve};
use crate::transfer::disk_streams::DiskSender;
use crate::transfer::relay::OutgoingRelay;
use crate::vms::beside::Beside;
use crate::vms::throttles;
use crate::vms::{Claimed, QEMU_DEADLINE, QMP_DEADLINE, qemu_has_ended};
use drainpipe_api_types::{MigrateRequest, TargetUse};

/// How often the transfer is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Carries out one migration. Decides nothing.
pub(super) struct Executor {
    outgoing: Arc<Outgoing>,
    pub(super) running: Arc<Running>,
    claimed: Claimed,
    order: Order,
    agreed: Agreed,
    heard: Heard,
    target: TargetSide,
    copying: Copying,
    settings: Settings,
    observed: Observed,
    // Told to send the last bytes of the VM, which is paused for them.
    is_switching_over: bool,
    post_copy: PostCopy,
    guard: Option<Guard>,
    relay: Option<OutgoingRelay>,
    tracked: Tracking,
}

/// What is to be done, and since when.
struct Order {
    asked: MigrateRequest,
    // What the plan is made by.
    request: PlanRequest,
    started_at: Timestamp,
    began: Instant,
}

/// What comes unasked, until the migration is told.
struct Heard {
    events: broadcast::Receiver<VmEvent>,
    news: mpsc::Receiver<News>,
    findings: Vec<Finding>,
}

/// What is known of the target's side.
#[derive(Default)]
struct TargetSide {
    watch: TargetWatch,
    // What has become of the VM there.
    asked_at: Option<Instant>,
}

/// The VM's connections, which the target's firewall is told.
#[derive(Default)]
struct Tracking {
    // Until it is paused.
    on_way: Option<OnWay>,
    // Once all is there that it needs to run.
    gone: Option<Gone>,
}

/// The copies of its disks, as long as they are made.
#[derive(Default)]
struct Copying {
    sender: Option<DiskSender>,
    pace: DiskPace,
    throttle: Option<Throttle>,
    held_writes: HeldWrites,
    // Limits memory that follows the disks by itself.
    memory_valve: Option<Valve>,
}

/// What is set on its QEMU and its connections, and taken back.
struct Settings {
    bandwidth: Option<Throttle>,
    reported_limit_mbps: Option<u64>,
    downtime_limit: DowntimeLimit,
    unsent_limit: UnsentLimit,
    no_resets: Setting,
    cpu_throttle: CpuThrottle,
}

/// Observations for its result.
struct Observed {
    measurements: Measurements,
    target_use: TargetUse,
    pause: Pause,
    // While memory is sent.
    standstill_watch: Option<StandstillWatch>,
    standstill_ms: Option<f64>,
}

impl Settings {
    fn none() -> Self {
        Self {
            bandwidth: None,
            reported_limit_mbps: None,
            downtime_limit: DowntimeLimit::default(),
            unsent_limit: UnsentLimit::new(),
            no_resets: Setting::new(
                "if the target's QEMU ends meanwhile, this VM may have to be shut down before it can be migrated again",
            ),
            cpu_throttle: CpuThrottle::default(),
        }
    }
}

impl Order {
    fn new(asked: &MigrateRequest, started_at: Timestamp) -> Self {
        Self { asked: asked.clone(), request: asked_for(asked), started_at, began: Instant::now() }
    }
}

impl Heard {
    fn of(vmm: Option<&dyn Machine>) -> Self {
        Self {
            // Without a QEMU a channel that is closed already.
            events: vmm.map_or_else(|| broadcast::channel(1).1, Vm::events),
            // Closed until paths are watched.
            news: mpsc::channel(1).1,
            findings: vec![],
        }
    }
}

impl Observed {
    fn begin(vmm: Option<&dyn Machine>) -> Self {
        Self {
            measurements: Measurements::begin(vmm),
            target_use: TargetUse::default(),
            pause: Pause::default(),
            standstill_watch: None,
            standstill_ms: None,
        }
    }
}

impl Executor {
    pub(super) fn new(
        outgoing: &Arc<Outgoing>,
        id: String,
        claimed: Claimed,
        request: &MigrateRequest,
        started_at: Timestamp,
        send_start: SendStart,
        is_taken_up: bool,
    ) -> Self {
        let running = Arc::new(Running::new(id.clone(), request, started_at, send_start, is_taken_up));
        outgoing.migrations.lock().insert(id, Arc::clone(&running));
        Self {
            outgoing: Arc::clone(outgoing),
            running,
            copying: Copying::default(),
            settings: Settings::none(),
            observed: Observed::begin(claimed.vmm.as_deref()),
            heard: Heard::of(claimed.vmm.as_deref()),
            claimed,
            order: Order::new(request, started_at),
            agreed: Agreed::default(),
            target: TargetSide::default(),
            is_switching_over: false,
            post_copy: PostCopy::default(),
            guard: None,
            relay: None,
            tracked: Tracking::default(),
        }
    }

    fn peer(&self) -> Result<ApiClient, Problem> {
        self.outgoing.peers.target(&self.running.target)
    }

    /// The VM's QEMU, which may have ended.
    fn vmm(&self) -> Result<&Arc<dyn Machine>, Problem> {
        let vmm = self.claimed.vmm.as_ref();
        vmm.filter(|vmm| vmm.alive()).ok_or_else(|| {
            let exit = vmm.and_then(|vmm| vmm.exit());
            let ended = qemu_has_ended(self.outgoing.host.name(), exit.as_ref());
            let start = self.claimed.definition.start_command();
            Problem::hypervisor_gone(format!("{ended}; `{start}` boots it again"))
        })
    }

    fn memory_bytes(&self) -> u64 {
        self.claimed.definition.memory_mib << 20
    }

    fn now_ms(&self) -> f64 {
        self.order.began.elapsed().as_secs_f64() * 1000.0
    }

    pub(super) async fn run(mut self, mut migration: Migration, mut first: SourceAction) {
        let mut target_lost = self.running.target_lost.subscribe();
        loop {
            self.carry_out(&mut migration, first).await;
            let outcome = migration.outcome().unwrap_or(Outcome::Failed);
            let result = self.result(&migration, outcome);
            if outcome != Outcome::InDoubt {
                self.conclude(result).await;
                return;
            }
            *self.running.result() = Some(result);
            self.running.stage.send_replace(Stage::Ended);
            // Both ends of the pause are good: the operator's word, and the time.
            drop(timeout(IN_DOUBT_PAUSE, target_lost.changed()).await);
            let limits = self.outgoing.host.config.limits.of_migration(None, None);
            (migration, first) = Migration::recover(limits, true);
        }
    }

    async fn carry_out(&mut self, migration: &mut Migration, first: SourceAction) {
        let mut next = Some(first);
        let mut cancel_delivered = false;
        while next != Some(SourceAction::Finish) {
            let event = match next {
                Some(action) => self.perform(action).await.unwrap_or_else(SourceEvent::Failed),
                None => self.transfer_event().await,
            };
            // Before the event, so that no further step begins.
            let interrupted = if self.running.cancel_requested.load(Ordering::Relaxed) && !cancel_delivered {
                cancel_delivered = true;
                migration.handle(self.now_ms(), SourceEvent::CancelRequested)
            } else {
                None
            };
            next = interrupted.or_else(|| migration.handle(self.now_ms(), event));
            for finding in std::mem::take(&mut self.heard.findings) {
                // Asks for nothing to be done.
                migration.handle(self.now_ms(), SourceEvent::Found(finding));
            }
            if next.is_none()
                && let Some(states) = self.copying.held_writes.states.take()
            {
                next = migration.handle(self.now_ms(), SourceEvent::DiskProgress(states));
            }
            while let Ok(news) = self.heard.news.try_recv() {
                // Asks for nothing to be done.
                let event = match news {
                    News::Path(path, turn) => SourceEvent::PathTurned(path, turn),
                    News::Found(finding) => SourceEvent::Found(*finding),
                };
                migration.handle(self.now_ms(), event);
            }
            if let Some(limited) = self.follow_bandwidth_limit().await {
                // Asks for nothing to be done.
                migration.handle(self.now_ms(), limited);
            }
            if let Some(throttled) = self.follow_cpu_throttle(migration.throttle_percent()).await {
                // Asks for nothing to be done.
                migration.handle(self.now_ms(), throttled);
            }
            self.follow_write_limit(migration.write_limit()).await;
            self.settings.downtime_limit.awaits_disks = migration.holds_pause(self.now_ms());
            let compression = self.relay.as_ref().and_then(OutgoingRelay::progress);
            let progress = Progress { compression, ..migration.progress(self.now_ms()) };
            self.running.progress.send_replace(progress);
            self.tell_stage(migration.stage());
        }
    }

    /// Its end is reported later, with its result.
    fn tell_stage(&self, stage: Stage) {
        if stage == Stage::SendingRest {
            // It is not in doubt any more, if it was.
            *self.running.result() = None;
        }
        self.running.stage.send_if_modified(|known| {
            let is_news = stage != *known && stage != Stage::Ended;
            if is_news {
                *known = stage;
            }
            is_news
        });
    }

    /// From its pause on it stands still for as long as that takes.
    fn end_standstill_watch(&mut self) {
        if let Some(watch) = self.observed.standstill_watch.take() {
            self.observed.standstill_ms = Some(watch.longest_ms());
        }
    }

    async fn perform(&mut self, action: SourceAction) -> Result<SourceEvent, Problem> {
        if is_step_before_memory(action) {
            self.outgoing.transfer.first_sessions.begin_step(self.claimed.vmm.as_deref());
        }
        match action {
            SourceAction::EstablishHosts => return self.establish_hosts().await,
            SourceAction::CheckPermissions => return self.check_permissions().await,
            SourceAction::AllocateMemory => self.tell_target("memory", QMP_DEADLINE).await?,
            SourceAction::BuildIncomingVm => {
                self.tell_target("skeleton", QEMU_DEADLINE + QMP_DEADLINE).await?;
            }
            SourceAction::ConnectHosts => return self.connect_hosts().await,
            SourceAction::AwaitTurn => return self.await_turn().await,
            SourceAction::StartDiskCopies => return self.start_disk_copies().await,
            SourceAction::SynchroniseDisks => return self.synchronise_disks().await,
            SourceAction::EndDiskCopies => self.end_disk_copies().await?,
            SourceAction::StartTransfer => self.start_transfer().await?,
            SourceAction::BeginPostCopy => return self.begin_post_copy().await,
            SourceAction::SwitchOver => self.switch_over().await?,
            SourceAction::RecordHandOver => self.record_hand_over()?,
            SourceAction::ResumeOnTarget => self.tell_target("run", QMP_DEADLINE).await?,
            SourceAction::AskSource => {
                return settled_source_state(self.claimed.vmm.as_deref()).await.map(SourceEvent::SourceSays);
            }
            SourceAction::AskTarget => return self.ask_target().await,
            SourceAction::Reconnect => self.reconnect().await?,
            SourceAction::EndOnTarget => self.tell_target("end", QEMU_DEADLINE + QMP_DEADLINE).await?,
            SourceAction::EndOnSource => self.end_on_source().await?,
            SourceAction::RevokeHandOver => self.revoke_hand_over()?,
            SourceAction::CleanUp => self.clean_up().await?,
            SourceAction::StopTransfer => self.stop_transfer().await?,
            SourceAction::ResumeOnSource => self.resume_on_source().await?,
            // Nothing was handed over: where there is no record, nothing is to be undone.
            SourceAction::DiscardTarget => self.discard_on_target().await.map(drop)?,
            SourceAction::PutBack => self.put_back().await?,
            SourceAction::LookAtVm => return self.look_at_vm().await.map(SourceEvent::VmIs),
            SourceAction::Finish => {}
        }
        Ok(SourceEvent::Done)
    }

    fn incoming(&self, what: &str) -> String {
        let id = &self.running.id;
        if what.is_empty() { format!("/v1/incoming/{id}") } else { format!("/v1/incoming/{id}/{what}") }
    }

    async fn tell_target(&self, what: &str, deadline: Duration) -> Result<(), Problem> {
        self.peer()?.post_within(&self.incoming(what), &(), deadline).await
    }

    /// Puts this host's network back, and keeps it so.
    async fn put_back(&self) -> Result<(), Problem> {
        self.outgoing.transfer.watches.leave(&self.running.id).await
    }

    /// Its turn, or a reason to look whether it still is to wait.
    async fn await_turn(&self) -> Result<SourceEvent, Problem> {
        self.vmm()?;
        let mut send_start = self.running.send_start.subscribe();
        Ok(tokio::select! {
            // The sender is this migration's own, so there is always an answer.
            _ = send_start.wait_for(|start| *start == SendStart::Now) => SourceEvent::Done,
            () = self.running.cancel.notified() => SourceEvent::Tick,
            () = tokio::time::sleep(LOOK_EVERY) => SourceEvent::Tick,
        })
    }

    fn result(&mut self, migration: &Migration, outcome: Outcome) -> MigrationResult {
        self.end_standstill_watch();
        let measured =
            self.observed.measurements.finish(self.claimed.vmm.as_deref(), self.observed.target_use);
        let plan = self.agreed.plan.as_ref();
        let mut result = result::assemble(
            result::Identity {
                id: self.running.id.clone(),
                vm: self.running.vm.clone(),
                source: self.outgoing.host.name().into(),
                target: self.running.target.clone(),
                memory_bytes: self.memory_bytes(),
                requested_option: self.order.request.option,
                started_at: self.order.started_at,
            },
            migration,
            result::Pauses {
                timings: self.observed.pause.correct(migration.timings()),
                standstill_ms: self.observed.standstill_ms,
            },
            outcome,
            plan,
            measured,
        );
        result.protocol = self.agreed.protocol.map(Protocol::number);
        result.connection_use.tracked_connections = self.tracked_use().filter(|_| result.has_left());
        result.times.predicted_total_ms = self.agreed.predicted_total_ms.map(result::tenth);
        result.host_use.free_cores = self.agreed.facts.as_ref().and_then(|(source, _)| source.idle_cores);
        if outcome == Outcome::Cancelled && self.outgoing.host.check_not_stopping().is_err() {
            let why =
                format!("cancelled, because the agent of {} was being stopped", self.outgoing.host.name());
            result.failure.error.get_or_insert(why);
            // As it would have been a moment later: who wanted it may try again.
            result.failure.error_kind.get_or_insert(ProblemKind::Unreachable);
        }
        result
    }

    /// Records the result and gives the VM free, in this order: what the journal still calls open,
    /// the next start would undo, and nobody else may have changed the VM by then.
    async fn conclude(mut self, result: MigrationResult) {
        let left = result.has_left();
        self.guard = None;
        let error = result.failure.error.as_deref();
        info!(migration = result.id, vm = result.vm, outcome = ?result.outcome, error, "over");
        if let Ok(vmm) = self.vmm()
            && self.copying.held_writes.is_begun
            && !left
        {
            // Beside: if it was not done already, its QEMU does not answer.
            tokio::spawn(throttles::let_writes_go(Arc::clone(vmm)));
        }
        while let Err(error) = self.outgoing.journal.end_migration(&result, left, Timestamp::now()) {
            warn!(%error, migration = result.id, "its result is not recorded yet; tried again soon");
            *self.running.result() = Some(result.clone());
            *self.running.unrecorded() = Some(error.into());
            tokio::time::sleep(RECORD_AGAIN_AFTER).await;
        }
        *self.running.unrecorded() = None;
        super::hooks::settle(&self.outgoing, &result);
        // Once more: what could not be recorded to be put back would stay until the next start.
        if let Err(problem) = self.put_back().await {
            warn!(%problem, migration = result.id, "the network is put back when the agent restarts");
        }
        if left {
            incoming::close_unfinished(&self.outgoing.incoming, &result.vm).await;
            self.outgoing.vms.forget(&result.vm);
        } else if let Ok(vmm) = self.vmm() {
            self.forget_leaving_disks();
            vmm.stay().await;
            Beside::note_outgoing(&self.claimed.definition, vmm.directory(), None);
        }
        self.outgoing.migrations.lock().remove(&self.running.id);
        // Somebody who hears that it has ended may begin another one at once.
        drop(self.claimed);
        self.running.stage.send_replace(Stage::Ended);
    }
}

/// Whether this is short work for a core before memory is sent. Waiting for a place or a turn is not.
fn is_step_before_memory(action: SourceAction) -> bool {
    matches!(
        action,
        SourceAction::EstablishHosts
            | SourceAction::AllocateMemory
            | SourceAction::BuildIncomingVm
            | SourceAction::ConnectHosts
    )
}

/// Why the VM's QEMU has not done what it was asked for.
fn hypervisor_failed(error: VmError) -> Problem {
    match error.kind {
        VmErrorKind::Gone => Problem::hypervisor_gone(error),
        _ => Problem::failed(error),
    }
}
