//! `drainpipe check`: each thing that can be wrong in a lab is found, named and fixed, and nothing is reported without
//! it.

use drainpipe_api_types::{DrainPlanView, PlanView};
use drainpipe_engine::check::CheckReport;
use drainpipe_engine::check::path_report::PathReport;
use drainpipe_engine::finding::{Finding, Severity};
use rustix::process::Signal;

use crate::Test;
use crate::check_vms::start_vm;
use crate::program::{BAD_INPUT, Output, REFUSED, WARNED, drainpipe};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("healthy_hosts", healthy_hosts),
    ("what_paths_and_kernels_have_wrong", what_paths_and_kernels_have_wrong),
    ("jumbo_frames_that_a_switch_drops", jumbo_frames_that_a_switch_drops),
    ("links_that_are_down_or_elsewhere", links_that_are_down_or_elsewhere),
    ("paths_by_ipv6", paths_by_ipv6),
    ("the_management_network", the_management_network),
    ("an_agent_that_does_not_answer", an_agent_that_does_not_answer),
];

/// Nothing is wrong, though there may be remarks.
pub(crate) const WELL: i32 = 0;

/// A check's exit code and its findings, without those about the machine rather than the lab.
#[track_caller]
pub(crate) fn check(lab: &TestLab, source: &str, target: &str) -> (i32, Vec<Finding>) {
    let report = report(lab, source, target, &[]);
    let of_machine = [
        "governor-powersave",
        "energy-preference",
        "power-profile",
        "target-memory-low",
        "kernel-old",
        "vm-machine-old",
    ];
    let findings = report.findings.into_iter().filter(|finding| !of_machine.contains(&finding.code.as_str()));
    let findings: Vec<Finding> = findings.collect();
    (exit_code_of(&findings), findings)
}

/// The findings of a check, whose exit code must be that of the worst one.
#[track_caller]
pub(crate) fn report(lab: &TestLab, source: &str, target: &str, more: &[&str]) -> CheckReport {
    let output = lab.drainpipe(&[&["check", source, target, "--json"], more].concat());
    let report: CheckReport =
        serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:#?}"));
    assert_eq!((report.source.as_str(), report.target.as_str()), (source, target));
    assert_eq!(output.code, exit_code_of(&report.findings), "{output:#?}");
    report
}

fn exit_code_of(findings: &[Finding]) -> i32 {
    let is_any = |severity| findings.iter().any(|finding| finding.severity == severity);
    match (is_any(Severity::Error), is_any(Severity::Warning)) {
        (true, _) => REFUSED,
        (false, true) => WARNED,
        (false, false) => WELL,
    }
}

/// Whether a check found nothing that would keep a VM from moving; there may be warnings about the machine.
pub(crate) fn is_no_error(output: &Output) -> bool {
    [WELL, WARNED].contains(&output.code)
}

/// Fails the test unless this is the only finding: its code, its place, and a part of its text.
#[track_caller]
pub(crate) fn assert_found(lab: &TestLab, exit_code: i32, code: &str, places: &[&str], part: &str) {
    let (exited, findings) = check(lab, "a", "b");
    let [finding] = findings.as_slice() else { panic!("{code} alone is expected: {findings:#?}") };
    let found: Vec<String> = finding.places.iter().map(ToString::to_string).collect();
    assert_eq!((finding.code.as_str(), exited), (code, exit_code), "{finding:#?}");
    assert_eq!(found, places, "{finding:#?}");
    let said = format!("{} {} {}", finding.what, finding.effect, finding.remedy);
    assert!(said.contains(part), "`{part}` is missing: {finding:#?}");
}

#[track_caller]
pub(crate) fn assert_silent(lab: &TestLab) {
    assert_eq!(check(lab, "a", "b"), (WELL, vec![]));
}

#[track_caller]
pub(crate) fn on(lab: &TestLab, host: &str, command: &str) {
    lab.exec(host, &["bash", "-c", command]).done();
}

/// Types what a finding says, as root on `host`: the commands after `on HOST: `.
#[track_caller]
pub(crate) fn mend(lab: &TestLab, finding: &Finding, host: &str) {
    let marker = format!("on {host}: ");
    let command = finding.remedy.split("; ").find_map(|part| part.strip_prefix(&marker));
    on(lab, host, command.unwrap_or_else(|| panic!("nothing to do on {host}: {finding:#?}")));
}

