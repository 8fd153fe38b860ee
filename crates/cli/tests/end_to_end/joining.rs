//! From two hosts that do not know each other to a VM that moves between them, with the commands that a user types; and
//! how hosts leave again, voluntarily or not.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_api_types::{FleetView, HostStatus, HostView};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_hypervisor_qemu::QemuUser;
use drainpipe_identity::{Identity, JoinSecret, JoinToken};
use rusqlite::Connection;
use rustix::process::Signal;
use serde_json::json;

use crate::Test;
use crate::drain::ask;
use crate::program::{BAD_INPUT, DRAINPIPE, FAILED, Output, REFUSED};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("two_hosts_come_to_know_each_other", two_hosts_come_to_know_each_other),
    ("from_nothing_to_the_first_drain", from_nothing_to_the_first_drain),
    ("a_token_is_good_once_for_who_has_it", a_token_is_good_once_for_who_has_it),
    ("hosts_leave_and_are_revoked", hosts_leave_and_are_revoked),
    ("certificates_are_renewed_while_agents_run", certificates_are_renewed_while_agents_run),
];

/// A lab without agents. Its hosts have only what no host finds by itself: where the lab keeps their files.
fn bare_lab(hosts: &str) -> TestLab {
    let lab = TestLab::up(&["--hosts", hosts, "--link", "500", "--link", "500", "--no-agents"]);
    for host in lab.hosts() {
        let directory = lab.directory(&host);
        let [listen, user] = [
            lab.agent_address(&host).to_string(),
            QemuUser::of_lab(Path::new("qemu-system-x86_64")).uid.to_string(),
        ];
        let directory = directory.display();
        let text = format!(
            "name = \"{host}\"\nlisten = \"{listen}\"\nsocket = \"{directory}/agent.sock\"\n\
             state_directory = \"{directory}/state\"\nruntime_directory = \"{directory}/run\"\n\n\
             [qemu]\nuser = \"{user}\"\n\n[vms]\ndirectories = [\"/\"]\n\n[libvirt]\nenabled = false\n"
        );
        fs::write(lab.directory(&host).join("agent.toml"), text).unwrap();
    }
    lab
}

/// Runs a command that sets a host up, on that host.
#[track_caller]
fn on(lab: &TestLab, host: &str, words: &[&str]) -> Output {
    let config = lab.directory(host).join("agent.toml");
    lab.exec(host, &[&[DRAINPIPE], words, &["--config", config.to_str().unwrap()]].concat())
}

/// Makes `a` the first host.
#[track_caller]
fn found(lab: &TestLab, words: &[&str]) {
    on(lab, "a", &[&["init"], words].concat()).refused(REFUSED, &["the agent does not run: start it"]);
    lab.start_agent("a");
}

/// A token from `a`, and the words of the line before it.
#[track_caller]
fn token(lab: &TestLab) -> (String, String) {
    let line = on(lab, "a", &["init"]).done();
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["drainpipe", "join", address, "--token", token] = words[..] else { panic!("{line}") };
    (address.into(), token.into())
}

/// Makes a host join, and starts its agent.
#[track_caller]
fn join(lab: &TestLab, host: &str) {
    let (address, token) = token(lab);
    on(lab, host, &["join", &address, "--token", &token]).done();
    lab.start_agent(host);
}

/// The hosts that this host knows and reaches, in the order of their names.
fn reached(lab: &TestLab, host: &str) -> Vec<String> {
    let mut hosts: Vec<HostStatus> = ask(lab, host, "/v1/hosts", None).unwrap();
    hosts.retain(|status| status.host.is_some());
    let mut names: Vec<String> = hosts.into_iter().map(|status| status.name).collect();
    names.sort();
    names
}

#[track_caller]
fn eventually_reaches(lab: &TestLab, host: &str, names: &[&str]) {
    eventually(&format!("{host} reaches {names:?}"), || reached(lab, host) == names);
}

fn fleet(lab: &TestLab, host: &str) -> Result<FleetView, Problem> {
    ask(lab, host, "/v1/fleet", None)
}

