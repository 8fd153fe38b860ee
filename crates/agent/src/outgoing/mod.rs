//! Migrations from this host: begun, planned, recovered after a crash, ended at shutdown.

mod connections;
mod disks;
mod dry_run;
mod executor;
mod hand_over;
mod hooks;
pub(crate) mod measure;
mod meeting;
pub(crate) mod memory_look;
mod pause;
pub(crate) mod result;
mod running;
mod standstill;
pub(crate) mod supervised;
mod target_watch;
mod tracked;

use std::sync::{Arc, Once};
use std::time::Duration;

use drainpipe_engine::migration::timing::RECEIVED_WAIT;
use drainpipe_engine::migration::{Migration, SourceAction, Stage};
use drainpipe_engine::problem::Problem;
use jiff::Timestamp;
use tokio::time::{sleep, timeout};
use tracing::{error, warn};
use uuid::Uuid;

pub(crate) use self::disks::{check_hosts, check_vm, disks_of, keep_all_left};
pub(crate) use self::dry_run::dry_run;
use self::executor::Executor;
pub(crate) use self::hand_over::{check_own, hand_over_view, reclaim};
pub(crate) use self::hooks::settle_left;
pub(crate) use self::meeting::{Meeting, meet};
pub(crate) use self::running::{OutgoingMigrations, Running, SendStart};
use crate::check::Checks;
use crate::host::Host;
use crate::incoming::Incoming;
use crate::peers::Peers;
use crate::store::journal::{Journal, OpenMigration};
use crate::transfer::Transfers;
use crate::vms::beside::{Beside, RecordedMigration};
use crate::vms::{Claim, Claimed, Vms, does_not_run};
use drainpipe_api_types::{MigrateRequest, MigrationView};

/// How long an agent that is told to stop waits for its migrations to be undone. Well below the 90 s
/// after which systemd kills it.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(20);

/// How often it looks.
const SHUTDOWN_LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long it then still answers. A command that follows a migration asks several times a second, and must learn
/// how it has ended.
const TELL_RESULTS_FOR: Duration = Duration::from_secs(1);

/// Before a migration is taken up that has crashed though it was taken up already.
const TAKE_UP_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Migrations from this host.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// The host.
    pub(crate) host: Arc<Host>,
    /// Those to which they go.
    pub(crate) peers: Arc<Peers>,
    /// What must survive a crash.
    pub(crate) journal: Arc<Journal>,
    /// The VMs that are here.
    pub(crate) vms: Arc<Vms>,
    /// What migrations in either direction share.
    pub(crate) transfer: Arc<Transfers>,
    /// Migrations to here: a VM that leaves may have come by one.
    pub(crate) incoming: Arc<Incoming>,
    /// What is looked at before each of them.
    pub(crate) checks: Arc<Checks>,
    /// Those under way.
    pub(crate) migrations: OutgoingMigrations,
    // The log says only once that this kernel tracks no connections.
    untracked_said: Once,
}

impl Outgoing {
    /// None yet.
    pub(crate) fn new(incoming: &Arc<Incoming>, checks: &Arc<Checks>) -> Self {
        Self {
            host: Arc::clone(&incoming.host),
            peers: Arc::clone(&incoming.peers),
            journal: Arc::clone(&incoming.journal),
            vms: Arc::clone(&incoming.vms),
            transfer: Arc::clone(&incoming.transfer),
            incoming: Arc::clone(incoming),
            checks: Arc::clone(checks),
            migrations: OutgoingMigrations::default(),
            untracked_said: Once::new(),
        }
    }

    /// Whether a VM's memory is on its way from here or to here, or will be. Where it has arrived, and it is not known
    /// yet whose the VM is, that may take days.
    pub(crate) fn is_migrating(&self) -> bool {
        !self.migrations.under_way().is_empty() || self.incoming.entries.are_receiving()
    }
}

/// The migrations that an earlier run of the agent left open, and that cannot be taken up yet.
pub(crate) fn left_open(outgoing: &Outgoing) -> Result<Vec<MigrationView>, Problem> {
    let mut open = outgoing.journal.open_migrations()?;
    open.retain(|open| outgoing.migrations.get(&open.id).is_none());
    let view = |open: OpenMigration| MigrationView {
        waits_for: outgoing.vms.why_unresponsive(&open.vm),
        id: open.id,
        vm: open.vm,
        source: outgoing.host.name().into(),
        target: open.target,
        started_at: Some(open.started_at.to_string()),
        requested_option: Some(open.requested_option),
        progress: None,
        result: None,
    };
    Ok(open.into_iter().map(view).collect())
}

