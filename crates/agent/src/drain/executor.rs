//! Carries out the engine's actions of a drain, and reports events to it. Decides nothing.

mod news;
mod written;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drainpipe_engine::drain::disks::longer_ms;
use drainpipe_engine::drain::plan::DrainPlan;
use drainpipe_engine::drain::run::{Departure, Drain, DrainAction, DrainEvent, MoveEnd};
use drainpipe_engine::drain::status::{DrainStatus, LinkRate, MoveState, MoveStatus};
use drainpipe_engine::drain::view::FoundTransfers;
use drainpipe_engine::journal::RECORD_AGAIN_AFTER;
use drainpipe_engine::migration::Stage;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::problem::Problem;
use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use self::news::News;
use self::written::Written;
use super::record::{claim_own, departure, own_migrations, problem_of, settled};
use super::{Course, Drains, crashed, limits, migration_deadline_s, plan_anew, sound};
use crate::outgoing::supervised;
use crate::outgoing::{self, Running, SendStart};
use crate::store::journal::DrainRecord;
use drainpipe_api_types::{DrainRequest, MigrateRequest, plan_warnings};

/// How often each VM's arrived bytes are reported to it.
const TELL_EVERY: Duration = Duration::from_millis(100);

const TO_BE_REPORTED: &str = "which is an error in Drainpipe: please report it with the agent's log";

struct Executor {
    drains: Arc<Drains>,
    course: Arc<Course>,
    request: DrainRequest,
    drain: Drain,
    began: Instant,
    earlier: Earlier,
    written: Written,
    // How many transfers at a time carried most, and to which targets VMs were to go then, as found last.
    found: Option<(u8, BTreeSet<String>)>,
    flights: BTreeMap<String, Arc<Running>>,
    warnings: Warnings,
    others: Others,
    news: News,
}

/// What an earlier attempt at the same drain has done.
struct Earlier {
    /// What it has moved.
    moves: Vec<MoveStatus>,
    /// The migrations that it had begun.
    own: BTreeSet<String>,
}

/// What others than this drain do with the host's VMs.
struct Others {
    /// How many they move away.
    leaving: u8,
    /// VMs that are not here and were not moved by anybody.
    absent: BTreeSet<String>,
    /// When it could not be read whether somebody has moved a VM.
    ask_again_at: Option<Instant>,
}

/// What a person should know of the plan that is carried out.
struct Warnings {
    of_plan: Vec<String>,
    // VMs and plans that the log has a warning about already.
    logged: BTreeSet<String>,
}

/// Begins what the plan says.
pub(super) fn start(
    drains: &Arc<Drains>,
    request: DrainRequest,
    record: &DrainRecord,
    plan: DrainPlan,
) -> Result<(), Problem> {
    let limits = limits(drains, &request);
    let others = leaving_beside(drains, &BTreeMap::new());
    let warnings = Warnings::of(&plan);
    let (drain, first) = Drain::begin(plan, limits, others, 0.0);
    let own = own_migrations(&record.status.moves);
    // What has become of it since is to be written too.
    let written = Written::of(&record.status);
    let record = settled(drains, record.clone())?;
    let is_kept =
        |one: &MoveStatus| matches!(one.state, MoveState::Moved | MoveState::InDoubt | MoveState::Left);
    let moves = record.status.moves.iter().filter(|one| is_kept(one)).cloned().collect();
    let course = Course::of(&record, record.status.clone());
    let executor = Executor {
        drains: Arc::clone(drains),
        news: News::of(&course),
        course: Arc::clone(&course),
        request,
        drain,
        began: Instant::now(),
        earlier: Earlier { moves, own },
        written,
        found: None,
        flights: BTreeMap::new(),
        warnings,
        others: Others { leaving: others, absent: BTreeSet::new(), ask_again_at: None },
    };
    executor.course.status.send_replace(executor.reported());
    drains.under_way.run(course, executor.run(first), crashed(Arc::clone(drains)));
    Ok(())
}

impl Executor {
    fn now_ms(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1_000.0
    }

