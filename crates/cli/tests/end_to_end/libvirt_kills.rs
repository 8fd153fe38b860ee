//! libvirt's domains, while agents, libvirt's daemons and QEMUs are killed during a migration. One copy always runs,
//! and goes on running, according to QEMU itself and to libvirt on both hosts.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_api_types::VmState;
use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::step::Step;
use rustix::process::{Pid, Signal, kill_process};

use crate::Test;
use crate::backend::Backend;
use crate::guest::Guest;
use crate::program::{LOST, Output, Running, drainpipe};
use crate::scene::{
    HeldJournal, MEMORY_MIB, SLOW_MBPS, Scene, assert_failed, cut_off, hold_journal, rejoin, result_of, step,
    wait_until_handed_over, wait_until_told_to_run,
};
use crate::silences::GUARDED_SILENCE_MAX;
use crate::support::{TestLab, eventually};
use crate::whole;

pub(crate) const TESTS: &[Test] = &[
    ("agents_are_killed_while_a_domain_is_copied", agents_are_killed_while_a_domain_is_copied),
    ("agents_are_killed_at_the_hand_over_of_a_domain", agents_are_killed_at_the_hand_over_of_a_domain),
    ("libvirt_ends_while_a_domain_is_copied", libvirt_ends_while_a_domain_is_copied),
    ("libvirt_ends_at_the_hand_over_of_a_domain", libvirt_ends_at_the_hand_over_of_a_domain),
    ("others_meddle_with_a_domain_that_moves", others_meddle_with_a_domain_that_moves),
    ("a_domain_that_its_owner_suspends_stays_suspended", a_domain_that_its_owner_suspends_stays_suspended),
    ("a_qemu_that_hangs_keeps_no_other_domain_waiting", a_qemu_that_hangs_keeps_no_other_domain_waiting),
    ("libvirt_ends_as_the_guest_is_paused", libvirt_ends_as_the_guest_is_paused),
    ("a_libvirt_is_mute_for_a_while", a_libvirt_is_mute_for_a_while),
    ("a_domain_whose_qemu_dies_is_defined_on_one_host", a_domain_whose_qemu_dies_is_defined_on_one_host),
];

/// How often an agent asks its libvirt when that reports nothing by itself, and some slack.
const ASKED_WITHIN: Duration = Duration::from_secs(15);

#[track_caller]
fn scene() -> Scene {
    scene_in(TestLab::up(&["--libvirt", "--link", SLOW_MBPS, "--link", SLOW_MBPS]))
}

#[track_caller]
fn scene_in(lab: TestLab) -> Scene {
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "");
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    Scene::of(lab, guest)
}

fn qemu_says(lab: &TestLab, host: &str) -> Option<String> {
    lab.qemu_says(host, "web")
}

