//! The source's orders, carried out on a fake hypervisor.

use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::fake::{Act, Fault};
use drainpipe_hypervisor::{Exit, RunState};

use super::*;

#[test]
fn a_vm_that_is_all_here_runs_by_its_sources_order_and_is_this_hosts() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    assert_eq!(received(&life), Ok(IncomingView::Waiting));
    vm.receives_all();
    assert_eq!(received(&life), Ok(IncomingView::Ready));
    for _ in 0..2 {
        life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap();
    }
    assert_eq!(vm.acts(), [Act::Run], "an order that is repeated does not touch it");
    assert_eq!((vm.state(), state(&life)), (RunState::Running, Some(IncomingState::Running)));
    assert!(life.parts.vms.contains("web"));
    life.block_on(finish(&life.parts.incoming, ID)).unwrap();
    assert_eq!(state(&life), Some(IncomingState::Finished));
    assert!(life.parts.incoming.entries.find(ID).is_none());
}

#[test]
fn what_is_not_all_here_does_not_run() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    let refused = life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap_err();
    assert!(refused.message.contains("part of the VM's state"), "{refused}");
    assert_eq!((vm.acts(), state(&life)), (vec![], Some(IncomingState::Waiting)));
}

#[test]
fn that_it_runs_is_recorded_before_it_does_and_is_not_taken_back_then() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    let incoming = &life.parts.incoming;
    vm.receives_all();
    vm.fails(Act::Run, Fault::Mute);
    life.block_on(run_by_order(incoming, ID)).unwrap_err();
    assert_eq!((vm.state(), state(&life)), (RunState::Paused, Some(IncomingState::Running)));
    // The source must not let go of its copy yet.
    assert_eq!(life.block_on(view(incoming, ID)), Ok(IncomingView::Ready));
    assert_eq!(life.block_on(discard(incoming, ID)).unwrap_err().kind, ProblemKind::Conflict);
    assert!(vm.alive());
    vm.succeeds(Act::Run);
    life.block_on(run_by_order(incoming, ID)).unwrap();
    assert_eq!(
        (vm.state(), life.block_on(view(incoming, ID))),
        (RunState::Running, Ok(IncomingView::Running))
    );
}

#[test]
fn what_was_discarded_never_runs() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    let incoming = &life.parts.incoming;
    vm.receives_all();
    life.block_on(discard(incoming, ID)).unwrap();
    assert_eq!((vm.alive(), vm.acts()), (false, vec![Act::DestroyUnrun]));
    let late = life.block_on(run_by_order(incoming, ID)).unwrap_err();
    assert_eq!(late.kind, ProblemKind::Conflict, "{late}");
    assert!(!vm.has_run() && !life.parts.vms.contains("web"));
    assert_eq!(life.block_on(view(incoming, ID)), Ok(IncomingView::Discarded));
}

#[test]
fn what_was_discarded_and_does_not_end_never_runs_either() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    let incoming = &life.parts.incoming;
    vm.receives_all();
    vm.fails(Act::DestroyUnrun, Fault::Fails);
    life.block_on(discard(incoming, ID)).unwrap_err();
    assert!(vm.alive());
    life.block_on(run_by_order(incoming, ID)).unwrap_err();
    assert!(!vm.has_run());
    vm.succeeds(Act::DestroyUnrun);
    // The order that came too late removes it.
    life.block_on(run_by_order(incoming, ID)).unwrap_err();
    assert!(!vm.alive() && !vm.has_run());
}

#[test]
fn one_that_its_hypervisor_refuses_to_run_is_given_back_as_it_arrived() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.receives_all();
    vm.fails(Act::Run, Fault::Refused);
    let refused = life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap_err();
    assert!(refused.message.contains("refused Run"), "{refused}");
    assert_eq!((vm.alive(), vm.has_run()), (false, false));
    assert_eq!(life.block_on(view(&life.parts.incoming, ID)), Ok(IncomingView::Discarded));
}

#[test]
fn one_that_may_have_run_for_a_moment_is_not_given_back() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.receives_all();
    vm.guest_is(RunState::InternalError);
    vm.fails(Act::Run, Fault::Refused);
    life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap_err();
    assert_eq!(state(&life), Some(IncomingState::Running));
    assert!(vm.alive() && life.parts.vms.contains("web"));
}

#[test]
fn one_whose_process_ends_as_it_is_told_to_run_is_not_given_back() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.receives_all();
    vm.fails(Act::Run, Fault::Ends);
    life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap_err();
    assert_eq!(state(&life), Some(IncomingState::Running));
    life.block_on(discard(&life.parts.incoming, ID)).unwrap_err();
}

#[test]
fn a_hypervisor_that_says_nothing_may_have_the_only_copy() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.receives_all();
    vm.is_mute();
    let unknown = life.block_on(view(&life.parts.incoming, ID)).unwrap_err();
    assert!(unknown.kind == ProblemKind::Failed && unknown.message.contains("does not answer"), "{unknown}");
    assert!(vm.alive());
}

#[test]
fn its_source_hears_why_not_all_is_here() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.transfer_fails("a page is damaged");
    let failed = received(&life).unwrap_err();
    assert!(failed.message.ends_with("could not take the state: a page is damaged"), "{failed}");
    vm.ends(Exit::Signal(11));
    let ended = received(&life).unwrap_err();
    assert!(ended.message.ends_with("has ended by signal 11"), "{ended}");
}

#[test]
fn its_source_hears_at_once_that_all_is_here() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    let waiting = wait_received(&life.parts.incoming, ID, false, Duration::from_mins(1));
    let arrives = async {
        tokio::task::yield_now().await;
        vm.receives_all();
    };
    let (said, ()) = life.block_on(async { tokio::join!(waiting, arrives) });
    assert_eq!(said, Ok(IncomingView::Ready));
}
