//! A VM that has just arrived leaves again before its previous host has heard of it. Nothing of it stays behind that
//! could be started.

use std::thread;
use std::time::{Duration, Instant};

use drainpipe_api_types::{MigrationView, VmList};
use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::RunState;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::Test;
use crate::drain::ask;
use crate::guest::Guest;
use crate::program::Running;
use crate::scene::{MEMORY_MIB, SmallDisk, hold_journal, step, wait_until_handed_over};
use crate::support::{TestLab, eventually};
use crate::switch_over_faults::{is_all_there, run_state};

pub(crate) const TESTS: &[Test] = &[
    ("a_vm_leaves_before_its_source_has_heard", a_vm_leaves_before_its_source_has_heard),
    ("a_vm_leaves_though_its_arrival_could_not_be_recorded", a_vm_leaves_though_its_arrival_was_not_recorded),
];

/// If the target has heard nothing about an arrival for 10 s, it asks; it checks every 2 s.
const GHOST_SEEN_WITHIN: Duration = Duration::from_secs(15);

/// How long an agent needs on a busy machine to send something, or to hear and record it.
const TURN: Duration = Duration::from_millis(500);

/// Within the 15 s that the source's agent waits for an answer.
const TURNS_MAX: u32 = 12;

fn three_hosts() -> TestLab {
    TestLab::up(&["--hosts", "a,b,c", "--link", "150", "--link", "150"])
}

/// Moves the VM on from `b`, and waits until it runs on `c`.
#[track_caller]
fn move_on(lab: &TestLab) {
    let request = json!({ "vm": "web", "target": "c", "option": "multichannel" });
    let begun: MigrationView = ask(lab, "b", "/v1/migrations", Some(request)).unwrap();
    eventually("it has moved on", || {
        let view: MigrationView = ask(lab, "b", &format!("/v1/migrations/{}", begun.id), None).unwrap();
        let Some(result) = view.result else { return false };
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
        true
    });
}

#[track_caller]
fn assert_no_ghost(lab: &TestLab, guest: &Guest) {
    let end = Instant::now() + GHOST_SEEN_WITHIN;
    while Instant::now() < end {
        let list: VmList = ask(lab, "b", "/v1/vms", None).unwrap();
        assert!(list.vms.is_empty(), "b still lists what has left it: {list:#?}");
        thread::sleep(Duration::from_millis(500));
    }
    let started = ask::<()>(lab, "b", "/v1/vms/web/start", Some(json!(null))).unwrap_err();
    assert_eq!(started.kind, ProblemKind::NotFound, "{started:?}");
    assert!(lab.qemu_pid("b", "web").is_none());
    guest.assert_intact();
}

/// The frozen agents run in turns, never both, until the target's has obeyed. It hears the source's, which may have to
/// connect to it first, and the source's does not hear that the VM runs.
#[track_caller]
fn obey_unheard(lab: &TestLab, source: Pid, target: Pid) {
    for _ in 0..TURNS_MAX {
        kill_process(target, Signal::CONT).unwrap();
        let end = Instant::now() + TURN;
        while Instant::now() < end {
            if run_state(lab, "b", "web") == RunState::Running {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        kill_process(target, Signal::STOP).unwrap();
        kill_process(source, Signal::CONT).unwrap();
        thread::sleep(TURN);
        kill_process(source, Signal::STOP).unwrap();
    }
    panic!("the target has not been told to run the VM in {TURNS_MAX} turns");
}

/// The VM runs on `b`. The agent of `a`, which ordered that, is frozen before it hears so.
#[track_caller]
fn arrive_unheard(lab: &TestLab) -> (Running, Pid) {
    let migrating = lab.start(&["migrate", "web", "b", "--option", "multichannel"]);
    eventually("memory is copied", || {
        matches!(step(&lab.migrations("a")), Some(Step::CopyMemory | Step::CopyDirtyMemory))
    });
    // Keeps the hand-over from being recorded until all state has arrived.
    let held = hold_journal(lab, "a");
    eventually("all state is on the target", || is_all_there(lab));
    let [agent, targets] = ["a", "b"].map(|host| lab.agent_pid(host).unwrap());
    // By then, its agent has said so.
    thread::sleep(Duration::from_millis(500));
    kill_process(targets, Signal::STOP).unwrap();
    held.release();
    wait_until_handed_over(lab);
    kill_process(agent, Signal::STOP).unwrap();
    obey_unheard(lab, agent, targets);
    // Its QEMU says so a moment before its agent counts the VM as its own.
    eventually("b's agent knows", || lab.agent_log("b").contains("runs here"));
    (migrating, agent)
}

#[track_caller]
fn assert_completed(lab: &TestLab) {
    eventually("its source has heard", || {
        lab.migrations("a").remove(0).result.is_some_and(|result| result.outcome == Outcome::Completed)
    });
}

fn a_vm_leaves_before_its_source_has_heard() {
    let lab = three_hosts();
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    let (_migrating, _) = arrive_unheard(&lab);
    move_on(&lab);
    assert_no_ghost(&lab, &guest);
    // Neither its source nor the next start of the host in between brings it back.
    for host in ["a", "b"] {
        lab.stop_agent(host, Signal::KILL);
        lab.start_agent(host);
    }
    assert_completed(&lab);
    lab.assert_runs_on("web", "c");
    guest.assert_intact();
}

fn a_vm_leaves_though_its_arrival_was_not_recorded() {
    let lab = three_hosts();
    let disk = SmallDisk::under_journal(&lab, "b", 1);
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    let (migrating, agent) = arrive_unheard(&lab);
    disk.fill();
    kill_process(agent, Signal::CONT).unwrap();
    assert_eq!(migrating.wait().code, 0);
    disk.free();
    move_on(&lab);
    assert_no_ghost(&lab, &guest);
    lab.assert_runs_on("web", "c");
}
