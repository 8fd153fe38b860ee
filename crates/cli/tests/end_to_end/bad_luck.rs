//! Failures in mid-flight: whatever is killed, frozen, full or cut off, one copy of the VM runs, its memory is intact,
//! and both hosts are as they were.

use std::time::Duration;
use std::{fs, thread};

use drainpipe_api_types::{VmList, VmState};
use drainpipe_engine::migration::result::{Outcome, PathState};
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::option::RequestedOption;
use drainpipe_hypervisor::RunState;
use rustix::process::{Pid, Signal, kill_process};

use crate::Test;
use crate::backend::Backend;
use crate::drain::start_small;
use crate::kills::qemu_of;
use crate::program::{DRAINPIPE, REFUSED, Running};
use crate::scene::{
    MEMORY_MIB, Scene, assert_failed, cut_off, find_hand_over, hold_journal, impatient_lab, is_handed_over,
    record_that_it_ran, rejoin, result_of, wait_until_handed_over,
};
use crate::silences::{GUARDED_SILENCE_MAX, RUNNING_SILENCE_MAX, UNANSWERED_SILENCE_MAX};
use crate::support::{TestLab, eventually};
use crate::switch_over_faults::{hold_until_all_is_there, run_state};
use crate::whole;

pub(crate) const TESTS: &[Test] = &[
    ("the_targets_qemu_is_killed", the_targets_qemu_is_killed),
    ("the_source_agent_is_killed", the_source_agent_is_killed),
    ("the_source_is_lost_around_the_hand_over", the_source_is_lost_around_the_hand_over),
    ("the_target_host_is_lost_after_the_hand_over", the_target_host_is_lost_after_the_hand_over),
    ("the_target_agent_is_killed", the_target_agent_is_killed),
    ("the_source_agent_freezes", the_source_agent_freezes),
    (
        "the_source_agent_is_stopped_and_ctrl_c_cancels_or_stops_watching",
        the_source_agent_is_stopped_and_ctrl_c_cancels_or_stops_watching,
    ),
    ("a_link_that_is_silent_from_the_start_is_left_out", a_link_that_is_silent_from_the_start_is_left_out),
    ("the_agents_lose_each_other", the_agents_lose_each_other),
    (
        "an_agent_is_killed_and_its_program_replaced_while_its_vm_runs",
        an_agent_is_killed_and_its_program_replaced_while_its_vm_runs,
    ),
    ("an_agent_is_killed_as_it_starts_a_vm", an_agent_is_killed_as_it_starts_a_vm),
    ("two_vms_pass_each_other_and_nothing_grows", two_vms_pass_each_other_and_nothing_grows),
];

fn the_targets_qemu_is_killed() {
    let scene = Scene::set();
    the_targets_qemu_is_killed_in_flight(&scene);
    the_targets_qemu_is_killed_when_all_state_is_there(&scene);
    scene.assert_moves("b");
}

fn the_targets_qemu_is_killed_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.kill_qemu("b");
    assert_failed(&migrating.wait(), "its QEMU on b has ended");
    scene.assert_settled("a");
}

fn the_targets_qemu_is_killed_when_all_state_is_there(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
    scene.kill_qemu("b");
    held.release();
    assert_failed(&migrating.wait(), "");
    scene.assert_settled("a");
}

fn the_source_agent_is_killed() {
    let scene = Scene::set();
    the_source_agent_is_killed_in_flight(&scene);
    the_source_agent_is_killed_after_the_hand_over(&scene);
    scene.take_back();
    the_source_agent_is_killed_before_the_order_to_run(&scene);
    scene.assert_moves("a");
}

/// The source's agent is killed in mid-flight and restarted.
#[track_caller]
pub(crate) fn runs_on_without_its_agent(scene: &Scene, migrating: Running) {
    let heartbeat = scene.guest.heartbeat();
    scene.lab.stop_agent("a", Signal::KILL);
    scene.guest.assert_answers();
    // The guard lets the VM run on, although nobody starts the agent.
    thread::sleep(Duration::from_secs(5));
    scene.guest.assert_intact();
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.lab.start_agent("a");
    assert_failed(&migrating.wait(), "in the middle of the migration; the migration was undone");
}

