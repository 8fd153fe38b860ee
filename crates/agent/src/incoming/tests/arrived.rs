//! What an earlier run of an agent has left, as the next one finds it.

use std::path::PathBuf;

use drainpipe_engine::problem::ProblemKind;
use drainpipe_engine::storage::DiskImage;
use drainpipe_hypervisor::fake::{Act, Fault};
use drainpipe_hypervisor::{Exit, Hypervisor, RunState};

use super::*;
use crate::incoming::stop_ordered;
use drainpipe_api_types::HandOverView;

/// A VM that its agent has recorded to run, and whose hypervisor has not obeyed.
fn ordered_and_mute(host: &TestHost, life: &Life) -> Arc<FakeVm> {
    let vm = let_come(host, life);
    vm.receives_all();
    vm.fails(Act::Run, Fault::Mute);
    life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap_err();
    vm
}

#[test]
fn what_is_recorded_to_run_runs_though_the_agent_ended_before_the_deed() {
    let host = TestHost::new();
    let life = host.start();
    let vm = ordered_and_mute(&host, &life);
    drop(life);
    vm.succeeds(Act::Run);
    let life = host.start();
    assert_eq!(vm.state(), RunState::Running);
    assert!(life.parts.vms.running("web").is_some());
}

#[test]
fn one_on_its_way_is_taken_up_and_runs_by_its_sources_order() {
    let host = TestHost::new();
    let vm = let_come(&host, &host.start());
    vm.receives_all();
    let life = host.start();
    assert!(!vm.has_run());
    assert_eq!(life.block_on(view(&life.parts.incoming, ID)), Ok(IncomingView::Ready));
    life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap();
    assert_eq!(vm.state(), RunState::Running);
}

#[test]
fn one_on_its_way_whose_hypervisor_does_not_answer_is_taken_up_when_it_does() {
    let host = TestHost::new();
    let vm = let_come(&host, &host.start());
    vm.receives_all();
    host.hypervisor.fails(Act::Attach, Fault::Mute);
    let life = host.start();
    let unknown = life.block_on(view(&life.parts.incoming, ID)).unwrap_err();
    assert_eq!(unknown.kind, ProblemKind::Failed, "{unknown}");
    assert!(vm.alive());
    host.hypervisor.succeeds(Act::Attach);
    assert_eq!(received(&life), Ok(IncomingView::Ready));
    life.block_on(run_by_order(&life.parts.incoming, ID)).unwrap();
    assert_eq!(vm.state(), RunState::Running);
}

#[test]
fn the_memory_of_one_on_its_way_that_does_not_answer_is_promised_as_far_as_it_is_not_taken() {
    let host = TestHost::new();
    let vm = let_come(&host, &host.start());
    host.hypervisor.fails(Act::Attach, Fault::Mute);
    let life = host.start();
    let promise = || life.parts.incoming.entries.find(ID).unwrap().promise(&life.parts.vms);
    assert!(promise().is_some_and(|promise| promise.resident_bytes.is_some()));
    vm.ends(Exit::Signal(9));
    assert_eq!(promise(), None, "nothing more comes to it");
}

#[test]
fn one_on_its_way_whose_process_has_ended_is_given_up() {
    let host = TestHost::new();
    let vm = let_come(&host, &host.start());
    vm.ends(Exit::Signal(9));
    let life = host.start();
    assert_eq!(state(&life), Some(IncomingState::Discarded));
    assert_eq!(host.hypervisor.with_files().unwrap(), []);
}

/// One that its agent could not end, and has left.
fn discarded_and_not_ended(host: &TestHost) -> Arc<FakeVm> {
    let life = host.start();
    let vm = let_come(host, &life);
    vm.fails(Act::DestroyUnrun, Fault::Fails);
    life.block_on(discard(&life.parts.incoming, ID)).unwrap_err();
    drop(life);
    vm
}

