//! Emptying this host, and bringing back what left it.
//!
//! ```text
//! view      what a plan is made from
//! disks     the disks that would go with VMs
//! executor  carries out what the engine says of a drain under way
//! failback  the way back
//! record    the reports on either, from the journal and from what became of the migrations
//! ```
//!
//! Only one drain or failback runs at a time. A drain cordons the host before it looks at anything, so that what it
//! sees is all there is to move; the cordon stays until somebody resumes the host.

mod disks;
mod executor;
mod failback;
mod record;
#[cfg(test)]
mod tests;
mod view;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use drainpipe_engine::drain::limits::DrainLimits;
use drainpipe_engine::drain::lint::lint;
use drainpipe_engine::drain::plan::{DrainPlan, plan as make_plan};
use drainpipe_engine::drain::run::Standing;
use drainpipe_engine::drain::status::DrainStatus;
use drainpipe_engine::journal::RECORD_AGAIN_AFTER;
use drainpipe_engine::migration::Stage;
use drainpipe_engine::problem::Problem;
use futures_util::future::join_all;
use jiff::Timestamp;
use tokio::sync::{Mutex as AsyncMutex, MutexGuard as AsyncMutexGuard, watch};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};
use uuid::Uuid;

pub(crate) use self::record::view;
use crate::check::Checks;
use crate::host::Host;
use crate::incoming::Incoming;
use crate::outgoing::Outgoing;
use crate::outgoing::supervised;
use crate::peers::Peers;
use crate::store::config::DrainBounds;
use crate::store::journal::{DrainRecord, Journal};
use crate::store::lock::lock;
use crate::transfer::Transfers;
use crate::vms::Vms;
use drainpipe_api_types::{DrainKind, DrainPlanView, DrainRequest, DrainView, ResumeRequest};

/// How long a drain that is carried on waits for the migrations that the agent's last life left to be undone
/// or finished.
const RECOVERY_DEADLINE: Duration = Duration::from_secs(15);

/// How often the agent tries to record that a drain has crashed: for a minute. A drain that is still open then is
/// reported as interrupted all the same, since nothing is under way.
const CRASH_RECORD_ATTEMPTS: u32 = 30;

/// How long a stopping agent waits for a drain that is just being planned.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(10);

/// What takes so many times as long as was predicted does not come to its end.
const PREDICTIONS_MAX: f64 = 3.0;

/// How much longer it may take, in seconds: for what is not in the prediction, as steps 1 to 5.
const UNPREDICTED_MAX_S: f64 = 600.0;

/// Drains of this host, and the ways back.
#[derive(Debug)]
pub(crate) struct Drains {
    host: Arc<Host>,
    peers: Arc<Peers>,
    journal: Arc<Journal>,
    vms: Arc<Vms>,
    transfer: Arc<Transfers>,
    incoming: Arc<Incoming>,
    checks: Arc<Checks>,
    outgoing: Arc<Outgoing>,
    under_way: UnderWay,
}

impl Drains {
    /// None yet.
    pub(crate) fn new(outgoing: &Arc<Outgoing>) -> Self {
        Self {
            host: Arc::clone(&outgoing.host),
            peers: Arc::clone(&outgoing.peers),
            journal: Arc::clone(&outgoing.journal),
            vms: Arc::clone(&outgoing.vms),
            transfer: Arc::clone(&outgoing.transfer),
            incoming: Arc::clone(&outgoing.incoming),
            checks: Arc::clone(&outgoing.checks),
            outgoing: Arc::clone(outgoing),
            under_way: UnderWay::default(),
        }
    }
}

/// The drain or the way back that is under way, if any.
#[derive(Debug, Default)]
struct UnderWay {
    // Held while one begins or the host is resumed: what was found then must hold until it is done.
    beginning: AsyncMutex<()>,
    current: Mutex<Option<Current>>,
}

/// What is under way, and the task in which it is.
#[derive(Debug)]
struct Current {
    course: Arc<Course>,
    task: AbortHandle,
}

/// A drain or a way back, as others see it.
#[derive(Debug)]
struct Course {
    id: String,
    kind: DrainKind,
    started_at: Timestamp,
    request: Option<DrainRequest>,
    status: watch::Sender<DrainStatus>,
    cancelled: watch::Sender<bool>,
}