fn healthy_hosts() {
    let lab = TestLab::up(&["--link", "1000", "--link", "1000:9000"]);
    let before = lab.network();
    assert_silent(&lab);
    assert_eq!(check(&lab, "b", "a"), (WELL, vec![]));
    let report = report(&lab, "a", "b", &[]);
    let is_measured = |path: &PathReport| {
        let trial = &path.trial;
        trial.round_trip_ms.is_some() && trial.tcp_round_trip.is_some()
    };
    assert!(report.paths.len() == 2 && report.paths.iter().all(is_measured), "{report:#?}");
    for (path, mtu_bytes) in report.paths.iter().zip([1500, 9000]) {
        for end in [&path.source, &path.target] {
            assert_eq!((end.speed_mbps, end.mtu_bytes), (Some(1000), Some(mtu_bytes)), "{report:#?}");
            // A link in software, without bond and RDMA, like all links of a lab.
            assert_eq!((end.receive_queues, &end.bond, &end.rdma_device), (None, &None, &None));
        }
    }
    let output = lab.drainpipe(&["check", "a", "b"]);
    assert!(is_no_error(&output), "{output:#?}");
    for words in ["e0–e0", "1000 Mb/s", "1500", "9000", "0 of "] {
        assert!(output.stdout.contains(words), "`{words}` is missing: {output:#?}");
    }
    lab.assert_network_as(&before);
    for host in ["a", "b"] {
        eventually("no port is left open", || lab.migration_ports(host).is_empty());
    }
    lab.drainpipe(&["check", "a", "a"]).refused(BAD_INPUT, &["itself", "two hosts"]);
    lab.drainpipe(&["check", "a", "nobody"]).refused(BAD_INPUT, &["a knows no host nobody"]);
    drainpipe(&["check", "a"]).refused(BAD_INPUT, &["<TARGET>"]);
}

/// Breaks one thing after the other; once fixed, nothing about it is found any more.
fn what_paths_and_kernels_have_wrong() {
    let lab = TestLab::fast();
    for goes_wrong in [an_mtu_that_differs, silent_and_one_way_paths, firewalls, loss, kernel_settings] {
        goes_wrong(&lab);
        assert_silent(&lab);
    }
}

fn an_mtu_that_differs(lab: &TestLab) {
    lab.fault("mtu b e1 9000");
    assert_found(lab, WARNED, "mtu-differs", &["a e1", "b e1"], "TCP keeps to the smaller size");
    let output = lab.drainpipe(&["check", "a", "b"]);
    for words in ["warning", "b e1", "MTU of e1 is 1500 on a", "on b: ip link set dev e1 mtu 1500"] {
        assert!(output.stdout.contains(words), "`{words}` is missing: {output:#?}");
    }
    let (_, findings) = check(lab, "a", "b");
    mend(lab, &findings[0], "b");
    assert_silent(lab);
    lab.fault("mtu b e1 1280");
    assert_found(lab, REFUSED, "mtu-differs", &["a e1", "b e1"], "on a: ip link set dev e1 mtu 1280");
    lab.fault("heal b e1");
}

fn jumbo_frames_that_a_switch_drops() {
    let lab = TestLab::up(&["--link", "unlimited:9000", "--link", "unlimited"]);
    assert_silent(&lab);
    let switch = "nft 'add table netdev switch; \
        add chain netdev switch port { type filter hook ingress device e0 priority 0; }; \
        add rule netdev switch port ip length > 1504 drop'";
    on(&lab, "b", switch);
    let part = "from a to b none larger than 1504 arrives";
    assert_found(&lab, WARNED, "mtu-does-not-pass", &["a e0", "b e0"], part);
    // A migration leaves such a path out.
    start_vm(&lab, "web", "pc-q35-7.2", "");
    let result = lab.migrate("web", "b", &["--option", "multichannel"]);
    let used: Vec<&str> = result.traffic.paths.iter().map(|path| path.link.as_str()).collect();
    let reason = result.choice.fallback_reason.as_deref().unwrap_or_default();
    assert!(used == ["e1"] && reason.contains("and large ones do not"), "{result:#?}");
    lab.drainpipe(&["vm", "stop", "web", "--force", "--agent", &lab.agent_socket("b")]).done();
    on(&lab, "b", "nft delete table netdev switch");
    assert_silent(&lab);
}

fn silent_and_one_way_paths(lab: &TestLab) {
    let ends = ["a e1", "b e1"];
    for (fault, code, part) in [
        ("blackhole a e1", "path-silent", "nothing passes between 10.77.2.11 and 10.77.2.12"),
        ("blackhole a e1 receive", "path-one-way", "nothing from e1 of b reaches it"),
        ("blackhole a e1 send", "path-one-way", "nothing from e1 of a reaches it"),
    ] {
        lab.fault(fault);
        assert_found(lab, WARNED, code, &ends, part);
        lab.fault("heal a e1");
        assert_silent(lab);
    }
    lab.fault("blackhole a e0");
    lab.fault("blackhole b e1");
    let (exited, findings) = check(lab, "a", "b");
    assert_eq!((exited, findings.len()), (REFUSED, 2), "{findings:#?}");
    assert!(findings.iter().all(|finding| finding.severity == Severity::Error), "{findings:#?}");
    lab.fault("heal a e0");
    lab.fault("heal b e1");
}

