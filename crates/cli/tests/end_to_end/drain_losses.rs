//! Drains during which QEMUs are killed or a target reboots: all VMs that can move do, and what the drain reports is
//! true.

use drainpipe_api_types::{DrainView, MigrationView, VmState};
use drainpipe_engine::drain::status::{DrainState, MoveState, MoveStatus};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::Test;
use crate::drain::{
    ask, assert_nowhere_but, assert_state, count, drain, ended, resume, start_small, status, wait_until,
};
use crate::drain_faults::power_off;
use crate::guest::Guest;
use crate::program::LOST;
use crate::scene::slow_lab;
use crate::silences::DRAINED_SILENCE_MAX;
use crate::support::{HostNetwork, TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("a_target_is_rebooted", a_target_is_rebooted),
    ("a_target_goes_down_and_is_started_later", a_target_goes_down_and_is_started_later),
    ("the_qemus_of_two_vms_are_killed", the_qemus_of_two_vms_are_killed),
    ("a_targets_qemu_is_killed", a_targets_qemu_is_killed),
];

/// The memory of a guest that is in flight for 8 s over [`slow_lab`], and for 5 s over [`faster_lab`].
const GUEST_MIB: u64 = 160;

/// A request that moves one VM after the other, over connections of QEMU.
fn one_by_one() -> Value {
    json!({ "to": ["b"], "transfers": 1, "option": "multichannel" })
}

fn faster_lab() -> TestLab {
    TestLab::up(&["--link", "100", "--link", "100"])
}

fn is_on_links(view: &DrainView, vm: &str) -> bool {
    let mut moves = view.status.iter().flat_map(|status| &status.moves);
    moves.any(|one| one.vm == vm && one.state == MoveState::Transferring && one.sent_bytes > 1 << 20)
}

/// What the drain reports of one VM.
#[track_caller]
fn move_of<'a>(view: &'a DrainView, vm: &str) -> &'a MoveStatus {
    let found = status(view).moves.iter().find(|one| one.vm == vm);
    found.unwrap_or_else(|| panic!("nothing is told of {vm}: {view:#?}"))
}

/// Why a VM has not moved. One that did not begin is reported as staying.
#[track_caller]
fn why_left(view: &DrainView, vm: &str) -> String {
    let stay = status(view).stays.iter().find(|stay| stay.vm == vm).map(|stay| stay.why.to_string());
    stay.unwrap_or_else(|| {
        let one = move_of(view, vm);
        assert!(matches!(one.state, MoveState::Failed | MoveState::Lost), "{view:#?}");
        one.error.as_ref().expect("it says why").message.clone()
    })
}

/// Fails the test unless the VM is on this host alone, and has died.
#[track_caller]
fn assert_has_died(lab: &TestLab, vm: &str, host: &str) {
    let list = lab.vms();
    let of_name = list.vms.iter().filter(|view| view.name == vm);
    let found: Vec<_> = of_name.map(|view| (view.host.as_str(), view.state)).collect();
    assert_eq!(found, [(host, VmState::Stopped)], "{list:#?}");
    let hosts = lab.hosts();
    assert!(hosts.iter().all(|host| lab.qemu_pid(host, vm).is_none()), "a QEMU of {vm} is left");
}

/// Boots a VM again on the host where it died.
#[track_caller]
fn boot(lab: &TestLab, guest: &Guest, host: &str) {
    lab.start_again(host, &guest.name);
    guest.wait_until_ready();
    guest.assert_intact();
}

/// Fails the test unless migrations have left nothing on either host.
#[track_caller]
fn assert_tidy(lab: &TestLab, network: &[HostNetwork; 2]) {
    for host in ["a", "b"] {
        eventually("no guard is left", || lab.pids(host, &[" guard --migration "]).is_empty());
    }
    eventually("the network is put back", || lab.network() == *network);
}

