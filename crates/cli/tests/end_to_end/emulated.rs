//! Labs of emulated machines: a kernel of their own, and all that this machine's kernel lacks.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::Signal;

use crate::Test;
use crate::guest::Guest;
use crate::lab_cli::assert_nothing_is_left;
use crate::program::{BAD_INPUT, DRAINPIPE, Output, REFUSED, Running, command, drainpipe};
use crate::support::{TestLab, eventually, unique_name};

pub(crate) const TESTS: &[Test] = &[
    ("programs_run_in_machines_as_anywhere", programs_run_in_machines_as_anywhere),
    ("links_have_rdma_teams_losses_and_carriers", links_have_rdma_teams_losses_and_carriers),
    ("an_up_that_is_killed_leaves_what_down_removes", an_up_that_is_killed_leaves_what_down_removes),
    ("a_vm_moves_between_machines_and_is_intact", a_vm_moves_between_machines_and_is_intact),
];

/// What this machine lacks to emulate others.
pub(crate) fn missing() -> Option<String> {
    let built = boot_files().join("built");
    (!built.exists()).then(|| format!("{} is missing: run scripts/emulated", built.display()))
}

fn boot_files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/emulated")
}

fn emulated() -> String {
    format!("--emulated={}", boot_files().display())
}

fn lab() -> TestLab {
    let machines = ["--machine-memory-mib", "768", "--no-agents"];
    TestLab::up(
        &[&[emulated().as_str(), "--link", "unlimited", "--link", "unlimited"], &machines[..]].concat(),
    )
}

/// In a shell of host `host`: what it prints. It must end well.
#[track_caller]
fn shell(lab: &TestLab, host: &str, script: &str) -> String {
    lab.exec(host, &["sh", "-c", script]).done()
}

fn programs_run_in_machines_as_anywhere() {
    let lab = lab();
    let ours = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let theirs = shell(&lab, "a", "uname -r");
    assert!(theirs.ends_with("-amd64\n") && theirs != ours, "{theirs}, and here {ours}");

    let Output { code, stdout, stderr } = lab.exec("b", &["sh", "-c", "hostname; echo wrong >&2; exit 7"]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (7, "b\n", "wrong\n"));
    assert_eq!(lab.exec("a", &["sh", "-c", "kill -TERM $$"]).code, 128 + 15);
    // Whoever it leaves behind and goes on printing is not waited for.
    let chatty = "(while :; do echo on; done) & (while sleep 0.05; do echo on; done) & echo over";
    assert!(shell(&lab, "a", chatty).contains("over"));
    lab.exec("a", &["no-such-program"]).refused(BAD_INPUT, &["on host a", "no-such-program"]);
    lab.exec("c", &["true"]).refused(BAD_INPUT, &["no host \"c\""]);

    shell(&lab, "a", "ls /dev/kvm /dev/net/tun /dev/vhost-net");

    assert_input_arrives(&lab, &vec![0; 300_000]);
    shell(&lab, "a", "echo changed >/etc/hostname");
    assert_eq!(shell(&lab, "b", "test \"$(cat /etc/hostname)\" = changed; echo $?"), "1\n");
    assert_a_killed_users_program_ends(&lab);

    let env = drainpipe(&["lab", "env", lab.name()]);
    env.refused(REFUSED, &["drainpipe lab exec", "drainpipe hosts"]);
    let fault = drainpipe(&["lab", "fault", lab.name(), "mtu", "a", "e0", "9000"]);
    fault.refused(BAD_INPUT, &["emulated machine", "ip link set"]);
}

#[track_caller]
fn assert_input_arrives(lab: &TestLab, input: &[u8]) {
    let mut count = command(&["lab", "exec", lab.name(), "a", "--", "wc", "-c"]);
    let mut count = count.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    count.stdin.take().unwrap().write_all(input).unwrap();
    let counted = count.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&counted.stdout), format!("{}\n", input.len()));
}

#[track_caller]
fn assert_a_killed_users_program_ends(lab: &TestLab) {
    let sleeps = |lab: &TestLab| lab.exec("a", &["pgrep", "--full", "sleep 4321"]).code == 0;
    let user = lab.start(&["lab", "exec", lab.name(), "a", "--", "sleep", "4321"]);
    eventually("the program runs", || sleeps(lab));
    user.signal(Signal::KILL);
    user.wait();
    eventually("the program has ended", || !sleeps(lab));
}

fn links_have_rdma_teams_losses_and_carriers() {
    let lab = lab();
    for host in ["a", "b"] {
        shell(&lab, host, "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev e0");
    }
    let links = shell(&lab, "a", "rdma link show");
    assert!(links.contains("rxe0/1 state ACTIVE physical_state LINK_UP netdev e0"), "{links}");
    assert_carriers_follow_cables(&lab);
    assert_a_team_survives_a_cable(&lab);
    assert_losses_are_seen(&lab);
    let name = lab.name().to_owned();
    drop(lab);
    assert_nothing_is_left(&name);
}

