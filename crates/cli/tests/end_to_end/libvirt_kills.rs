//! libvirt's domains, and what is killed while they move: agents, libvirt's daemons, QEMUs. One copy runs, always, and it
//! runs on; by QEMU's own word, and by what libvirt of both hosts says.

use std::thread;
use std::time::Duration;

use drainpipe_engine::result::Outcome;
use rustix::process::{Signal, kill_process};

use crate::Test;
use crate::program::{Output, drainpipe};
use crate::scene::{
    GUARDED_SILENCE_MAX, HeldJournal, MEMORY_MIB, SLOW_MBPS, Scene, assert_failed, cut_off, hold_journal,
    rejoin, result_of, wait_until_handed_over,
};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("agents_are_killed_while_a_domain_is_copied", agents_are_killed_while_a_domain_is_copied),
    ("agents_are_killed_at_the_hand_over_of_a_domain", agents_are_killed_at_the_hand_over_of_a_domain),
    ("libvirt_ends_while_a_domain_is_copied", libvirt_ends_while_a_domain_is_copied),
    ("libvirt_ends_at_the_hand_over_of_a_domain", libvirt_ends_at_the_hand_over_of_a_domain),
    ("others_meddle_with_a_domain_that_moves", others_meddle_with_a_domain_that_moves),
];

#[track_caller]
fn scene() -> Scene {
    let lab = TestLab::up(&["--libvirt", "--link", SLOW_MBPS, "--link", SLOW_MBPS]);
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "");
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    Scene::of(lab, guest)
}

fn qemu_says(lab: &TestLab, host: &str) -> Option<String> {
    lab.qemu_says(host, "web")
}

/// Fails the test unless it runs whole on this host alone, and libvirt of the other knows nothing of it.
#[track_caller]
fn assert_settled(scene: &Scene, host: &str) {
    let other = if host == "a" { "b" } else { "a" };
    // A libvirt that has just come back takes a moment until it has seen what its QEMUs do.
    eventually("libvirt sees that it runs", || {
        scene.lab.domain_state(host, "web").as_deref() == Some("running")
    });
    eventually("what its libvirt could not end is ended", || scene.lab.qemu_pid(other, "web").is_none());
    scene.assert_settled(host);
    assert_eq!(qemu_says(&scene.lab, host).as_deref(), Some("running"));
    eventually("libvirt of the other host has forgotten it", || {
        scene.lab.domain_state(other, "web").is_none()
    });
}

#[track_caller]
fn wait_without_guard(scene: &Scene) {
    eventually("no guard is left", || scene.lab.pids("a", &[" guard --migration "]).is_empty());
}

/// Its libvirt, and back when the agent has seen that it answers.
#[track_caller]
fn start_libvirt(scene: &Scene, host: &str) {
    let answers = || scene.lab.agent_log(host).matches("its VMs can be moved").count();
    let before = answers();
    scene.lab.fault(&format!("libvirt-start {host}"));
    eventually("libvirt answers its agent", || answers() > before);
}

/// Ends libvirt, which may refuse to end by TERM in the middle of a migration: then it is killed, as systemd does.
#[track_caller]
fn end_libvirt(scene: &Scene, host: &str, ending: &str) {
    let lab = &scene.lab;
    let stopped = drainpipe(&["lab", "fault", lab.name(), &format!("libvirt-{ending}"), host]);
    if stopped.code != 0 {
        lab.fault(&format!("libvirt-kill {host}"));
    }
}

/// Keeps the hand-over from being recorded; back when the guest stands still on both hosts, whole.
#[track_caller]
fn hold_until_all_is_there(scene: &Scene) -> HeldJournal {
    let held = hold_journal(&scene.lab, "a");
    eventually("all state is on the target", || {
        ["a", "b"].map(|host| qemu_says(&scene.lab, host))
            == ["postmigrate", "paused"].map(|state| Some(state.into()))
    });
    thread::sleep(Duration::from_millis(300));
    held
}

#[track_caller]
fn assert_completed(output: &Output) {
    assert_eq!(result_of(output).outcome, Outcome::Completed, "{output:#?}");
}

fn agents_are_killed_while_a_domain_is_copied() {
    let scene = scene();
    for killed in [&["a"][..], &["b"], &["a", "b"]] {
        let heartbeat = scene.guest.heartbeat();
        let migrating = scene.migrate(&[]);
        for host in killed {
            scene.lab.stop_agent(host, Signal::KILL);
        }
        if killed.contains(&"a") {
            wait_without_guard(&scene);
        }
        scene.guest.assert_answers();
        assert_eq!(qemu_says(&scene.lab, "a").as_deref(), Some("running"), "{killed:?}");
        for host in killed {
            scene.lab.start_agent(host);
        }
        assert_ne!(migrating.wait().code, 0, "{killed:?}");
        assert_settled(&scene, "a");
        assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{killed:?}: {:?}", heartbeat.statistics());
    }
    scene.assert_moves("b");
}

fn agents_are_killed_at_the_hand_over_of_a_domain() {
    let scene = scene();
    the_sources_agent_is_killed_before_the_record(&scene);
    the_targets_agent_is_killed_before_the_record(&scene);
    the_sources_agent_is_killed_after_the_record(&scene);
}

fn the_sources_agent_is_killed_before_the_record(scene: &Scene) {
    let heartbeat = scene.guest.heartbeat();
    let migrating = scene.migrate(&[]);
    let held = hold_until_all_is_there(scene);
    scene.lab.stop_agent("a", Signal::KILL);
    held.release();
    drop(migrating.wait());
    wait_without_guard(scene);
    eventually("it runs on", || qemu_says(&scene.lab, "a").as_deref() == Some("running"));
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.lab.start_agent("a");
    assert_settled(scene, "a");
}

