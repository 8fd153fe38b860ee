//! Failures around the commit: of the links for the last bytes, the network between the agents, and the disk under the
//! target's journal. Afterwards, the VM runs where the source's journal says.

use std::thread;
use std::time::Duration;

use drainpipe_api_types::VmList;
use drainpipe_engine::migration::result::Outcome;
use drainpipe_hypervisor::RunState;
use drainpipe_hypervisor_qemu::{Privileges, RuntimePaths, Vmm};
use rustix::process::{Pid, Signal, kill_process};

use crate::Test;
use crate::backend::Backend;
use crate::libvirt_kills;
use crate::program::{REFUSED, Running};
use crate::scene::{
    HeldJournal, Scene, SmallDisk, assert_failed, cut_off, impatient_lab, rejoin, result_of, slow_lab,
    wait_until_handed_over,
};
use crate::silences::{CUT_SILENCE_MAX, RUNNING_SILENCE_MAX};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("all_links_fall_silent_at_the_switch_over", all_links_fall_silent_at_the_switch_over),
    (
        "the_target_hears_nothing_or_cannot_write_after_the_hand_over",
        the_target_hears_nothing_or_cannot_write_after_the_hand_over,
    ),
    ("a_journal_is_full_when_a_vm_comes_or_in_flight", a_journal_is_full_when_a_vm_comes_or_in_flight),
];

/// A guest is in flight for 3 s over these links.
const LINKS: [&str; 4] = ["--link", "200", "--link", "200"];

/// For a program that talks to QEMU in the middle of its work.
const QMP_DEADLINE: Duration = Duration::from_secs(5);

/// The state that a VM's QEMU reports over its guard's socket; for a domain, the state that libvirt reports.
#[track_caller]
pub(crate) fn run_state(lab: &TestLab, host: &str, vm: &str) -> RunState {
    try_run_state(lab, host, vm).unwrap()
}

/// The same for a QEMU that may be starting or ending.
fn try_run_state(lab: &TestLab, host: &str, vm: &str) -> Result<RunState, String> {
    if Backend::of_test() == Backend::Libvirt {
        let said = lab.qemu_says(host, vm).ok_or("its QEMU does not answer")?;
        return serde_json::from_value(said.into()).map_err(|error| error.to_string());
    }
    let paths = RuntimePaths::new(&lab.directory(host).join("run"), &vm.parse().unwrap()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let attached = Vmm::attach_beside_agent(&Privileges::own(), paths, QMP_DEADLINE).await;
        let vmm = attached.map_err(|error| error.to_string())?;
        vmm.run_state(QMP_DEADLINE).await.map_err(|error| error.to_string())
    })
}

/// A source on which only QEMU continues: paused for its last bytes, it waits for permission to send them.
struct PausedSource<'a> {
    scene: &'a Scene,
    agent: Pid,
    guard: Pid,
}

impl<'a> PausedSource<'a> {
    /// Returns when the VM is paused.
    #[track_caller]
    fn at_pause(scene: &'a Scene) -> Self {
        let lab = &scene.lab;
        let guard = lab.pids("a", &[" guard --migration "])[0];
        let paused = Self { scene, agent: lab.agent_pid("a").unwrap(), guard };
        for pid in [paused.agent, paused.guard] {
            kill_process(pid, Signal::STOP).unwrap();
        }
        eventually("the VM is paused", || run_state(lab, "a", "web") == RunState::FinishMigrate);
        paused
    }

    /// Freezes the guard after the agent's last sign of life, or it would let the VM run.
    #[track_caller]
    fn release(self) {
        kill_process(self.agent, Signal::CONT).unwrap();
        self.scene.lab.wait_for_agent("a");
        thread::sleep(Duration::from_secs(1));
        kill_process(self.guard, Signal::CONT).unwrap();
    }
}

