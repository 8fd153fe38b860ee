//! Migrations over links with only IPv6 link-local addresses, only IPv4, or both; and with migration addresses that the
//! agents choose.

use std::process::Command;
use std::thread;
use std::time::Duration;

use drainpipe_api_types::{DrainPlanView, PlanView};
use drainpipe_engine::check::path_report::PathReport;
use drainpipe_engine::finding::{Finding, Severity};
use drainpipe_engine::migration::result::{MigrationResult, Outcome, PathState, PathUse};
use drainpipe_engine::option::MigrationOption;
use drainpipe_engine::plan::{Plan, Spread};
use rustix::process::Signal;

use crate::Test;
use crate::check::{check, on, report};
use crate::path_loss::{makes_e1_again, turns};
use crate::scene::{Scene, result_of};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("link_local_with_and_without_configuration", link_local_with_and_without_configuration),
    ("ipv4_only", ipv4_only),
    ("both", both),
    ("one_segment", one_segment),
    ("link_local_paths_are_lost_and_return", link_local_paths_are_lost_and_return),
    ("agents_are_started_anew_in_flight", agents_are_started_anew_in_flight),
    ("what_is_removed_in_flight_is_made_again", what_is_removed_in_flight_is_made_again),
];

/// Links like those of [`TestLab::brisk`].
const TWO_LINKS: [&str; 4] = ["--link", "500", "--link", "500"];

const MEMORY_MIB: u64 = 160;

fn lab(link_addresses: &str) -> TestLab {
    TestLab::up(&[&["--link-addresses", link_addresses], TWO_LINKS.as_slice()].concat())
}

/// Removes these lines from both hosts' configurations.
#[track_caller]
fn unconfigure(lab: &TestLab, lines_of: impl Fn(&str) -> Vec<String>) {
    for (host, last) in [("a", "11"), ("b", "12")] {
        lab.stop_agent(host, Signal::TERM);
        for line in lines_of(last) {
            lab.configure(host, &line, "");
        }
        lab.start_agent(host);
    }
}

fn links() -> Vec<String> {
    ["e0", "e1"].map(|link| format!("[[link]]\nname = \"{link}\"\nspeed_mbps = 500\n")).to_vec()
}

fn migration_address(last: &str) -> String {
    format!("migration_address = \"10.77.255.{last}\"\n")
}

#[track_caller]
fn plan(lab: &TestLab, option: &str) -> Plan {
    lab.json::<PlanView>(&["migrate", "web", "b", "--dry-run", "--option", option]).plan
}

#[track_caller]
fn assert_link_local(plan: &Plan) {
    assert_eq!(plan.paths.len(), 2, "{plan:#?}");
    assert!(plan.paths.iter().all(drainpipe_engine::paths::path::Path::is_link_local), "{plan:#?}");
}

/// Fails the test unless both links carried data, and were watched all the time.
#[track_caller]
fn assert_both_links_carried(result: &MigrationResult) {
    let mut links: Vec<&str> = result.traffic.paths.iter().map(|path| path.link.as_str()).collect();
    links.sort_unstable();
    assert_eq!(links, ["e0", "e1"], "{result:#?}");
    // On a busy machine, hellos may be late, so that a path is left out for a while.
    let unwatched = |path: &PathUse| path.turns.iter().any(|turn| turn.state == PathState::Unwatched);
    assert!(result.traffic.paths.iter().all(|path| path.share > 0.05 && !unwatched(path)), "{result:#?}");
}

#[track_caller]
fn there_and_back_over_both(lab: &TestLab) {
    for target in ["b", "a"] {
        // The option is named, since `auto` may compress over links of this speed.
        let result = lab.migrate("web", target, &["--option", "multichannel"]);
        assert_eq!(result.choice.option, MigrationOption::Multichannel, "{result:#?}");
        assert_both_links_carried(&result);
    }
}

fn link_local_with_and_without_configuration() {
    let lab = lab("link-local");
    for (host, last) in [("a", "11"), ("b", "12")] {
        lab.stop_agent(host, Signal::TERM);
        lab.configure(host, "\n\n[tls]", &format!("\n{}\n[tls]", migration_address(last)));
        lab.start_agent(host);
    }
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    ipv4_over_link_local(&lab);
    guest.assert_intact();
    unconfigure(&lab, |last| [links(), vec![migration_address(last)]].concat());
    link_local_only(&lab);
    guest.assert_intact();
}

