//! What concerns a guest's network when it moves: stateful firewalls on both hosts, and hooks.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drainpipe_engine::migration::result::{MigrationResult, TrackedUse};
use rustix::process::Signal;

use crate::Test;
use crate::guest::Guest;
use crate::scene::{Scene, assert_failed, hold_journal, slow_lab};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("hooks_are_told_in_their_order", hooks_are_told_in_their_order),
    ("a_hook_that_hangs_is_ended_and_the_vm_moves", a_hook_that_hangs_is_ended_and_the_vm_moves),
    (
        "a_vm_that_stays_is_told_though_its_agent_was_killed",
        a_vm_that_stays_is_told_though_its_agent_was_killed,
    ),
    ("a_live_connection_passes_the_targets_firewall", a_live_connection_passes_the_targets_firewall),
    ("what_is_loaded_goes_where_the_vm_does_not_come", what_is_loaded_goes_where_the_vm_does_not_come),
    (
        "what_stands_goes_ahead_and_goes_when_that_is_cancelled",
        what_stands_goes_ahead_and_goes_when_that_is_cancelled,
    ),
];

/// Bridged packets pass the firewall. It lets in connections that begin properly, and those that it has seen begin.
const FIREWALL: &str = "add table inet firewall; \
    add chain inet firewall forward { type filter hook forward priority 0; policy drop; }; \
    add rule inet firewall forward ct state established accept; \
    add rule inet firewall forward meta l4proto != tcp accept; \
    add rule inet firewall forward tcp flags & (fin|syn|rst|ack) == syn ct state new accept";

/// A connection that did not begin here is never taken for an established one.
const STRICT: &str = "net.netfilter.nf_conntrack_tcp_loose=0";
const BRIDGED: &str = "net.bridge.bridge-nf-call-iptables=1";

/// Long enough for a lost packet to be sent again.
const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// TCP sends again several times meanwhile.
const SILENT_FOR: Duration = Duration::from_secs(8);

fn a_live_connection_passes_the_targets_firewall() {
    let lab = TestLab::fast();
    if !put_up_firewalls(&lab) {
        return;
    }
    let guest = lab.start_guest("web", 160, "");
    get_to_know(&lab, "a", &guest);
    let mut connection = guest.control().expect("the firewall lets new connections in");
    connection.status(ANSWERS_WITHIN).expect("the guest answers");
    assert!(tracks(&lab, "a", &guest) && !tracks(&lab, "b", &guest));

    let used = tracked(&lab.migrate("web", "b", &["--option", "multichannel"]));
    assert!(used.along >= 1, "{used:#?}");
    assert!(tracks(&lab, "b", &guest), "it is on the target");
    eventually("it is gone from the source", || !tracks(&lab, "a", &guest));
    connection.status(ANSWERS_WITHIN).expect("the connection passes the target's firewall");

    // Without conntrack, the connection does not pass.
    get_to_know(&lab, "b", &guest);
    for host in ["a", "b"] {
        lab.stop_agent(host, Signal::TERM);
        lab.configure(host, "[vms]\n", "[vms]\nconntrack = false\n");
        lab.start_agent(host);
    }
    let result = lab.migrate("web", "a", &["--option", "multichannel"]);
    assert_eq!(result.connection_use.tracked_connections, None);
    connection.status(SILENT_FOR).expect_err("the firewall has not seen it begin");
    guest.assert_intact();
}

fn what_is_loaded_goes_where_the_vm_does_not_come() {
    let Some(scene) = slow_scene_behind_firewalls() else { return };
    let Scene { lab, guest, .. } = &scene;
    let mut connection = guest.control().expect("the firewall lets new connections in");
    let migrating = scene.migrate(&[]);
    // Everything has arrived by then, and the agent cannot record that the VM is the target's.
    let journal = hold_journal(lab, "a");
    eventually("it is on the target", || tracks(lab, "b", guest));
    let output = migrating.wait();
    journal.release();
    assert_failed(&output, "journal");
    lab.assert_runs_on("web", "a");
    eventually("nothing is left on the target", || !tracks(lab, "b", guest));
    assert!(tracks(lab, "a", guest));
    connection.status(ANSWERS_WITHIN).expect("the connection is as it was");
}

fn what_stands_goes_ahead_and_goes_when_that_is_cancelled() {
    let Some(scene) = slow_scene_behind_firewalls() else { return };
    let Scene { lab, guest, .. } = &scene;
    let mut connection = guest.control().expect("the firewall lets new connections in");
    connection.status(ANSWERS_WITHIN).expect("the guest answers");
    let migrating = scene.migrate(&[]);
    eventually("it is on the target while the VM runs here", || tracks(lab, "b", guest));
    connection.status(ANSWERS_WITHIN).expect("the guest runs on");
    migrating.signal(Signal::INT);
    assert_eq!(migrating.wait().code, 5, "there was time to cancel it");
    lab.assert_runs_on("web", "a");
    eventually("nothing is left on the target", || !tracks(lab, "b", guest));
    assert!(tracks(lab, "a", guest));
}

/// A lab in which a guest of 160 MiB is in flight for some seconds. A VM that arrives at once may be paused before its
/// hook begins.
fn lab_in_which_there_is_time() -> TestLab {
    TestLab::up(&["--link", "200", "--link", "200"])
}

