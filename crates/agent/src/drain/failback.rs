//! The failback: fetches what the last drain has moved away from where it went, if it is still there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::drain::eta::{Eta, Load, LoadStage};
use drainpipe_engine::drain::pace::Pace;
use drainpipe_engine::drain::status::{
    DisksProgress, DrainState, DrainStatus, LinkRate, MoveState, MoveStatus,
};
use drainpipe_engine::drain::stay::{Stay, StayReason};
use drainpipe_engine::estimate::sending::{self, UNKNOWN_SPEED_MBPS};
use drainpipe_engine::journal::RECORD_AGAIN_AFTER;
use drainpipe_engine::migration::progress::{PathRate, Progress};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::storage::{DiskCopy, allowance_ms};
use futures_util::{StreamExt, stream};
use jiff::Timestamp;
use tokio::time::sleep;
use tracing::{info, warn};
use uuid::Uuid;

use super::record::{self, has_arrived, settled};
use super::{Course, Drains, crashed, migration_deadline_s};
use crate::peers::client::ApiClient;
use crate::store::journal::DrainRecord;
use crate::store::lock::lock;
use crate::vms::is_off;
use drainpipe_api_types::{
    DEADLINE_S_MAX, DrainRequest, MigrateRequest, MigrationView, ResumeRequest, VmState, VmView,
};

/// VMs that are fetched at a time: one is on the links while the next is made ready.
const AT_ONCE: u8 = 2;

/// How often the host that a VM comes from is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long that host may be silent before it is left open what became of the VM.
const SILENCE_MAX: Duration = Duration::from_mins(2);

/// Between two attempts: what keeps a VM, as somebody who is just changing it, may be over by then.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How long a host from which VMs come may give no answer, as while its agent restarts, and how long something
/// else may be under way with a VM. An agent that is told to stop ends within 20 s, and begins nothing meanwhile.
const PUT_OFF_MAX: Duration = Duration::from_secs(30);

/// A way back under way.
struct WayBack {
    drains: Arc<Drains>,
    course: Arc<Course>,
    // How VMs are moved.
    request: DrainRequest,
    began: Instant,
    estimate: Mutex<TimeEstimate>,
    // The rates of the paths of each VM on its way.
    carried: Mutex<BTreeMap<String, Vec<PathRate>>>,
    // Hosts that VMs come from and that do not answer, since when.
    silent: Mutex<BTreeMap<String, Instant>>,
}

/// How fast all of them come.
struct TimeEstimate {
    pace: Pace,
    eta: Eta,
    // On the way there.
    bytes_per_ms: f64,
    // The bytes reported so far.
    seen_bytes: u64,
}

/// What became of a VM that was to be fetched.
enum Fetched {
    /// Its migration is over.
    Ended(Box<MigrationResult>),
    /// It is not where it went; where it is, is its owner's affair.
    Gone,
    /// It stays where it is.
    Failed(Problem),
    /// It may be on its way.
    Unknown(Problem),
}

/// Why a VM does not come yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PutOff {
    /// Its host does not answer, or is about not to.
    Silent,
    /// Something else is under way with it, or its agent begins nothing more.
    Busy,
}

impl Fetched {
    /// Whether the VM runs where it ran, and another attempt may bring it.
    fn has_failed(&self) -> bool {
        match self {
            Self::Ended(result) => result.outcome == Outcome::Failed,
            Self::Failed(_) => true,
            Self::Gone | Self::Unknown(_) => false,
        }
    }

    /// Why it may come later, if it may. Then this was no attempt.
    fn put_off(&self) -> Option<(&str, PutOff)> {
        let (why, kind) = match self {
            // By its agent, which was stopped.
            Self::Ended(result) if result.outcome == Outcome::Cancelled => {
                (result.failure.error.as_deref()?, result.failure.error_kind?)
            }
            Self::Failed(problem) | Self::Unknown(problem) => (&*problem.message, problem.kind),
            Self::Ended(_) | Self::Gone => return None,
        };
        match kind {
            ProblemKind::Unreachable => Some((why, PutOff::Silent)),
            ProblemKind::Conflict => Some((why, PutOff::Busy)),
            _ => None,
        }
    }
}