fn links_that_are_down_or_elsewhere() {
    // Links in two subnets would find each other over link-local addresses.
    let lab = TestLab::up(&["--link-addresses", "ipv4", "--link", "unlimited", "--link", "unlimited"]);
    lab.fault("link-down b e1");
    assert_found(&lab, WARNED, "link-down", &["b e1"], "e1 of b is switched off");
    let (_, findings) = check(&lab, "a", "b");
    mend(&lab, &findings[0], "b");
    assert_silent(&lab);

    on(&lab, "b", "ip address add 10.78.2.12/24 dev e1; ip address delete 10.77.2.12/24 dev e1");
    assert_found(&lab, WARNED, "subnet-mismatch", &["a e1", "b e1"], "10.78.2.12/24");
    lab.fault("link-down a e0");
    let (exited, findings) = check(&lab, "a", "b");
    let codes: Vec<&str> = findings.iter().map(|finding| finding.code.as_str()).collect();
    assert_eq!((exited, codes), (REFUSED, vec!["no-path", "link-down"]), "{findings:#?}");
}

fn paths_by_ipv6() {
    let lab = TestLab::fast();
    for (host, last) in [("a", 11), ("b", 12)] {
        on(
            &lab,
            host,
            &format!(
                "ip address add fd77:2::{last}/64 dev e1 nodad; ip address delete 10.77.2.{last}/24 dev e1"
            ),
        );
    }
    let report = report(&lab, "a", "b", &[]);
    let path = &report.paths[1].trial;
    assert!(path.path.address.is_ipv6() && path.connection_error.is_none(), "{report:#?}");
    assert!(path.forward.passes_whole() && path.backward.passes_whole(), "{report:#?}");
    assert_eq!(path.forward.arrived_bytes_max, Some(1500));
    assert_silent(&lab);
    lab.fault("blackhole a e1 send");
    assert_found(&lab, WARNED, "path-one-way", &["a e1", "b e1"], "nothing from e1 of a reaches it");
}

fn the_management_network() {
    let lab = TestLab::fast();
    for host in ["a", "b"] {
        lab.stop_agent(host, Signal::TERM);
        lab.configure(host, "[[link]]\nname = \"e0\"", "[[link]]\nname = \"mgmt\"");
        lab.start_agent(host);
    }
    let (exited, findings) = check(&lab, "a", "b");
    let found: Vec<(&str, String)> =
        findings.iter().map(|finding| (finding.code.as_str(), finding.places[0].to_string())).collect();
    let expected = [("management-link", "a mgmt".to_owned()), ("management-link", "b mgmt".to_owned())];
    assert_eq!((exited, found), (WARNED, expected.to_vec()), "{findings:#?}");

    // Without configuration, it is used where no other link makes a path.
    for host in ["a", "b"] {
        lab.stop_agent(host, Signal::TERM);
        for link in ["mgmt", "e1"] {
            lab.configure(host, &format!("[[link]]\nname = \"{link}\"\n"), "");
        }
        lab.start_agent(host);
    }
    on(&lab, "b", "sysctl -qw net.ipv4.conf.mgmt.rp_filter=1");
    assert_silent(&lab);
    on(&lab, "a", "ip link set dev e0 down; ip link set dev e1 down");
    let (exited, findings) = check(&lab, "a", "b");
    let found: Vec<(&str, String)> =
        findings.iter().map(|finding| (finding.code.as_str(), finding.places[0].to_string())).collect();
    let expected = [
        ("link-down", "a e0"),
        ("link-down", "a e1"),
        ("management-link", "a mgmt"),
        ("management-link", "b mgmt"),
        ("reverse-path-filter", "b mgmt"),
    ];
    let expected = expected.map(|(code, place)| (code, place.to_owned())).to_vec();
    assert_eq!((exited, found), (WARNED, expected), "{findings:#?}");
    plans_tell_of_the_management_network(&lab);
}

#[track_caller]
fn plans_tell_of_the_management_network(lab: &TestLab) {
    lab.start_guest("web", 160, "");
    let PlanView { findings, plan, .. } = lab.json(&["migrate", "web", "b", "--dry-run"]);
    assert_eq!(plan.paths[0].link, "mgmt");
    let found = findings.iter().filter(|finding| finding.code == "management-link");
    let found: Vec<String> = found.map(|finding| finding.places[0].to_string()).collect();
    assert_eq!(found, ["a mgmt", "b mgmt"], "{findings:#?}");
    let DrainPlanView { plan, .. } = lab.json(&["drain", "a", "--to", "b", "--dry-run"]);
    for host in ["a", "b"] {
        let words = format!("mgmt of {host} carries the management network, and migrations too");
        assert!(plan.warnings.iter().any(|warning| warning.starts_with(&words)), "{:#?}", plan.warnings);
    }
}