/// A configured IPv4 migration address, on links without IPv4.
fn ipv4_over_link_local(lab: &TestLab) {
    let before = lab.network();
    assert_link_local(&plan(lab, "auto"));
    there_and_back_over_both(lab);
    lab.assert_network_as(&before);
}

fn link_local_only(lab: &TestLab) {
    let before = lab.network();
    let planned = plan(lab, "multichannel");
    assert_link_local(&planned);
    assert_eq!((planned.option(), planned.spread()), (MigrationOption::Multichannel, Spread::Routed));
    let output = lab.drainpipe(&["migrate", "web", "b", "--dry-run"]).done();
    assert!(output.contains("answered over link-local addresses"), "{output}");
    there_and_back_over_both(lab);
    let result = lab.migrate("web", "b", &["--option", "tcp"]);
    assert_eq!((result.choice.option, result.choice.fallback_reason), (MigrationOption::Tcp, None));
    let report = report(lab, "a", "b", &[]);
    assert_eq!(report.paths.len(), 2, "{report:#?}");
    let whole = |path: &PathReport| {
        let trial = &path.trial;
        let round_trip = trial.tcp_round_trip.expect("the kernel knows the connection on its link");
        assert!(0.0 < round_trip.least_ms && round_trip.least_ms <= round_trip.smoothed_ms, "{trial:?}");
        trial.connection_error.is_none() && trial.forward.passes_whole() && trial.backward.passes_whole()
    };
    assert!(report.paths.iter().all(whole), "{report:#?}");
    lab.assert_network_as(&before);
}

fn ipv4_only() {
    let lab = lab("ipv4");
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    let before = lab.network();
    there_and_back_over_both(&lab);
    lab.assert_network_as(&before);
    // Without a configured address, there is none that such links could route.
    unconfigure(&lab, |last| vec![migration_address(last)]);
    let planned = plan(&lab, "multichannel");
    assert_eq!(planned.option(), MigrationOption::Tcp);
    let reason = planned.reason().unwrap();
    assert!(reason.contains("give both hosts a private IPv4 address as migration_address"), "{reason}");
    let report = report(&lab, "a", "b", &[]);
    let is_found = |finding: &Finding| finding.code == "migration-addresses-unroutable";
    assert!(report.findings.iter().any(is_found), "{report:#?}");
    for host in ["a", "b"] {
        lab.exec(host, &["sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1"]).done();
    }
    let result = lab.migrate("web", "b", &["--option", "multichannel"]);
    assert_eq!((result.choice.option, result.traffic.paths.len()), (MigrationOption::Tcp, 1));
    let reason = result.choice.fallback_reason.unwrap();
    assert!(reason.contains("IPv6 is off, and no migration_address is configured"), "{reason}");
    guest.assert_intact();
}

fn both() {
    let lab = lab("both");
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    let subnets = plan(&lab, "multichannel");
    assert!(subnets.paths.iter().all(|path| path.address.is_ipv4()), "{subnets:#?}");
    unconfigure(&lab, |last| vec![migration_address(last)]);
    let before = lab.network();
    assert_link_local(&plan(&lab, "multichannel"));
    let tcp = plan(&lab, "tcp");
    assert!(tcp.paths.iter().all(|path| path.address.is_ipv4()), "{tcp:#?}");
    there_and_back_over_both(&lab);
    lab.assert_network_as(&before);
    guest.assert_intact();
    lab.exec("b", &["ip", "route", "add", "unreachable", "fc00::/7"]).done();
    let planned = plan(&lab, "multichannel");
    assert_eq!(planned.option(), MigrationOption::Tcp);
    let reason = planned.reason().unwrap();
    assert!(reason.contains("on b the address fd") && reason.contains("belongs to fc00::/7"), "{reason}");
}

/// The speed of each link of [`slow_lab`].
const SLOW_MBPS: &str = "20";

#[track_caller]
fn slow_lab() -> TestLab {
    TestLab::up(&["--link-addresses", "link-local", "--link", SLOW_MBPS, "--link", SLOW_MBPS])
}