#[test]
fn what_was_discarded_and_did_not_end_is_ended_at_the_next_start() {
    let host = TestHost::new();
    let vm = discarded_and_not_ended(&host);
    assert!(vm.alive());
    let _life = host.start();
    assert!(!vm.alive());
}

#[test]
fn what_was_discarded_and_does_not_end_at_the_next_start_is_ended_later() {
    let host = TestHost::new();
    let vm = discarded_and_not_ended(&host);
    // As if its manager were away too.
    host.hypervisor.fails(Act::EndGivenUp, Fault::Fails);
    host.hypervisor.fails(Act::Attach, Fault::Fails);
    let life = host.start();
    assert!(vm.alive());
    host.hypervisor.succeeds(Act::EndGivenUp);
    life.block_on(async {
        while !life.parts.journal.discarded_incoming_vms().unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(!vm.alive());
}

#[test]
fn one_that_was_given_back_to_its_source_is_forgotten_where_it_has_ended() {
    let mut host = TestHost::new();
    host.source_answers(says_of_hand_over(HandOverView::Refused));
    let life = host.start();
    let vm = ordered_and_mute(&host, &life);
    drop(life);
    vm.ends(Exit::Signal(9));
    let life = host.start();
    life.block_on(async {
        while life.parts.vms.contains("web") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert_eq!(state(&life), Some(IncomingState::Discarded));
}

#[test]
fn one_that_does_not_say_whether_it_runs_ends_only_by_force() {
    let host = TestHost::new();
    let life = host.start();
    let vm = ordered_and_mute(&host, &life);
    let stop = |force| life.block_on(stop_ordered(&life.parts.incoming, "web", force));
    assert_eq!(stop(false).unwrap_err().kind, ProblemKind::Conflict);
    assert!(vm.alive());
    assert_eq!(stop(true), Ok(true));
    assert!(!vm.alive());
    // Like any VM that has ended where it ran.
    assert!(life.parts.vms.contains("web"));
}

/// A disk that was made for the VM by the migration that brings it.
fn made_disk(host: &TestHost, life: &Life) -> PathBuf {
    let directory = &host.config().vms.directories[0];
    std::fs::create_dir_all(directory).unwrap();
    let path = directory.join("web.img");
    let (text, incoming) = (path.to_str().unwrap(), &life.parts.incoming);
    life.parts.journal.make_disk(ID, text).unwrap();
    let record = |file| Ok(life.parts.journal.disk_made(ID, text, file)?);
    life.block_on(incoming.files.make(text, ID, (DiskImage::Raw, 1 << 20), record)).unwrap();
    path
}

#[test]
fn a_disk_made_for_a_vm_that_was_given_up_goes_but_not_if_the_vm_is_here_since() {
    for is_here in [false, true] {
        let host = TestHost::new();
        let life = host.start();
        life.parts.journal.begin_incoming(ID, "source", &definition("web")).unwrap();
        let path = made_disk(&host, &life);
        life.parts.journal.discard_incoming(ID).unwrap();
        if is_here {
            life.parts.vms.create(definition("web")).unwrap();
        }
        drop(life);
        let life = host.start();
        assert_eq!(path.exists(), is_here);
        assert_eq!(life.parts.journal.made_disks(ID).unwrap(), vec![]);
        drop(life);
        host.start();
        assert_eq!(path.exists(), is_here, "nor at a later start");
    }
}

#[test]
fn the_disks_of_a_vm_that_runs_here_are_its_own() {
    let host = TestHost::new();
    let life = host.start();
    let vm = ordered_and_mute(&host, &life);
    made_disk(&host, &life);
    assert_eq!(life.parts.journal.made_disks(ID).unwrap().len(), 1);
    drop(life);
    vm.succeeds(Act::Run);
    let life = host.start();
    assert_eq!(state(&life), Some(IncomingState::Finished));
    assert_eq!(life.parts.journal.made_disks(ID).unwrap(), vec![]);
}
