//! VMs on their way whose source says nothing.

use drainpipe_engine::migration::target::silence::{Watch, WatchAction, WatchEvent};
use drainpipe_hypervisor::RunState;
use drainpipe_hypervisor::fake::{Act, Fault};

use super::*;
use crate::incoming::silence::perform;
use drainpipe_api_types::HandOverView;

/// A source that says this about the hand-over when asked, and otherwise nothing.
fn says(said: HandOverView) -> TestHost {
    let mut host = TestHost::new();
    host.source_answers(says_of_hand_over(said));
    host
}

/// Looks after the VM once its source has been silent for long.
fn look_after(life: &Life) {
    let incoming = &life.parts.incoming;
    let entry = incoming.entries.find(ID).expect("it is on its way");
    be_silent(&entry);
    life.block_on(async {
        let (mut watch, mut event) = (Watch::begin().0, WatchEvent::Done);
        loop {
            let memory = *entry.memory();
            let action = watch.handle(entry.now_ms(), &memory, event);
            if action == WatchAction::Rest {
                return;
            }
            event = perform(incoming, &entry, action).await;
        }
    });
}

#[test]
fn one_that_its_source_has_given_up_is_discarded_though_all_is_here() {
    let host = says(HandOverView::Refused);
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.receives_all();
    look_after(&life);
    assert_eq!((vm.alive(), vm.has_run()), (false, false));
    assert!(life.parts.incoming.entries.find(ID).is_none());
}

#[test]
fn one_that_was_handed_over_runs_though_no_order_came() {
    let host = says(HandOverView::HandedOver);
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.receives_all();
    look_after(&life);
    assert_eq!((vm.state(), state(&life)), (RunState::Running, Some(IncomingState::Running)));
}

#[test]
fn one_of_which_its_source_has_not_decided_is_waited_for() {
    let host = says(HandOverView::Pending);
    let life = host.start();
    let vm = let_come(&host, &life);
    look_after(&life);
    assert!(vm.alive() && life.parts.incoming.entries.are_receiving());
}

#[test]
fn one_whose_source_is_gone_is_given_up_only_while_a_part_is_missing() {
    for host in [TestHost::new(), says(HandOverView::Unknown)] {
        let life = host.start();
        let vm = let_come(&host, &life);
        vm.receives_all();
        look_after(&life);
        assert!(vm.alive(), "it may be the only copy that can run");
        assert_eq!((state(&life), vm.has_run()), (Some(IncomingState::Waiting), false));
        vm.goes_to(MigrationStatus::Active);
        vm.guest_is(RunState::Inmigrate);
        *life.parts.incoming.entries.find(ID).unwrap().memory() = Memory::new(0.0);
        look_after(&life);
        assert!(!vm.alive());
    }
}

#[test]
fn one_whose_hypervisor_says_nothing_is_kept() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.is_mute();
    look_after(&life);
    assert!(vm.alive());
}

#[test]
fn what_was_discarded_and_did_not_end_is_ended_later() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.fails(Act::DestroyUnrun, Fault::Fails);
    life.block_on(discard(&life.parts.incoming, ID)).unwrap_err();
    vm.succeeds(Act::DestroyUnrun);
    look_after(&life);
    assert!(!vm.alive());
}