fn two_hosts_come_to_know_each_other() {
    let lab = bare_lab("a,b,c");
    found(&lab, &[]);
    let first = lab.agent_pid("a");
    join(&lab, "b");
    let second = lab.agent_pid("b");
    eventually_reaches(&lab, "a", &["a", "b"]);
    eventually_reaches(&lab, "b", &["a", "b"]);
    // The earlier hosts hear of the third by themselves.
    join(&lab, "c");
    for host in ["a", "b", "c"] {
        eventually_reaches(&lab, host, &["a", "b", "c"]);
    }
    assert_eq!((lab.agent_pid("a"), lab.agent_pid("b")), (first, second), "no agent was started anew");
    let checked = lab.drainpipe(&["check", "a", "b"]);
    assert!(checked.code != REFUSED && checked.code != FAILED, "{checked:#?}");
    let guest = lab.start_guest("web", 160, "");
    lab.migrate("web", "b", &[]);
    lab.migrate("web", "a", &["--option", "multichannel"]);
    guest.assert_intact();
    // What hosts know outlives their agents.
    lab.stop_agent("c", Signal::KILL);
    lab.start_agent("c");
    assert_eq!(reached(&lab, "c"), ["a", "b", "c"]);
}

/// The commands of docs/start.md. `DRAINPIPE_TEST_TIMES` prints the time that they take.
fn from_nothing_to_the_first_drain() {
    let lab = bare_lab("a,b");
    let began = Instant::now();
    let lap = |what: &str| {
        if std::env::var_os("DRAINPIPE_TEST_TIMES").is_some() {
            eprintln!("{:7.1} s until {what}", began.elapsed().as_secs_f64());
        }
    };
    found(&lab, &[]);
    let (address, token) = token(&lab);
    lap("init has printed a token");
    on(&lab, "b", &["join", &address, "--token", &token]).done();
    lab.start_agent("b");
    eventually_reaches(&lab, "a", &["a", "b"]);
    lap("the hosts reach each other");
    // The guest's boot does not count, since users already have VMs.
    let guest = lab.start_guest("web", 160, "");
    lap("there is a VM");
    let checked = lab.drainpipe(&["check", "a", "b"]);
    assert!(checked.code != REFUSED && checked.code != FAILED, "{checked:#?}");
    lap("check has looked");
    lab.drainpipe(&["drain", "a", "--yes"]).done();
    lap("a is empty");
    lab.assert_runs_on("web", "b");
    guest.assert_intact();
}

fn a_token_is_good_once_for_who_has_it() {
    let lab = bare_lab("a,b,c");
    found(&lab, &[]);
    let refused = |host: &str, address: &str, token: &str, code: i32, words: &[&str]| {
        on(&lab, host, &["join", address, "--token", token]).refused(code, words);
        assert!(!lab.directory(host).join("state/fleet/host.pem").exists(), "{host} has a certificate");
    };
    // Without a token, a host is refused.
    let (address, good) = token(&lab);
    let of = |token: &str| -> JoinToken { token.parse().unwrap() };
    lab.stop_agent("a", Signal::TERM);
    let database = Connection::open(lab.directory("a").join("state/journal.sqlite")).unwrap();
    database.execute("UPDATE join_tokens SET ends_at_s = 1", []).unwrap();
    let kept: String = database.query_row("SELECT hash FROM join_tokens", [], |row| row.get(0)).unwrap();
    assert_ne!(kept, of(&good).secret.to_string(), "the journal has no token by which somebody joins");
    lab.start_agent("a");
    refused("b", &address, &good, FAILED, &["it lets no host join now"]);

    let (address, good) = token(&lab);
    refused("b", &address, &good[..good.len() - 1], BAD_INPUT, &["not a token"]);
    let wrong = JoinToken { secret: JoinSecret::random().unwrap(), ..of(&good) };
    refused("b", &address, &wrong.to_string(), REFUSED, &["this token is not valid"]);
    // Another authority at that address does not get to see the token.
    let elsewhere = JoinToken { authority: other_authority(&lab), ..of(&good) };
    refused("b", &address, &elsewhere.to_string(), FAILED, &["the token was not sent"]);
    let elsewhere = JoinToken { host: "c".into(), ..of(&good) };
    refused("b", &address, &elsewhere.to_string(), FAILED, &["the token was not sent"]);

    on(&lab, "b", &["join", &address, "--token", &good]).done();
    lab.start_agent("b");
    refused("c", &address, &good, REFUSED, &["this token is not valid"]);
    let (address, another) = token(&lab);
    refused("c", &address, &good, REFUSED, &["this token is not valid"]);
    // Two hosts cannot have the same name.
    lab.configure("c", "name = \"c\"", "name = \"b\"");
    refused("c", &address, &another, REFUSED, &["there is a host b in this fleet"]);
    lab.configure("c", "name = \"b\"", "name = \"c\"");
    on(&lab, "c", &["join", &address, "--token", &another]).done();
    // Only the host with the authority's key accepts new hosts.
    on(&lab, "b", &["init"])
        .refused(REFUSED, &["run `drainpipe init` on the host that has the authority's key"]);
    let life = json!({ "life_s": 60 });
    let problem =
        ask::<drainpipe_api_types::TokenView>(&lab, "b", "/v1/fleet/tokens", Some(life)).unwrap_err();
    assert_eq!(problem.kind, ProblemKind::Refused, "{problem}");
}