#[track_caller]
fn slow_scene() -> Scene {
    Scene::in_lab(slow_lab())
}

fn link_local_paths_are_lost_and_return() {
    let scene = slow_scene();
    a_link_local_path_is_lost_and_returns(&scene);
    take_back(&scene);
    all_link_local_paths_are_lost_for_a_while(&scene);
    take_back(&scene);
    // The address is then the same, but belongs to a link with another number.
    makes_e1_again(&scene);
}

#[track_caller]
fn take_back(scene: &Scene) {
    scene.set_rates("unlimited");
    scene.assert_moves("a");
    scene.set_rates(SLOW_MBPS);
}

/// A link that is switched off loses its link-local address, and gets it back when it is switched on.
fn a_link_local_path_is_lost_and_returns(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.lab.fault("link-down b e1");
    thread::sleep(Duration::from_secs(2));
    scene.lab.fault("link-up b e1");
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!(turns(&result, "e1"), [PathState::Out, PathState::Back], "{result:#?}");
    scene.assert_settled("b");
}

fn all_link_local_paths_are_lost_for_a_while(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    for link in ["e0", "e1"] {
        scene.lab.fault(&format!("link-down a {link}"));
    }
    thread::sleep(Duration::from_secs(5));
    for link in ["e0", "e1"] {
        scene.lab.fault(&format!("link-up a {link}"));
    }
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    scene.assert_settled("b");
}

fn agents_are_started_anew_in_flight() {
    let scene = slow_scene();
    agents_killed_leave_nothing(&scene);
    the_target_agent_is_started_anew_with_a_link_down(&scene);
}

/// The other path is watched at once, and the one over that link as soon as the link is back.
fn the_target_agent_is_started_anew_with_a_link_down(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.lab.stop_agent("b", Signal::KILL);
    scene.lab.fault("link-down b e1");
    scene.lab.start_agent("b");
    eventually("e0 is watched", || scene.lab.agent_log("a").contains("e0–e0 is watched now"));
    let route = scene.lab.exec("b", &["ip", "-6", "route", "show", "proto", "215"]).done();
    assert!(route.contains(" dev e0 ") && !route.contains(" dev e1 "), "{route}");
    assert!(!scene.lab.agent_log("a").contains("does not watch the paths"));
    scene.lab.fault("link-up b e1");
    eventually("e1 is watched", || scene.lab.agent_log("a").contains("e1–e1 is watched now"));
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!(turns(&result, "e0"), [PathState::Unwatched, PathState::Watched], "{result:#?}");
    let e1 = turns(&result, "e1");
    assert_eq!(e1.iter().filter(|state| **state == PathState::Watched).count(), 1, "{result:#?}");
    // It was down so briefly that it was never taken out, or it is back.
    assert!(matches!(e1.last(), Some(PathState::Back | PathState::Watched)), "{result:#?}");
    scene.assert_settled("b");
}

/// As programs do that manage the network, and do not know what the agent has made.
fn what_is_removed_in_flight_is_made_again() {
    let lab = slow_lab();
    // In flight for longer than a busy machine needs for what follows.
    let guest = lab.start_guest("web", 256, "");
    let scene = Scene::of(lab, guest);
    let migrating = scene.migrate(&[]);
    let on_a = |command: &str| scene.lab.exec("a", &["bash", "-c", command]).done();
    let both = || on_a("ip -6 route show proto 215 | grep -c 'nexthop.* dev e[01]' || true") == "2\n";
    let address = "ip -6 -oneline address show dev lo | grep -o 'fd[^ ]*/128'";
    let [one, all] = ["via $(ip -6 route show proto 215 | grep -o 'fe80[^ ]*' | head -1) dev e0", ""];
    eventually("the route has both next hops", both);
    let log = scene.lab.agent_log("a");
    assert!(!log.contains("restored, because"), "nothing is restored that is there: {log}");
    for which in [one, all] {
        on_a(&format!("ip -6 route del $(ip -6 route show proto 215 | head -1 | cut -d' ' -f1) {which}"));
        // By the next check of the route, or because connections are being placed just then.
        eventually("the route is made again", both);
    }
    let before = on_a(address);
    on_a(&format!("ip address del $({address}) dev lo"));
    eventually("the address is made again", || on_a(&format!("{address} || true")) == before);
    eventually("and the route has it as its source", || {
        both() && on_a("ip -6 route show proto 215").contains(before.trim_end().trim_end_matches("/128"))
    });
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert!(result.traffic.paths.iter().all(|path| path.share > 0.2), "{result:#?}");
    scene.assert_settled("b");
}

