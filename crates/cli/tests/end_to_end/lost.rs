//! A VM whose QEMU dies on the source: in each part of a migration, and while nothing moves it.

use std::fs;

use drainpipe_api_types::VmState;
use drainpipe_engine::migration::result::{MigrationResult, Outcome, SourceVm};
use rustix::process::{Signal, kill_process};

use crate::Test;
use crate::program::{LOST, Output, Running};
use crate::scene::{Scene, result_of};
use crate::support::eventually;
use crate::switch_over_faults::hold_until_all_is_there;
use crate::whole;

pub(crate) const TESTS: &[Test] = &[("a_qemu_dies_and_that_is_told", a_qemu_dies_and_that_is_told)];

fn a_qemu_dies_and_that_is_told() {
    let scene = Scene::set();
    it_dies_while_nothing_moves_it(&scene);
    for &(signal, number) in whole::first_or_all(1, &[(Signal::KILL, 9), (Signal::ABORT, 6)]) {
        it_dies_in_flight(&scene, signal, number);
    }
    it_dies_while_the_vm_is_paused(&scene);
    scene.assert_moves("b");
}

fn it_dies_while_nothing_moves_it(scene: &Scene) {
    die(scene, Signal::ABORT);
    assert_died(scene, 6);
}

fn it_dies_in_flight(scene: &Scene, signal: Signal, number: i32) {
    let migrating: Running = scene.migrate(&[]);
    die(scene, signal);
    assert_lost(&migrating.wait(), number);
    assert_died(scene, number);
}

/// The hand-over is not recorded, and what the target has is given up.
fn it_dies_while_the_vm_is_paused(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
    kill_process(scene.lab.agent_pid("a").unwrap(), Signal::STOP).unwrap();
    held.release();
    die(scene, Signal::KILL);
    scene.lab.stop_agent("a", Signal::KILL);
    drop(migrating.wait());
    scene.lab.start_agent("a");
    let result = scene.last_result();
    // The record may have been made before the agent was frozen, or not.
    if result.outcome == Outcome::Completed {
        scene.assert_settled("b");
        scene.take_back();
    } else {
        assert_is_lost(&result);
        boot_anew(scene);
    }
}

#[track_caller]
fn die(scene: &Scene, signal: Signal) {
    kill_process(scene.lab.qemu_pid("a", "web").expect("its QEMU runs"), signal).unwrap();
}

#[track_caller]
fn assert_lost(output: &Output, signal: i32) {
    assert_eq!(output.code, LOST, "{output:#?}");
    let result = result_of(output);
    assert_is_lost(&result);
    let error = result.failure.error.unwrap_or_default();
    assert!(error.contains(&format!("signal {signal}")), "{error}");
}

#[track_caller]
fn assert_is_lost(result: &MigrationResult) {
    assert_eq!(
        (result.outcome, result.failure.source_vm),
        (Outcome::Lost, Some(SourceVm::Ended)),
        "{result:#?}"
    );
    assert!(
        result.failure.error.as_ref().is_some_and(|error| error.contains("the VM is lost")),
        "{result:#?}"
    );
}

/// Fails the test unless everybody reports the VM as lost. It can be booted again.
#[track_caller]
fn assert_died(scene: &Scene, signal: i32) {
    let how = format!("signal {signal}");
    let died = || {
        let list = scene.lab.vms();
        matches!(&list.vms[..], [vm] if vm.host == "a" && vm.state == VmState::Stopped
            && vm.ended.as_ref().is_some_and(|ended| ended.contains(&how)))
    };
    eventually("it is listed as died, and by what", died);
    let log = fs::read_to_string(scene.lab.directory("a").join("agent.log")).unwrap();
    let is_reported = |line: &str| line.contains("its QEMU has died") && line.contains(&how);
    assert!(log.lines().any(is_reported), "{log}");
    assert!(scene.lab.drainpipe(&["vms"]).done().contains("died"));
    boot_anew(scene);
}

#[track_caller]
fn boot_anew(scene: &Scene) {
    scene.lab.start_again("a", "web");
    scene.guest.wait_until_ready();
    let list = scene.lab.vms();
    assert!(list.vms.iter().all(|vm| vm.ended.is_none()), "{list:#?}");
}
