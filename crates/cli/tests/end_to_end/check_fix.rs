//! `drainpipe check --fix` and `--undo`: a fix lasts until it is undone.

use std::path::Path;

use rustix::process::Signal;

use crate::Test;
use crate::check::{assert_found, assert_silent, check, is_no_error, on};
use crate::program::{BAD_INPUT, DRAINPIPE, Output, REFUSED, WARNED};
use crate::support::TestLab;

pub(crate) const TESTS: &[Test] = &[
    ("mended_until_it_is_put_back", mended_until_it_is_put_back),
    (
        "it_asks_first_and_leaves_alone_what_is_not_its_own",
        it_asks_first_and_leaves_alone_what_is_not_its_own,
    ),
];

const FILTER: &str = "net.ipv4.conf.e0.rp_filter";
const BUFFERS: &str = "net.ipv4.tcp_rmem";
const SMALL: &str = "4096\t8192\t4000";

#[track_caller]
fn set(lab: &TestLab, host: &str, setting: &str, value: &str) {
    on(lab, host, &format!("sysctl -qw {setting}='{value}'"));
}

#[track_caller]
fn get(lab: &TestLab, host: &str, setting: &str) -> String {
    lab.exec(host, &["sysctl", "-n", setting]).done().trim().to_owned()
}

/// Runs a check as an operator, who may change every host, from the client.
#[track_caller]
fn as_operator(lab: &TestLab, arguments: &[&str]) -> Output {
    let authority = lab.directory("client").join("pki");
    let ann = Path::new(&authority).join("operators/ann");
    if !ann.exists() {
        lab.drainpipe(&["pki", "operator", "ann", "--directory", authority.to_str().unwrap()]).done();
    }
    let agent = format!("a@{}", lab.agent_address("a"));
    let who = ["--agent", &agent, "--identity", ann.to_str().unwrap()];
    lab.exec("client", &[&[DRAINPIPE], arguments, &who].concat())
}

fn mended_until_it_is_put_back() {
    let lab = TestLab::fast();
    set(&lab, "a", FILTER, "1");
    set(&lab, "b", BUFFERS, SMALL);
    let (_, findings) = check(&lab, "a", "b");
    assert_eq!(findings.iter().filter(|finding| finding.fix.is_some()).count(), 2, "{findings:#?}");

    let fixed = as_operator(&lab, &["check", "a", "b", "--fix", "--yes"]);
    assert!(is_no_error(&fixed), "{fixed:#?}");
    assert!(fixed.stderr.contains("on a: rp_filter of e0 becomes 2 (loose)"), "{fixed:#?}");
    assert_silent(&lab);
    assert_eq!(get(&lab, "a", FILTER), "2");
    let buffers = get(&lab, "b", BUFFERS);
    assert!(buffers.starts_with("4096\t8192\t") && buffers != SMALL, "{buffers}");

    // At its next start, a killed agent undoes its migrations' changes, but not these.
    for (host, signal) in [("a", Signal::KILL), ("b", Signal::TERM)] {
        lab.stop_agent(host, signal);
        lab.start_agent(host);
    }
    assert_eq!((get(&lab, "a", FILTER), get(&lab, "b", BUFFERS)), ("2".into(), buffers));

    let undone: serde_json::Value =
        serde_json::from_str(&as_operator(&lab, &["check", "a", "b", "--undo", "--json"]).done()).unwrap();
    let undone: Vec<[&str; 2]> = undone
        .as_array()
        .unwrap()
        .iter()
        .map(|fix| ["host", "setting"].map(|name| fix[name].as_str().unwrap()))
        .collect();
    assert!(undone.contains(&["a", FILTER]) && undone.contains(&["b", BUFFERS]), "{undone:?}");
    assert_eq!(undone.len(), 2, "{undone:?}");
    assert_eq!((get(&lab, "a", FILTER), get(&lab, "b", BUFFERS)), ("1".into(), SMALL.into()));
    let again = as_operator(&lab, &["check", "a", "b", "--undo"]);
    assert!(again.code == 0 && again.stderr.contains("--fix has changed nothing"), "{again:#?}");
}

fn it_asks_first_and_leaves_alone_what_is_not_its_own() {
    let lab = TestLab::fast();
    what_another_changed_since_is_left_alone(&lab);
    it_asks_first(&lab);
    lab.drainpipe(&["check", "a", "b", "--undo"]).done();
    a_host_mends_itself_alone(&lab);
}

fn it_asks_first(lab: &TestLab) {
    set(lab, "a", FILTER, "1");
    lab.drainpipe(&["check", "a", "b", "--fix"]).refused(BAD_INPUT, &["no terminal", "--yes"]);
    lab.drainpipe(&["check", "a", "b", "--yes"]).refused(BAD_INPUT, &["--fix"]);
    lab.drainpipe(&["check", "a", "b", "--fix", "--undo"]).refused(BAD_INPUT, &["--undo"]);
    let answered = |answer: &str| {
        let command = format!("{DRAINPIPE} check a b --fix --agent {}", lab.agent_socket("a"));
        let typed = format!("echo {answer} | script --quiet --return --command '{command}' /dev/null");
        let output = lab.exec("a", &["bash", "-c", &typed]);
        assert!(is_no_error(&output), "{output:#?}");
        output.stdout
    };
    let shown = answered("n");
    assert!(shown.contains("[y/N]") && shown.contains("nothing is changed"), "{shown}");
    assert_eq!(get(lab, "a", FILTER), "1");
    answered("y");
    assert_eq!(get(lab, "a", FILTER), "2");
    assert_silent(lab);
}

fn a_host_mends_itself_alone(lab: &TestLab) {
    set(lab, "a", FILTER, "1");
    set(lab, "b", FILTER, "1");
    // Root on host `a`.
    lab.drainpipe(&["check", "a", "b", "--fix", "--yes"]).refused(
        REFUSED,
        &[
            "not everything could be changed on b",
            "--undo",
            "the agent of host a may not change settings",
            "operator",
        ],
    );
    assert_eq!((get(lab, "a", FILTER), get(lab, "b", FILTER)), ("2".into(), "1".into()));
    assert_found(lab, WARNED, "reverse-path-filter", &["b e0"], "rp_filter=2");
    let own = lab.drainpipe(&["check", "b", "a", "--fix", "--yes", "--agent", &lab.agent_socket("b")]);
    assert!(is_no_error(&own), "{own:#?}");
    assert_silent(lab);
    lab.drainpipe(&["check", "a", "b", "--undo"])
        .refused(REFUSED, &["not everything could be put back on b"]);
    assert_eq!((get(lab, "a", FILTER), get(lab, "b", FILTER)), ("1".into(), "2".into()));
}

fn what_another_changed_since_is_left_alone(lab: &TestLab) {
    set(lab, "a", FILTER, "1");
    let fixed = lab.drainpipe(&["check", "a", "b", "--fix", "--yes"]);
    assert!(is_no_error(&fixed), "{fixed:#?}");
    set(lab, "a", FILTER, "0");
    let undone = lab.drainpipe(&["check", "a", "b", "--undo"]);
    assert_eq!(undone.code, 0, "{undone:#?}");
    assert!(undone.stderr.contains("left as it is: 0; before --fix it was 1"), "{undone:#?}");
    assert_eq!(get(lab, "a", FILTER), "0");

    // With nothing to fix, nothing is asked and nothing is written.
    let idle = lab.drainpipe(&["check", "a", "b", "--fix", "--yes"]);
    assert!(is_no_error(&idle) && idle.stderr.contains("--fix can fix none of this"), "{idle:#?}");
}