/// What is to come back.
pub(super) struct Away {
    moves: Vec<MoveStatus>,
    // What the drain was asked for.
    request: DrainRequest,
    // How fast the drain has moved it.
    bytes_per_ms: f64,
}

/// What the last drain has moved, each still to come back; and of what nobody knows yet whether it has moved.
pub(super) fn away(drains: &Drains) -> Result<Away, Problem> {
    let Some(drain) = drains.journal.last_drain()? else {
        let host = drains.host.name();
        return Err(Problem::refused(format!("{host} was never drained, so there is nothing to bring back")));
    };
    let DrainRecord { request, status, .. } = settled(drains, drain)?;
    let DrainStatus { mut moves, transfers, .. } = status;
    let bytes_per_ms = bytes_per_ms(&moves, transfers);
    moves.retain(|one| match one.state {
        MoveState::Moved => !drains.vms.contains(&one.vm),
        state => state == MoveState::InDoubt,
    });
    let back = |one: MoveStatus| if one.state == MoveState::Moved { waiting(one) } else { one };
    let request = request.unwrap_or_default();
    Ok(Away { moves: moves.into_iter().map(back).collect(), request, bytes_per_ms })
}

/// How VMs come back: as they went, unless something else is asked for. Nothing takes encryption away.
fn as_they_went(went: &DrainRequest, asked: ResumeRequest) -> DrainRequest {
    DrainRequest {
        throttle_max_percent: asked.throttle_max_percent.or(went.throttle_max_percent),
        encrypt: asked.encrypt || went.encrypt,
        post_copy: went.post_copy,
        ..DrainRequest::default()
    }
}

/// What the links carried in a millisecond while so many VMs shared them at a time: no less than for any one of them.
fn bytes_per_ms(moves: &[MoveStatus], at_once: u8) -> f64 {
    // Predicted times are those of memory alone.
    let carried = || moves.iter().filter_map(|one| Some((one.sent_bytes as f64, one.transfer_ms?.max(1.0))));
    let (bytes, ms) = carried().fold((0.0, 0.0), |all, one| (all.0 + one.0, all.1 + one.1));
    let at_once = usize::from(at_once.max(1)).min(carried().count()) as f64;
    let shared = if ms > 0.0 { bytes / ms * at_once } else { 0.0 };
    carried().map(|(bytes, ms)| bytes / ms).fold(shared, f64::max)
}

fn waiting(one: MoveStatus) -> MoveStatus {
    // As long as it took to go, and as much.
    let predicted_ms = one.transfer_ms.unwrap_or(one.predicted_ms);
    let predicted_bytes = if one.sent_bytes > 0 { one.sent_bytes } else { one.predicted_bytes };
    MoveStatus {
        state: MoveState::Waiting,
        sent_bytes: 0,
        predicted_bytes,
        attempts: 0,
        predicted_ms,
        transfer_ms: None,
        disks: one.disks.map(|disks| DisksProgress {
            bytes: if disks.copied_bytes > 0 { disks.copied_bytes } else { disks.bytes },
            copied_bytes: 0,
            are_being_copied: false,
        }),
        ..one
    }
}

/// Lets VMs come here again and begins to bring these back.
pub(super) fn start(drains: &Arc<Drains>, away: Away, asked: ResumeRequest) -> Result<(), Problem> {
    let id = Uuid::new_v4().to_string();
    let Away { moves, request, bytes_per_ms } = away;
    let request = as_they_went(&request, asked);
    let (eta, predicted_ms) = planned(&moves, bytes_per_ms);
    let predicted_ms = predicted_ms.unwrap_or(0.0);
    let status = DrainStatus { moves, transfers: AT_ONCE, predicted_ms, ..DrainStatus::begun() };
    let record = drains.journal.begin_failback(&id, Timestamp::now(), &request, &status)?;
    let way_back = WayBack {
        drains: Arc::clone(drains),
        course: Course::of(&record, status),
        request,
        began: Instant::now(),
        estimate: Mutex::new(TimeEstimate { pace: Pace::default(), eta, bytes_per_ms, seen_bytes: 0 }),
        carried: Mutex::default(),
        silent: Mutex::default(),
    };
    drains.under_way.run(Arc::clone(&way_back.course), way_back.run(), crashed(Arc::clone(drains)));
    Ok(())
}