fn all_links_fall_silent_at_the_switch_over() {
    let scene = Scene::in_lab(TestLab::up(&LINKS));
    all_links_fall_silent_for_good(&scene);
    all_links_are_silent_for_five_seconds(&scene);
    scene.assert_moves("a");
}

fn all_links_fall_silent_for_good(scene: &Scene) {
    let heartbeat = scene.guest.heartbeat();
    let migrating = scene.migrate(&[]);
    let paused = PausedSource::at_pause(scene);
    silence(scene);
    paused.release();
    let output = migrating.wait();
    assert_failed(&output, "the last of the state did not arrive within 15 s; look at the links");
    let result = result_of(&output);
    let paused_ms = result.silence.downtime_ms.expect("it was paused, and runs again");
    assert!((15_000.0..CUT_SILENCE_MAX.as_secs_f64() * 1000.0).contains(&paused_ms), "{result:#?}");
    assert!(result.silence.standstill_ms >= result.silence.downtime_ms, "{result:#?}");
    scene.guest.assert_answers();
    assert!(heartbeat.longest_gap() < CUT_SILENCE_MAX, "{:?}", heartbeat.statistics());
    // The target, too, gives the VM up while the links are still dead: the agents reach each other over another
    // network.
    scene.assert_settled("a");
    heal(scene);
}