fn the_source_agent_is_killed_in_flight(scene: &Scene) {
    runs_on_without_its_agent(scene, scene.migrate(&[]));
    let result = scene.last_result();
    assert_eq!(
        (result.outcome, result.choice.requested_option),
        (Outcome::Failed, RequestedOption::Multichannel)
    );
    scene.assert_settled("a");
}

/// The source's agent is killed and restarted.
#[track_caller]
pub(crate) fn the_source_agent_is_killed_after_the_hand_over(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    scene.lab.stop_agent("a", Signal::KILL);
    held.release();
    scene.lab.start_agent("a");
    assert_eq!(migrating.wait().code, 0);
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

/// The order to run is lost, and only the guard is there to repeat it.
fn the_source_agent_is_killed_before_the_order_to_run(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
    cut_off(&scene.lab, "b");
    held.release();
    wait_until_handed_over(&scene.lab);
    scene.lab.stop_agent("a", Signal::KILL);
    rejoin(&scene.lab, "b");
    scene.guest.assert_answers();
    assert_eq!(run_state(&scene.lab, "b", "web"), RunState::Running);
    eventually("the guard has left", || scene.lab.pids("a", &[" guard --migration "]).is_empty());
    scene.lab.start_agent("a");
    assert_eq!(migrating.wait().code, 0);
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

fn the_source_is_lost_around_the_hand_over() {
    let scene = Scene::set();
    a_hand_over_is_found_to_be_recorded_and_the_vm_ran_on(&scene);
    the_source_host_is_lost_after_the_hand_over(&scene);
}

fn a_hand_over_is_found_to_be_recorded_and_the_vm_ran_on(scene: &Scene) {
    let (migrating, held) = hold_until_all_is_there(scene);
    scene.lab.stop_agent("a", Signal::KILL);
    held.release();
    eventually("the guard has left", || scene.lab.pids("a", &[" guard --migration "]).is_empty());
    scene.guest.assert_answers();
    find_hand_over(&scene.lab);
    scene.lab.start_agent("a");
    assert_failed(&migrating.wait(), "the VM ran on at the source");
    scene.assert_settled("a");
}

fn the_source_host_is_lost_after_the_hand_over(scene: &Scene) {
    let _migrating = scene.migrate(&[]);
    // The target receives the order and does not act on it, so that the source's next start finds it open.
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    let agent = scene.lab.agent_pid("b").unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    held.release();
    scene.lab.stop_agent("a", Signal::KILL);
    scene.kill_qemu("a");
    scene.lab.start_agent("a");
    scene.lab.drainpipe(&["vm", "start", "web"]).refused(3, &["is already being moved"]);
    kill_process(agent, Signal::CONT).unwrap();
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

fn the_target_host_is_lost_after_the_hand_over() {
    let scene = Scene::in_lab(impatient_lab());
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    let reclaim = |host| scene.lab.drainpipe(&["vm", "reclaim", "web", "--lost", host, "--yes"]);
    reclaim("c").refused(2, &["was handed over to b, not to c"]);
    scene.lab.stop_agent("b", Signal::KILL);
    scene.kill_qemu("b");
    held.release();
    assert_eq!(migrating.wait().code, 4);
    scene.lab.drainpipe(&["vm", "reclaim", "web", "--lost", "b"]).refused(2, &["add --yes"]);
    let reclaimed = reclaim("b");
    assert_eq!(reclaimed.code, 0, "{reclaimed:#?}");
    assert!(reclaimed.stderr.contains("`drainpipe vm start web` boots it again"), "{reclaimed:#?}");
    assert_eq!(scene.last_result().outcome, Outcome::Failed);
    assert!(scene.lab.qemu_pid("a", "web").is_none(), "its disks may be newer than its memory");
    scene.lab.start_again("a", "web");
    scene.guest.wait_until_ready();
    scene.guest.assert_intact();
    // When the host is back, nothing of the VM is left there.
    scene.lab.start_agent("b");
    scene.assert_settled("a");
    reclaim("b").refused(3, &["is not in doubt"]);
    // Nor is anything left if the VM had begun to run there. What libvirt says of a domain is not in the journal.
    if Backend::of_test() == Backend::Libvirt {
        return scene.assert_moves("b");
    }
    scene.lab.stop_agent("b", Signal::KILL);
    record_that_it_ran(&scene.lab, "b");
    scene.lab.start_agent("b");
    scene.assert_settled("a");
    scene.assert_moves("b");
}

fn the_target_agent_is_killed() {
    let scene = Scene::set();
    the_target_agent_is_killed_in_flight(&scene);
    the_target_agent_is_killed_after_the_hand_over(&scene);
}

fn the_target_agent_is_killed_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.lab.stop_agent("b", Signal::KILL);
    let output = migrating.wait();
    // libvirt ends an incoming domain with the connection of its agent, so nothing arrives any more.
    let why = match Backend::of_test() {
        Backend::Qemu => "the agent of b",
        Backend::Libvirt => "nothing has arrived",
    };
    assert_failed(&output, why);
    // Nor does the result claim that somebody watched the paths meanwhile.
    for path in result_of(&output).traffic.paths {
        assert_eq!(path.turns[0].state, PathState::Unwatched, "{path:#?}");
    }
    scene.guest.assert_intact();
    scene.lab.start_agent("b");
    scene.assert_settled("a");
}

fn the_target_agent_is_killed_after_the_hand_over(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    scene.lab.stop_agent("b", Signal::KILL);
    held.release();
    scene.lab.start_agent("b");
    assert_eq!(result_of(&migrating.wait()).outcome, Outcome::Completed);
    scene.assert_settled("b");
}

fn the_source_agent_freezes() {
    // Slow links let the agent wake up before the VM is paused.
    let scene = Scene::in_lab(TestLab::up(&["--link", "40", "--link", "40"]));
    the_source_agent_freezes_while_the_vm_is_paused(&scene);
    the_source_agent_freezes_in_flight(&scene);
}

fn the_source_agent_freezes_while_the_vm_is_paused(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let id = scene.id();
    let heartbeat = scene.guest.heartbeat();
    let agents = ["b", "a"].map(|host| scene.lab.agent_pid(host).unwrap());
    // Without its target's agent, the source gets only as far as the pause.
    kill_process(agents[0], Signal::STOP).unwrap();
    scene.wait_until_paused(&id);
    kill_process(agents[1], Signal::STOP).unwrap();
    scene.guest.assert_answers();
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    for agent in agents {
        kill_process(agent, Signal::CONT).unwrap();
    }
    assert_eq!(migrating.wait().code, 1);
    scene.assert_settled("a");
}

fn the_source_agent_freezes_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let heartbeat = scene.guest.heartbeat();
    let agent = scene.lab.agent_pid("a").unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    thread::sleep(Duration::from_secs(6));
    kill_process(agent, Signal::CONT).unwrap();
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.assert_settled("b");
}

fn the_source_agent_is_stopped_and_ctrl_c_cancels_or_stops_watching() {
    let scene = Scene::set();
    the_source_agent_is_stopped_in_flight(&scene);
    an_agent_that_shuts_down_begins_nothing(&scene);
    ctrl_c_cancels(&scene);
    a_second_ctrl_c_stops_watching(&scene);
}

fn the_source_agent_is_stopped_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.lab.stop_agent("a", Signal::TERM);
    scene.guest.assert_intact();
    assert_eq!(scene.lab.qemu_pid("b", "web"), None, "the target has discarded it");
    assert_eq!(scene.lab.network(), scene.network, "put back before the agent ended");
    // The agent that was stopped says this, not its next life.
    let output = migrating.wait();
    assert_eq!(output.code, 5, "{output:#?}");
    assert_eq!(result_of(&output).outcome, Outcome::Cancelled);
    scene.lab.start_agent("a");
    scene.assert_settled("a");
}

