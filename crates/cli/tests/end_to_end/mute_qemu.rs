//! A QEMU that answers nothing for a while: the agents wait for its VM, and do not take it for gone.

use std::time::Duration;
use std::{fs, thread};

use drainpipe_api_types::{VmList, VmState};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use rustix::process::{Pid, Signal, getsid, kill_process};

use crate::Test;
use crate::drain::ask;
use crate::program::Running;
use crate::scene::{Scene, hold_journal, record_that_it_ran, result_of, wait_until_handed_over};
use crate::silences::GUARDED_SILENCE_MAX;
use crate::support::eventually;

/// The source asks its target once a second, and waits up to 5 s for an answer.
const ASKED_WITHIN: Duration = Duration::from_secs(7);

pub(crate) const TESTS: &[Test] = &[
    ("as_its_agent_starts", as_its_agent_starts),
    ("for_its_target_is_killed_or_as_it_is_told_to_run", for_its_target_is_killed_or_as_it_is_told_to_run),
    ("at_the_target_that_it_was_handed_over_to", at_the_target_that_it_was_handed_over_to),
];

fn as_its_agent_starts() {
    let scene = Scene::set();
    as_its_agent_starts_with_nothing_open(&scene);
    as_its_agent_starts_with_a_migration_left_open(&scene);
    scene.assert_moves("b");
}

fn as_its_agent_starts_with_nothing_open(scene: &Scene) {
    let qemu = scene.lab.qemu_pid("a", "web").unwrap();
    // When its agent ends, the kernel tells a stopped process to hang up, and to continue.
    let _stopped = Still::of(qemu);
    scene.lab.stop_agent("a", Signal::KILL);
    scene.guest.assert_answers();
    let qemu = Still::of(qemu);
    scene.lab.start_agent("a");
    let list: VmList = scene.lab.json(&["vms"]);
    assert_eq!(list.vms.first().unwrap().state, VmState::Unknown, "{list:#?}");
    scene.lab.drainpipe(&["vm", "stop", "web"]).refused(3, &["the agent keeps trying"]);
    drop(qemu);
    eventually("it answers", || scene.lab.vms().vms.first().unwrap().state == VmState::Running);
}

fn as_its_agent_starts_with_a_migration_left_open(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    // By then, its guard would have stopped the migration.
    for guard in scene.lab.pids("a", &[" guard --migration "]) {
        assert_eq!(getsid(Some(guard)), Ok(guard), "the end of the agent's session is not its own");
        kill_process(guard, Signal::KILL).unwrap();
    }
    scene.lab.stop_agent("a", Signal::KILL);
    let qemu = Still::of(scene.lab.qemu_pid("a", "web").unwrap());
    scene.lab.start_agent("a");
    scene.lab.drainpipe(&["migrate", "web", "b"]).refused(3, &["the agent keeps trying"]);
    drop(qemu);
    assert_eq!(migrating.wait().code, 1);
    assert_eq!(scene.last_result().outcome, Outcome::Failed);
    scene.assert_settled("a");
}

fn for_its_target_is_killed_or_as_it_is_told_to_run() {
    let scene = Scene::set();
    for_its_target_is_killed_with_its_agent(&scene);
    at_the_target_as_it_is_told_to_run(&scene);
    scene.take_back();
    as_its_migration_is_cancelled_in_the_pause(&scene);
    while_memory_is_in_flight(&scene);
}