    async fn run(mut self, first: Vec<DrainAction>) {
        let mut actions = VecDeque::from(first);
        loop {
            // What is not written down is not done: a later run of the agent must know what this one moved.
            if self.write_down() {
                while let Some(action) = actions.pop_front() {
                    if action == DrainAction::Finish {
                        return self.conclude().await;
                    }
                    self.perform(action);
                }
            } else {
                self.cancel_ahead(&actions);
            }
            let event = self.next_event().await;
            if let DrainEvent::Planned(plan) = &event {
                self.warnings.change(plan);
            }
            actions.extend(self.drain.handle(self.now_ms(), event));
            self.note_found();
        }
    }

    /// Notes what the drain has found with the event that was handled now, and the targets that VMs were to go to before
    /// that. Nothing that follows from it is reported yet.
    fn note_found(&mut self) {
        let found = self.drain.found_transfers();
        if found != self.found.as_ref().map(|(transfers, _)| *transfers) {
            let status = self.course.status.borrow();
            let targets = || status.targets_left().into_iter().map(str::to_owned).collect();
            self.found = found.map(|transfers| (transfers, targets()));
        }
    }

    /// Tells how it stands, and writes that down where it can. `false` while the journal cannot be written.
    fn write_down(&mut self) -> bool {
        if self.written.may_be_tried() {
            let status = self.status();
            let recorded = self.record(&status);
            self.written.note(&self.course.id, recorded);
        }
        self.course.status.send_replace(self.reported());
        self.written.problem().is_none()
    }

    fn record(&mut self, status: &DrainStatus) -> Result<(), Problem> {
        self.written.record(&self.drains.journal, &self.course.id, status)
    }

    /// What is cancelled twice is cancelled once, and it follows from nothing that must be known later.
    fn cancel_ahead(&self, actions: &VecDeque<DrainAction>) {
        for action in actions {
            if let DrainAction::Cancel { vm } = action {
                self.with_flight(vm, Running::cancel);
            }
        }
    }

    async fn next_event(&mut self) -> DrainEvent {
        if let Some(event) = self.news.own() {
            return event;
        }
        let event = self.news.next().await;
        // Told first: a new plan says nothing of a VM that has left, and the drain may be over with this event.
        self.note_departures();
        self.note_settled();
        self.note_others();
        let Some(first) = self.news.own() else { return event };
        self.news.push(event);
        first
    }

    fn note_others(&mut self) {
        let count = leaving_beside(&self.drains, &self.flights);
        if count != self.others.leaving {
            self.others.leaving = count;
            self.news.push(DrainEvent::OthersLeave { count });
        }
    }

    /// VMs that somebody else has moved meanwhile.
    fn note_departures(&mut self) {
        let vms = &self.drains.vms;
        self.others.absent.retain(|vm| !vms.is_there(vm));
        if self.others.ask_again_at.is_some_and(|at| Instant::now() < at) {
            return;
        }
        self.others.ask_again_at = None;
        // One that an earlier attempt has handed over is this drain's own, and its row is settled in the end.
        let is_own =
            |vm: &str| self.earlier.moves.iter().any(|one| one.vm == vm && one.state == MoveState::InDoubt);
        let is_news = |vm: &&str| !vms.is_there(vm) && !self.others.absent.contains(*vm) && !is_own(vm);
        let gone: Vec<String> = self.drain.unmoved().filter(is_news).map(str::to_owned).collect();
        for vm in gone {
            match self.departure(&vm) {
                Ok(departure) => {
                    if let Some(departure) = departure {
                        self.news.push(DrainEvent::Left { vm: vm.clone(), departure });
                    }
                    self.others.absent.insert(vm);
                }
                Err(problem) => {
                    warn!(%problem, vm, "it is not known whether somebody has moved it; asked again");
                    self.others.ask_again_at = Some(Instant::now() + RECORD_AGAIN_AFTER);
                }
            }
        }
    }

    /// Notes VMs that were in doubt and are no longer.
    fn note_settled(&mut self) {
        if self.others.ask_again_at.is_some() {
            return;
        }
        let Drains { outgoing, journal, .. } = &*self.drains;
        let is_over =
            |(vm, id): &(&str, &str)| outgoing.migrations.of_vm(vm).is_none_or(|open| open.id() != *id);
        for (vm, id) in self.drain.in_doubt().filter(is_over) {
            match journal.result(id) {
                Ok(Some(result)) => {
                    self.news.push(DrainEvent::Settled { vm: vm.to_owned(), end: end_by(&result) });
                }
                Ok(None) => {}
                Err(error) => {
                    warn!(%error, vm, "cannot read where it runs; asked again");
                    self.others.ask_again_at = Some(Instant::now() + RECORD_AGAIN_AFTER);
                }
            }
        }
    }

