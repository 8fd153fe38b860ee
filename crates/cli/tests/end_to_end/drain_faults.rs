//! Drains during which more than one agent fails: each VM runs once, and what the drain reports is true.

use std::fs;
use std::thread;
use std::time::Duration;

use drainpipe_api_types::{DrainView, VmView};
use drainpipe_engine::drain::status::{DrainState, MoveState};
use drainpipe_engine::migration::step::Step;
use rustix::process::{Signal, kill_process};
use serde_json::json;

use crate::Test;
use crate::drain::{
    ask, assert_nowhere_but, assert_state, count, drain, drain_until_one_is_in_flight, ended, fast_lab,
    resume, start_small, status, view, wait_until,
};
use crate::guest::Guest;
use crate::program::{REFUSED, Running};
use crate::scene::{SmallDisk, cut_off, hold_journal, rejoin, slow_lab, wait_until_handed_over};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("of_two_drains_of_a_host_one_begins", of_two_drains_of_a_host_one_begins),
    ("the_disk_under_the_journal_is_full", the_disk_under_the_journal_is_full),
    (
        "the_disk_under_the_journal_is_full_on_the_way_back",
        the_disk_under_the_journal_is_full_on_the_way_back,
    ),
    ("the_agent_is_killed_on_the_way_back", the_agent_is_killed_on_the_way_back),
    (
        "the_agent_from_which_vms_come_back_is_started_anew",
        the_agent_from_which_vms_come_back_is_started_anew,
    ),
    ("the_drained_host_is_rebooted", the_drained_host_is_rebooted),
    ("a_target_is_cut_off_after_a_hand_over", a_target_is_cut_off_after_a_hand_over),
];

const GUEST_MIB: u64 = 160;

fn of_two_drains_of_a_host_one_begins() {
    let lab = fast_lab();
    for vm in ["db", "shop", "web"] {
        start_small(&lab, vm, "");
    }
    let both = [(); 2].map(|()| lab.start(&["drain", "a", "--yes", "--json"])).map(Running::wait);
    let (begun, refused): (Vec<_>, Vec<_>) = both.into_iter().partition(|output| output.code == 0);
    assert_eq!((begun.len(), refused.len()), (1, 1), "{begun:#?} {refused:#?}");
    assert_eq!(refused[0].code, REFUSED, "{refused:#?}");
    let said = &refused[0].stderr;
    assert!(said.contains("is being drained") || said.contains("just being planned"), "{said}");
    let drained: DrainView = serde_json::from_str(&begun[0].stdout).unwrap();
    assert_state(&drained, DrainState::Drained, 3);
    assert!(status(&drained).moves.iter().all(|one| one.attempts == 1), "{drained:#?}");
    assert_nowhere_but(&lab, &["db", "shop", "web"], &["b", "c"]);
}

fn the_disk_under_the_journal_is_full() {
    let lab = slow_lab();
    let disk = SmallDisk::under_journal(&lab, "a", 4);
    let guest = lab.start_guest("web", GUEST_MIB, "");
    start_small(&lab, "least", "");
    let in_flight = drain_until_one_is_in_flight(&lab, &["b"]);
    disk.fill();
    eventually("it is noticed", || lab.agent_log("a").contains("is its disk full"));
    let waiting = wait_until(&lab, "a", "it says why it waits", |view| status(view).obstacle.is_some());
    assert_eq!((waiting.id, waiting.ended_at), (in_flight.id, None));
    guest.assert_answers();
    disk.free();
    assert_state(&ended(&lab, "a"), DrainState::Drained, 2);
    assert_nowhere_but(&lab, &["web", "least"], &["b"]);
    guest.assert_intact();
}