impl WayBack {
    async fn run(self) {
        let is_waiting = |one: &&MoveStatus| one.state == MoveState::Waiting;
        let mut waiting: Vec<MoveStatus> =
            self.course.status.borrow().moves.iter().filter(is_waiting).cloned().collect();
        // Those whose disks are copied take long, so they come last.
        waiting.sort_by_key(|one| one.disks.is_some());
        let vms: Vec<String> = waiting.into_iter().map(|one| one.vm).collect();
        stream::iter(vms)
            .for_each_concurrent(usize::from(AT_ONCE), |vm| {
                let way_back = &self;
                async move { way_back.bring(&vm).await }
            })
            .await;
        self.conclude().await;
    }

    fn is_cancelled(&self) -> bool {
        *self.course.cancelled.borrow()
    }

    async fn bring(&self, vm: &str) {
        let Some(one) = self.of(vm) else { return };
        if self.is_cancelled() {
            return self.change(vm, |one| fail(one, MoveState::Failed, cancelled()));
        }
        match self.fetch_at_last(&one).await {
            Fetched::Ended(result) => self.change(vm, |one| record::end(one, &result)),
            Fetched::Failed(problem) => self.change(vm, |one| fail(one, MoveState::Failed, problem)),
            Fetched::Unknown(problem) => self.change(vm, |one| fail(one, MoveState::InDoubt, problem)),
            Fetched::Gone if has_arrived(&self.drains, vm) => {
                self.change(vm, |one| (one.state, one.error) = (MoveState::Moved, None));
            }
            Fetched::Gone => self.leave(&one),
        }
    }

    /// As often as there are attempts, and as long as it is put off.
    async fn fetch_at_last(&self, one: &MoveStatus) -> Fetched {
        let (mut attempt, mut in_doubt, mut busy_since) = (1, false, None);
        loop {
            let fetched = self.fetch(one, attempt).await;
            in_doubt |= matches!(fetched, Fetched::Unknown(_));
            let goes_on = if let Some((why, put_off)) = fetched.put_off() {
                self.update(&one.vm, |one| (one.state, one.waits) = (MoveState::Waiting, Some(why.into())));
                let since = match put_off {
                    PutOff::Silent => self.silent_since(&one.target),
                    PutOff::Busy => *busy_since.get_or_insert_with(Instant::now),
                };
                since.elapsed() < PUT_OFF_MAX
            } else {
                busy_since = None;
                attempt += 1;
                fetched.has_failed() && attempt <= self.drains.host.config.drain.attempts
            };
            if goes_on {
                sleep(AGAIN_AFTER).await;
            }
            if goes_on && !self.is_cancelled() {
                continue;
            }
            return match fetched {
                // That its host is silent now does not say that it has not left.
                Fetched::Failed(problem) if in_doubt && problem.kind == ProblemKind::Unreachable => {
                    Fetched::Unknown(problem)
                }
                fetched => fetched,
            };
        }
    }

    /// One that is silent for good is waited for once, not for each VM.
    fn silent_since(&self, host: &str) -> Instant {
        *lock(&self.silent).entry(host.to_owned()).or_insert_with(Instant::now)
    }

