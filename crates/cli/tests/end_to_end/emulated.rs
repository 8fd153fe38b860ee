//! Labs of emulated machines: each has its own kernel, with everything that this machine's kernel lacks.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::option::MigrationOption;
use rustix::process::Signal;

use crate::Test;
use crate::guest::Guest;
use crate::lab_cli::assert_nothing_is_left;
use crate::program::{BAD_INPUT, DRAINPIPE, FAILED, Output, REFUSED, Running, command, drainpipe};
use crate::support::{TestLab, eventually, unique_name};

pub(crate) const TESTS: &[Test] = &[
    ("programs_run_in_machines_as_anywhere", programs_run_in_machines_as_anywhere),
    ("links_have_rdma_teams_losses_and_carriers", links_have_rdma_teams_losses_and_carriers),
    ("an_up_that_is_killed_leaves_what_down_removes", an_up_that_is_killed_leaves_what_down_removes),
    ("a_vm_moves_between_machines_and_is_intact", a_vm_moves_between_machines_and_is_intact),
    ("a_vm_moves_by_rdma_or_says_why_not", a_vm_moves_by_rdma_or_says_why_not),
    (
        "a_vm_whose_rdma_is_cut_stays_and_then_moves_without",
        a_vm_whose_rdma_is_cut_stays_and_then_moves_without,
    ),
];

/// Sets up RDMA in software on the first link, with packets of 4 KiB.
const RDMA: &str = "ip link set e0 mtu 9000 && modprobe rdma_rxe && modprobe rdma_ucm && \
    rdma link add rxe0 type rxe netdev e0";

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

/// Runs a shell command on `host`, which must succeed; returns what it prints.
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
    // Nobody waits for processes that it leaves behind and that go on printing.
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

/// Links with LACP, whose frames an ordinary bridge would keep.
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
    // Both members are in one aggregator, and the partner has answered.
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

/// A guest in an emulated machine. It uses KVM there, as no other test does on a machine without KVM.
struct Nested {
    lab: TestLab,
    guest: Guest,
}

impl Nested {
    /// Starts the guest on host `a`.
    #[track_caller]
    fn start() -> Self {
        let machines = ["--machine-memory-mib", "1536", "--link", "1000:9000", "--link", "1000"];
        let lab = TestLab::up(&[&[emulated().as_str()], &machines[..]].concat());
        let guest = Guest::new("nested", lab.guest_address(), lab.namespace("client"));
        let specification =
            guest.specification(128, "").replace("accelerator = \"tcg\"", "accelerator = \"kvm\"");
        let file = lab.directory("a").join("nested.toml");
        std::fs::write(&file, specification).unwrap();
        let nested = Self { lab, guest };
        nested.ask("a", &["vm", "create", file.to_str().unwrap()]).done();
        nested.ask("a", &["vm", "start", "nested"]).done();
        nested.guest.wait_until_ready();
        nested
    }

    /// The output of `drainpipe` on a host.
    #[track_caller]
    fn ask(&self, host: &str, words: &[&str]) -> Output {
        self.lab.exec(host, &[&[DRAINPIPE], words].concat())
    }

    /// Moves the guest; returns the result. Its memory must be as it was.
    #[track_caller]
    fn moves(&self, [from, to]: [&str; 2], option: &str) -> MigrationResult {
        let said = self.ask(from, &["migrate", "nested", to, "--option", option, "--json"]).done();
        let result: MigrationResult = serde_json::from_str(&said).unwrap();
        assert_eq!((result.outcome, result.target.as_str()), (Outcome::Completed, to), "{result:#?}");
        self.guest.assert_intact();
        result
    }
}

fn a_vm_moves_between_machines_and_is_intact() {
    let nested = Nested::start();
    for (hosts, option) in [(["a", "b"], "multichannel"), (["b", "a"], "tcp")] {
        assert_eq!(nested.moves(hosts, option).choice.option.to_string(), option);
    }
}

fn a_vm_moves_by_rdma_or_says_why_not() {
    let nested = Nested::start();
    shell(&nested.lab, "a", RDMA);
    let result = nested.moves(["a", "b"], "direct");
    let reason = result.choice.fallback_reason.as_deref();
    assert_eq!((result.choice.option, reason), (MigrationOption::Multichannel, Some("no RDMA device on b")));
    shell(&nested.lab, "b", RDMA);
    let result = nested.moves(["b", "a"], "direct");
    assert_eq!((result.choice.option, result.choice.fallback_reason), (MigrationOption::Direct, None));
    assert_eq!(result.traffic.paths.iter().map(|path| path.link.as_str()).collect::<Vec<_>>(), ["e0"]);
}

fn a_vm_whose_rdma_is_cut_stays_and_then_moves_without() {
    let nested = Nested::start();
    let lab = &nested.lab;
    for host in ["a", "b"] {
        shell(lab, host, RDMA);
    }
    let words =
        ["lab", "exec", lab.name(), "a", "--", DRAINPIPE, "migrate", "nested", "b", "--option", "direct"];
    let moving = lab.start(&words);
    let sent = || shell(lab, "a", "cat /sys/class/net/e0/statistics/tx_bytes").trim().parse::<u64>().unwrap();
    let before = sent();
    eventually("memory is on its way", || sent() > before + (4 << 20));
    lab.fault("link-down a e0");
    let Output { code, stderr, .. } = moving.wait();
    assert_eq!(code, FAILED, "{stderr}");
    // The target's QEMU may notice first, and end.
    assert!(stderr.contains("it runs on a"), "{stderr}");
    nested.guest.assert_intact();
    let result = nested.moves(["a", "b"], "direct");
    let reason = result.choice.fallback_reason.unwrap_or_default();
    assert!(reason.contains("no path that carries now has an RDMA device"), "{reason}");
    assert_ne!(result.choice.option, MigrationOption::Direct);
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
