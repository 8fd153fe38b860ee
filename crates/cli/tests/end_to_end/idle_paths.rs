//! Paths that are tested from time to time while no migration is under way, so that a dead one is known before it is
//! needed.

use drainpipe_api_types::{HostStatus, PathsView};
use drainpipe_engine::paths::path_record::PathRecord;
use rustix::process::Signal;

use crate::Test;
use crate::program::Running;
use crate::scene::{Scene, slow_lab};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("a_dead_path_is_told_and_so_is_its_return", a_dead_path_is_told_and_so_is_its_return),
    (
        "a_link_local_path_that_is_not_found_any_more_is_told",
        a_link_local_path_that_is_not_found_any_more_is_told,
    ),
    ("nothing_is_tried_while_a_vm_moves", nothing_is_tried_while_a_vm_moves),
];

#[track_caller]
fn try_often(lab: &TestLab) {
    for host in ["a", "b"] {
        lab.stop_agent(host, Signal::TERM);
        lab.configure(host, "probe_every_s = 0", "probe_every_s = 1");
        lab.start_agent(host);
    }
}

/// What host `a` knows of the paths to `b`.
#[track_caller]
fn known(lab: &TestLab) -> Option<PathsView> {
    let hosts: Vec<HostStatus> = lab.json(&["hosts"]);
    let view = hosts.into_iter().find(|status| status.name == "a").and_then(|status| status.host);
    view.expect("a answers").paths.into_iter().find(|known| known.peer == "b")
}

/// Waits until the path over `e1` is in the state that `is` names, and the one over `e0` works.
#[track_caller]
fn eventually_e1(lab: &TestLab, what: &str, is: impl Fn(&PathRecord) -> bool) {
    eventually(what, || {
        known(lab).is_some_and(|known| {
            let [e0, e1] = &known.paths[..] else { return false };
            e0.fault.is_none() && e1.to_string() == "e1–e1" && is(e1)
        })
    });
}

fn says(path: &PathRecord, words: &str) -> bool {
    path.fault.as_ref().is_some_and(|fault| fault.contains(words))
}

fn a_dead_path_is_told_and_so_is_its_return() {
    let lab = TestLab::fast();
    assert_eq!(known(&lab), None, "it is switched off in labs");
    try_often(&lab);
    eventually_e1(&lab, "both work", |e1| e1.fault.is_none());
    lab.fault("blackhole b e1");
    eventually_e1(&lab, "e1 is silent", |e1| says(e1, "no answer from"));
    let output = lab.drainpipe(&["hosts"]).done();
    for words in ["paths from a to b at ", ": e0–e0 ok, e1–e1 silent since "] {
        assert!(output.contains(words), "`{words}` is missing: {output}");
    }
    let log = lab.agent_log("a");
    assert!(log.contains("WARN") && log.contains("path e1–e1 does not work"), "{log}");
    lab.fault("heal b e1");
    eventually_e1(&lab, "e1 works again", |e1| e1.fault.is_none());
    lab.fault("link-down b e1");
    eventually_e1(&lab, "e1 is down", |e1| says(e1, "e1 of b"));
    lab.fault("link-up b e1");
    eventually_e1(&lab, "e1 is up again", |e1| e1.fault.is_none());
    assert_eq!(lab.agent_log("a").matches("path e1–e1 works again").count(), 2);
}

fn a_link_local_path_that_is_not_found_any_more_is_told() {
    let lab = TestLab::up(&["--link-addresses", "link-local", "--link", "unlimited", "--link", "unlimited"]);
    try_often(&lab);
    eventually_e1(&lab, "both work", |e1| e1.fault.is_none());
    lab.fault("blackhole b e1");
    eventually_e1(&lab, "e1 is silent", |e1| says(e1, "no longer reach each other"));
}

fn nothing_is_tried_while_a_vm_moves() {
    let lab = slow_lab();
    try_often(&lab);
    let scene = Scene::in_lab(lab);
    let migrating: Running = scene.migrate(&["--option", "tcp"]);
    let before = known(&scene.lab);
    assert!(before.is_some());
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(known(&scene.lab), before);
    assert_eq!(migrating.wait().code, 0);
    eventually("they are tried again", || known(&scene.lab) != before);
    scene.assert_settled("b");
}