fn other_authority(lab: &TestLab) -> drainpipe_identity::Fingerprint {
    let directory = lab.files().join("other");
    let options = drainpipe_identity::authority::InitOptions::default();
    let certificate = drainpipe_identity::authority::init(&directory, &options).unwrap();
    drainpipe_identity::Fingerprint::of_pem(&fs::read_to_string(certificate).unwrap()).unwrap()
}

fn hosts_leave_and_are_revoked() {
    let lab = bare_lab("a,b,c");
    found(&lab, &[]);
    join(&lab, "b");
    join(&lab, "c");
    for host in ["a", "b", "c"] {
        eventually_reaches(&lab, host, &["a", "b", "c"]);
    }
    // A stolen certificate is refused, in handshakes and on open connections.
    lab.drainpipe(&["revoke", "c", "--yes"]).done();
    for host in ["a", "b"] {
        eventually_reaches(&lab, host, &["a", "b"]);
        eventually("it is no host of theirs", || {
            fleet(&lab, host).is_ok_and(|fleet| fleet.members.len() == 2 && fleet.revoked.len() == 1)
        });
    }
    eventually_reaches(&lab, "c", &["c"]);
    // The revocation survives restarts.
    lab.stop_agent("b", Signal::KILL);
    lab.start_agent("b");
    assert_eq!(reached(&lab, "b"), ["a", "b"]);
    assert_eq!(reached(&lab, "c"), ["c"]);
    // A revoked host cannot renew its certificate either, but it can join again.
    lab.stop_agent("c", Signal::TERM);
    fs::remove_dir_all(lab.directory("c").join("state/fleet")).unwrap();
    // Makes the new certificate younger than the revocation, which counts seconds.
    thread::sleep(Duration::from_secs(2));
    join(&lab, "c");
    for host in ["a", "b", "c"] {
        eventually_reaches(&lab, host, &["a", "b", "c"]);
    }

    // A host with VMs does not leave without `--force`.
    let socket = lab.agent_socket("b");
    let leave = |words: &[&str]| on(&lab, "b", &[&["--agent", &socket, "leave"], words].concat());
    let spec = json!({ "name": "web", "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2" });
    ask::<serde_json::Value>(&lab, "b", "/v1/vms", Some(json!({ "spec": spec }))).unwrap();
    leave(&[]).refused(REFUSED, &["b has VMs: web"]);
    leave(&["--force"]).done();
    assert!(!lab.directory("b").join("state/fleet/host.pem").exists());
    for host in ["a", "c"] {
        eventually_reaches(&lab, host, &["a", "c"]);
    }
    assert_eq!(reached(&lab, "b"), ["b"]);
    // The authority's key stays as long as somebody needs it.
    let socket = lab.agent_socket("a");
    on(&lab, "a", &["--agent", &socket, "leave"]).refused(REFUSED, &["a has the authority's key", "c"]);
    lab.drainpipe(&["revoke", "a", "--yes"]).refused(REFUSED, &["a has the authority's key"]);
}

fn certificates_are_renewed_while_agents_run() {
    let lab = bare_lab("a,b");
    found(&lab, &["--certificate-seconds", "40"]);
    join(&lab, "b");
    eventually_reaches(&lab, "b", &["a", "b"]);
    let pids = [lab.agent_pid("a"), lab.agent_pid("b")];
    let ends = |host: &str| {
        let [pem, ca] = ["host.pem", "ca.pem"].map(|file| lab.directory(host).join("state/fleet").join(file));
        Identity::load(&pem, &pem, &ca).unwrap().not_after()
    };
    for _ in 0..2 {
        let before = [ends("a"), ends("b")];
        for (host, before) in ["a", "b"].into_iter().zip(before) {
            eventually("its certificate is a new one", || ends(host) > before);
        }
        // With new handshakes: the open connections have ended with the old certificate.
        for host in ["a", "b"] {
            eventually_reaches(&lab, host, &["a", "b"]);
        }
    }
    assert_eq!(pids, [lab.agent_pid("a"), lab.agent_pid("b")], "no agent was started anew");
    let view: HostView = ask(&lab, "a", "/v1/host?host=b", None).unwrap();
    assert_eq!(view.facts.name, "b");
}