impl UnderWay {
    fn lock(&self) -> MutexGuard<'_, Option<Current>> {
        // One assignment leaves it whole.
        lock(&self.current)
    }

    fn current(&self) -> Option<Arc<Course>> {
        self.lock().as_ref().map(|current| Arc::clone(&current.course))
    }

    /// The right to begin something, while nothing else begins or is under way.
    fn begin(&self, host: &str) -> Result<AsyncMutexGuard<'_, ()>, Problem> {
        let beginning = self.beginning.try_lock().map_err(|_| being_planned(host))?;
        match self.current() {
            None => Ok(beginning),
            Some(course) => Err(Problem::conflict(match course.kind {
                DrainKind::Drain => {
                    format!("{host} is being drained: wait until that has ended, or cancel it")
                }
                DrainKind::Failback => {
                    format!("VMs are on their way back to {host}: wait until they are there, or cancel it")
                }
            })),
        }
    }

    /// Runs `course` in a task of its own, which calls [`Self::ended`] last; if it panics, does `crashed` instead.
    fn run(
        &self,
        course: Arc<Course>,
        work: impl Future<Output = ()> + Send + 'static,
        crashed: impl Future<Output = ()> + Send + 'static,
    ) {
        // Held until it is entered, should the work be over at once.
        let mut current = self.lock();
        *current = Some(Current { course, task: supervised::spawn(work, crashed) });
    }

    fn ended(&self) {
        *self.lock() = None;
    }

    /// Whether one is just being planned.
    fn is_beginning(&self) -> bool {
        self.beginning.try_lock().is_err()
    }
}

fn being_planned(host: &str) -> Problem {
    Problem::conflict(format!("a drain of {host} is just being planned: try again in a few seconds"))
}

impl Course {
    fn of(record: &DrainRecord, status: DrainStatus) -> Arc<Self> {
        Arc::new(Self {
            id: record.id.clone(),
            kind: record.kind,
            started_at: record.started_at,
            request: record.request.clone(),
            status: watch::Sender::new(status),
            cancelled: watch::Sender::new(false),
        })
    }
}

/// Waits until no drain and no way back is under way any more, for so long at most.
pub(crate) async fn wait_over(drains: &Drains, at_most: Duration) {
    let status = drains.under_way.current().map(|course| course.status.subscribe());
    let Some(mut status) = status else { return };
    // The sender is gone once it has ended. The caller then looks how it stands.
    let _ended = timeout(at_most, async { while status.changed().await.is_ok() {} }).await;
}

/// How this host would be emptied.
pub(crate) async fn plan(drains: &Drains, request: &DrainRequest) -> Result<DrainPlanView, Problem> {
    check(drains, request)?;
    Ok(plan_anew(drains, request, &Standing::default()).await)
}

/// Refuses hosts that cannot be targets.
fn check(drains: &Drains, request: &DrainRequest) -> Result<(), Problem> {
    if targets_named(request).any(|name| name == drains.host.name()) {
        return Err(Problem::bad_input(format!(
            "{0} cannot be drained to {0}: name other hosts",
            drains.host.name()
        )));
    }
    if drains.host.peers().is_empty() {
        return Err(Problem::refused(format!(
            "{} knows no other host: let one join (`drainpipe init`), or add a [[peer]] to its agent.toml",
            drains.host.name()
        )));
    }
    if request.swap_with.is_some() && !request.to.is_empty() {
        return Err(Problem::bad_input("a swap drains to that host alone: name no others"));
    }
    targets_named(request).try_for_each(|name| drains.peers.target(name).map(drop))
}

fn targets_named(request: &DrainRequest) -> impl Iterator<Item = &String> {
    request.to.iter().chain(&request.swap_with)
}

/// What the request and this host's configuration allow.
fn limits(drains: &Drains, request: &DrainRequest) -> DrainLimits {
    let DrainBounds { outbound, inbound, attempts } = drains.host.config.drain;
    DrainLimits {
        total_ms: request.deadline_s.map(|seconds| f64::from(seconds) * 1_000.0),
        outbound,
        inbound,
        transfers: request.transfers,
        attempts,
        post_copy: request.post_copy,
        disks_first: request.disks_first,
    }
}

/// How long the migration of one VM may take, in seconds: what was configured with usual VMs in mind must not end that
/// of a huge one, nor of one whose disks are copied, which may take so much longer.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn migration_deadline_s(configured_s: u32, predicted_ms: f64, disks_ms: f64) -> u32 {
    let usual_s = (PREDICTIONS_MAX * predicted_ms / 1_000.0 + UNPREDICTED_MAX_S).ceil() as u32;
    configured_s.max(usual_s).saturating_add((disks_ms / 1_000.0).ceil() as u32)
}

async fn plan_anew(drains: &Drains, request: &DrainRequest, standing: &Standing) -> DrainPlanView {
    let mut seen = view::look(drains, request).await;
    standing.complete(&mut seen);
    let plan = make_plan(&seen, Some(&limits(drains, request)));
    let findings = lint(&seen, &plan);
    DrainPlanView { plan, findings }
}

/// Only a plan in which nothing is found may be carried out.
fn sound(planned: DrainPlanView) -> Result<DrainPlan, Problem> {
    if planned.findings.is_empty() {
        return Ok(planned.plan);
    }
    let found: Vec<&str> = planned.findings.iter().map(|finding| finding.what.as_str()).collect();
    Err(Problem::refused(format!(
        "the plan is not carried out, because its check found: {}; this is an error in Drainpipe, please report \
         it with the plan (`drainpipe drain --dry-run --json`)",
        found.join("; ")
    )))
}