fn the_targets_agent_is_killed_before_the_record(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_until_all_is_there(scene);
    scene.lab.stop_agent("b", Signal::KILL);
    held.release();
    wait_until_handed_over(&scene.lab);
    scene.lab.start_agent("b");
    drop(migrating.wait());
    eventually("it is decided", || scene.migrations()[0].progress.is_none());
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    assert_settled(scene, "b");
    scene.take_back();
}

/// The target hears nothing until then.
fn the_sources_agent_is_killed_after_the_record(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_until_all_is_there(scene);
    cut_off(&scene.lab, "b");
    held.release();
    wait_until_handed_over(&scene.lab);
    scene.lab.stop_agent("a", Signal::KILL);
    drop(migrating.wait());
    rejoin(&scene.lab, "b");
    eventually("its guard orders the target to run it", || {
        qemu_says(&scene.lab, "b").as_deref() == Some("running")
    });
    assert_ne!(qemu_says(&scene.lab, "a").as_deref(), Some("running"));
    scene.lab.start_agent("a");
    assert_settled(scene, "b");
}

fn libvirt_ends_while_a_domain_is_copied() {
    let scene = scene();
    for host in ["a", "b"] {
        for ending in ["kill", "stop"] {
            let heartbeat = scene.guest.heartbeat();
            let migrating = scene.migrate(&[]);
            end_libvirt(&scene, host, ending);
            let output = migrating.wait();
            // Of libvirt, or of the QEMU that libvirt had for it.
            assert_failed(&output, "");
            scene.guest.assert_answers();
            assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{ending}: {:?}", heartbeat.statistics());
            start_libvirt(&scene, host);
            assert_settled(&scene, "a");
        }
    }
    the_sources_libvirt_and_agent_are_killed(&scene);
    the_sources_libvirt_is_killed_and_its_agent_stands_still(&scene);
    scene.assert_moves("b");
}

fn the_sources_libvirt_and_agent_are_killed(scene: &Scene) {
    let heartbeat = scene.guest.heartbeat();
    let migrating = scene.migrate(&[]);
    scene.lab.fault("libvirt-kill a");
    scene.lab.stop_agent("a", Signal::KILL);
    drop(migrating.wait());
    wait_without_guard(scene);
    scene.guest.assert_answers();
    scene.lab.start_agent("a");
    start_libvirt(scene, "a");
    assert_settled(scene, "a");
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
}

/// QEMU halts before its switch-over, and nobody but the guard is there to go back.
fn the_sources_libvirt_is_killed_and_its_agent_stands_still(scene: &Scene) {
    let heartbeat = scene.guest.heartbeat();
    let migrating = scene.migrate(&[]);
    let agent = scene.lab.agent_pid("a").unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    scene.lab.fault("libvirt-kill a");
    wait_without_guard(scene);
    scene.guest.assert_answers();
    kill_process(agent, Signal::CONT).unwrap();
    assert_ne!(migrating.wait().code, 0);
    start_libvirt(scene, "a");
    assert_settled(scene, "a");
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
}

fn libvirt_ends_at_the_hand_over_of_a_domain() {
    let scene = scene();
    for (host, ending) in [("b", "kill"), ("a", "kill"), ("b", "stop"), ("a", "stop")] {
        let migrating = scene.migrate(&[]);
        let held = hold_until_all_is_there(&scene);
        end_libvirt(&scene, host, ending);
        held.release();
        let output = migrating.wait();
        start_libvirt(&scene, host);
        assert_completed(&output);
        assert_settled(&scene, "b");
        scene.take_back();
    }
}

fn others_meddle_with_a_domain_that_moves() {
    let scene = scene();
    its_job_is_aborted(&scene);
    qemus_are_killed_while_it_is_copied(&scene);
    it_is_resumed_by_others_at_the_hand_over(&scene);
    qemu_of_source_dies_after_the_hand_over(&scene);
}

fn its_job_is_aborted(scene: &Scene) {
    for option in ["tcp", "multichannel"] {
        let migrating = scene.migrate(&["--option", option]);
        scene.lab.virsh("a", &["domjobabort", "web"]).done();
        // The target's QEMU ends with it, and which of the two is told is chance on a busy host.
        assert_failed(&migrating.wait(), "");
        assert_settled(scene, "a");
    }
}

fn qemus_are_killed_while_it_is_copied(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.kill_qemu("b");
    assert_failed(&migrating.wait(), "its QEMU on b has ended");
    assert_settled(scene, "a");
}

/// libvirt keeps them waiting for as long as the domain is protected.
fn it_is_resumed_by_others_at_the_hand_over(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_until_all_is_there(scene);
    let resuming = ["a", "b"].map(|host| scene.lab.start_virsh(host, &["resume", "web"]));
    thread::sleep(Duration::from_secs(1));
    let states = ["a", "b"].map(|host| qemu_says(&scene.lab, host));
    held.release();
    assert_eq!(states, ["postmigrate", "paused"].map(|state| Some(state.into())));
    assert_completed(&migrating.wait());
    for resuming in resuming {
        // Both are told something; what became of the domain is seen below.
        drop(resuming.wait());
    }
    assert_settled(scene, "b");
    scene.take_back();
}

fn qemu_of_source_dies_after_the_hand_over(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_until_all_is_there(scene);
    cut_off(&scene.lab, "b");
    held.release();
    wait_until_handed_over(&scene.lab);
    scene.kill_qemu("a");
    rejoin(&scene.lab, "b");
    drop(migrating.wait());
    assert_settled(scene, "b");
}
