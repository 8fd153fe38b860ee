//! What a drain does to its host on a fake hypervisor: a drain that begins, is refused, is cancelled, or is found by
//! the agent's next run.

use axum::Router;
use axum::routing::any;
use drainpipe_engine::drain::status::{DrainState, MoveState, MoveStatus};
use drainpipe_engine::migration::result::{MigrationFailure, MigrationResult, SourceVm};
use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::RunState;
use drainpipe_hypervisor::fake::FakeVm;
use serde_json::json;
use tokio::sync::oneshot;

use super::*;
use crate::test_host::{Life, TestHost, definition, migrate};

/// A host whose VM `web` runs.
fn with_vm(host: &TestHost) -> (Life, Arc<FakeVm>) {
    let life = host.start();
    life.parts.vms.create(definition("web")).unwrap();
    life.block_on(life.parts.vms.start("web", async |_| Ok(()))).unwrap();
    (life, host.vm("web"))
}

/// The agent's next run.
fn again(host: &TestHost, life: Life) -> Life {
    drop(life);
    host.start()
}

fn shown(life: &Life) -> DrainView {
    view(&life.parts.drains).unwrap()
}

fn state(view: &DrainView) -> DrainState {
    view.status.as_ref().unwrap().state
}

fn begin_drain(life: &Life, request: DrainRequest) -> Result<DrainView, Problem> {
    life.block_on(begin(&life.parts.drains, request))
}

/// Waits for the drain's end.
fn ended(life: &Life) -> DrainView {
    life.block_on(async {
        loop {
            let view = shown(life);
            if view.ended_at.is_some() {
                return view;
            }
            sleep(Duration::from_millis(10)).await;
        }
    })
}

fn refused<T: std::fmt::Debug>(done: Result<T, Problem>, kind: ProblemKind, says: &str) {
    let problem = done.unwrap_err();
    assert_eq!(problem.kind, kind, "{problem}");
    assert!(problem.message.contains(says), "{problem}");
}

#[test]
fn a_drain_that_is_refused_leaves_its_host_as_it_was() {
    let host = TestHost::new();
    let (life, _vm) = with_vm(&host);
    let to = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let request = |names| DrainRequest { to: to(names), ..DrainRequest::default() };
    refused(begin_drain(&life, request(&["here"])), ProblemKind::BadInput, "cannot be drained to here");
    begin_drain(&life, request(&["target", "elsewhere"])).unwrap_err();
    let swap = DrainRequest { swap_with: Some("source".into()), ..request(&["target"]) };
    refused(begin_drain(&life, swap), ProblemKind::BadInput, "name no others");
    let as_it_was = |life: &Life| {
        let view = shown(life);
        assert_eq!((view.cordoned, view.kind, view.id), (false, None, None));
        life.parts.incoming.check_cordon(None).unwrap();
    };
    as_it_was(&life);
    as_it_was(&again(&host, life));
}

#[test]
fn a_host_that_cannot_be_emptied_says_why_and_stays_cordoned_until_it_is_resumed() {
    let host = TestHost::new();
    let (life, vm) = with_vm(&host);
    begin_drain(&life, DrainRequest::default()).unwrap();
    let view = ended(&life);
    assert_eq!((view.cordoned, state(&view)), (true, DrainState::Incomplete));
    let stays = &view.status.as_ref().unwrap().stays;
    assert_eq!(stays.len(), 1, "{stays:?}");
    assert_eq!(stays[0].vm, "web");
    assert_eq!(vm.state(), RunState::Running);
    let life = again(&host, life);
    let found = shown(&life);
    assert_eq!((found.cordoned, &found.id, &found.ended_at), (true, &view.id, &view.ended_at));
    refused(life.parts.incoming.check_cordon(None), ProblemKind::Refused, "`drainpipe resume here`");
    assert!(!resume(&life.parts.drains, ResumeRequest::default()).unwrap().cordoned);
    let life = again(&host, life);
    assert!(!shown(&life).cordoned);
    life.parts.incoming.check_cordon(None).unwrap();
    assert_eq!(vm.state(), RunState::Running);
}

#[test]
fn a_drain_that_is_asked_for_again_goes_on_as_the_same_one() {
    let host = TestHost::new();
    let (life, _vm) = with_vm(&host);
    begin_drain(&life, DrainRequest::default()).unwrap();
    let first = ended(&life);
    let life = again(&host, life);
    begin_drain(&life, DrainRequest::default()).unwrap();
    let second = ended(&life);
    assert_eq!((&second.id, &second.started_at), (&first.id, &first.started_at));
}