fn hooks_are_told_in_their_order() {
    let lab = lab_in_which_there_is_time();
    let log = set_hooks(&lab, "");
    let guest = lab.start_guest("web", 160, "");
    lab.migrate("web", "b", &["--option", "multichannel"]);
    let expected = "before_pause web a b \nafter web a b moved\n";
    eventually("both hooks are told", || read(&log) == expected);
    lab.migrate("web", "a", &["--option", "multichannel"]);
    let told_back = "before_pause web b a \nafter web b a moved\n";
    eventually("both are told of the way back", || read(&log) == format!("{expected}{told_back}"));
    guest.assert_intact();
    for host in ["a", "b"] {
        assert!(lab.agent_log(host).contains("said by a hook"), "what they print is in the log");
    }
}

fn a_hook_that_hangs_is_ended_and_the_vm_moves() {
    let lab = lab_in_which_there_is_time();
    let log = set_hooks(&lab, "test $DRAINPIPE_HOOK = after || sleep 600");
    let guest = lab.start_guest("web", 160, "");
    lab.migrate("web", "b", &["--option", "multichannel"]);
    eventually("the hooks are told", || read(&log) == "before_pause web a b \nafter web a b moved\n");
    guest.assert_intact();
    let said = lab.agent_log("a");
    assert!(
        said.contains("killed, because it took longer") || said.contains("the hook is stopped"),
        "{said}"
    );
    eventually("nothing of it is left", || lab.pids("a", &["sleep", "600"]).is_empty());
}

fn a_vm_that_stays_is_told_though_its_agent_was_killed() {
    let lab = lab_in_which_there_is_time();
    let log = set_hooks(&lab, "test $DRAINPIPE_HOOK = after || sleep 5");
    let guest = lab.start_guest("web", 160, "");
    let scene = Scene::of(lab, guest);
    let migrating = scene.migrate(&[]);
    eventually("the hook is told", || read(&log).starts_with("before_pause"));
    scene.lab.stop_agent("a", Signal::KILL);
    migrating.wait();
    scene.lab.start_agent("a");
    let expected = "before_pause web a b \nafter web a b stayed\n";
    eventually("a hook is told that it stays", || read(&log) == expected);
    scene.assert_settled("a");
}

/// A scene with a guest that is in flight for some seconds, and that its host knows; `None` if the kernel cannot track
/// connections.
fn slow_scene_behind_firewalls() -> Option<Scene> {
    let lab = slow_lab();
    put_up_firewalls(&lab).then(|| {
        let scene = Scene::in_lab(lab);
        get_to_know(&scene.lab, "a", &scene.guest);
        scene
    })
}

/// Puts up firewalls on both hosts. Returns whether the kernel can, and prints why not.
pub(crate) fn put_up_firewalls(lab: &TestLab) -> bool {
    for (host, number) in [("a", 251), ("b", 252)] {
        let address = format!("ip address add 10.77.100.{number}/24 dev guests");
        let all = format!("{address} && nft '{FIREWALL}' && sysctl -q -w {BRIDGED} {STRICT}");
        let output = lab.exec(host, &["bash", "-c", &all]);
        if output.code != 0 {
            eprintln!("SKIPPED: no stateful firewall of bridged packets here: {}", output.stderr);
            return false;
        }
    }
    true
}

/// Makes the host know the guest's address, as if it routed to it.
#[track_caller]
pub(crate) fn get_to_know(lab: &TestLab, host: &str, guest: &Guest) {
    lab.exec(host, &["ping", "-c1", "-W30", &guest.address().to_string()]).done();
}

/// Whether a host's kernel tracks a TCP connection of the guest.
#[track_caller]
fn tracks(lab: &TestLab, host: &str, guest: &Guest) -> bool {
    let all = lab.exec(host, &["cat", "/proc/net/nf_conntrack"]).done();
    let address = format!("dst={} ", guest.address());
    all.lines().any(|line| line.contains(" tcp ") && line.contains(&address))
}

#[track_caller]
fn tracked(result: &MigrationResult) -> TrackedUse {
    result
        .connection_use
        .tracked_connections
        .clone()
        .unwrap_or_else(|| panic!("nothing is told: {result:#?}"))
}

/// Makes both hosts' hooks one program, which records its input, prints something, and then does this.
#[track_caller]
fn set_hooks(lab: &TestLab, then: &str) -> PathBuf {
    let log = lab.files().join("told");
    fs::write(&log, "").unwrap();
    let words = "$DRAINPIPE_HOOK $DRAINPIPE_VM $DRAINPIPE_SOURCE $DRAINPIPE_TARGET $DRAINPIPE_OUTCOME";
    let text = format!("#!/bin/sh\necho \"{words}\" >> {}\necho said by a hook\n{then}\n", log.display());
    let program = lab.write("hook", &text);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    for host in ["a", "b"] {
        lab.stop_agent(host, Signal::TERM);
        let hooks = format!(
            "[hooks]\nbefore_pause = \"{program}\"\nbefore_pause_s = 8\nafter = \"{program}\"\n\n[tls]"
        );
        lab.configure(host, "[tls]", &hooks);
        lab.start_agent(host);
    }
    log
}

fn read(log: &Path) -> String {
    fs::read_to_string(log).unwrap()
}