fn firewalls(lab: &TestLab) {
    for (protocol, code) in [("tcp", "tcp-blocked"), ("udp", "udp-blocked")] {
        let filter = format!(
            "nft 'add table inet filter; \
             add chain inet filter input {{ type filter hook input priority 0; policy accept; }}; \
             add rule inet filter input iifname e1 meta l4proto {protocol} drop'"
        );
        on(lab, "b", &filter);
        let part = format!("iifname \"e1\" {protocol} dport 49152-49215 accept");
        assert_found(lab, WARNED, code, &["a e1", "b e1"], &part);
        let (_, findings) = check(lab, "a", "b");
        mend(lab, &findings[0], "b");
        assert_silent(lab);
        on(lab, "b", "nft delete table inet filter");
        assert_silent(lab);
    }
    // Most firewalls do the same: they drop what was not asked for from within.
    let closed = "nft 'add table inet filter; \
        add chain inet filter input { type filter hook input priority 0; policy drop; }; \
        add rule inet filter input ct state established,related accept; \
        add rule inet filter input iifname { lo, mgmt, e0 } accept; \
        add rule inet filter input meta l4proto icmpv6 accept'";
    on(lab, "b", closed);
    let part = "on b: nft insert rule inet filter input 'iifname \"e1\" meta l4proto { tcp, udp } th dport";
    assert_found(lab, WARNED, "path-one-way", &["a e1", "b e1"], part);
    let (_, findings) = check(lab, "a", "b");
    mend(lab, &findings[0], "b");
    assert_silent(lab);
    on(lab, "b", "nft delete table inet filter");
}

fn loss(lab: &TestLab) {
    let lossy = "nft 'add table netdev lossy; \
        add chain netdev lossy port { type filter hook ingress device e0 priority 0; }; \
        add rule netdev lossy port meta l4proto udp numgen inc mod 7 0 drop'";
    on(lab, "b", lossy);
    assert_found(lab, WARNED, "path-loses-packets", &["a e0", "b e0"], "from a to b");
    on(lab, "b", "nft delete table netdev lossy");
}

fn kernel_settings(lab: &TestLab) {
    on(lab, "b", "sysctl -qw net.ipv4.conf.e0.rp_filter=1");
    assert_found(lab, WARNED, "reverse-path-filter", &["b e0"], "net/ipv4/conf/e0/rp_filter=2");
    on(lab, "b", "sysctl -qw net.ipv4.conf.e0.rp_filter=2");
    assert_silent(lab);

    on(lab, "b", "sysctl -qw net.ipv4.tcp_rmem='4096 8192 4000'");
    let (exited, findings) = check(lab, "a", "b");
    let [finding] = findings.as_slice() else { panic!("{findings:#?}") };
    assert_eq!((exited, finding.code.as_str()), (WARNED, "tcp-buffers-small"), "{finding:#?}");
    assert!(finding.remedy.contains("net.ipv4.tcp_rmem='4096 8192 "), "{finding:#?}");
    mend(lab, finding, "b");
}

fn an_agent_that_does_not_answer() {
    let lab = TestLab::fast();
    lab.stop_agent("b", Signal::TERM);
    assert_found(&lab, REFUSED, "agent-unreachable", &["b"], "systemctl status drainpipe");
    let closed = |from: &str| {
        format!(
            "nft 'add table inet filter; \
             add chain inet filter input {{ type filter hook input priority 0; policy accept; }}; \
             add rule inet filter input ip saddr {from} tcp dport 7420 drop'"
        )
    };
    on(&lab, "b", &closed("10.77.0.11"));
    lab.start_agent("b");
    let rule = "nft insert rule inet filter input 'tcp dport 7420 accept'";
    assert_found(&lab, REFUSED, "agent-unreachable", &["b"], &format!("on b: {rule}"));
    on(&lab, "b", rule);
    assert_silent(&lab);
    on(&lab, "a", &closed("10.77.0.12"));
    assert_found(&lab, WARNED, "agent-unreachable", &["a"], "b cannot ask a");
    let (_, findings) = check(&lab, "a", "b");
    mend(&lab, &findings[0], "a");
    assert_silent(&lab);

    lab.stop_agent("b", Signal::TERM);
    lab.configure("b", "migration_address = \"10.77.255.12\"", "migration_address = \"10.77.255.11\"");
    lab.start_agent("b");
    assert_found(&lab, REFUSED, "migration-addresses-equal", &["a", "b"], "10.77.255.11");

    // The opened ports are closed again, so any number of checks may follow each other.
    for _ in 0..10 {
        check(&lab, "b", "a");
    }
    let lab = lab.lab();
    let held = lab.run_in("a", || std::fs::read_to_string("/proc/net/udp")).unwrap().unwrap();
    assert!(!held.contains(":C0"), "{held}");
}