fn the_disk_under_the_journal_is_full_on_the_way_back() {
    let lab = slow_lab();
    let disk = SmallDisk::under_journal(&lab, "a", 4);
    let guest = lab.start_guest("web", GUEST_MIB, "");
    drain(&lab, "a", json!({ "to": ["b"] }));
    assert_state(&ended(&lab, "a"), DrainState::Drained, 1);
    resume(&lab, "a", true);
    wait_until(&lab, "a", "it is on its way", |view| count(view, MoveState::Transferring) == 1);
    disk.fill();
    let waiting = wait_until(&lab, "a", "it says why it waits", |view| status(view).obstacle.is_some());
    assert_eq!(waiting.ended_at, None);
    guest.assert_answers();
    disk.free();
    assert_state(&ended(&lab, "a"), DrainState::Incomplete, 0);
    assert_nowhere_but(&lab, &["web"], &["b"]);
    guest.assert_intact();
}

/// Ends everything that ran on a host, and removes what the host kept in memory.
#[track_caller]
pub(crate) fn power_off(lab: &TestLab, host: &str) {
    for pid in lab.pids(host, &[]) {
        // A process may have ended with another one.
        let _ = kill_process(pid, Signal::KILL);
    }
    eventually("nothing runs there", || lab.pids(host, &[]).is_empty());
    fs::remove_dir_all(lab.directory(host).join("run")).unwrap();
}

/// Two VMs, `web` and `least`, that left a for b, and that a is bringing back.
#[track_caller]
fn two_on_their_way_back() -> (TestLab, Guest) {
    let lab = slow_lab();
    let guest = lab.start_guest("web", GUEST_MIB, "");
    start_small(&lab, "least", "");
    drain(&lab, "a", json!({ "to": ["b"] }));
    assert_state(&ended(&lab, "a"), DrainState::Drained, 2);
    resume(&lab, "a", true);
    (lab, guest)
}

fn the_agent_is_killed_on_the_way_back() {
    let (lab, guest) = two_on_their_way_back();
    let row =
        |view: &DrainView, vm: &str| status(view).moves.iter().find(|one| one.vm == vm).unwrap().clone();
    wait_until(&lab, "a", "it is in flight", |view| row(view, "web").state == MoveState::Transferring);
    lab.stop_agent("a", Signal::KILL);
    let is_at_rest = || ask::<VmView>(&lab, "b", "/v1/vms/web", None).is_ok_and(|vm| vm.migration.is_none());
    eventually("it is undone", is_at_rest);
    lab.start_agent("a");
    let reported = wait_until(&lab, "a", "what was in flight is settled", |view| {
        status(view).moves.iter().all(|one| matches!(one.state, MoveState::Moved | MoveState::Waiting))
    });
    let back = count(&reported, MoveState::Moved);
    assert_state(&reported, DrainState::Interrupted, back);
    let web = row(&reported, "web");
    assert_eq!(web.state, MoveState::Waiting, "{reported:#?}");
    assert!(web.error.is_some_and(|error| error.message.contains("b had it last")), "{reported:#?}");
    for one in &status(&reported).moves {
        assert_nowhere_but(&lab, &[&one.vm], &[if one.state == MoveState::Moved { "a" } else { "b" }]);
    }
    resume(&lab, "a", true);
    assert_state(&ended(&lab, "a"), DrainState::Drained, 2 - back);
    assert_nowhere_but(&lab, &["web", "least"], &["a"]);
    guest.assert_intact();
}

fn the_agent_from_which_vms_come_back_is_started_anew() {
    let (lab, guest) = two_on_their_way_back();
    // An agent that ends while connections are being made may leave behind a QEMU that waits for itself
    // (docs/decisions/0040).
    eventually("its memory is on its way", || {
        let mut in_flight = lab.migrations("b").into_iter().filter_map(|view| view.progress);
        in_flight.any(|progress| progress.step == Step::CopyMemory && progress.sent_bytes > 1_000_000)
    });
    lab.stop_agent("b", Signal::TERM);
    // As long as some hosts take to boot.
    thread::sleep(Duration::from_secs(3));
    lab.start_agent("b");
    assert_state(&ended(&lab, "a"), DrainState::Drained, 2);
    assert_nowhere_but(&lab, &["web", "least"], &["a"]);
    guest.assert_intact();
}