    fn departure(&self, vm: &str) -> Result<Option<Departure>, Problem> {
        departure(&self.drains, vm, &self.course.id)
    }

    fn perform(&mut self, action: DrainAction) {
        match action {
            DrainAction::Begin { vm, target, post_copy } => self.begin(vm, target, post_copy),
            DrainAction::GiveWay { vm } => self.with_flight(&vm, Running::give_way),
            DrainAction::TakeAll { vm } => self.with_flight(&vm, Running::take_all),
            DrainAction::Release { vm } => self.with_flight(&vm, Running::release),
            DrainAction::Cancel { vm } => self.with_flight(&vm, Running::cancel),
            DrainAction::Plan => self.plan(),
            DrainAction::Finish => {}
        }
    }

    fn with_flight(&self, vm: &str, what: impl FnOnce(&Running)) {
        if let Some(flight) = self.flights.get(vm) {
            what(flight);
        }
    }

    fn begin(&mut self, vm: String, target: String, post_copy: bool) {
        let DrainRequest { option, throttle_max_percent, encrypt, .. } = self.request;
        let disks = self.drain.disks_of(&vm);
        let configured_s = self.drains.host.config.limits.deadline_s;
        let deadline_s = migration_deadline_s(configured_s, self.predicted_ms(&vm), longer_ms(disks));
        let request = MigrateRequest {
            vm: vm.clone(),
            target,
            // Post-copy goes over one connection.
            option: if post_copy { RequestedOption::Tcp } else { option },
            encrypt,
            post_copy,
            copy_storage: !disks.is_empty(),
            disks: BTreeMap::new(),
            deadline_s: Some(deadline_s),
            throttle_max_percent,
        };
        match outgoing::begin(&self.drains.outgoing, &request, SendStart::Held) {
            Ok(flight) => {
                self.news.push(DrainEvent::Begun { vm: vm.clone(), migration: flight.id().into() });
                self.follow(&flight);
                self.flights.insert(vm, flight);
            }
            Err(problem) => {
                let departure = self.departure(&vm).inspect_err(|problem| {
                    warn!(%problem, vm, "it is not known whether somebody has moved it; counted when the \
                        drain is over");
                });
                let departure = departure.unwrap_or_default();
                let end = departure.map_or(MoveEnd::Failed(problem), MoveEnd::Left);
                self.news.push(DrainEvent::Ended { vm, end });
            }
        }
    }

    fn follow(&self, flight: &Arc<Running>) {
        let work = follow(Arc::clone(&self.drains), Arc::clone(flight), self.news.sender());
        supervised::spawn(work, lost_sight(Arc::clone(flight), self.news.sender()));
    }

    /// How long the transfer of a VM should take, by the last report.
    fn predicted_ms(&self, vm: &str) -> f64 {
        let status = self.course.status.borrow();
        status.moves.iter().find(|one| one.vm == vm).map_or(0.0, |one| one.predicted_ms)
    }

    fn plan(&self) {
        let standing = self.drain.standing();
        let (drains, request, tell) = (Arc::clone(&self.drains), self.request.clone(), self.news.sender());
        let work = async move {
            let planned = sound(plan_anew(&drains, &request, &standing).await);
            // Nobody hears it once the agent stops.
            let _ = tell.send(planned.map_or_else(DrainEvent::NotPlanned, DrainEvent::Planned)).await;
        };
        let tell = self.news.sender();
        let crashed = async move {
            let problem = Problem::failed(format!("planning has crashed, {TO_BE_REPORTED}"));
            let _ = tell.send(DrainEvent::NotPlanned(problem)).await;
        };
        supervised::spawn(work, crashed);
    }

