//! The source's side on a fake hypervisor, with a journal in a temporary directory, and a target whose answers a test
//! chooses.

use std::sync::Mutex;

use axum::routing::{get, post};
use axum::{Json, Router};
use drainpipe_engine::migration::VmCondition;
use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::fake::{Act, FakeVm, Fault};
use drainpipe_hypervisor::{
    Exit, MigrationStatus, Parcel, RunState, SourceSettings, SourceVm, Transport, Vm,
};

use super::*;
use crate::outgoing::hand_over;
use crate::store::journal::Journal;
use crate::test_host::{Life, TestHost, definition, migrate};
use crate::vms::Claim;
use drainpipe_api_types::IncomingView;

const ID: &str = "11111111-1111-4111-8111-111111111111";

/// The requests that a target received.
type Asked = Arc<Mutex<Vec<&'static str>>>;

/// A target that says this about the VM, and discards it or finishes when it is asked to.
fn target(says: IncomingView) -> (Router, Asked) {
    let asked = Asked::default();
    let note = |what: &'static str| {
        let asked = Arc::clone(&asked);
        move || asked.lock().unwrap().push(what)
    };
    let (discard, finish) = (note("discard"), note("finish"));
    let about = get(async move || Json(says)).delete(async move || {
        discard();
        Json(())
    });
    let finish = post(async move || {
        finish();
        Json(TargetUse::default())
    });
    let router = Router::new().route("/v1/incoming/{id}", about).route("/v1/incoming/{id}/finish", finish);
    (router, asked)
}

/// A host whose agent has ended in the middle of a migration, when its VM was paused for the last bytes.
fn left_in_the_midst(host: &TestHost) -> Arc<FakeVm> {
    let life = host.start();
    let vm = runs(host, &life);
    life.parts.journal.begin_migration(ID, &migrate("web"), Timestamp::UNIX_EPOCH).unwrap();
    life.block_on(starts(&vm, Transport::Single));
    vm.converges();
    vm
}

/// A host whose agent has also recorded that the VM is the target's.
fn left_handed_over(host: &TestHost) -> Arc<FakeVm> {
    let vm = left_in_the_midst(host);
    host.block_on(vm.switch_over(QMP_DEADLINE)).unwrap();
    record_hand_over(host);
    vm
}

fn record_hand_over(host: &TestHost) {
    let config = host.config();
    let journal = Journal::open(&config.state_directory, &config.runtime_directory).unwrap();
    assert!(journal.hand_over(ID).unwrap());
}

/// Starts the host's VM `web`.
fn runs(host: &TestHost, life: &Life) -> Arc<FakeVm> {
    let vms = &life.parts.vms;
    vms.create(definition("web")).unwrap();
    life.block_on(vms.start("web", async |_| Ok(()))).unwrap();
    host.vm("web")
}

async fn starts(vm: &FakeVm, transport: Transport) {
    let address = std::net::SocketAddr::from(([10, 0, 0, 2], 49152));
    let settings = SourceSettings { downtime_limit_ms: 300, bandwidth_mbps: None, zero_pages: None };
    vm.start_transfer(transport, address.into(), settings, Parcel::default(), QMP_DEADLINE).await.unwrap();
}