fn the_drained_host_is_rebooted() {
    let lab = slow_lab();
    let guest = lab.start_guest("web", GUEST_MIB, "");
    start_small(&lab, "first", "");
    lab.migrate("first", "b", &[]);
    let in_flight = drain_until_one_is_in_flight(&lab, &["b"]);
    power_off(&lab, "a");
    lab.start_agent("a");
    let interrupted = view(&lab, "a");
    assert!(interrupted.cordoned && interrupted.id == in_flight.id, "{interrupted:#?}");
    assert_eq!(status(&interrupted).state, DrainState::Interrupted, "{interrupted:#?}");
    assert_eq!(count(&interrupted, MoveState::Moved), 0, "{interrupted:#?}");
    eventually("b has discarded what was in flight", || lab.qemu_pid("b", "web").is_none());
    eventually("what was in flight is settled", || {
        lab.migrations("a").iter().all(|one| one.progress.is_none())
    });
    lab.assert_runs_on("first", "b");
    // The reboot has ended the VM, so nothing is left to move.
    lab.drainpipe(&["vm", "start", "web"]).refused(REFUSED, &["drainpipe resume a"]);
    let again = drain(&lab, "a", json!({}));
    assert_eq!(again.id, in_flight.id, "it is carried on");
    assert_state(&ended(&lab, "a"), DrainState::Drained, 0);
    lab.drainpipe(&["resume", "a"]).done();
    lab.start_again("a", "web");
    lab.assert_runs_on("web", "a");
    guest.wait_until_ready();
    guest.assert_intact();
}

fn a_target_is_cut_off_after_a_hand_over() {
    let lab = slow_lab();
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", "[tls]", "[limits]\ndecision_s = 2\n\n[tls]");
    lab.start_agent("a");
    let guest = lab.start_guest("web", GUEST_MIB, "");
    start_small(&lab, "least", "");
    // Without the deadline, the drain would go on looking for a host that takes the other VM.
    let drain_it = ["drain", "a", "--transfers", "1", "--deadline", "15", "--yes", "--json"];
    let draining = lab.start(&drain_it);
    // By then, the other VM is ready or has moved.
    wait_until(&lab, "a", "it is in flight, and the other one is ready", |view| {
        let state = |vm: &str| {
            let mut moves = view.status.iter().flat_map(|status| &status.moves);
            moves.find(|one| one.vm == vm).map(|one| one.state)
        };
        state("web") == Some(MoveState::Transferring)
            && !matches!(state("least"), None | Some(MoveState::Waiting | MoveState::Preparing))
    });
    let held = hold_journal(&lab, "b");
    wait_until_handed_over(&lab);
    cut_off(&lab, "b");
    held.release();
    let output = draining.wait();
    assert_eq!(output.code, 4, "{output:#?}");
    let reported: DrainView = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(status(&reported).state, DrainState::Incomplete, "{reported:#?}");
    // The smaller VM may be handed over while the other one is in flight.
    let in_doubt = status(&reported).moves.iter().filter(|one| one.state == MoveState::InDoubt);
    for one in in_doubt {
        assert_eq!(one.attempts, 1, "never tried again: {reported:#?}");
        lab.drainpipe(&["migrate", &one.vm, "b"]).refused(REFUSED, &["is already being moved"]);
    }
    rejoin(&lab, "b");
    wait_until(&lab, "a", "it is settled", |view| count(view, MoveState::InDoubt) == 0);
    assert_nowhere_but(&lab, &["web", "least"], &["a", "b"]);
    drain(&lab, "a", json!({}));
    assert_state(&ended(&lab, "a"), DrainState::Drained, 2);
    assert_nowhere_but(&lab, &["web", "least"], &["b"]);
    guest.assert_intact();
}