    fn status(&self) -> DrainStatus {
        let mut status = self.drain.status(self.now_ms());
        claim_own(&mut status.moves, &self.earlier.own);
        let listed: BTreeSet<&str> = status.moves.iter().map(|one| one.vm.as_str()).collect();
        let stays = |vm: &str| status.stays.iter().any(|stay| stay.vm == vm);
        // One that is in doubt is here still, by its claim; that it may run elsewhere is what counts.
        let is_listed = |one: &MoveStatus| {
            listed.contains(one.vm.as_str()) || (one.state != MoveState::InDoubt && stays(&one.vm))
        };
        let mut moves: Vec<MoveStatus> =
            self.earlier.moves.iter().filter(|one| !is_listed(one)).cloned().collect();
        status.stays.retain(|stay| moves.iter().all(|one| one.vm != stay.vm));
        moves.append(&mut status.moves);
        let unrecorded = || self.flights.values().find_map(|flight| flight.unrecorded().clone());
        let obstacle = self.written.problem().cloned().or_else(unrecorded);
        let links = if self.drain.outcome().is_some() { vec![] } else { self.links() };
        DrainStatus { moves, obstacle, links, warnings: self.warnings.of_plan.clone(), ..status }
    }

    /// With what changes all the time, and is of no use later.
    fn reported(&self) -> DrainStatus {
        let mut status = self.status();
        for one in status.moves.iter_mut().filter(|one| one.state == MoveState::Transferring) {
            one.compression = self.flights.get(&one.vm).and_then(|flight| flight.compression());
        }
        status
    }

    fn links(&self) -> Vec<LinkRate> {
        let paths = self.flights.values().flat_map(|flight| flight.paths());
        LinkRate::summed(paths.map(|path| (path.link, path.rate_mbps)))
    }

    /// The host stays cordoned.
    async fn conclude(mut self) {
        let status = self.status();
        // What changes all the time counts in the end.
        self.written.forget_moves();
        loop {
            let recorded = self.record(&status).and_then(|()| self.end());
            self.written.note(&self.course.id, recorded);
            self.course.status.send_replace(self.reported());
            if self.written.problem().is_none() {
                break;
            }
            sleep(RECORD_AGAIN_AFTER).await;
        }
        info!(drain = self.course.id, state = ?status.state, "over");
        self.drains.under_way.ended();
    }

    fn end(&self) -> Result<(), Problem> {
        let journal = &self.drains.journal;
        // What an earlier attempt has moved may have gone by another option.
        let moves = self.drain.status(self.now_ms()).moves;
        if let Some((transfers, targets)) = &self.found {
            let found = FoundTransfers {
                transfers: *transfers,
                targets: u8::try_from(targets.len().max(1)).unwrap_or(u8::MAX),
            };
            let has_come = |target: &&str| {
                moves.iter().any(|one| one.state == MoveState::Moved && one.target == **target)
            };
            let targets = targets.iter().map(String::as_str).filter(has_come);
            journal.remember_transfers(targets, self.request.option, found)?;
        }
        Ok(journal.end_drain(&self.course.id, Timestamp::now())?)
    }
}

/// How many VMs leave this host by migrations that are none of these.
fn leaving_beside(drains: &Drains, flights: &BTreeMap<String, Arc<Running>>) -> u8 {
    let is_other = |one: &Arc<Running>| flights.get(one.vm()).is_none_or(|flight| flight.id() != one.id());
    let others = drains.outgoing.migrations.under_way().iter().filter(|one| is_other(one)).count();
    u8::try_from(others).unwrap_or(u8::MAX)
}

impl Warnings {
    fn of(plan: &DrainPlan) -> Self {
        let mut warnings = Self { of_plan: vec![], logged: BTreeSet::new() };
        warnings.change(plan);
        warnings
    }

    /// Takes those of this plan, and logs them: of each VM once, as the figures in it are others each time.
    fn change(&mut self, plan: &DrainPlan) {
        self.of_plan = plan_warnings(plan).collect();
        for one in &plan.moves {
            if let Some(warning) = &one.warning
                && self.logged.insert(one.vm.clone())
            {
                warn!(vm = one.vm, "warning about the plan: {warning}");
            }
        }
        for warning in &plan.warnings {
            if self.logged.insert(warning.clone()) {
                warn!("warning about the plan: {warning}");
            }
        }
    }
}