    async fn fetch(&self, one: &MoveStatus, attempt: u8) -> Fetched {
        let peer = match self.drains.peers.target(&one.target) {
            Ok(peer) => peer,
            Err(problem) => return Fetched::Failed(problem),
        };
        let there = match peer.get::<VmView>(&format!("/v1/vms/{}", one.vm)).await {
            Ok(view) => view,
            Err(problem) if problem.kind == ProblemKind::NotFound => return Fetched::Gone,
            Err(problem) => return Fetched::Failed(problem),
        };
        lock(&self.silent).remove(&one.target);
        if there.state == VmState::Stopped {
            return Fetched::Failed(Problem::refused(is_off(there.manager, &one.vm)));
        }
        let begun = match self.on_its_way(&peer, &there).await {
            Some(id) => Ok(id),
            None => self.ask_for(&peer, one).await,
        };
        match begun {
            Ok(id) => {
                self.change(&one.vm, |one| {
                    (one.state, one.migration) = (MoveState::Preparing, Some(id.clone()));
                    (one.attempts, one.error) = (attempt, None);
                });
                let end = self.follow(&peer, &one.vm, &id).await;
                self.carry(&one.vm, vec![]);
                end
            }
            // It may have begun, and the answer was lost.
            Err(problem) if problem.kind == ProblemKind::Unreachable => Fetched::Unknown(problem),
            Err(problem) => Fetched::Failed(problem),
        }
    }

    /// The migration by which a VM comes here already, as one that an earlier way back has begun.
    async fn on_its_way(&self, peer: &ApiClient, there: &VmView) -> Option<String> {
        let id = there.migration.as_ref()?;
        // What cannot be read now may be over.
        let view = peer.get::<MigrationView>(&format!("/v1/migrations/{id}")).await.ok()?;
        (view.target == self.drains.host.name()).then_some(view.id)
    }

    /// Has the host on which a VM is move it here; gives the migration.
    async fn ask_for(&self, peer: &ApiClient, one: &MoveStatus) -> Result<String, Problem> {
        let configured_s = self.drains.host.config.limits.deadline_s;
        let disks = self.disks_of(one);
        let deadline_s = migration_deadline_s(configured_s, one.predicted_ms, allowance_ms(&disks));
        let DrainRequest { throttle_max_percent, encrypt, .. } = self.request;
        let request = MigrateRequest {
            vm: one.vm.clone(),
            target: self.drains.host.name().into(),
            option: self.option_of(one),
            encrypt,
            post_copy: self.request.post_copy && self.came_in_parts(one),
            // By this host's configuration: what that of the other one says is not known here.
            copy_storage: one.disks.is_some() || !disks.is_empty(),
            disks: BTreeMap::new(),
            deadline_s: Some(deadline_s.min(DEADLINE_S_MAX)),
            throttle_max_percent,
        };
        Ok(peer.post::<MigrationView>("/v1/migrations", &request).await?.id)
    }

    /// Those that went with it, which were copied to the same paths. They are copied back in whole.
    fn disks_of(&self, one: &MoveStatus) -> Vec<DiskCopy> {
        let disks = self.way_there(one).map(|result| result.copied.disks).unwrap_or_default();
        disks.into_iter().map(|disk| disk.copy).collect()
    }

    /// It comes back as it went.
    fn option_of(&self, one: &MoveStatus) -> RequestedOption {
        self.way_there(one).map_or_else(RequestedOption::default, |result| result.choice.requested_option)
    }

    /// Whether it ran on its target before all its memory was there.
    fn came_in_parts(&self, one: &MoveStatus) -> bool {
        self.way_there(one)
            .is_some_and(|result| result.choice.post_copy_allowed || result.times.post_copy_ms.is_some())
    }

    fn way_there(&self, one: &MoveStatus) -> Option<MigrationResult> {
        one.migration.as_ref().and_then(|id| self.drains.journal.result(id).ok().flatten())
    }