/// While an agent winds its migrations up, it says what becomes of them and begins nothing.
fn an_agent_that_shuts_down_begins_nothing(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    // Then the target cannot discard the VM at once.
    let held = hold_journal(&scene.lab, "b");
    kill_process(scene.lab.agent_pid("a").unwrap(), Signal::TERM).unwrap();
    eventually("it is being stopped", || {
        let refused = scene.lab.drainpipe(&["vm", "start", "web"]);
        refused.code == REFUSED && refused.stderr.contains("is being stopped")
    });
    scene.lab.drainpipe(&["migrate", "web", "b"]).refused(REFUSED, &["is being stopped"]);
    assert!(scene.step().is_some(), "it answers what it is asked");
    held.release();
    assert_eq!(result_of(&migrating.wait()).outcome, Outcome::Cancelled);
    eventually("the agent ends", || scene.lab.agent_pid("a").is_none());
    scene.lab.start_agent("a");
    scene.assert_settled("a");
}

fn ctrl_c_cancels(scene: &Scene) {
    for &delay_ms in whole::first_or_all(2, &[20, 150, 60, 300]) {
        let migrating = scene.lab.start(&["migrate", "web", "b", "--json"]);
        eventually("it has begun", || scene.step().is_some());
        thread::sleep(Duration::from_millis(delay_ms));
        migrating.signal(Signal::INT);
        let output = migrating.wait();
        assert_eq!(output.code, 5, "{output:#?}");
        assert_eq!(result_of(&output).outcome, Outcome::Cancelled);
        scene.assert_settled("a");
    }
    let migrating = scene.migrate(&[]);
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    assert_eq!(migrating.wait().code, 5);
    scene.assert_settled("a");
}

