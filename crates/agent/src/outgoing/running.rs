//! Migrations from this host, as others see them while they run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use drainpipe_engine::migration::Stage;
use drainpipe_engine::migration::progress::{CompressionProgress, PathRate, Progress, ProgressMeter};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::problem::Problem;
use jiff::Timestamp;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::store::journal::Journal;
use crate::store::lock::lock;
use drainpipe_api_types::{MigrateRequest, MigrationView};

/// Migrations under way from this host.
#[derive(Debug, Default)]
pub(crate) struct OutgoingMigrations {
    running: Mutex<BTreeMap<String, Arc<Running>>>,
}

/// One migration under way, as others see it.
#[derive(Debug)]
pub(crate) struct Running {
    pub(super) id: String,
    pub(super) vm: String,
    pub(super) target: String,
    pub(super) requested_option: RequestedOption,
    pub(super) started_at: Timestamp,
    // Begun by an earlier run of the agent, or by a task that has crashed.
    pub(super) is_taken_up: bool,
    pub(super) cancel: Notify,
    pub(super) cancel_requested: AtomicBool,
    pub(super) progress: watch::Sender<Progress>,
    pub(super) stage: watch::Sender<Stage>,
    pub(super) send_start: watch::Sender<SendStart>,
    pub(super) gives_way: watch::Sender<bool>,
    // By the operator's word, which is asked for only once the hand-over is recorded.
    pub(super) target_lost: watch::Sender<bool>,
    // Only while the journal cannot have it: the outcome is open still, or the disk is full.
    pub(super) result: Mutex<Option<MigrationResult>>,
    // Why its result is not in the journal, though it is over.
    pub(super) unrecorded: Mutex<Option<Problem>>,
}

/// Whether a migration may send as soon as it can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SendStart {
    /// It may.
    Now,
    /// After step 5 it waits for [`Running::release`].
    Held,
}

impl OutgoingMigrations {
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Running>>> {
        // Insertion and removal leave the map whole.
        lock(&self.running)
    }

    /// One migration under way.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<Running>> {
        self.lock().get(id).cloned()
    }

    /// How many others are sending.
    pub(super) fn sending_beside(&self, id: &str) -> usize {
        let running = self.lock();
        let uses_links = |stage| matches!(stage, Stage::CopyingDisks | Stage::Sending);
        running.values().filter(|other| other.id != id && uses_links(*other.stage.borrow())).count()
    }

    /// Those that an earlier run of the agent, or a task that has crashed, has begun, but for those in doubt: these
    /// end when their target answers.
    pub(crate) fn taken_up(&self) -> Vec<Arc<Running>> {
        let running = self.lock();
        running.values().filter(|running| running.is_taken_up && !running.is_in_doubt()).cloned().collect()
    }

    /// Those whose outcome is neither known nor left open.
    pub(crate) fn under_way(&self) -> Vec<Arc<Running>> {
        self.lock().values().filter(|running| !running.is_over()).cloned().collect()
    }

    /// Whether a VM is on its way to this host, or may be there.
    pub(crate) fn are_to(&self, host: &str) -> bool {
        self.lock().values().any(|running| running.target == host)
    }

    /// That of a VM which is on its way from here, or may have left.
    pub(crate) fn of_vm(&self, vm: &str) -> Option<Arc<Running>> {
        self.lock().values().find(|running| running.vm == vm).cloned()
    }

    /// All migrations that are not over, or whose outcome is left open.
    pub(crate) fn all(&self) -> Vec<Arc<Running>> {
        self.lock().values().cloned().collect()
    }
}

impl Running {
    pub(super) fn new(
        id: String,
        request: &MigrateRequest,
        started_at: Timestamp,
        send_start: SendStart,
        is_taken_up: bool,
    ) -> Self {
        let first = ProgressMeter::default().progress(Step::EstablishHosts, 0.0);
        Self {
            id,
            vm: request.vm.clone(),
            target: request.target.clone(),
            requested_option: request.option,
            started_at,
            is_taken_up,
            cancel: Notify::new(),
            cancel_requested: AtomicBool::new(false),
            result: Mutex::default(),
            unrecorded: Mutex::default(),
            progress: watch::Sender::new(first),
            stage: watch::Sender::new(Stage::Preparing),
            send_start: watch::Sender::new(send_start),
            gives_way: watch::Sender::new(false),
            target_lost: watch::Sender::new(false),
        }
    }

    /// Where it goes.
    pub(crate) fn target(&self) -> &str {
        &self.target
    }

    /// Lets it send: at once, or as soon as it can.
    pub(crate) fn release(&self) {
        self.send_start.send_replace(SendStart::Now);
    }

    /// Leaves the links to another one, until further notice and for some seconds at most.
    pub(crate) fn give_way(&self) {
        self.gives_way.send_replace(true);
    }

    /// May have all of the links.
    pub(crate) fn take_all(&self) {
        self.gives_way.send_replace(false);
    }

    /// Whether it leaves the links to another one, now and from now on.
    pub(crate) fn way_given(&self) -> watch::Receiver<bool> {
        self.gives_way.subscribe()
    }