    async fn follow(&self, peer: &ApiClient, vm: &str, id: &str) -> Fetched {
        let path = format!("/v1/migrations/{id}");
        let mut heard = Instant::now();
        let mut is_cancel_heard = false;
        loop {
            if self.is_cancelled() && !is_cancel_heard {
                // Asked again as long as it was not heard.
                is_cancel_heard = peer.post::<()>(&format!("{path}/cancel"), &()).await.is_ok();
            }
            match peer.get::<MigrationView>(&path).await {
                Ok(MigrationView { result: Some(result), .. }) => return Fetched::Ended(Box::new(result)),
                Ok(MigrationView { waits_for: Some(why), .. }) if heard.elapsed() > SILENCE_MAX => {
                    return Fetched::Unknown(Problem::failed(why));
                }
                Ok(MigrationView { waits_for: Some(_), .. }) => {}
                Ok(view) => {
                    heard = Instant::now();
                    if let Some(progress) = &view.progress {
                        self.progressed(vm, progress);
                    }
                }
                Err(problem) if heard.elapsed() > SILENCE_MAX => return Fetched::Unknown(problem),
                Err(_) => {}
            }
            sleep(LOOK_EVERY).await;
        }
    }

    fn of(&self, vm: &str) -> Option<MoveStatus> {
        self.course.status.borrow().moves.iter().find(|one| one.vm == vm).cloned()
    }

    fn progressed(&self, vm: &str, progress: &Progress) {
        let copied_bytes: u64 = progress.disks.iter().map(|disk| disk.copied_bytes).sum();
        // From when its disks are on the links until its memory is.
        let are_being_copied = progress.step == Step::ConnectHosts && copied_bytes > 0;
        let state = match progress.step {
            _ if are_being_copied => MoveState::Transferring,
            Step::ResumeOnTarget | Step::CleanUp => MoveState::Finishing,
            Step::CopyMemory | Step::CopyDirtyMemory | Step::Downtime => MoveState::Transferring,
            _ => MoveState::Preparing,
        };
        self.update(vm, |one| {
            (one.state, one.sent_bytes) = (state, progress.sent_bytes);
            if let Some(disks) = &mut one.disks {
                (disks.copied_bytes, disks.are_being_copied) = (copied_bytes, are_being_copied);
            }
            one.compression = progress.compression.filter(|_| state == MoveState::Transferring);
        });
        self.carry(vm, progress.paths.clone());
    }

    /// Reports what the links carry, now that this VM's paths carry so much.
    fn carry(&self, vm: &str, paths: Vec<PathRate>) {
        let mut carried = lock(&self.carried);
        carried.insert(vm.to_owned(), paths);
        let paths = carried.values().flatten();
        let links = LinkRate::summed(paths.map(|path| (path.peer_link.clone(), path.rate_mbps)));
        self.course.status.send_modify(|status| status.links = links);
    }

    /// Changes the view of one VM, and records it.
    fn change(&self, vm: &str, change: impl FnOnce(&mut MoveStatus)) {
        self.update(vm, |one| {
            (one.compression, one.waits) = (None, None);
            change(one);
        });
        let status = self.course.status.borrow().clone();
        let changed: Vec<_> = status.moves.iter().enumerate().filter(|(_, one)| one.vm == vm).collect();
        self.write_down(&status, &changed, &[]);
    }

    /// A VM that is where its owner has put it since counts among those that stay.
    fn leave(&self, one: &MoveStatus) {
        let why = StayReason::MovedOn { from: one.target.clone() };
        self.course.status.send_modify(|status| {
            status.moves.retain(|other| other.vm != one.vm);
            status.stays.push(Stay { vm: one.vm.clone(), why });
        });
        let status = self.course.status.borrow().clone();
        self.write_down(&status, &[], &[&one.vm]);
    }

    fn update(&self, vm: &str, change: impl FnOnce(&mut MoveStatus)) {
        let now_ms = self.began.elapsed().as_secs_f64() * 1_000.0;
        self.course.status.send_modify(|status| {
            if let Some(one) = status.moves.iter_mut().find(|one| one.vm == vm) {
                change(one);
            }
            let TimeEstimate { pace, eta, bytes_per_ms, seen_bytes } = &mut *lock(&self.estimate);
            let sent_bytes = status.sent_bytes();
            // What is tried again begins at nothing.
            pace.arrived(sent_bytes.saturating_sub(*seen_bytes));
            *seen_bytes = sent_bytes;
            if status.moves.iter().any(|one| one.state == MoveState::Transferring) {
                pace.begins(now_ms);
                pace.sample(now_ms);
            }
            status.rate_mbps = pace.rate_mbps(now_ms);
            status.elapsed_ms = now_ms;
            let loads = || status.moves.iter().map(|one| load(one, *bytes_per_ms));
            eta.look(now_ms, loads());
            status.eta_ms = eta.left_ms(loads(), false);
        });
    }