/// At their next start, the agents remove the chosen addresses and their routes.
fn agents_killed_leave_nothing(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    for host in ["a", "b"] {
        scene.lab.stop_agent(host, Signal::KILL);
    }
    for host in ["b", "a"] {
        scene.lab.start_agent(host);
    }
    assert_ne!(migrating.wait().code, 0);
    scene.assert_settled("a");
}

/// All links of all hosts are in one segment, as on a single switch: each link reaches two of the peer's.
fn one_segment() {
    let lab = TestLab::up(
        &[&["--hosts", "a,b,c", "--link-addresses", "link-local"], TWO_LINKS.as_slice()].concat(),
    );
    let switch = lab.namespace("switch");
    let switch = switch.file_name().unwrap().to_str().unwrap();
    for command in [
        "link add join0 type veth peer name join1",
        "link set join0 master e0 up",
        "link set join1 master e1 up",
    ] {
        let ip = Command::new("ip").args(["-n", switch]).args(command.split(' ')).status().unwrap();
        assert!(ip.success(), "{command}");
    }
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    let planned = plan(&lab, "multichannel");
    let pairs: Vec<String> = planned.paths.iter().map(ToString::to_string).collect();
    assert_eq!(pairs, ["e0–e0", "e1–e1"]);
    there_and_back_over_both(&lab);
    guest.assert_intact();
}

/// Why this machine has no VLANs, if its kernel lacks them.
pub(crate) fn no_vlans() -> Option<String> {
    let command = "ip link add cable type veth && ip link add link cable name vlan type vlan id 7";
    let made = Command::new("unshare").args(["--net", "sh", "-c", command]).output();
    let is_made = made.is_ok_and(|made| made.status.success());
    (!is_made).then(|| "this kernel makes no VLANs (CONFIG_VLAN_8021Q)".into())
}

/// Two cards without configuration, one of which only carries VLANs.
pub(crate) fn a_card_and_its_vlans_are_one_path() {
    let lab = lab("both");
    for (host, last) in [("a", "11"), ("b", "12")] {
        on(&lab, host, "ip -4 address flush dev e1");
        for vlan in ["7", "9"] {
            let add = format!(
                "ip link add link e1 name e1.{vlan} type vlan id {vlan}; ip link set dev e1.{vlan} up; \
                 ip address add 10.78.{vlan}.{last}/24 dev e1.{vlan}"
            );
            on(&lab, host, &add);
        }
    }
    unconfigure(&lab, |_| links());
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    let planned = plan(&lab, "multichannel");
    let pairs: Vec<String> = planned.paths.iter().map(ToString::to_string).collect();
    assert_eq!(pairs, ["e1.7–e1.7", "e0–e0"], "{planned:#?}");
    // The speed of two veth pairs, according to their driver.
    let DrainPlanView { plan: drain, .. } = lab.json(&["drain", "a", "--to", "b", "--dry-run"]);
    assert_eq!(drain.links_mbps, Some(20_000), "{drain:#?}");
    let (_, findings) = check(&lab, "a", "b");
    assert!(findings.iter().all(|finding| finding.severity == Severity::Remark), "{findings:#?}");
    let sent = || -> u64 {
        let counter = lab.exec("a", &["cat", "/sys/class/net/e1.9/statistics/tx_bytes"]).done();
        counter.trim().parse().unwrap()
    };
    let before = sent();
    let result = lab.migrate("web", "b", &["--option", "multichannel"]);
    let mut carried: Vec<&str> = result.traffic.paths.iter().map(|path| path.link.as_str()).collect();
    carried.sort_unstable();
    assert_eq!(carried, ["e0", "e1.7"], "{result:#?}");
    assert!(result.traffic.paths.iter().all(|path| path.share > 0.05), "{result:#?}");
    assert!(sent() - before < 1 << 20, "the other VLAN carries nothing of it");
    guest.assert_intact();
}