fn all_links_are_silent_for_five_seconds(scene: &Scene) {
    let heartbeat = scene.guest.heartbeat();
    let migrating = scene.migrate(&[]);
    let paused = PausedSource::at_pause(scene);
    silence(scene);
    paused.release();
    thread::sleep(Duration::from_secs(4));
    heal(scene);
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert!(heartbeat.longest_gap() < CUT_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.assert_settled("b");
}

#[track_caller]
pub(crate) fn silence(scene: &Scene) {
    for link in ["e0", "e1"] {
        scene.lab.fault(&format!("blackhole a {link}"));
    }
}

#[track_caller]
pub(crate) fn heal(scene: &Scene) {
    for link in ["e0", "e1"] {
        scene.lab.fault(&format!("heal a {link}"));
    }
}

/// Whether all state of the VM is on `b`. A target's libvirt asks its QEMU nothing before the record.
pub(crate) fn is_all_there(lab: &TestLab) -> bool {
    match Backend::of_test() {
        Backend::Qemu => try_run_state(lab, "b", "web") == Ok(RunState::Paused),
        Backend::Libvirt => try_run_state(lab, "a", "web") == Ok(RunState::Postmigrate),
    }
}

/// Like [`Scene::migrate_and_hold`].
#[track_caller]
pub(crate) fn hold_until_all_is_there(scene: &Scene) -> (Running, HeldJournal) {
    match Backend::of_test() {
        Backend::Qemu => scene.migrate_and_hold(|_| is_all_there(&scene.lab), || is_all_there(&scene.lab)),
        Backend::Libvirt => libvirt_kills::hold_until_all_is_there(scene),
    }
}

/// Fails the test unless the VM runs on neither host, nor can be made to.
#[track_caller]
fn assert_runs_nowhere(scene: &Scene) {
    assert_eq!(run_state(&scene.lab, "a", "web"), RunState::Postmigrate);
    match Backend::of_test() {
        Backend::Qemu => assert_eq!(run_state(&scene.lab, "b", "web"), RunState::Paused),
        Backend::Libvirt => assert_eq!(scene.lab.domain_state("b", "web").as_deref(), Some("paused")),
    }
    scene.lab.drainpipe(&["migrate", "web", "b"]).refused(REFUSED, &["is already being moved"]);
}

fn the_target_hears_nothing_or_cannot_write_after_the_hand_over() {
    let lab = impatient_lab();
    let disk = SmallDisk::under_journal(&lab, "b", 1);
    let scene = Scene::in_lab(lab);
    the_agents_lose_each_other_before_the_order_to_run(&scene);
    scene.take_back();
    the_targets_journal_is_full_after_the_hand_over(&scene, &disk);
    scene.assert_moves("a");
}

fn the_agents_lose_each_other_before_the_order_to_run(scene: &Scene) {
    // All state arrives, and the hand-over is recorded when the target no longer hears anything.
    let (migrating, paused) = hold_until_all_is_there(scene);
    cut_off(&scene.lab, "b");
    paused.release();
    wait_until_handed_over(&scene.lab);
    let output = migrating.wait();
    assert_eq!(output.code, 4, "{output:#?}");
    assert_eq!(result_of(&output).outcome, Outcome::InDoubt);
    // The VM is the target's, which does not know that yet.
    assert_runs_nowhere(scene);
    let migration = scene.migrations().remove(0);
    assert_eq!(migration.result.map(|result| result.outcome), Some(Outcome::InDoubt));
    let list: VmList = scene.lab.incomplete_json(&["vms"]);
    assert!(list.errors.iter().any(|error| error.contains("the agent of b")), "{list:#?}");
    rejoin(&scene.lab, "b");
    eventually("it is decided", || scene.migrations()[0].progress.is_none());
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

/// Before the VM is paused: after the hand-over, it would stand still until there is room.
fn a_journal_is_full_when_a_vm_comes_or_in_flight() {
    let lab = slow_lab();
    let [sources, targets] = ["a", "b"].map(|host| SmallDisk::under_journal(&lab, host, 1));
    let scene = Scene::in_lab(lab);
    the_targets_journal_is_full_when_a_vm_comes(&scene, &targets);
    the_targets_journal_becomes_full_in_flight(&scene, &targets);
    the_sources_journal_becomes_full_in_flight(&scene, &sources);
    scene.assert_moves("b");
}

fn the_targets_journal_is_full_when_a_vm_comes(scene: &Scene, disk: &SmallDisk) {
    let heartbeat = scene.guest.heartbeat();
    disk.fill();
    let output = scene.lab.drainpipe(&["migrate", "web", "b", "--option", "multichannel", "--json"]);
    assert_failed(&output, "its disk");
    scene.assert_settled("a");
    assert!(heartbeat.longest_gap() < RUNNING_SILENCE_MAX, "{:?}", heartbeat.statistics());
    disk.free();
}

fn the_targets_journal_becomes_full_in_flight(scene: &Scene, disk: &SmallDisk) {
    let heartbeat = scene.guest.heartbeat();
    let migrating = scene.migrate(&[]);
    disk.fill();
    assert_failed(&migrating.wait(), "its disk");
    assert!(heartbeat.longest_gap() < RUNNING_SILENCE_MAX, "{:?}", heartbeat.statistics());
    disk.free();
    scene.assert_settled("a");
}

fn the_sources_journal_becomes_full_in_flight(scene: &Scene, disk: &SmallDisk) {
    let migrating = scene.migrate(&[]);
    disk.fill();
    let output = migrating.wait();
    assert_failed(&output, "its disk");
    scene.guest.assert_intact();
    let refused = scene.lab.drainpipe(&["migrate", "web", "b"]);
    assert_ne!(refused.code, 0, "{refused:#?}");
    disk.free();
    scene.last_result();
    scene.assert_settled("a");
}

fn the_targets_journal_is_full_after_the_hand_over(scene: &Scene, disk: &SmallDisk) {
    let (migrating, paused) = hold_until_all_is_there(scene);
    disk.fill();
    paused.release();
    let output = migrating.wait();
    assert_eq!(output.code, 4, "{output:#?}");
    let result = result_of(&output);
    assert!(result.failure.error.as_ref().is_some_and(|error| error.contains("its disk")), "{result:#?}");
    let in_vain = result.record.events.iter().filter(|event| event.what.starts_with("failed: ")).count();
    assert!((1..=4).contains(&in_vain), "asked once a second for 2 s: {result:#?}");
    // The VM is the target's, which cannot record that.
    assert_runs_nowhere(scene);
    disk.free();
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}