/// Cordons this host and begins to empty it, or carries on.
pub(crate) async fn begin(drains: &Arc<Drains>, request: DrainRequest) -> Result<DrainView, Problem> {
    check(drains, &request)?;
    let drains = Arc::clone(drains);
    // Goes on when the caller has gone: by then the host is cordoned.
    let begun = tokio::spawn(async move {
        let _beginning = drains.under_way.begin(drains.host.name())?;
        drains.host.check_not_stopping()?;
        let id = Uuid::new_v4().to_string();
        let drain = drains.journal.begin_drain(&id, Timestamp::now(), &request)?;
        info!(drain = drain.record.id, "cordoned");
        wait_for_recovered(&drains).await;
        let begun = match sound(plan_anew(&drains, &request, &Standing::default()).await) {
            Ok(plan) => executor::start(&drains, request, &drain.record, plan),
            Err(problem) => Err(problem),
        };
        if let Err(problem) = begun {
            return Err(match drains.journal.take_back_drain(&drain) {
                Ok(()) => problem,
                Err(error) => problem.context(error),
            });
        }
        view(&drains)
    });
    begun.await.map_err(Problem::failed)?
}

/// What the last life of this agent began may still be on its way back, also what its drain could not record.
async fn wait_for_recovered(drains: &Drains) {
    let over = drains.outgoing.migrations.taken_up().into_iter().map(|flight| async move {
        // The sender goes only after the end.
        let _ = flight.stages().wait_for(|stage| *stage == Stage::Ended).await;
    });
    // Moves that are not over by then count as being moved.
    let _ = timeout(RECOVERY_DEADLINE, join_all(over)).await;
}

/// Asks for what is under way to be ended: nothing new begins, and what is past its hand-over finishes.
pub(crate) fn cancel(drains: &Drains) -> Result<DrainView, Problem> {
    let host = drains.host.name();
    let course = drains.under_way.current().ok_or_else(|| match drains.under_way.beginning.try_lock() {
        Ok(_) => Problem::conflict(format!(
            "no drain of {host} is under way; `drainpipe resume {host}` lets VMs run there again"
        )),
        Err(_) => being_planned(host),
    })?;
    course.cancelled.send_replace(true);
    view(drains)
}

/// Lets VMs come to this host again; if asked for, begins to bring back what the last drain moved.
pub(crate) fn resume(drains: &Arc<Drains>, request: ResumeRequest) -> Result<DrainView, Problem> {
    let _beginning = drains.under_way.begin(drains.host.name())?;
    drains.host.check_not_stopping()?;
    let settled = record::settle_for_good(drains);
    if request.failback {
        settled.map_err(|problem| nothing_changed(drains, problem))?;
        let begun = failback::away(drains).and_then(|away| failback::start(drains, away, request));
        begun.map_err(|problem| nothing_changed(drains, problem))?;
    } else {
        if let Err(problem) = settled {
            warn!(%problem, "it is not all known what has become of the drain's VMs");
        }
        drains.journal.lift_cordon()?;
    }
    info!("VMs may come here");
    view(drains)
}

/// The same problem, and that the host is cordoned still, if it is.
fn nothing_changed(drains: &Drains, problem: Problem) -> Problem {
    match drains.journal.cordon() {
        Ok(Some(_)) => Problem {
            message: format!(
                "{problem}; nothing was begun, and {0} stays cordoned: `drainpipe resume {0}` without --failback \
                 ends that",
                drains.host.name()
            ),
            ..problem
        },
        Ok(None) | Err(_) => problem,
    }
}

/// Ends what has crashed by an error in Drainpipe as what it is: interrupted. What waits for its turn would wait
/// for ever; what is on the links goes on by itself.
async fn crashed(drains: Arc<Drains>) {
    error!(
        "a drain or failback has crashed, which is an error in Drainpipe; give the same command again to continue"
    );
    let flights = drains.outgoing.migrations.all();
    flights.iter().filter(|flight| flight.is_held()).for_each(|flight| flight.cancel());
    for _ in 0..CRASH_RECORD_ATTEMPTS {
        match drains.journal.interrupt_drains(Timestamp::now()) {
            Ok(()) => break,
            Err(error) => warn!(%error, "the crash is not recorded yet"),
        }
        sleep(RECORD_AGAIN_AFTER).await;
    }
    drains.under_way.ended();
}

/// Takes up what an earlier run of the agent left: nothing goes on by itself.
pub(crate) fn recover(drains: &Drains) -> Result<(), Problem> {
    Ok(drains.journal.interrupt_drains(Timestamp::now())?)
}

/// Before the agent stops: nothing more is begun. At the next start the drain is found interrupted.
pub(crate) async fn shut_down(drains: &Drains) {
    let beginning = timeout(SHUTDOWN_DEADLINE, drains.under_way.beginning.lock()).await;
    if beginning.is_err() {
        warn!("a drain is still being planned; the agent stops without it");
    }
    if let Some(current) = drains.under_way.lock().take() {
        current.task.abort();
    }
}