#[track_caller]
fn assert_carriers_follow_cables(lab: &TestLab) {
    let carriers = || ["a", "b"].map(|host| shell(lab, host, "cat /sys/class/net/e0/carrier"));
    assert_eq!(carriers(), ["1\n", "1\n"]);
    lab.fault("link-down a e0");
    eventually("both have lost their carrier", || carriers() == ["0\n", "0\n"]);
    let status = drainpipe(&["lab", "status", lab.name()]).done();
    assert!(status.contains("link-down a e0") && status.contains("b/machine/console.log"), "{status}");
    lab.fault("link-up a e0");
    eventually("both have it again", || carriers() == ["1\n", "1\n"]);
}

/// With LACP, whose frames an ordinary bridge would keep.
#[track_caller]
fn assert_a_team_survives_a_cable(lab: &TestLab) {
    for (host, address) in [("a", "10.99.0.1/24"), ("b", "10.99.0.2/24")] {
        let script = format!(
            "rdma link delete rxe0; set -e
            ip link add team0 type bond mode 802.3ad miimon 50 lacp_rate fast xmit_hash_policy layer3+4
            for member in e0 e1; do ip link set $member down; ip link set $member master team0; done
            ip address add {address} dev team0; ip link set team0 up"
        );
        shell(lab, host, &script);
    }
    // Both members in one aggregator, with a partner who has answered.
    let joined = || {
        let team = shell(lab, "a", "cat /proc/net/bonding/team0");
        team.contains("Number of ports: 2") && team.contains("Partner Mac Address: 52:54:00:77:02")
    };
    eventually("the two have agreed by LACP", joined);
    shell(lab, "a", "ping -c 1 -W 5 10.99.0.2");
    lab.fault("link-down b e1");
    let members = || shell(lab, "a", "cat /proc/net/bonding/team0");
    eventually("the team has lost a member", || {
        let members = members();
        let second = members.split("Slave Interface: e1").nth(1);
        second.is_some_and(|second| second.trim_start().starts_with("MII Status: down"))
    });
    eventually("the other one carries on", || {
        lab.exec("a", &["ping", "-c", "1", "-W", "1", "10.99.0.2"]).code == 0
    });
}

#[track_caller]
fn assert_losses_are_seen(lab: &TestLab) {
    shell(lab, "a", "tc qdisc add dev team0 root netem loss 50%");
    let Output { stdout, .. } =
        lab.exec("a", &["ping", "-q", "-c", "60", "-i", "0.02", "-W", "1", "10.99.0.2"]);
    let lost = stdout.split(", ").find_map(|part| part.split_once("% packet")?.0.parse::<f64>().ok());
    assert!(lost.is_some_and(|percent| (10.0..90.0).contains(&percent)), "{stdout}");
}

/// By KVM in the machines, which no other test without KVM has.
fn a_vm_moves_between_machines_and_is_intact() {
    let machines = ["--machine-memory-mib", "1536", "--link", "1000", "--link", "1000"];
    let lab = TestLab::up(&[&[emulated().as_str()], &machines[..]].concat());
    let guest = Guest::new("nested", lab.guest_address(), lab.namespace("client"));
    let specification =
        guest.specification(160, "").replace("accelerator = \"tcg\"", "accelerator = \"kvm\"");
    let file = lab.directory("a").join("nested.toml");
    std::fs::write(&file, specification).unwrap();
    let ask = |host: &str, words: &[&str]| lab.exec(host, &[&[DRAINPIPE], words].concat()).done();
    ask("a", &["vm", "create", file.to_str().unwrap()]);
    ask("a", &["vm", "start", "nested"]);
    guest.wait_until_ready();
    for (from, to, option) in [("a", "b", "multichannel"), ("b", "a", "tcp")] {
        let output = ask(from, &["migrate", "nested", to, "--option", option]);
        assert!(output.contains(&format!("nested runs on {to}")) && output.contains(option), "{output}");
        guest.assert_intact();
    }
}

fn an_up_that_is_killed_leaves_what_down_removes() {
    let name = unique_name();
    let up = Running::start(command(&["lab", "up", &name, &emulated(), "--no-agents"]));
    let monitor = Path::new("/run/drainpipe/lab").join(&name).join("b/machine/monitor.sock");
    eventually("both QEMUs run", || monitor.exists());
    up.signal(Signal::KILL);
    up.wait();
    drainpipe(&["lab", "exec", &name, "a", "--", "true"]).refused(1, &["incomplete", "drainpipe lab down"]);
    let down = drainpipe(&["lab", "down", &name]).done();
    assert!(down.contains("2 processes ended, 4 namespaces removed"), "{down}");
    assert_nothing_is_left(&name);
}