    /// Whether it waits, or will wait, to be released.
    pub(crate) fn is_held(&self) -> bool {
        *self.send_start.borrow() == SendStart::Held
    }

    /// What each of its paths carries.
    pub(crate) fn paths(&self) -> Vec<PathRate> {
        if *self.stage.borrow() == Stage::Ended { vec![] } else { self.progress.borrow().paths.clone() }
    }

    /// What compression has recently done; none without it.
    pub(crate) fn compression(&self) -> Option<CompressionProgress> {
        self.progress.borrow().compression
    }

    /// How far it is, now and from now on. When it has [`Stage::Ended`], its result is recorded; of an
    /// outcome that is not known yet, [`Self::view`] has it.
    pub(crate) fn stages(&self) -> watch::Receiver<Stage> {
        self.stage.subscribe()
    }

    /// Waits until it is over, or its outcome is left open, for so long at most.
    pub(crate) async fn wait_over(&self, at_most: Duration) {
        let mut stages = self.stages();
        // The caller then looks how it stands.
        let _ended = timeout(at_most, stages.wait_for(|stage| *stage == Stage::Ended)).await;
    }

    /// Its identifier.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    /// The VM.
    pub(crate) fn vm(&self) -> &str {
        &self.vm
    }

    /// What the target's host has confirmed so far.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.progress.borrow().sent_bytes
    }

    /// How much of its disks has been copied so far; 0 where none is copied.
    pub(crate) fn copied_bytes(&self) -> u64 {
        self.progress.borrow().disks.iter().map(|disk| disk.copied_bytes).sum()
    }

    /// How it ended, once it has; also when that is not known until the target answers.
    pub(crate) fn end(&self, journal: &Journal) -> Result<Option<MigrationResult>, Problem> {
        let recorded = journal.result(&self.id)?;
        Ok(recorded.or_else(|| self.result().clone()))
    }

    /// Asks for it to be undone.
    pub(crate) fn cancel(&self) {
        self.cancel_requested.store(true, Ordering::Relaxed);
        self.cancel.notify_one();
    }

    fn is_in_doubt(&self) -> bool {
        self.result().as_ref().is_some_and(|result| result.outcome == Outcome::InDoubt)
    }

    pub(super) fn is_over(&self) -> bool {
        self.result().is_some()
    }

    pub(super) fn result(&self) -> MutexGuard<'_, Option<MigrationResult>> {
        lock(&self.result)
    }

    /// Why its result cannot be written down, if it cannot: it waits until it can.
    pub(crate) fn unrecorded(&self) -> MutexGuard<'_, Option<Problem>> {
        lock(&self.unrecorded)
    }

    /// The migration in the shape of the API.
    pub(crate) fn view(&self, source: &str) -> MigrationView {
        MigrationView {
            id: self.id.clone(),
            vm: self.vm.clone(),
            source: source.into(),
            target: self.target.clone(),
            started_at: Some(self.started_at.to_string()),
            requested_option: Some(self.requested_option),
            progress: Some(self.progress.borrow().clone()),
            result: self.result().clone(),
            waits_for: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::migration::{Limits, Migration};

    use super::*;
    use crate::outgoing::measure::Measurements;
    use crate::outgoing::result::{Identity, Pauses, assemble};
    use drainpipe_api_types::TargetUse;

    fn in_doubt() -> MigrationResult {
        let (migration, _) = Migration::begin(Limits::default());
        let measured = Measurements::begin(None).finish(None, TargetUse::default());
        let identity = Identity {
            id: "1".into(),
            vm: "web".into(),
            source: "a".into(),
            target: "b".into(),
            memory_bytes: 1 << 30,
            requested_option: RequestedOption::Auto,
            started_at: Timestamp::UNIX_EPOCH,
        };
        let pauses = Pauses { timings: migration.timings(), standstill_ms: None };
        assemble(identity, &migration, pauses, Outcome::InDoubt, None, measured)
    }

    fn running() -> Arc<Running> {
        let request = MigrateRequest::plain("web", "b", RequestedOption::Auto);
        Arc::new(Running::new("1".into(), &request, Timestamp::UNIX_EPOCH, SendStart::Now, false))
    }

    #[tokio::test]
    async fn who_waits_for_its_end_waits_no_longer_than_that() {
        let (running, for_long) = (running(), Duration::from_hours(1));
        running.wait_over(Duration::ZERO).await;
        tokio::join!(running.wait_over(for_long), async { running.stage.send_replace(Stage::Ended) });
        running.wait_over(for_long).await;
    }

    #[test]
    fn one_that_waits_for_its_targets_word_is_not_under_way() {
        let (outgoing, running) = (OutgoingMigrations::default(), running());
        outgoing.lock().insert("1".into(), Arc::clone(&running));
        assert_eq!(outgoing.under_way().len(), 1);
        *running.result() = Some(in_doubt());
        assert_eq!((outgoing.under_way().len(), outgoing.all().len()), (0, 1));
    }
}