#[test]
fn nothing_is_cancelled_or_brought_back_where_nothing_was_drained() {
    let host = TestHost::new();
    let (life, vm) = with_vm(&host);
    refused(cancel(&life.parts.drains), ProblemKind::Conflict, "no drain of here is under way");
    let failback = ResumeRequest { failback: true, ..ResumeRequest::default() };
    resume(&life.parts.drains, failback).unwrap_err();
    assert_eq!((shown(&life).kind, vm.state()), (None, RunState::Running));
}

/// A host that takes its time, and says nothing.
fn silent() -> Router {
    Router::new().fallback(any(async || std::future::pending::<()>().await))
}

#[test]
fn while_a_drain_is_planned_nothing_else_begins_and_an_agent_that_ends_then_has_moved_nothing() {
    let mut host = TestHost::new();
    host.target_answers(silent());
    let (life, vm) = with_vm(&host);
    let drains = Arc::clone(&life.parts.drains);
    life.block_on(async move {
        let beginning = Arc::clone(&drains);
        tokio::spawn(async move { begin(&beginning, DrainRequest::default()).await });
        while !view(&drains).unwrap().cordoned {
            sleep(Duration::from_millis(1)).await;
        }
    });
    assert_eq!(state(&shown(&life)), DrainState::Moving);
    let planning = "is just being planned";
    refused(begin_drain(&life, DrainRequest::default()), ProblemKind::Conflict, planning);
    refused(cancel(&life.parts.drains), ProblemKind::Conflict, planning);
    refused(resume(&life.parts.drains, ResumeRequest::default()), ProblemKind::Conflict, planning);
    let life = again(&host, life);
    let view = shown(&life);
    assert_eq!((view.cordoned, state(&view)), (true, DrainState::Interrupted));
    assert!(view.ended_at.is_some());
    assert_eq!(vm.state(), RunState::Running);
    assert!(!resume(&life.parts.drains, ResumeRequest::default()).unwrap().cordoned);
}

fn moves(vm: &str, state: MoveState) -> MoveStatus {
    MoveStatus {
        vm: vm.into(),
        target: "target".into(),
        state,
        migration: Some(format!("of {vm}")),
        attempts: 1,
        error: None,
        waits: None,
        memory_bytes: 64 << 20,
        sent_bytes: 0,
        predicted_bytes: 0,
        predicted_ms: 1.0,
        transfer_ms: None,
        compression: None,
        disks: None,
    }
}

/// Asserts that the VM has gone to the target.
fn has_left(life: &Life, vm: &str) {
    let request = migrate(vm);
    life.parts.journal.begin_migration(&format!("of {vm}"), &request, Timestamp::UNIX_EPOCH).unwrap();
    life.parts.journal.end_migration(&result_of(vm, "completed"), true, Timestamp::now()).unwrap();
}

fn result_of(vm: &str, outcome: &str) -> MigrationResult {
    let result = json!({
        "id": format!("of {vm}"), "vm": vm, "source": "here", "target": "target",
        "started_at": "1970-01-01T00:00:00Z", "requested_option": "auto", "option": "tcp", "outcome": outcome,
        "total_ms": 9.0, "setup_ms": 1.0, "transfer_ms": 5.0, "completion_ms": 3.0, "memory_bytes": 1 << 26,
        "wire_bytes": 7, "throughput_gbps": 1.0, "rounds": 2,
        "cpu_seconds": { "source_vmm": 0.0, "source_agent": 0.0, "target_vmm": 0.0, "target_agent": 0.0 },
        "paths": [], "events": [], "samples": [],
    });
    serde_json::from_value(result).unwrap()
}

#[test]
fn an_agent_that_ended_in_the_midst_tells_what_has_become_of_each_vm() {
    let host = TestHost::new();
    let (life, vm) = with_vm(&host);
    let journal = &life.parts.journal;
    journal.begin_drain("one", Timestamp::now(), &DrainRequest::default()).unwrap();
    let rows = [
        moves("db", MoveState::Finishing),
        moves("shop", MoveState::Moved),
        moves("mail", MoveState::Finishing),
        MoveStatus { migration: None, ..moves("web", MoveState::Preparing) },
    ];
    let placed: Vec<_> = rows.iter().enumerate().collect();
    journal.record_drain("one", &DrainStatus::begun(), &placed, &[]).unwrap();
    has_left(&life, "db");
    has_left(&life, "shop");
    journal.begin_migration("of mail", &migrate("mail"), Timestamp::UNIX_EPOCH).unwrap();
    assert!(journal.hand_over("of mail").unwrap());
    let life = again(&host, life);
    let view = shown(&life);
    assert_eq!((view.cordoned, state(&view)), (true, DrainState::Interrupted));
    assert!(view.ended_at.is_some());
    let rows = view.status.unwrap().moves;
    let states: Vec<_> = rows.iter().map(|one| (one.vm.as_str(), one.state)).collect();
    let expected = [
        ("db", MoveState::Moved),
        ("shop", MoveState::Moved),
        ("mail", MoveState::InDoubt),
        ("web", MoveState::Waiting),
    ];
    assert_eq!(states, expected, "{rows:#?}");
    assert_eq!(vm.state(), RunState::Running);
    assert!(vm.sends_to().is_none());
}

