//! The commands that empty a host and fill it again, as people and scripts use them.

use drainpipe_api_types::{DrainKind, DrainPlanView, DrainView, MigrationView};
use drainpipe_engine::drain::status::{DrainState, MoveState};
use rustix::process::Signal;

use crate::Test;
use crate::drain::{assert_nowhere_but, fast_lab, host_of, slow_lab, start_small, wait_until};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("a_host_is_drained_serviced_and_resumed", a_host_is_drained_serviced_and_resumed),
    ("nothing_begins_where_nobody_can_be_asked_or_the_input_is_wrong", nothing_begins_on_wrong_input),
    (
        "ctrl_c_cancels_and_a_drain_goes_on_when_the_program_is_killed",
        ctrl_c_cancels_and_a_drain_goes_on_when_the_program_is_killed,
    ),
];

/// Fails the test unless all VMs that moved from this host were encrypted on their way.
#[track_caller]
fn assert_encrypted(lab: &TestLab, view: &DrainView, host: &str) {
    for one in view.status.iter().flat_map(|status| &status.moves) {
        let id = one.migration.as_ref().expect("it was moved");
        let migration: MigrationView = lab.json(&["history", id, "--host", host]);
        let used = migration.result.and_then(|result| result.connection_use.encryption);
        assert!(used.as_ref().is_some_and(|used| used.is_encrypted), "{used:?}");
    }
}

fn a_host_is_drained_serviced_and_resumed() {
    let lab = fast_lab();
    start_small(&lab, "bound", "[placement]\nstays = \"licence bound to this host\"");
    start_small(&lab, "db", "[placement]\ntogether = [\"shop\"]");
    start_small(&lab, "web", "[placement]\ntogether = [\"shop\"]");

    let never = lab.drainpipe(&["drain", "status"]).done();
    assert!(never.contains("a takes VMs"), "{never}");
    let planned = lab.drainpipe(&["drain", "a", "--to", "b", "--dry-run"]).done();
    for words in ["2 VMs would leave a", "licence bound to this host"] {
        assert!(planned.contains(words), "{words} in\n{planned}");
    }
    let view: DrainPlanView = lab.json(&["drain", "a", "--to", "b", "--dry-run"]);
    assert!(view.plan.moves.iter().all(|one| one.target == "b"), "{view:#?}");

    let drained = lab.drainpipe(&["drain", "a", "--to", "b", "--encrypt", "--yes"]);
    assert_eq!(drained.code, 1, "one VM stays: {drained:#?}");
    for words in ["web runs on b", "db runs on b", "warning: if b failed after this"] {
        assert!(drained.stderr.contains(words), "{words} in {drained:#?}");
    }
    for words in ["2 of 2 VMs moved away from a, 1 stays", "licence bound", "a is cordoned"] {
        assert!(drained.stdout.contains(words), "{words} in {drained:#?}");
    }
    assert_nowhere_but(&lab, &["db", "web"], &["b"]);
    assert_eq!(host_of(&lab, "bound"), "a");
    let hosts = lab.drainpipe(&["hosts"]).done();
    let state = hosts.lines().find(|line| line.trim_start().starts_with("a ")).expect("a host a");
    assert!(state.contains("cordoned"), "{hosts}");
    let status: DrainView = lab.json(&["drain", "status", "a"]);
    assert_eq!(status.status.as_ref().map(|status| status.state), Some(DrainState::Incomplete));
    assert_encrypted(&lab, &status, "a");

    let back = lab.drainpipe(&["resume", "a", "--failback"]);
    assert!(back.stderr.contains("web is back from b"), "{back:#?}");
    assert!(back.stdout.contains("2 of 2 VMs back on a") && back.stdout.contains("a takes VMs"), "{back:#?}");
    assert_eq!(back.code, 0, "{back:#?}");
    assert_nowhere_but(&lab, &["bound", "db", "web"], &["a"]);
    let status: DrainView = lab.json(&["drain", "status"]);
    assert_eq!((status.kind, status.cordoned), (Some(DrainKind::Failback), false), "{status:#?}");
    assert_encrypted(&lab, &status, "b");

    lab.drainpipe(&["drain", "b", "--agent", &lab.agent_socket("b"), "--yes"]).done();
    lab.drainpipe(&["resume", "b", "--agent", &lab.agent_socket("b")]).done();
}

fn nothing_begins_on_wrong_input() {
    let lab = fast_lab();
    start_small(&lab, "web", "");
    for (arguments, code, words) in [
        (&["drain", "a"][..], 2, &["no terminal", "--yes"][..]),
        (&["drain"], 2, &["<HOST>"]),
        (&["drain", "a", "b", "--yes"], 2, &["drainpipe drain"]),
        (&["drain", "a", "--yes", "--transfers", "9"], 2, &["--transfers"]),
        (&["drain", "a", "--yes", "--to", "x"], 2, &["no host x"]),
        (&["drain", "a", "--yes", "--to", "a"], 2, &["name other hosts"]),
        (&["drain", "a", "--yes", "--dry-run"], 2, &["--dry-run"]),
        (&["drain", "x", "--yes"], 2, &["no host x"]),
        (&["drain", "cancel"], 3, &["no drain of a is under way"]),
        (&["resume", "a", "--failback"], 3, &["never drained"]),
    ] {
        lab.drainpipe(arguments).refused(code, words);
    }
    let status: DrainView = lab.json(&["drain", "status"]);
    assert!(!status.cordoned && status.id.is_none(), "{status:#?}");
    assert_eq!(host_of(&lab, "web"), "a");
}

#[track_caller]
fn wait_until_in_flight(lab: &TestLab) {
    wait_until(lab, "a", "a VM is on the links", |view| {
        let moves = view.status.iter().flat_map(|status| &status.moves);
        moves.into_iter().any(|one| one.state == MoveState::Transferring && one.sent_bytes > 1 << 20)
    });
}

fn ctrl_c_cancels_and_a_drain_goes_on_when_the_program_is_killed() {
    let lab = slow_lab();
    let guest = lab.start_guest("web", 160, "");
    ctrl_c_cancels_and_the_end_is_told(&lab);
    guest.assert_intact();
    lab.drainpipe(&["resume", "a"]).done();
    a_drain_goes_on_when_the_program_is_killed(&lab);
    guest.assert_intact();
}

fn ctrl_c_cancels_and_the_end_is_told(lab: &TestLab) {
    let draining = lab.start(&["drain", "a", "--yes", "--json"]);
    wait_until_in_flight(lab);
    draining.signal(Signal::INT);
    let cancelled = draining.wait();
    assert_eq!(cancelled.code, 5, "{cancelled:#?}");
    let view: DrainView = serde_json::from_str(&cancelled.stdout).unwrap();
    assert_eq!(view.status.map(|status| status.state), Some(DrainState::Cancelled));
    assert!(view.cordoned && view.ended_at.is_some());
    assert_eq!(host_of(lab, "web"), "a");
}

fn a_drain_goes_on_when_the_program_is_killed(lab: &TestLab) {
    let draining = lab.start(&["drain", "a", "--yes"]);
    wait_until_in_flight(lab);
    draining.signal(Signal::KILL);
    draining.wait();
    eventually("it is over all the same", || {
        let view: DrainView = lab.json(&["drain", "status", "a"]);
        view.status.is_some_and(|status| status.state == DrainState::Drained)
    });
    assert_nowhere_but(lab, &["web"], &["b", "c"]);
}