/// Tells of one migration until it is over.
async fn follow(drains: Arc<Drains>, flight: Arc<Running>, tell: mpsc::Sender<DrainEvent>) {
    let vm = || flight.vm().to_owned();
    let mut stages = flight.stages();
    let mut shown = Stage::Preparing;
    loop {
        let stage = *stages.borrow_and_update();
        let mut news = vec![DrainEvent::Arrived { vm: vm(), bytes: flight.sent_bytes() }];
        if flight.copied_bytes() > 0 {
            news.insert(0, DrainEvent::DisksCopied { vm: vm(), bytes: flight.copied_bytes() });
        }
        if shown == Stage::CopyingDisks && stage == Stage::Sending {
            news.push(DrainEvent::MemoryFollows { vm: vm() });
        }
        if stage != shown {
            news.extend(event_of(stage, vm()));
            shown = stage;
        }
        if stage == Stage::Ended {
            let result = result_of(&drains, &flight).await;
            // One may be over before anybody has looked: then what the kernel counted.
            let counted = result.as_ref().filter(|_| flight.sent_bytes() == 0);
            news.extend(
                counted.map(|result| DrainEvent::Arrived { vm: vm(), bytes: result.memory.wire_bytes }),
            );
            news.push(DrainEvent::Ended { vm: vm(), end: result.as_ref().map_or_else(crashed_end, end_by) });
        }
        for event in news {
            if tell.send(event).await.is_err() {
                return;
            }
        }
        if stage == Stage::Ended {
            return;
        }
        // A closed channel means the end, which was reported before.
        let _ = timeout(TELL_EVERY, stages.changed()).await;
    }
}

/// Ends for the drain a migration that nobody reports on any more, since what followed it has crashed. It goes on by
/// itself, but not if it waits for its turn.
async fn lost_sight(flight: Arc<Running>, tell: mpsc::Sender<DrainEvent>) {
    if flight.is_held() {
        flight.cancel();
    }
    let problem = Problem::failed(format!("the clean-up after its migration has crashed, {TO_BE_REPORTED}"));
    let end = MoveEnd::InDoubt(problem);
    let _ = tell.send(DrainEvent::Ended { vm: flight.vm().to_owned(), end }).await;
}

fn event_of(stage: Stage, vm: String) -> Option<DrainEvent> {
    match stage {
        Stage::AwaitingPlace => Some(DrainEvent::Busy { vm }),
        Stage::Ready => Some(DrainEvent::Prepared { vm }),
        Stage::Ending => Some(DrainEvent::Ending { vm }),
        Stage::SwitchingOver => Some(DrainEvent::Paused { vm }),
        Stage::SendingRest => Some(DrainEvent::RestFollows { vm }),
        Stage::Sent => Some(DrainEvent::Sent { vm }),
        Stage::Preparing | Stage::CopyingDisks | Stage::Sending | Stage::Undoing | Stage::Ended => None,
    }
}

/// How a migration that is over has ended; none where its task has crashed, and another one takes it up.
async fn result_of(drains: &Drains, flight: &Running) -> Option<MigrationResult> {
    loop {
        match flight.end(&drains.journal) {
            Ok(result) => return result,
            Err(problem) => warn!(%problem, "it is not known yet how a migration ended; tried again soon"),
        }
        sleep(RECORD_AGAIN_AFTER).await;
    }
}

fn crashed_end() -> MoveEnd {
    MoveEnd::InDoubt(Problem::failed(format!(
        "its migration has crashed, {TO_BE_REPORTED}; it is undone or finished as after a crash of the agent"
    )))
}

fn end_by(result: &MigrationResult) -> MoveEnd {
    let problem = problem_of(result).unwrap_or_else(|| Problem::failed("no reason is known"));
    match result.outcome {
        Outcome::Completed => MoveEnd::Completed { transfer_ms: result.times.sending_ms() },
        Outcome::Failed if result.has_vm_ended() => MoveEnd::Lost(problem),
        Outcome::Failed => MoveEnd::Failed(problem),
        Outcome::Cancelled => MoveEnd::Cancelled(problem),
        Outcome::InDoubt => MoveEnd::InDoubt(problem),
        Outcome::Lost => MoveEnd::Lost(problem),
    }
}
