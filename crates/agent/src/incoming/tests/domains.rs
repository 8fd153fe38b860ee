//! A domain, which others than its agent may let run once the last of it is taken.

use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::fake::{Act, Fault};
use drainpipe_hypervisor::{Exit, RunState, TargetVm};

use super::*;
use crate::test_host::domain;

/// A domain of which all is here, and its source has handed the last over.
fn let_domain_come(host: &TestHost, life: &Life) -> Arc<FakeVm> {
    let vm = let_come_as(domain("web"), host, life);
    life.block_on(complete(&life.parts.incoming, ID, Parcel::default())).unwrap();
    vm
}

/// The same, and somebody has let it run, whom its agent has not ordered to.
fn let_run_by_others(host: &TestHost, life: &Life) -> Arc<FakeVm> {
    let vm = let_domain_come(host, life);
    life.block_on(vm.take_last(Duration::ZERO)).unwrap();
    vm.guest_is(RunState::Running);
    vm
}

#[test]
fn its_last_is_taken_by_its_sources_order_to_run_alone() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_domain_come(&host, &life);
    assert_eq!(received(&life), Ok(IncomingView::Ready));
    assert_eq!(life.block_on(view(&life.parts.incoming, ID)), Ok(IncomingView::Ready));
    assert_eq!(vm.acts(), []);
    life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap();
    assert_eq!(vm.acts(), [Act::TakeLast, Act::Run]);
    assert_eq!((vm.state(), state(&life)), (RunState::Running, Some(IncomingState::Running)));
}

#[test]
fn one_whose_last_is_not_taken_is_not_recorded_to_run() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_domain_come(&host, &life);
    vm.fails(Act::TakeLast, Fault::Fails);
    let failed = life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap_err();
    assert!(failed.message.contains("could not take the state"), "{failed}");
    assert_eq!((vm.has_run(), state(&life)), (false, Some(IncomingState::Waiting)));
}

#[test]
fn one_that_is_discarded_is_ended_first() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_domain_come(&host, &life);
    life.block_on(discard(&life.parts.incoming, ID)).unwrap();
    assert_eq!(vm.acts(), [Act::EndUnrun, Act::DestroyUnrun]);
    assert_eq!((vm.alive(), state(&life)), (false, Some(IncomingState::Discarded)));
}

#[test]
fn one_that_others_have_let_run_is_not_discarded_and_stays() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_run_by_others(&host, &life);
    let refused = life.block_on(discard(&life.parts.incoming, ID)).unwrap_err();
    assert_eq!(refused.kind, ProblemKind::Conflict);
    assert!(refused.message.contains("others have let the VM run on here"), "{refused}");
    assert!(vm.alive() && life.parts.vms.contains("web"));
    assert_eq!(state(&life), Some(IncomingState::Running));
    assert_eq!(life.block_on(view(&life.parts.incoming, ID)), Ok(IncomingView::Running));
}

#[test]
fn one_of_which_nobody_says_whether_it_has_run_is_not_discarded() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_domain_come(&host, &life);
    vm.fails(Act::EndUnrun, Fault::Mute);
    life.block_on(discard(&life.parts.incoming, ID)).unwrap_err();
    assert_eq!((vm.alive(), state(&life)), (true, Some(IncomingState::Waiting)));
}

#[test]
fn one_that_others_have_let_run_and_that_has_ended_never_goes_back() {
    for restarts in [false, true] {
        let host = TestHost::new();
        let mut life = host.start();
        let vm = let_run_by_others(&host, &life);
        vm.ends(Exit::Signal(9));
        if restarts {
            drop(life);
            life = host.start();
        }
        life.block_on(discard(&life.parts.incoming, ID)).unwrap_err();
        assert_eq!(life.block_on(view(&life.parts.incoming, ID)), Ok(IncomingView::Running));
    }
}