/// Begins a migration; it runs on by itself.
pub(crate) fn begin(
    outgoing: &Arc<Outgoing>,
    request: &MigrateRequest,
    send_start: SendStart,
) -> Result<Arc<Running>, Problem> {
    outgoing.host.check_not_stopping()?;
    outgoing.peers.target(&request.target)?;
    let id = Uuid::new_v4().to_string();
    let claimed = outgoing.vms.claim(&request.vm, Claim::Migrating(id.clone()))?;
    if claimed.vmm.is_none() {
        return Err(does_not_run(&claimed.definition));
    }
    let started_at = Timestamp::now();
    outgoing.vms.note_managed(&claimed.definition)?;
    outgoing.journal.begin_migration(&id, request, started_at)?;
    if let Some(vmm) = &claimed.vmm {
        let outgoing = RecordedMigration { id: id.clone(), host: request.target.clone() };
        Beside::note_outgoing(&claimed.definition, vmm.directory(), Some(outgoing));
    }
    let (migration, first) = Migration::begin(
        outgoing.host.config.limits.of_migration(request.deadline_s, request.throttle_max_percent),
    );
    let executor = Executor::new(outgoing, id, claimed, request, started_at, send_start, false);
    Ok(run(outgoing, executor, migration, first))
}

fn run(
    outgoing: &Arc<Outgoing>,
    executor: Executor,
    migration: Migration,
    first: SourceAction,
) -> Arc<Running> {
    let running = Arc::clone(&executor.running);
    let crashed = crashed(Arc::clone(outgoing), Arc::clone(&running));
    supervised::spawn(executor.run(migration, first), crashed);
    running
}

/// How far a migration is whose task has crashed, nobody knows. It keeps its claim of the VM, and is taken up under that
/// as at the agent's next start.
async fn crashed(outgoing: Arc<Outgoing>, running: Arc<Running>) {
    let Running { id, vm, .. } = &*running;
    error!(migration = id, vm, "has crashed, which is an error in Drainpipe; it is now undone or finished");
    if running.is_taken_up {
        // It may crash again and again.
        sleep(TAKE_UP_AGAIN_AFTER).await;
    }
    let open = loop {
        match outgoing.journal.open_migration(id) {
            Ok(open) => break open,
            Err(error) => warn!(%error, migration = id, "cannot read how far it has got; tried again soon"),
        }
        sleep(TAKE_UP_AGAIN_AFTER).await;
    };
    let claimed = open.as_ref().and_then(|_| outgoing.vms.claim_of_crashed(vm, id));
    if let (Some(open), Some(claimed)) = (open, claimed) {
        take_up(&outgoing, open, claimed);
    } else {
        // Its result is recorded. The VM stays claimed: what was left to do, the next start does.
        outgoing.migrations.lock().remove(id);
    }
    running.stage.send_replace(Stage::Ended);
}

/// Where a target tells whether all of a VM's state has arrived.
fn received_path(migration: &str, is_paused: bool) -> String {
    format!("/v1/incoming/{migration}/received?wait_ms={}&is_paused={is_paused}", RECEIVED_WAIT.as_millis())
}

/// Takes up the migrations that an earlier run of the agent left open.
///
/// Also those whose VM has no QEMU here any more, or whose target is no peer: until it is known
/// where the VM belongs, the claim keeps everybody from starting it here a second time.
pub(crate) fn recover(outgoing: &Arc<Outgoing>) -> Result<(), Problem> {
    for open in outgoing.journal.open_migrations()? {
        match outgoing.vms.claim(&open.vm, Claim::Migrating(open.id.clone())) {
            Ok(claimed) => take_up(outgoing, open, claimed),
            Err(problem) => {
                warn!(migration = open.id, vm = open.vm, %problem, "cannot be recovered yet; left open");
            }
        }
    }
    Ok(())
}

/// Takes up one of them.
pub(crate) fn take_up(outgoing: &Arc<Outgoing>, open: OpenMigration, claimed: Claimed) {
    let limits = outgoing.host.config.limits.of_migration(None, None);
    let (migration, first) = Migration::recover(limits, open.handed_over);
    let request = MigrateRequest::plain(open.vm, open.target, open.requested_option);
    let executor = Executor::new(outgoing, open.id, claimed, &request, open.started_at, SendStart::Now, true);
    run(outgoing, executor, migration, first);
}

/// Before the agent stops: has what can be undone undone, and waits for it, so that the VMs run on
/// here and nothing is left to guards and to the next start. Then waits until those have heard of it who
/// ask.
pub(crate) async fn shut_down(outgoing: &Outgoing) {
    if outgoing.migrations.under_way().is_empty() {
        return;
    }
    let over = async {
        loop {
            let mut running = outgoing.migrations.under_way();
            // Their QEMUs go on by themselves, or wait for the next start.
            running.retain(|running| *running.stage.borrow() != Stage::SendingRest);
            if running.is_empty() {
                return;
            }
            for running in running {
                running.cancel();
            }
            sleep(SHUTDOWN_LOOK_EVERY).await;
        }
    };
    if timeout(SHUTDOWN_DEADLINE, over).await.is_err() {
        warn!(
            "migrations are still running; their guards, or the agent when it restarts, finish or undo them"
        );
    }
    sleep(TELL_RESULTS_FOR).await;
}