fn a_second_ctrl_c_stops_watching(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let agent = scene.lab.agent_pid("a").unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    migrating.signal(Signal::INT);
    thread::sleep(Duration::from_secs(1));
    migrating.signal(Signal::INT);
    migrating.wait().refused(4, &["no longer watching", "drainpipe history"]);
    kill_process(agent, Signal::CONT).unwrap();
    // It does not matter whether the frozen agent still heard the request.
    let moved = scene.last_result().outcome == Outcome::Completed;
    scene.assert_settled(if moved { "b" } else { "a" });
}

fn a_link_that_is_silent_from_the_start_is_left_out() {
    let scene = Scene::in_lab(TestLab::fast());
    scene.lab.fault("blackhole a e0");
    let moved = scene.lab.migrate("web", "b", &["--option", "multichannel"]);
    assert!(moved.choice.fallback_reason.is_some(), "{moved:#?}");
    assert!(moved.traffic.paths.iter().all(|path| path.link == "e1"), "{moved:#?}");
    let moved = scene.lab.migrate("web", "a", &["--option", "tcp"]);
    assert!(moved.traffic.paths.iter().all(|path| path.link == "e1"), "{moved:#?}");
    scene.assert_settled("a");
}

fn the_agents_lose_each_other() {
    let scene = Scene::in_lab(impatient_lab());
    the_agents_lose_each_other_in_flight(&scene);
    the_agents_lose_each_other_after_the_hand_over(&scene);
}