/// The result of the migration, or that nobody knows it yet.
fn result(life: &Life) -> MigrationResult {
    let outgoing = &life.parts.outgoing;
    life.block_on(async {
        loop {
            let running = outgoing.migrations.get(ID);
            // The result is recorded before the VM is released here.
            if let (None, Some(result)) = (&running, outgoing.journal.result(ID).unwrap()) {
                return result;
            }
            if let Some(in_doubt) = running.and_then(|running| running.result().clone()) {
                return in_doubt;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
}

#[test]
fn what_an_earlier_life_has_begun_is_undone_and_the_vm_runs_on() {
    let mut host = TestHost::new();
    let (router, asked) = target(IncomingView::Waiting);
    host.target_answers(router);
    let vm = left_in_the_midst(&host);
    let result = result(&host.start());
    assert_eq!((result.outcome, vm.state()), (Outcome::Failed, RunState::Running));
    assert_eq!(vm.acts(), [Act::StartTransfer, Act::Cancel, Act::Run]);
    assert_eq!(*asked.lock().unwrap(), ["discard"]);
}

#[test]
fn a_vm_that_does_not_run_at_the_first_order_is_told_again() {
    let mut host = TestHost::new();
    host.target_answers(target(IncomingView::Waiting).0);
    let vm = left_in_the_midst(&host);
    vm.fails_once(Act::Run, Fault::Fails);
    let result = result(&host.start());
    assert_eq!((result.outcome, vm.state()), (Outcome::Failed, RunState::Running));
}

#[test]
fn a_vm_that_was_handed_over_ends_here_once_its_target_says_that_it_runs_there() {
    let mut host = TestHost::new();
    let (router, asked) = target(IncomingView::Running);
    host.target_answers(router);
    let vm = left_handed_over(&host);
    let life = host.start();
    assert_eq!(result(&life).outcome, Outcome::Completed);
    assert!(!vm.alive() && !life.parts.vms.contains("web"));
    assert!(!vm.acts().contains(&Act::Run));
    assert_eq!(*asked.lock().unwrap(), ["finish"]);
}

#[test]
fn a_vm_that_its_target_has_discarded_runs_on_here() {
    let mut host = TestHost::new();
    host.target_answers(target(IncomingView::Discarded).0);
    let vm = left_handed_over(&host);
    let life = host.start();
    assert_eq!(result(&life).outcome, Outcome::Failed);
    assert_eq!(vm.state(), RunState::Running);
    assert!(!life.parts.journal.hand_over(ID).unwrap());
}

#[test]
fn a_vm_whose_target_is_lost_comes_back_on_the_operators_word_and_is_booted_anew() {
    let host = TestHost::new();
    let vm = left_handed_over(&host);
    let life = host.start();
    let outgoing = &life.parts.outgoing;
    let refuse =
        |name: &str, lost: &str| life.block_on(hand_over::reclaim(outgoing, name, lost)).unwrap_err();
    assert_eq!(refuse("web", "source").kind, ProblemKind::BadInput);
    assert_eq!(refuse("db", "target").kind, ProblemKind::Conflict);
    assert!(hand_over::check_own(outgoing, "web").unwrap_err().message.contains("`drainpipe vm reclaim web"));
    assert!(life.parts.journal.open_migration(ID).unwrap().unwrap().handed_over, "nothing has changed");
    let result = life.block_on(hand_over::reclaim(outgoing, "web", "target")).unwrap();
    assert_eq!(result.outcome, Outcome::Failed);
    assert!(!vm.acts().contains(&Act::Run), "it may have run there, and written to its disks");
    assert!(!vm.alive() && life.parts.vms.contains("web"));
    life.block_on(async {
        while life.parts.vms.claim("web", Claim::Changing).is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    life.block_on(life.parts.vms.start("web", async |_| Ok(()))).unwrap();
    assert_eq!(host.vm("web").state(), RunState::Running);
    hand_over::check_own(outgoing, "web").unwrap();
}

#[test]
fn a_vm_of_which_its_target_says_nothing_or_does_not_know_stands_still() {
    for knows_nothing in [false, true] {
        let mut host = TestHost::new();
        if knows_nothing {
            host.target_answers(target(IncomingView::Unknown).0);
        }
        let vm = left_handed_over(&host);
        let life = host.start();
        assert_eq!(result(&life).outcome, Outcome::InDoubt);
        assert_eq!((vm.alive(), vm.state()), (true, RunState::Postmigrate));
        assert!(!vm.acts().contains(&Act::Run));
    }
}

#[test]
fn a_vm_that_ran_on_here_though_the_journal_hands_it_over_stays_here() {
    let mut host = TestHost::new();
    let (router, asked) = target(IncomingView::Ready);
    host.target_answers(router);
    let vm = left_in_the_midst(&host);
    host.block_on(vm.cancel(QMP_DEADLINE)).unwrap();
    record_hand_over(&host);
    let life = host.start();
    assert_eq!(result(&life).outcome, Outcome::Failed);
    assert_eq!(vm.state(), RunState::Running);
    assert_eq!(*asked.lock().unwrap(), ["discard"]);
}

#[test]
fn with_post_copy_what_runs_on_here_ends_once_its_target_was_told_to_run_it() {
    let mut host = TestHost::new();
    host.target_answers(target(IncomingView::Running).0);
    let life = host.start();
    let vm = runs(&host, &life);
    life.parts.journal.begin_migration(ID, &migrate("web"), Timestamp::UNIX_EPOCH).unwrap();
    life.block_on(async {
        starts(&vm, Transport::CLEAR_POST_COPY).await;
        assert!(vm.start_post_copy(QMP_DEADLINE).await.unwrap());
    });
    drop(life);
    record_hand_over(&host);
    // Its connection broke when it was about to let go.
    vm.goes_to(MigrationStatus::Failed);
    vm.guest_is(RunState::Running);
    assert_eq!(result(&host.start()).outcome, Outcome::Completed);
    assert!(!vm.alive());
}

/// The executor of a migration that has just begun.
fn executor(life: &Life) -> Executor {
    let (outgoing, request) = (&life.parts.outgoing, migrate("web"));
    outgoing.journal.begin_migration(ID, &request, Timestamp::UNIX_EPOCH).unwrap();
    let claimed = outgoing.vms.claim("web", Claim::Migrating(ID.into())).unwrap();
    Executor::new(outgoing, ID.into(), claimed, &request, Timestamp::UNIX_EPOCH, SendStart::Now, false)
}

#[test]
fn a_hand_over_that_its_guard_has_forbidden_is_not_recorded() {
    let host = TestHost::new();
    let life = host.start();
    runs(&host, &life);
    let mut executor = executor(&life);
    life.parts.journal.forbid_hand_over(ID).unwrap();
    let refused = life.block_on(executor.perform(SourceAction::RecordHandOver)).unwrap_err();
    assert!(refused.message.contains("its guard let the VM run here"), "{refused}");
    assert!(!life.parts.journal.open_migration(ID).unwrap().unwrap().handed_over);
}

#[test]
fn what_the_vm_does_here_is_told_or_not_known() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs(&host, &life);
    let mut executor = executor(&life);
    let mut look = || life.block_on(executor.perform(SourceAction::LookAtVm));
    assert_eq!(look(), Ok(SourceEvent::VmIs(VmCondition::Runs)));
    vm.guest_is(RunState::Paused);
    assert_eq!(look(), Ok(SourceEvent::VmIs(VmCondition::Paused)));
    vm.is_mute();
    assert!(look().is_err(), "it lives");
    vm.ends(Exit::Signal(9));
    let Ok(SourceEvent::VmIs(VmCondition::Ended(why))) = look() else { panic!("it has ended") };
    assert!(why.message.contains("by signal 9"), "{why}");
}

#[test]
fn to_stop_the_transfer_of_one_that_has_ended_is_no_failure() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs(&host, &life);
    let mut executor = executor(&life);
    vm.ends(Exit::Signal(9));
    assert_eq!(life.block_on(executor.perform(SourceAction::StopTransfer)), Ok(SourceEvent::Done));
    let gone = life.block_on(executor.perform(SourceAction::ResumeOnSource)).unwrap_err();
    assert!(gone.is_hypervisor_gone, "{gone}");
}

#[test]
fn only_a_vm_that_runs_moves() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs(&host, &life);
    let mut executor = executor(&life);
    vm.guest_is(RunState::Paused);
    let refused = life.block_on(executor.perform(SourceAction::CheckPermissions)).unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Refused, "{refused}");
    vm.guest_is(RunState::Running);
    vm.goes_to(MigrationStatus::PostcopyActive);
    let refused = life.block_on(executor.perform(SourceAction::CheckPermissions)).unwrap_err();
    assert!(refused.message.contains("still on its way to here"), "{refused}");
}
