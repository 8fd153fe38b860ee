//! VMs that run here before all of their memory has arrived.

use drainpipe_engine::migration::target::order::Order;
use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::RunState;
use drainpipe_hypervisor::fake::{Act, Fault};

use super::*;
use crate::incoming::order::carry_out;
use drainpipe_api_types::ConnectionRequest;
/// A VM that has what it needs to run here, and whose rest is to follow.
fn in_part(host: &TestHost, life: &Life) -> Arc<FakeVm> {
    let vm = let_come(host, life);
    let incoming = &life.parts.incoming;
    incoming.journal.allow_post_copy(ID).unwrap();
    incoming.entries.find(ID).unwrap().memory().allow_post_copy();
    vm.receives_a_part();
    vm
}

/// The same, and it runs here.
fn runs_in_part(host: &TestHost, life: &Life) -> Arc<FakeVm> {
    let vm = in_part(host, life);
    life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap();
    vm
}

#[test]
fn it_runs_by_its_sources_order_and_waits_for_the_rest() {
    let host = TestHost::new();
    let life = host.start();
    let vm = in_part(&host, &life);
    let incoming = &life.parts.incoming;
    assert_eq!(life.block_on(view(incoming, ID)), Ok(IncomingView::ReadyInPart));
    life.block_on(run_by_order(incoming, ID)).unwrap();
    assert_eq!(vm.state(), RunState::Running);
    assert_eq!(life.block_on(view(incoming, ID)), Ok(IncomingView::RunningInPart));
    vm.receives_all();
    assert_eq!(life.block_on(view(incoming, ID)), Ok(IncomingView::Running));
}

#[test]
fn by_the_journals_alone_it_does_not_run() {
    let host = TestHost::new();
    let life = host.start();
    let vm = in_part(&host, &life);
    life.block_on(carry_out(&life.parts.incoming, ID, Order::Run { is_sources: false })).unwrap_err();
    assert_eq!((vm.has_run(), state(&life)), (false, Some(IncomingState::Waiting)));
}

#[test]
fn it_is_not_given_back_for_its_source_cannot_run_it() {
    let host = TestHost::new();
    let life = host.start();
    let vm = in_part(&host, &life);
    vm.fails(Act::Run, Fault::Refused);
    life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap_err();
    assert_eq!((vm.alive(), state(&life)), (true, Some(IncomingState::Running)));
}

fn to_connect_again(attempt: Option<u64>) -> ConnectionRequest {
    let mut request = serde_json::to_value(connect::over_loopback()).unwrap();
    request["plan"]["post_copy"] = true.into();
    ConnectionRequest { attempt, ..serde_json::from_value(request).unwrap() }
}

#[test]
fn it_listens_again_once_its_connection_is_cut() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs_in_part(&host, &life);
    life.block_on(connect_again(&life.parts.incoming, ID, to_connect_again(None))).unwrap();
    assert_eq!(vm.acts(), [Act::Run, Act::CutMigration, Act::RecoverListen]);
    vm.receives_all();
    life.block_on(finish(&life.parts.incoming, ID)).unwrap();
}

#[test]
fn an_attempt_to_connect_that_its_source_has_given_up_cuts_no_later_one_off() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs_in_part(&host, &life);
    let attempt =
        |attempt| life.block_on(connect_again(&life.parts.incoming, ID, to_connect_again(Some(attempt))));
    attempt(2).unwrap();
    assert_eq!(attempt(1).unwrap_err().kind, ProblemKind::Conflict);
    assert_eq!(vm.acts(), [Act::Run, Act::CutMigration, Act::RecoverListen]);
    attempt(3).unwrap();
    assert_eq!(vm.acts()[3..], [Act::CutMigration, Act::RecoverListen]);
    vm.receives_all();
    life.block_on(finish(&life.parts.incoming, ID)).unwrap();
}

#[test]
fn it_ends_only_while_a_part_is_missing() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs_in_part(&host, &life);
    let incoming = &life.parts.incoming;
    vm.receives_all();
    assert_eq!(life.block_on(end_part(incoming, ID)).unwrap_err().kind, ProblemKind::Conflict);
    assert!(vm.alive());
    vm.goes_to(MigrationStatus::PostcopyPaused);
    life.block_on(end_part(incoming, ID)).unwrap();
    assert!(!vm.alive());
}

#[test]
fn one_that_says_nothing_since_its_source_vanished_is_cut_off_and_ended() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs_in_part(&host, &life);
    let incoming = &life.parts.incoming;
    // Its main thread waits for a page; out-of-band commands get through.
    vm.fails(Act::Migration, Fault::Mute);
    life.block_on(end_part(incoming, ID)).unwrap();
    assert!(!vm.alive() && vm.acts().contains(&Act::CutMigration));
}

#[test]
fn one_that_says_nothing_and_cannot_be_cut_off_may_have_got_all() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs_in_part(&host, &life);
    let incoming = &life.parts.incoming;
    vm.receives_all();
    vm.fails(Act::Migration, Fault::Mute);
    let kept = life.block_on(end_part(incoming, ID)).unwrap_err();
    assert!(kept.message.contains("vm stop web --force") && vm.alive(), "{kept}");
}