fn the_agents_lose_each_other_in_flight(scene: &Scene) {
    let heartbeat = scene.guest.heartbeat();
    let migrating = scene.migrate(&[]);
    cut_off(&scene.lab, "b");
    // All memory arrives, but nobody can say so.
    assert_failed(&migrating.wait(), "the agent of b");
    assert!(heartbeat.longest_gap() < UNANSWERED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.guest.assert_intact();
    assert!(!is_handed_over(&scene.lab));
    if Backend::of_test() == Backend::Qemu {
        // The target cannot know that, and keeps what may be the only intact copy. A domain there lacks what the agents
        // carry, so it is no such copy.
        assert_eq!(run_state(&scene.lab, "b", "web"), RunState::Paused);
    }
    assert_eq!(run_state(&scene.lab, "a", "web"), RunState::Running);
    rejoin(&scene.lab, "b");
    scene.assert_settled("a");
    assert_eq!(scene.last_result().outcome, Outcome::Failed);
}

fn the_agents_lose_each_other_after_the_hand_over(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    // It takes much longer for QEMU to be cut off than for the order after that to be sent.
    eventually("b is ordered to run it", || scene.step() == Some(Step::ResumeOnTarget));
    cut_off(&scene.lab, "b");
    held.release();
    let output = migrating.wait();
    assert_eq!(output.code, 4, "{output:#?}");
    assert_eq!(result_of(&output).outcome, Outcome::InDoubt);
    // The VM may run on the target. It does not run here, nor can anybody make it.
    scene.lab.drainpipe(&["migrate", "web", "b"]).refused(3, &["is already being moved"]);
    scene.guest.assert_answers();
    rejoin(&scene.lab, "b");
    eventually("it is decided", || scene.migrations()[0].progress.is_none());
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

/// Kills each agent in turn, at both ends, with a migration in between.
fn an_agent_is_killed_and_its_program_replaced_while_its_vm_runs() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    lab.stop_agent("a", Signal::KILL);
    let old = lab.files().join("drainpipe");
    fs::copy(DRAINPIPE, &old).unwrap();
    lab.start_agent_by("a", &[old.to_str().unwrap()]);
    fs::remove_file(&old).unwrap();
    lab.assert_runs_on("web", "a");
    lab.migrate("web", "b", &[]);
    guest.assert_intact();

    let heartbeat = guest.heartbeat();
    lab.stop_agent("b", Signal::KILL);
    lab.start_agent("b");
    lab.assert_runs_on("web", "b");
    guest.assert_intact();
    assert!(heartbeat.longest_gap() < RUNNING_SILENCE_MAX, "{:?}", heartbeat.statistics());
    lab.migrate("web", "a", &[]);
    guest.assert_intact();
}

/// Pools and caches are full after the second round. What still grows by one in each round shows.
const ROUNDS: usize = 7;

fn two_vms_pass_each_other_and_nothing_grows() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    start_small(&lab, "db", "");
    lab.migrate("db", "b", &[]);
    let mut here_and_there = ["a", "b"];
    let mut at_first = None;
    for round in 0..ROUNDS {
        here_and_there.reverse();
        let moves = [("web", here_and_there[0]), ("db", here_and_there[1])];
        let moving = moves.map(|(vm, to)| lab.start(&["migrate", vm, to]));
        for output in moving.map(Running::wait) {
            assert_eq!(output.code, 0, "{output:#?}");
        }
        if round == 1 {
            at_first = Some(["a", "b"].map(|host| open_things(lab.agent_pid(host).unwrap())));
        }
    }
    guest.assert_intact();
    let at_first = at_first.unwrap();
    eventually("no descriptor or thread is left behind", || {
        let now = ["a", "b"].map(|host| open_things(lab.agent_pid(host).unwrap()));
        now.iter().zip(&at_first).all(|(now, first)| now.0 <= first.0 + 4 && now.1 <= first.1 + 4)
    });
    for host in ["a", "b"] {
        // The watch begins and ends with each round, at both ends in any order.
        let log = lab.agent_log(host);
        assert!(!log.contains("is not watched"), "{log}");
    }
    let list: VmList = lab.json(&["vms"]);
    assert!(list.vms.iter().all(|vm| vm.state == VmState::Running), "{list:#?}");
}

/// The numbers of descriptors and threads of a process.
fn open_things(pid: Pid) -> (usize, usize) {
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    (count("fd"), count("task"))
}

fn an_agent_is_killed_as_it_starts_a_vm() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    lab.drainpipe(&["vm", "stop", "--force", "web"]).done();
    let starting = lab.start(&["vm", "start", "web"]);
    let qemu = qemu_of(&lab, "a");
    // The test is about a QEMU that has not answered its agent yet.
    kill_process(qemu, Signal::STOP).unwrap();
    lab.stop_agent("a", Signal::KILL);
    kill_process(qemu, Signal::CONT).unwrap();
    starting.wait();
    // A QEMU that is not ready yet may stay mute to whoever connects.
    thread::sleep(Duration::from_secs(2));
    assert_eq!(run_state(&lab, "a", "web"), RunState::Prelaunch);
    lab.start_agent("a");
    let list = lab.vms();
    assert_eq!(list.vms.first().unwrap().state, VmState::Stopped, "{list:#?}");
    assert_eq!(lab.qemu_pid("a", "web"), None);
    let log = lab.agent_log("a");
    assert!(log.contains("was being started when the agent ended") && log.contains("vm start web"), "{log}");
    lab.drainpipe(&["vm", "start", "web"]).done();
    guest.wait_until_ready();
    // A running VM is left alone.
    lab.stop_agent("a", Signal::KILL);
    lab.start_agent("a");
    lab.migrate("web", "b", &[]);
    guest.assert_intact();
}