    /// A VM's place is in its own journals; what cannot be recorded here is only missing in later reports.
    fn write_down(&self, status: &DrainStatus, changed: &[(usize, &MoveStatus)], gone: &[&str]) {
        let written = self.drains.journal.record_drain(&self.course.id, status, changed, gone);
        if let Err(error) = written {
            warn!(%error, failback = self.course.id, "cannot record how far it has got");
        }
    }

    async fn conclude(&self) {
        let is_cancelled = self.is_cancelled();
        self.course.status.send_modify(|status| {
            status.state = match (status.all_moved(), is_cancelled) {
                (true, _) => DrainState::Drained,
                (false, true) => DrainState::Cancelled,
                (false, false) => DrainState::Incomplete,
            };
            (status.rate_mbps, status.eta_ms, status.links) = (0.0, None, vec![]);
            status.elapsed_ms = self.began.elapsed().as_secs_f64() * 1_000.0;
        });
        let status = self.course.status.borrow().clone();
        // Without this record it would be reported as interrupted.
        while let Err(problem) = self.end(&status) {
            warn!(%problem, failback = self.course.id, "it waits until its journal can be written");
            self.course.status.send_modify(|status| status.obstacle = Some(problem));
            sleep(RECORD_AGAIN_AFTER).await;
        }
        info!(failback = self.course.id, state = ?status.state, "over");
        self.drains.under_way.ended();
    }

    fn end(&self, status: &DrainStatus) -> Result<(), Problem> {
        let all: Vec<_> = status.moves.iter().enumerate().collect();
        self.drains.journal.record_drain(&self.course.id, status, &all, &[])?;
        Ok(self.drains.journal.end_drain(&self.course.id, Timestamp::now())?)
    }
}

fn fail(one: &mut MoveStatus, state: MoveState, problem: Problem) {
    (one.state, one.error) = (state, Some(problem));
}

fn cancelled() -> Problem {
    Problem::failed("cancelled before it began: the VM runs where it ran")
}

/// How long they are to take at this rate, if there is one.
fn planned(moves: &[MoveStatus], bytes_per_ms: f64) -> (Eta, Option<f64>) {
    let loads = || moves.iter().map(|one| load(one, bytes_per_ms));
    let predicted_ms = (bytes_per_ms > 0.0).then(|| loads().map(|load| load.left_ms()).sum());
    (Eta::planned(loads(), predicted_ms.unwrap_or(f64::INFINITY)), predicted_ms)
}