/// A VM whose target was lost after the hand-over, and that the operator reclaimed here.
fn was_reclaimed(life: &Life, vm: &str) {
    life.parts.journal.begin_migration(&format!("of {vm}"), &migrate(vm), Timestamp::UNIX_EPOCH).unwrap();
    let result = result_of(vm, "failed");
    let result = MigrationResult {
        failure: MigrationFailure {
            source_vm: Some(SourceVm::Ended),
            error: Some("its target was lost after the hand-over, on the operator's word".into()),
            error_kind: None,
        },
        ..result
    };
    life.parts.journal.end_migration(&result, false, Timestamp::now()).unwrap();
}

#[test]
fn a_vm_that_was_reclaimed_is_lost_until_it_is_booted_anew_and_is_then_still_to_move() {
    let host = TestHost::new();
    let (life, _vm) = with_vm(&host);
    let journal = &life.parts.journal;
    journal.begin_drain("one", Timestamp::now(), &DrainRequest::default()).unwrap();
    let rows = [moves("db", MoveState::InDoubt), moves("web", MoveState::InDoubt)];
    let placed: Vec<_> = rows.iter().enumerate().collect();
    journal.record_drain("one", &DrainStatus::begun(), &placed, &[]).unwrap();
    was_reclaimed(&life, "db");
    was_reclaimed(&life, "web");
    let [db, web] = <[MoveStatus; 2]>::try_from(shown(&life).status.unwrap().moves).unwrap();
    let says = |one: &MoveStatus| one.error.as_ref().unwrap().message.clone();
    assert_eq!((db.state, web.state), (MoveState::Lost, MoveState::Failed));
    assert!(says(&db).ends_with("on the operator's word"), "{db:?}");
    assert!(says(&web).contains("was booted again and runs here: drain again to move it"), "{web:?}");
}

fn course() -> Arc<Course> {
    let (kind, started_at) = (DrainKind::Drain, Timestamp::UNIX_EPOCH);
    let (status, cancelled) = (watch::Sender::new(DrainStatus::begun()), watch::Sender::new(false));
    Arc::new(Course { id: "of-a-test".into(), kind, started_at, request: None, status, cancelled })
}

#[test]
fn a_huge_vm_has_the_time_that_it_is_predicted_to_take() {
    let minutes = |minutes: u32| minutes * 60;
    let predicted_ms = |count| f64::from(minutes(count)) * 1_000.0;
    assert_eq!(migration_deadline_s(3_600, predicted_ms(73), 0.0), minutes(3 * 73 + 10));
    assert_eq!(migration_deadline_s(3_600, predicted_ms(16), 0.0), 3_600);
    assert_eq!(migration_deadline_s(7, 0.0, 0.0), minutes(10));
    assert_eq!(migration_deadline_s(7, f64::INFINITY, 9.0), u32::MAX);
    assert_eq!(migration_deadline_s(3_600, 0.0, 1_500.0), 3_602, "disks take longer");
}

#[tokio::test]
async fn what_panics_is_ended_and_what_is_aborted_is_left() {
    let under_way = UnderWay::default();
    let (tell, crashed) = oneshot::channel();
    let crash = async { panic!("an error in Drainpipe, of this test") };
    under_way.run(course(), crash, async move { tell.send(()).unwrap() });
    crashed.await.expect("the crash is seen");
    assert!(under_way.begin("a").is_err(), "until it has been written down");
    under_way.ended();
    assert!(under_way.begin("a").is_ok());

    let (tell, crashed) = oneshot::channel::<()>();
    under_way.run(course(), std::future::pending(), async move { tell.send(()).unwrap() });
    under_way.lock().take().unwrap().task.abort();
    crashed.await.expect_err("the agent stops in good order");
}