/// Fails the test unless the domain runs intact on this host alone, and the other host's libvirt does not know it.
#[track_caller]
fn assert_settled(scene: &Scene, host: &str) {
    let other = if host == "a" { "b" } else { "a" };
    // A restarted libvirt takes a moment to see what its QEMUs do.
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

/// Starts its libvirt, and returns once its agent knows that it answers. An agent that did not ask meanwhile reports
/// nothing, but has asked the new libvirt a while later.
#[track_caller]
fn start_libvirt(scene: &Scene, host: &str) {
    const ANSWERS: &str = "its VMs can be moved";
    const SILENT: &str = "does not answer: its VMs stay";
    let answers = || scene.lab.agent_log(host).matches(ANSWERS).count();
    let before = answers();
    scene.lab.fault(&format!("libvirt-start {host}"));
    let started = Instant::now();
    eventually("libvirt answers its agent", || {
        let log = scene.lab.agent_log(host);
        let missed_nothing = log.rfind(ANSWERS) > log.rfind(SILENT);
        answers() > before || missed_nothing && started.elapsed() > ASKED_WITHIN
    });
}

/// Ends libvirt. If it refuses to end by TERM in the middle of a migration, it is killed, as systemd would do.
#[track_caller]
fn end_libvirt(scene: &Scene, host: &str, ending: &str) {
    let lab = &scene.lab;
    let stopped = drainpipe(&["lab", "fault", lab.name(), &format!("libvirt-{ending}"), host]);
    if stopped.code != 0 {
        lab.fault(&format!("libvirt-kill {host}"));
    }
}

/// Like [`Scene::migrate_and_hold`], for a domain. The target's libvirt asks its QEMU nothing before the record.
#[track_caller]
pub(crate) fn hold_until_all_is_there(scene: &Scene) -> (Running, HeldJournal) {
    scene.migrate_and_hold(
        // Asking libvirt all the time would cost more than the migration.
        |id| scene.step_of(id).is_none_or(|step| step >= Step::Downtime),
        || qemu_says(&scene.lab, "a").as_deref() == Some("postmigrate"),
    )
}

/// What both hosts have of it before the record, according to QEMU and to libvirt.
fn stand_still(scene: &Scene) -> bool {
    let on_target = scene.lab.virsh("b", &["domstate", "web"]).stdout;
    on_target.trim() == "paused" && qemu_says(&scene.lab, "a").as_deref() == Some("postmigrate")
}

#[track_caller]
fn assert_completed(output: &Output) {
    assert_eq!(result_of(output).outcome, Outcome::Completed, "{output:#?}");
}

fn agents_are_killed_while_a_domain_is_copied() {
    let scene = scene();
    for killed in whole::first_or_all(2, &[&["a"][..], &["b"], &["a", "b"]]) {
        let heartbeat = scene.guest.heartbeat();
        let migrating = scene.migrate(&[]);
        for host in *killed {
            scene.lab.stop_agent(host, Signal::KILL);
        }
        if killed.contains(&"a") {
            wait_without_guard(&scene);
        }
        scene.guest.assert_answers();
        assert_eq!(qemu_says(&scene.lab, "a").as_deref(), Some("running"), "{killed:?}");
        for host in *killed {
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
    the_targets_agent_is_killed_before_its_order_to_run(&scene);
    the_sources_agent_is_killed_after_the_record(&scene);
}

fn the_sources_agent_is_killed_before_the_record(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
    let heartbeat = scene.guest.heartbeat();
    scene.lab.stop_agent("a", Signal::KILL);
    held.release();
    drop(migrating.wait());
    wait_without_guard(scene);
    eventually("it runs on", || qemu_says(&scene.lab, "a").as_deref() == Some("running"));
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.lab.start_agent("a");
    assert_settled(scene, "a");
}

/// libvirt ends the domain on the target with its agent, and nobody could let it run there.
fn the_targets_agent_is_killed_before_its_order_to_run(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
    scene.lab.stop_agent("b", Signal::KILL);
    held.release();
    wait_until_handed_over(&scene.lab);
    scene.lab.start_agent("b");
    drop(migrating.wait());
    eventually("it is decided", || scene.migrations()[0].progress.is_none());
    assert_eq!(scene.last_result().outcome, Outcome::Failed);
    assert_settled(scene, "a");
}

/// The target hears nothing until then.
fn the_sources_agent_is_killed_after_the_record(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
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
    for &(host, ending) in
        whole::first_or_all(2, &[("a", "kill"), ("b", "stop"), ("a", "stop"), ("b", "kill")])
    {
        let heartbeat = scene.guest.heartbeat();
        let migrating = scene.migrate(&[]);
        end_libvirt(&scene, host, ending);
        let output = migrating.wait();
        // The error comes from libvirt, or from the QEMU that libvirt had for it.
        assert_failed(&output, "");
        scene.guest.assert_answers();
        assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{ending}: {:?}", heartbeat.statistics());
        start_libvirt(&scene, host);
        assert_settled(&scene, "a");
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

/// QEMU stops before its switch-over, and only the guard is there to go back.
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

pub(crate) fn libvirt_ends_at_the_hand_over_of_a_domain() {
    let scene = scene();
    for &(host, ending) in
        whole::first_or_all(2, &[("b", "stop"), ("a", "kill"), ("b", "kill"), ("a", "stop")])
    {
        let (migrating, held) = hold_until_all_is_there(&scene);
        end_libvirt(&scene, host, ending);
        held.release();
        let output = migrating.wait();
        start_libvirt(&scene, host);
        if host == "b" {
            // With the target's libvirt ends what has come, which nobody could let run.
            assert_failed(&output, "");
            assert_settled(&scene, "a");
        } else {
            assert_completed(&output);
            assert_settled(&scene, "b");
            scene.take_back();
        }
    }
}

fn others_meddle_with_a_domain_that_moves() {
    let scene = scene();
    its_job_is_aborted(&scene);
    qemus_are_killed_while_it_is_copied(&scene);
    it_is_resumed_by_others_at_the_hand_over(&scene);
    it_is_resumed_by_others_while_it_comes(&scene);
    it_runs_by_others_before_the_target_has_recorded_it(&scene);
    qemu_of_source_dies_after_the_hand_over(&scene);
}

fn its_job_is_aborted(scene: &Scene) {
    for option in whole::first_or_all(1, &["multichannel", "tcp"]) {
        let migrating = scene.migrate(&["--option", option]);
        scene.lab.virsh("a", &["domjobabort", "web"]).done();
        // The target's QEMU ends with it. On a busy host, chance decides which of the two is reported.
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

/// libvirt makes them wait as long as the domain is protected.
fn it_is_resumed_by_others_at_the_hand_over(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
    let resuming = ["a", "b"].map(|host| scene.lab.start_virsh(host, &["resume", "web"]));
    thread::sleep(Duration::from_secs(1));
    let stand_still = stand_still(scene);
    held.release();
    assert!(stand_still, "one of them was let run before the record");
    assert_completed(&migrating.wait());
    for resuming in resuming {
        // Both get some answer; what matters is checked below.
        drop(resuming.wait());
    }
    assert_settled(scene, "b");
    scene.take_back();
}

/// As [`hold_until_all_is_there`], while somebody waits on the target with `virsh resume`: libvirt lets them in as its job
/// ends.
#[track_caller]
fn hold_while_others_wait(scene: &Scene) -> (Running, HeldJournal, Vec<Running>) {
    let resuming = RefCell::new(HashMap::new());
    let (migrating, held) = scene.migrate_and_hold(
        |id| {
            let step = scene.step_of(id);
            if step.is_some_and(|step| step >= Step::CopyMemory) {
                let resume = || scene.lab.start_virsh("b", &["resume", "web"]);
                resuming.borrow_mut().entry(id.to_owned()).or_insert_with(resume);
            }
            step.is_none_or(|step| step >= Step::Downtime)
        },
        || qemu_says(&scene.lab, "a").as_deref() == Some("postmigrate"),
    );
    (migrating, held, resuming.into_inner().into_values().collect())
}

fn it_is_resumed_by_others_while_it_comes(scene: &Scene) {
    let (migrating, held, resuming) = hold_while_others_wait(scene);
    let stand_still = stand_still(scene);
    held.release();
    assert!(stand_still, "one of them was let run before the record");
    assert_completed(&migrating.wait());
    for resuming in resuming {
        drop(resuming.wait());
    }
    assert_settled(scene, "b");
    scene.take_back();
}

/// Its agent ends before it has recorded that, and the source never lets it run again.
fn it_runs_by_others_before_the_target_has_recorded_it(scene: &Scene) {
    let (migrating, held, resuming) = hold_while_others_wait(scene);
    let held_there = hold_journal(&scene.lab, "b");
    held.release();
    eventually("others let it run", || qemu_says(&scene.lab, "b").as_deref() == Some("running"));
    scene.lab.stop_agent("b", Signal::KILL);
    held_there.release();
    for resuming in resuming {
        drop(resuming.wait());
    }
    scene.guest.assert_answers();
    assert_eq!(qemu_says(&scene.lab, "a").as_deref(), Some("postmigrate"));
    scene.lab.start_agent("b");
    assert_completed(&migrating.wait());
    assert_settled(scene, "b");
    scene.take_back();
}

fn qemu_of_source_dies_after_the_hand_over(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
    cut_off(&scene.lab, "b");
    held.release();
    wait_until_handed_over(&scene.lab);
    scene.kill_qemu("a");
    rejoin(&scene.lab, "b");
    drop(migrating.wait());
    assert_settled(scene, "b");
}

/// libvirt makes QEMU stop before the switch-over, and then continues by itself, unless it ends at that moment. So that it
/// does, it is frozen first, and ended once the guest stands still.
fn libvirt_ends_as_the_guest_is_paused() {
    let scene = scene();
    for signals in [&[Signal::KILL][..], &[Signal::TERM, Signal::CONT]] {
        let migrating = scene.migrate(&[]);
        let libvirt = libvirtd(&scene.lab, "a");
        kill_process(libvirt, Signal::STOP).unwrap();
        wait_until_silent(&scene);
        let heartbeat = scene.guest.heartbeat();
        for signal in signals {
            kill_process(libvirt, *signal).unwrap();
        }
        eventually("the guest runs on", || heartbeat.statistics().answered > 0);
        // Sooner or later, with the agent's connection.
        eventually("it has ended", || scene.lab.lab().libvirt_pid("a").unwrap() != Some(libvirt));
        drop(migrating.wait());
        start_libvirt(&scene, "a");
        let host = assert_one_home(&scene);
        assert_settled(&scene, &host);
        scene.bring_back(&host);
    }
}

/// Its socket is there, and it may continue at any time. So nobody speaks to QEMU in its place.
fn a_libvirt_is_mute_for_a_while() {
    let of_libvirt = Backend::Libvirt.lab_arguments(&[]);
    let arguments: Vec<&str> = of_libvirt.iter().map(String::as_str).collect();
    let scene =
        scene_in(TestLab::up(&[&arguments[..], &["--link", SLOW_MBPS, "--link", SLOW_MBPS]].concat()));
    let mute = |host: &str| {
        let migrating = scene.migrate(&[]);
        let libvirt = libvirtd(&scene.lab, host);
        kill_process(libvirt, Signal::STOP).unwrap();
        wait_until_silent(&scene);
        (migrating, libvirt)
    };
    // Without the target's libvirt, the source goes back by itself.
    let (migrating, libvirt) = mute("b");
    scene.guest.assert_answers();
    assert_failed(&migrating.wait(), "");
    kill_process(libvirt, Signal::CONT).unwrap();
    assert_settled(&scene, "a");
    // Without its own libvirt, the guest stands still until that continues.
    let (migrating, libvirt) = mute("a");
    thread::sleep(Duration::from_secs(5));
    kill_process(libvirt, Signal::CONT).unwrap();
    scene.guest.assert_answers();
    drop(migrating.wait());
    let host = assert_one_home(&scene);
    assert_settled(&scene, &host);
    scene.bring_back(&host);
    scene.assert_moves("b");
}

#[track_caller]
fn libvirtd(lab: &TestLab, host: &str) -> Pid {
    lab.lab().libvirt_pid(host).unwrap().expect("it runs")
}

/// Returns when the guest has not answered for a while.
#[track_caller]
fn wait_until_silent(scene: &Scene) {
    eventually("the guest stands still", || {
        let heartbeat = scene.guest.heartbeat();
        thread::sleep(Duration::from_secs(1));
        heartbeat.statistics().answered == 0
    });
}

/// The only host whose libvirt has the domain, in whatever state.
#[track_caller]
fn assert_one_home(scene: &Scene) -> String {
    let homes = || {
        let known = ["a", "b"].into_iter().filter(|host| scene.lab.domain_state(host, "web").is_some());
        known.collect::<Vec<_>>()
    };
    eventually("the migration is decided", || scene.migrations()[0].progress.is_none());
    eventually("one libvirt has it", || homes().len() == 1);
    homes()[0].into()
}

impl Scene {
    /// Like [`Scene::take_back`], from whichever host.
    #[track_caller]
    fn bring_back(&self, host: &str) {
        if host != "a" {
            self.take_back();
        }
    }
}

fn a_domain_whose_qemu_dies_is_defined_on_one_host() {
    let scene = scene();
    let migrating = scene.migrate(&[]);
    scene.kill_qemu("a");
    assert_eq!(migrating.wait().code, LOST);
    assert_eq!(assert_one_home(&scene), "a");
    boot(&scene, "a");

    let (migrating, held) = hold_until_all_is_there(&scene);
    cut_off(&scene.lab, "b");
    held.release();
    wait_until_handed_over(&scene.lab);
    scene.kill_qemu("b");
    rejoin(&scene.lab, "b");
    drop(migrating.wait());
    // It was never ordered to run.
    assert_eq!(assert_one_home(&scene), "a");
    assert_settled(&scene, "a");

    for delay_ms in [0, 10, 100] {
        let migrating = scene.migrate(&[]);
        // By now, it may already run.
        wait_until_told_to_run(&scene.lab);
        thread::sleep(Duration::from_millis(delay_ms));
        scene.kill_qemu("b");
        drop(migrating.wait());
        let host = assert_one_home(&scene);
        assert_eq!(host, "b", "it may have run there");
        boot(&scene, &host);
        scene.bring_back(&host);
    }
    the_targets_agent_is_killed_after_the_order_to_run(&scene);
}

fn the_targets_agent_is_killed_after_the_order_to_run(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    wait_until_told_to_run(&scene.lab);
    scene.lab.stop_agent("b", Signal::KILL);
    scene.lab.start_agent("b");
    drop(migrating.wait());
    assert_eq!(assert_one_home(scene), "b");
    assert_settled(scene, "b");
}

/// Resumes the domain, as its owner would.
#[track_caller]
fn boot(scene: &Scene, host: &str) {
    eventually("its QEMU is gone", || scene.lab.qemu_pid(host, "web").is_none());
    scene.lab.virsh(host, &["start", "web"]).done();
    scene.guest.wait_until_ready();
    assert_settled(scene, host);
}

fn a_domain_that_its_owner_suspends_stays_suspended() {
    let scene = scene();
    // Its memory is still being sent.
    let migrating = scene.migrate(&[]);
    scene.lab.virsh("a", &["suspend", "web"]).done();
    assert_completed(&migrating.wait());
    assert_eq!(assert_one_home(&scene), "b");
    assert_stays_suspended(&scene, "b");
    scene.lab.virsh("b", &["resume", "web"]).done();
    assert_settled(&scene, "b");
    scene.take_back();
    // It stays here, since its target's agent is gone.
    let migrating = scene.migrate(&[]);
    scene.lab.virsh("a", &["suspend", "web"]).done();
    eventually("that is seen", || files_of_domain(&scene.lab, "a").join("suspended").exists());
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    drop(migrating.wait());
    assert_eq!(assert_one_home(&scene), "a");
    assert_stays_suspended(&scene, "a");
    scene.lab.virsh("a", &["resume", "web"]).done();
    assert_settled(&scene, "a");
    scene.assert_moves("b");
}

fn files_of_domain(lab: &TestLab, host: &str) -> PathBuf {
    lab.directory(host).join("run/libvirt/vms/web")
}

#[track_caller]
fn assert_stays_suspended(scene: &Scene, host: &str) {
    for _ in 0..3 {
        assert_eq!(scene.lab.domain_state(host, "web").as_deref(), Some("paused"));
        thread::sleep(Duration::from_secs(1));
    }
    let list = scene.lab.vms();
    assert!(list.vms.iter().all(|vm| vm.host == host && vm.state == VmState::Paused), "{list:#?}");
}

/// A connection has at most three calls under way, and libvirt answers none that needs a hanging QEMU, such as one
/// about a job.
fn a_qemu_that_hangs_keeps_no_other_domain_waiting() {
    let lab = TestLab::up(&["--libvirt", "--link", SLOW_MBPS, "--link", SLOW_MBPS]);
    let guests = ["web", "db"].map(|name| lab.start_domain("a", name, MEMORY_MIB, ""));
    eventually("the agent has seen them", || lab.vms().vms.len() == 2);
    let migrating = lab.start(&["migrate", "db", "b", "--json", "--option", "tcp"]);
    eventually("memory is copied", || step(&lab.migrations("a")) == Some(Step::CopyMemory));
    let hanging = lab.qemu_pid("a", "db").unwrap();
    kill_process(hanging, Signal::STOP).unwrap();
    let states = || {
        let vms = lab.vms().vms;
        ["web", "db"].map(|name| vms.iter().find(|vm| vm.name == name && vm.host == "a").map(|vm| vm.state))
    };
    // Each question leaves one of its calls under way.
    for _ in 0..4 {
        assert_eq!(states(), [Some(VmState::Running), Some(VmState::Unknown)]);
    }
    kill_process(hanging, Signal::CONT).unwrap();
    drop(migrating.wait());
    guests.iter().for_each(Guest::assert_intact);
}