/// How far a VM is: how long its steps took is not known any more.
fn load(one: &MoveStatus, bytes_per_ms: f64) -> Load {
    let stage = match one.state {
        MoveState::Waiting => LoadStage::ToCome,
        MoveState::Preparing => LoadStage::Preparing,
        MoveState::Ready => LoadStage::Ready,
        MoveState::Transferring | MoveState::Finishing => LoadStage::OnLinks,
        MoveState::Moved => LoadStage::Moved,
        MoveState::Failed | MoveState::Lost | MoveState::InDoubt | MoveState::Left => LoadStage::Over,
    };
    let predicted_bytes = if one.predicted_bytes > 0 { one.predicted_bytes } else { one.memory_bytes };
    let predicted_bytes = predicted_bytes.saturating_add(one.disks.map_or(0, |disks| disks.bytes));
    let bytes_per_ms =
        if bytes_per_ms > 0.0 { bytes_per_ms } else { sending::bytes_per_ms(UNKNOWN_SPEED_MBPS as f64) };
    Load {
        stage,
        steps_ms: 0.0,
        transfer_ms: predicted_bytes as f64 / bytes_per_ms,
        predicted_bytes,
        sent_bytes: one.arrived_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(sent_bytes: u64, transfer_ms: f64) -> MoveStatus {
        MoveStatus {
            vm: "web".into(),
            target: "b".into(),
            state: MoveState::Moved,
            migration: None,
            attempts: 1,
            error: None,
            waits: None,
            memory_bytes: 1 << 30,
            sent_bytes,
            predicted_bytes: 7,
            predicted_ms: 9.0,
            transfer_ms: Some(transfer_ms),
            compression: None,
            disks: None,
        }
    }

    fn about(rate: f64, expected: f64) -> bool {
        (rate - expected).abs() < 1e-6
    }

    #[test]
    fn the_links_carried_what_vms_had_of_them_together() {
        let moves = [moved(100_000, 1_000.0), moved(300_000, 3_000.0)];
        assert!(about(bytes_per_ms(&moves, 1), 100.0));
        assert!(about(bytes_per_ms(&moves, 2), 200.0));
        // Not less than the fastest, though the others waited for something else.
        assert!(about(bytes_per_ms(&[moved(100_000, 1_000.0), moved(1_000, 9_000.0)], 1), 100.0));
        // More might have been on the links than there were.
        assert!(about(bytes_per_ms(&[moved(100_000, 1_000.0)], 8), 100.0));
        assert!(about(bytes_per_ms(&[], 1), 0.0));
    }

    #[test]
    fn a_way_back_is_to_take_as_long_as_its_bytes_at_that_rate() {
        let back = [waiting(moved(100_000, 2_000.0)), waiting(moved(300_000, 6_000.0))];
        let left_ms =
            |eta: &Eta, bytes_per_ms| eta.left_ms(back.iter().map(|one| load(one, bytes_per_ms)), false);
        let (eta, predicted_ms) = planned(&back, 100.0);
        assert_eq!((predicted_ms, left_ms(&eta, 100.0)), (Some(4_000.0), Some(4_000.0)));
        let (eta, predicted_ms) = planned(&back, 0.0);
        assert_eq!((predicted_ms, left_ms(&eta, 0.0)), (None, None), "nobody knows yet");
    }

    #[test]
    fn its_preparation_does_not_make_a_way_back_look_long() {
        const BYTES_PER_MS: f64 = 230_000.0;
        let mut back = [waiting(moved(32 << 30, 150_000.0))];
        let (mut eta, predicted_ms) = planned(&back, BYTES_PER_MS);
        let predicted_ms = predicted_ms.unwrap();
        for (state, now_ms, bytes) in [
            (MoveState::Preparing, 0.0, 0),
            (MoveState::Preparing, 500.0, 0),
            (MoveState::Transferring, 600.0, 5 << 20),
        ] {
            back[0].state = state;
            back[0].sent_bytes = bytes;
            eta.look(now_ms, back.iter().map(|one| load(one, BYTES_PER_MS)));
            let left_ms = eta.left_ms(back.iter().map(|one| load(one, BYTES_PER_MS)), false).unwrap();
            assert!(
                (0.9..1.5).contains(&(left_ms / predicted_ms)),
                "{left_ms} of {predicted_ms} after {now_ms}"
            );
        }
    }

    #[test]
    fn vms_come_back_as_they_went_unless_something_else_is_asked_for() {
        let went = DrainRequest {
            to: vec!["b".into()],
            throttle_max_percent: Some(0),
            encrypt: true,
            ..DrainRequest::default()
        };
        let back = |went: &DrainRequest, throttle_max_percent, encrypt| {
            let asked = ResumeRequest { failback: true, throttle_max_percent, encrypt };
            let request = as_they_went(went, asked);
            assert_eq!((request.to.len(), request.transfers), (0, None));
            (request.throttle_max_percent, request.encrypt)
        };
        assert_eq!(back(&went, None, false), (Some(0), true));
        assert_eq!(back(&went, Some(99), false), (Some(99), true));
        let plainly = DrainRequest::default();
        assert_eq!(back(&plainly, None, false), (None, false));
        assert_eq!(back(&plainly, Some(50), true), (Some(50), true));
    }
}