fn a_target_is_rebooted() {
    let lab = faster_lab();
    let guests = ["db", "web"].map(|vm| lab.start_guest(vm, GUEST_MIB, ""));
    let network = lab.network();
    drain(&lab, "a", one_by_one());
    let before = wait_until(&lab, "a", "one has moved, and one is on the links", |view| {
        count(view, MoveState::Moved) == 1 && guests.iter().any(|guest| is_on_links(view, &guest.name))
    });
    let (arrived, on_way): (Vec<&Guest>, Vec<&Guest>) =
        guests.iter().partition(|guest| move_of(&before, &guest.name).state == MoveState::Moved);
    let (arrived, on_way) = (arrived[0], on_way[0]);
    let heartbeat = on_way.heartbeat();
    power_off(&lab, "b");
    lab.start_agent("b");
    // The drain goes on by itself with the VMs that are still here.
    let drained = ended(&lab, "a");
    assert_state(&drained, DrainState::Drained, 2);
    let attempts = [arrived, on_way].map(|guest| move_of(&drained, &guest.name).attempts);
    assert_eq!(attempts, [1, 2], "{drained:#?}");
    lab.assert_runs_on(&on_way.name, "b");
    on_way.assert_intact();
    assert!(heartbeat.longest_gap() < DRAINED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    // What was on b ended with its host, and nobody starts it automatically.
    assert_has_died(&lab, &arrived.name, "b");
    boot(&lab, arrived, "b");
    assert_tidy(&lab, &network);
    // By the time that both are asked for, one of them is on its way.
    resume(&lab, "a", false);
    let request = json!({ "vm": on_way.name, "target": "a" });
    let coming: MigrationView = ask(&lab, "b", "/v1/migrations", Some(request)).unwrap();
    resume(&lab, "a", true);
    let back = ended(&lab, "a");
    assert_state(&back, DrainState::Drained, 2);
    assert_eq!(move_of(&back, &on_way.name).migration, Some(coming.id), "it is waited for: {back:#?}");
    assert_nowhere_but(&lab, &["db", "web"], &["a"]);
}

fn a_target_goes_down_and_is_started_later() {
    let lab = faster_lab();
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", "[tls]", "[limits]\nstall_s = 3\n\n[tls]");
    lab.start_agent("a");
    let guest = lab.start_guest("web", GUEST_MIB, "");
    let network = lab.network();
    let heartbeat = guest.heartbeat();
    drain(&lab, "a", one_by_one());
    wait_until(&lab, "a", "it is on the links", |view| is_on_links(view, "web"));
    power_off(&lab, "b");
    let left = ended(&lab, "a");
    assert_state(&left, DrainState::Incomplete, 0);
    let why = why_left(&left, "web");
    for words in ["nothing has arrived for 3 s", "no host can take it: b: the agent of b"] {
        assert!(why.contains(words), "`{words}` is missing: {left:#?}");
    }
    assert!(heartbeat.longest_gap() < DRAINED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    lab.start_agent("b");
    lab.assert_runs_on("web", "a");
    let again = drain(&lab, "a", one_by_one());
    assert_eq!(again.id, left.id, "it is carried on");
    assert_state(&ended(&lab, "a"), DrainState::Drained, 1);
    assert_nowhere_but(&lab, &["web"], &["b"]);
    guest.assert_intact();
    assert_tidy(&lab, &network);
}

fn the_qemus_of_two_vms_are_killed() {
    let lab = slow_lab();
    let guest = lab.start_guest("web", GUEST_MIB, "");
    let small = ["one", "other"];
    for vm in small {
        start_small(&lab, vm, "");
    }
    let network = lab.network();
    let command = "drain a --to b --transfers 1 --option multichannel --yes --json";
    let draining = lab.start(&command.split(' ').collect::<Vec<_>>());
    // A small VM may be ready before the large one, and move first.
    let waits = |view: &DrainView, vm: &str| move_of(view, vm).state == MoveState::Ready;
    let before = wait_until(&lab, "a", "one is on the links, and one waits for them", |view| {
        is_on_links(view, "web") && small.iter().any(|vm| waits(view, vm))
    });
    let [waiting, other] = if waits(&before, small[0]) { small } else { [small[1], small[0]] };
    for vm in ["web", waiting] {
        kill_process(lab.qemu_pid("a", vm).unwrap(), Signal::KILL).unwrap();
    }
    let output = draining.wait();
    assert_eq!(output.code, LOST, "{output:#?}");
    let reported: DrainView = serde_json::from_str(&output.stdout).unwrap();
    assert_state(&reported, DrainState::Incomplete, 1);
    for vm in ["web", waiting] {
        assert_has_died(&lab, vm, "a");
        let why = why_left(&reported, vm);
        assert!(why.contains("is lost: its QEMU on a has ended by signal 9"), "{reported:#?}");
        assert_eq!(why.matches("QEMU on a has ended").count(), 1, "{reported:#?}");
    }
    assert_nowhere_but(&lab, &[other], &["b"]);
    assert_tidy(&lab, &network);
    lab.drainpipe(&["resume", "a"]).done();
    boot(&lab, &guest, "a");
    drain(&lab, "a", one_by_one());
    assert_state(&ended(&lab, "a"), DrainState::Drained, 1);
    assert_nowhere_but(&lab, &["web", other], &["b"]);
    guest.assert_intact();
}

fn a_targets_qemu_is_killed() {
    let lab = slow_lab();
    let guest = lab.start_guest("web", GUEST_MIB, "");
    start_small(&lab, "other", "");
    let network = lab.network();
    let heartbeat = guest.heartbeat();
    drain(&lab, "a", one_by_one());
    wait_until(&lab, "a", "it is on the links", |view| is_on_links(view, "web"));
    kill_process(lab.qemu_pid("b", "web").unwrap(), Signal::KILL).unwrap();
    let drained = ended(&lab, "a");
    assert_state(&drained, DrainState::Drained, 2);
    assert_eq!(["web", "other"].map(|vm| move_of(&drained, vm).attempts), [2, 1], "{drained:#?}");
    assert_nowhere_but(&lab, &["web", "other"], &["b"]);
    guest.assert_intact();
    assert!(heartbeat.longest_gap() < DRAINED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    assert_tidy(&lab, &network);
}