fn at_the_target_as_it_is_told_to_run(scene: &Scene) {
    let _migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    // The target has seen that all state has arrived, and waits for its journal.
    thread::sleep(Duration::from_secs(1));
    let qemu = Still::of(scene.lab.qemu_pid("b", "web").unwrap());
    scene.lab.stop_agent("a", Signal::KILL);
    held.release();
    // The order to run gets no answer, and the source no longer asks.
    thread::sleep(Duration::from_secs(7));
    drop(qemu);
    eventually("it is among the target's VMs", || {
        let list: VmList = ask(&scene.lab, "b", "/v1/vms?scope=all", None).unwrap();
        list.vms.iter().any(|vm| vm.host == "b" && vm.state == VmState::Running)
    });
    scene.guest.assert_intact();
    scene.lab.start_agent("a");
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

/// Its connections are not cut then: its threads may be anywhere, and QEMU would wait for some of them for ever.
fn as_its_migration_is_cancelled_in_the_pause(scene: &Scene) {
    const LONGER_THAN_A_MUTE_ONE_IS_LEFT_ALONE: Duration = Duration::from_millis(3500);
    const ATTEMPTS_MAX: u32 = 12;
    let is_cancelled = || {
        // Through a relay, the last bytes arrive slowly, so that QEMU is mostly stopped before they have arrived.
        let migrating = scene.migrate(&["--option", "compression", "--encrypt"]);
        let id = scene.id();
        scene.wait_until_paused(&id);
        let qemu = scene.lab.qemu_pid("a", "web").map(Still::of);
        scene.lab.drainpipe(&["cancel", &id]);
        thread::sleep(LONGER_THAN_A_MUTE_ONE_IS_LEFT_ALONE);
        drop(qemu);
        match result_of(&migrating.wait()) {
            MigrationResult { outcome: Outcome::Completed, .. } => {
                scene.take_back();
                false
            }
            result => {
                assert_eq!(result.outcome, Outcome::Cancelled, "{result:#?}");
                true
            }
        }
    };
    assert!(
        (0..ATTEMPTS_MAX).any(|_| is_cancelled()),
        "its last bytes are always there before it is stopped"
    );
    let log = scene.lab.agent_log("a");
    assert!(!log.contains("its connections are cut"), "{log}");
    scene.assert_settled("a");
}

/// The result says how long the VM can have stood still, which none of its pauses shows.
fn while_memory_is_in_flight(scene: &Scene) {
    const STILL_FOR: Duration = Duration::from_secs(2);
    let migrating = scene.migrate(&[]);
    let qemu = Still::of(scene.lab.qemu_pid("a", "web").unwrap());
    thread::sleep(STILL_FOR);
    drop(qemu);
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    // It is asked ten times a second, and looked at twenty times.
    let still_ms = result.silence.standstill_ms.expect("somebody looked");
    assert!(still_ms >= STILL_FOR.as_secs_f64() * 1000.0 - 500.0, "{result:#?}");
    assert!(result.silence.downtime_ms.is_some_and(|downtime_ms| downtime_ms < still_ms), "{result:#?}");
    scene.assert_settled("b");
}

fn at_the_target_that_it_was_handed_over_to() {
    let scene = Scene::set();
    at_the_target_that_was_told_to_let_it_run(&scene);
    scene.take_back();
    at_the_target_that_has_the_only_copy(&scene);
}

/// The target's agent is killed before it can record that the VM runs there.
#[track_caller]
fn hand_over_to_a_killed_agent(scene: &Scene) -> Running {
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    scene.lab.stop_agent("b", Signal::KILL);
    held.release();
    migrating
}

fn at_the_target_that_was_told_to_let_it_run(scene: &Scene) {
    let _migrating = hand_over_to_a_killed_agent(scene);
    record_that_it_ran(&scene.lab, "b");
    let qemu = Still::of(scene.lab.qemu_pid("b", "web").unwrap());
    scene.lab.start_agent("b");
    thread::sleep(ASKED_WITHIN);
    assert!(scene.lab.qemu_pid("a", "web").is_some(), "it is let go before it runs on the target");
    drop(qemu);
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

fn at_the_target_that_has_the_only_copy(scene: &Scene) {
    let _migrating = hand_over_to_a_killed_agent(scene);
    let qemu = Still::of(scene.lab.qemu_pid("b", "web").unwrap());
    scene.lab.stop_agent("a", Signal::KILL);
    scene.kill_qemu("a");
    scene.lab.start_agent("b");
    scene.lab.start_agent("a");
    thread::sleep(ASKED_WITHIN);
    drop(qemu);
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

fn for_its_target_is_killed_with_its_agent(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let id = scene.id();
    let [qemu, agent] = [scene.lab.qemu_pid("b", "web").unwrap(), scene.lab.agent_pid("a").unwrap()];
    let heartbeat = scene.guest.heartbeat();
    // Without its target's agent, the source gets only as far as the pause.
    let targets_agent = Still::of(scene.lab.agent_pid("b").unwrap());
    scene.wait_until_paused(&id);
    for process in [qemu, agent] {
        kill_process(process, Signal::KILL).unwrap();
    }
    drop(targets_agent);
    scene.guest.assert_answers();
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.lab.start_agent("a");
    assert_eq!(migrating.wait().code, 1);
    scene.assert_settled("a");
}

/// A process that is frozen until this is dropped.
pub(crate) struct Still(Pid);

impl Still {
    #[track_caller]
    pub(crate) fn of(process: Pid) -> Self {
        kill_process(process, Signal::STOP).unwrap();
        // On a busy machine, its threads stop one after the other, and the process has stopped only with the last one.
        eventually("all of its threads have stopped", || has_stopped(process));
        Self(process)
    }
}

fn has_stopped(process: Pid) -> bool {
    let mut threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads.all(|thread| {
        let status = fs::read_to_string(thread.unwrap().path().join("stat")).unwrap_or_default();
        status.rsplit(')').next().is_some_and(|status| status.starts_with(" T "))
    })
}

impl Drop for Still {
    fn drop(&mut self) {
        // It may be gone, since the test has ended it.
        let _gone = kill_process(self.0, Signal::CONT);
    }
}
