//! Every option moves a guest there and back, reports truthfully what it did, and leaves the hosts as they were.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use drainpipe_api_types::{MigrationView, PlanView, VmState};
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::option::{MigrationOption, RequestedOption};
use drainpipe_engine::plan::Spread;
use drainpipe_report::BenchReport;
use rustix::process::Signal;
use serde_json::Value;

use crate::Test;
use crate::burner::Burner;
use crate::guest::Guest;
use crate::scene::{hold_journal, session_nice};
use crate::support::{PATIENCE, TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("tcp_multichannel_and_direct", tcp_multichannel_and_direct),
    ("compression", compression),
    ("auto_and_bench", auto_and_bench),
    ("links_are_found_without_configuration", links_are_found_without_configuration),
    ("dry_run_changes_nothing", dry_run_changes_nothing),
];

/// The fields on which scripts may rely.
const CONTRACT: [&str; 25] = [
    "vm",
    "source",
    "target",
    "requested_option",
    "option",
    "fallback_reason",
    "outcome",
    "error",
    "total_ms",
    "setup_ms",
    "transfer_ms",
    "blackout_ms",
    "guest_gap_ms",
    "guest_rewritten_mib_per_s",
    "memory_bytes",
    "wire_bytes",
    "throughput_gbps",
    "rounds",
    "predicted_total_ms",
    "cpu_seconds",
    "paths",
    "events",
    "verified",
    "id",
    "started_at",
];

fn compression() {
    let lab = TestLab::up(&["--link", "200", "--link", "200"]);
    let guest = lab.start_guest("web", 160, "");
    let raw_bytes = lab.migrate("web", "b", &["--option", "tcp"]).memory.wire_bytes;
    lab.migrate("web", "a", &["--option", "tcp"]);
    for result in there_and_back(&lab, &guest, RequestedOption::Compression) {
        assert_eq!(result.choice.option, MigrationOption::Compression);
        assert_eq!(result.choice.fallback_reason, None);
        assert!(result.memory.wire_bytes < raw_bytes, "{} of {raw_bytes}", result.memory.wire_bytes);
        assert_both_links_carried(&result);
    }
}

fn tcp_multichannel_and_direct() {
    let lab = TestLab::brisk();
    let guest = lab.start_guest("web", 160, "");
    the_agent_goes_first_before_memory(&lab);
    for result in there_and_back(&lab, &guest, RequestedOption::Tcp) {
        assert_eq!(result.choice.option, MigrationOption::Tcp);
        assert_eq!(result.choice.fallback_reason, None);
        assert_eq!(result.traffic.paths.len(), 1, "one path carries all: {:?}", result.traffic.paths);
    }
    for result in there_and_back(&lab, &guest, RequestedOption::Multichannel) {
        assert_eq!(result.choice.option, MigrationOption::Multichannel);
        assert_eq!(result.choice.fallback_reason, None);
        assert_both_links_carried(&result);
    }
    for result in there_and_back(&lab, &guest, RequestedOption::Direct) {
        assert_eq!(result.choice.option, MigrationOption::Multichannel);
        let reason = result.choice.fallback_reason.as_deref().unwrap();
        assert_eq!(reason, "no RDMA device on a and b");
        assert_both_links_carried(&result);
    }
}

/// While the target waits for its journal in step 2.
#[track_caller]
fn the_agent_goes_first_before_memory(lab: &TestLab) {
    let agent = lab.agent_pid("a").expect("it runs");
    if session_nice(agent).is_none() {
        eprintln!("SKIPPED: the kernel does not group threads by session");
        return;
    }
    let held = hold_journal(lab, "b");
    let migrating = lab.start(&["migrate", "web", "b", "--option", "tcp"]);
    eventually("the session of the source's agent goes first", || session_nice(agent) == Some(-10));
    held.release();
    assert_eq!(migrating.wait().code, 0);
    lab.migrate("web", "a", &["--option", "tcp"]);
    eventually("it does not any more", || session_nice(agent) == Some(0));
}

fn auto_and_bench() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", 160, "");
    for result in there_and_back(&lab, &guest, RequestedOption::Auto) {
        assert_eq!(result.choice.option, MigrationOption::Multichannel);
        let reason = result.choice.fallback_reason.as_deref().unwrap();
        assert!(reason.contains("2 paths"), "{reason}");
        assert_eq!(result.traffic.paths.len(), 2, "{result:#?}");
    }
    bench_compares_and_reports(&lab);
    lab.assert_runs_on("web", "a");
    guest.assert_intact();
}

fn links_are_found_without_configuration() {
    let lab = TestLab::brisk();
    for host in ["a", "b"] {
        lab.stop_agent(host, Signal::TERM);
        for link in ["e0", "e1"] {
            lab.configure(host, &format!("[[link]]\nname = \"{link}\"\nspeed_mbps = 500\n"), "");
        }
        // A bridge like that of libvirt's default network, with the same address on every host; a guest uses it.
        let bridge = "ip link add virbr0 type bridge && ip address add 192.168.122.1/24 dev virbr0 && \
                      ip link set virbr0 up && ip link add vnet0 type veth peer name guest0 && \
                      ip link set guest0 up && ip link set vnet0 master virbr0 up";
        lab.exec(host, &["sh", "-c", bridge]).done();
        lab.start_agent(host);
    }
    let guest = lab.start_guest("web", 160, "");
    for result in there_and_back(&lab, &guest, RequestedOption::Multichannel) {
        assert_eq!(result.choice.option, MigrationOption::Multichannel);
        assert_both_links_carried(&result);
    }
    let only_e1 = "exclude_links = [\"e0\"]\nmigration_address";
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", "migration_address", only_e1);
    lab.start_agent("a");
    let result = lab.migrate("web", "b", &[]);
    let links: Vec<&str> = result.traffic.paths.iter().map(|path| path.link.as_str()).collect();
    assert_eq!(links, ["e1"], "{result:#?}");
}

/// Uses the QEMU that `DRAINPIPE_TEST_QEMU` names on both hosts, such as a newer one.
pub(crate) fn another_qemu() {
    let qemu = other_qemu().expect("the test runs only where there is one");
    let lab = TestLab::up(&["--link", "unlimited", "--link", "unlimited", "--qemu", &qemu]);
    let guest = lab.start_guest("web", 160, "");
    for option in RequestedOption::ALL {
        there_and_back(&lab, &guest, option);
    }
}

/// A second QEMU to test with.
pub(crate) fn other_qemu() -> Option<String> {
    std::env::var("DRAINPIPE_TEST_QEMU").ok().filter(|path| !path.is_empty())
}

/// The daemon of a newer libvirt to test with.
pub(crate) fn newer_libvirt() -> Option<PathBuf> {
    let directory = std::env::var_os("DRAINPIPE_TEST_LIBVIRT").filter(|path| !path.is_empty())?;
    Some(Path::new(&directory).join("usr/sbin/libvirtd"))
}

/// Moves the guest from `a` to `b` and back while a client watches and holds a connection open.
#[track_caller]
fn there_and_back(lab: &TestLab, guest: &Guest, option: RequestedOption) -> [MigrationResult; 2] {
    let before = lab.network();
    let mut connection = guest.control().expect("the guest takes a connection");
    connection.status(PATIENCE).expect("the guest answers");
    let results = [("a", "b"), ("b", "a")].map(|(source, target)| {
        let heartbeat = guest.heartbeat();
        let result = migrate(lab, &guest.name, target, option);
        let answered = heartbeat.statistics().answered;
        eventually("the guest goes on answering", || heartbeat.statistics().answered > answered);
        drop(heartbeat);
        connection.status(PATIENCE).expect("the connection survived the migration");
        guest.assert_intact();
        assert_eq!((result.source.as_str(), result.target.as_str()), (source, target));
        check_measurements(&result);
        check_history(lab, &result);
        result
    });
    lab.assert_network_as(&before);
    results
}

#[track_caller]
fn migrate(lab: &TestLab, vm: &str, target: &str, option: RequestedOption) -> MigrationResult {
    let result: Value = lab.json(&["migrate", vm, target, "--option", &option.to_string()]);
    for field in CONTRACT {
        assert!(result.get(field).is_some(), "the field `{field}` is missing: {result:#}");
    }
    for process in ["source_vmm", "source_agent", "target_vmm", "target_agent"] {
        assert!(result["cpu_seconds"][process].is_f64(), "{result:#}");
    }
    assert_eq!(result["outcome"], "completed", "{result:#}");
    assert_eq!(result["error"], Value::Null, "{result:#}");
    assert_eq!(result["requested_option"], option.to_string());
    lab.assert_runs_on(vm, target);
    serde_json::from_value(result).unwrap()
}

#[track_caller]
fn check_measurements(result: &MigrationResult) {
    assert_eq!(result.memory.memory_bytes, 160 << 20);
    assert!(
        result.memory.wire_bytes > 0 && result.memory.throughput_gbps > 0.0 && result.memory.rounds > 0,
        "{result:#?}"
    );
    let parts_ms =
        result.times.setup_ms + result.times.held_ms + result.times.transfer_ms + result.times.completion_ms;
    // Each part is rounded to a tenth.
    assert!((parts_ms - result.times.total_ms).abs() < 0.3, "{result:#?}");
    let downtime_ms = result.silence.downtime_ms.expect("the VM was paused");
    assert!(downtime_ms > 0.0 && downtime_ms < result.times.total_ms, "{result:#?}");
    assert!(
        result.host_use.cpu_seconds.source_vmm > 0.0 && result.host_use.cpu_seconds.target_vmm > 0.0,
        "{result:#?}"
    );
    let shares: f64 = result.traffic.paths.iter().map(|path| path.share).sum();
    assert!((shares - 1.0).abs() < 0.01, "{result:#?}");
    let bytes: u64 = result.traffic.paths.iter().map(|path| path.bytes).sum();
    assert!(bytes >= result.memory.wire_bytes, "headers come on top of what QEMU sent: {result:#?}");
    let mut steps: Vec<Step> = result.record.events.iter().map(|event| event.step).collect();
    assert!(steps.is_sorted(), "{result:#?}");
    steps.dedup();
    assert_eq!((steps[0], steps[steps.len() - 1]), (Step::EstablishHosts, Step::CleanUp), "{result:#?}");
}

/// Fails the test unless the source's history has the same result, in the list and by itself.
#[track_caller]
fn check_history(lab: &TestLab, result: &MigrationResult) {
    let past: Vec<MigrationView> = lab.json(&["history", "--host", &result.source]);
    let recorded = past.iter().find(|view| view.id == result.id).expect("the history has it");
    assert_eq!(recorded.result.as_ref(), Some(result));
    let one: MigrationView = lab.json(&["history", &result.id, "--host", &result.source]);
    assert_eq!(one.result.as_ref(), Some(result));
}

#[track_caller]
fn assert_both_links_carried(result: &MigrationResult) {
    let mut links: Vec<&str> = result.traffic.paths.iter().map(|path| path.link.as_str()).collect();
    links.sort_unstable();
    assert_eq!(links, ["e0", "e1"], "{result:#?}");
    assert!(result.traffic.paths.iter().all(|path| path.share > 0.05), "{:#?}", result.traffic.paths);
}

fn dry_run_changes_nothing() {
    let lab = TestLab::fast();
    let guest = Guest::new("web", lab.guest_address(), lab.namespace("client"));
    lab.create(&guest.specification(160, ""), "web");
    let before = lab.network();
    let view: PlanView = lab.json(&["migrate", "web", "b", "--dry-run"]);
    assert_eq!(view.plan.option(), MigrationOption::Multichannel);
    assert_eq!((view.plan.spread(), view.plan.paths.len()), (Spread::Routed, 2));
    let output = lab.drainpipe(&["migrate", "web", "b", "--dry-run"]).done();
    for words in ["web would move from a to b by multichannel", "because", "2 paths", "e0–e0", "e1–e1"] {
        assert!(output.contains(words), "`{words}` is missing:\n{output}");
    }
    let output = lab.drainpipe(&["migrate", "web", "b", "--dry-run", "--option", "tcp"]).done();
    assert!(output.contains("by tcp") && !output.contains("because"), "{output}");
    says_that_cores_are_busy(&lab);
    lab.assert_network_as(&before);
    assert!(lab.json::<Vec<MigrationView>>(&["history"]).is_empty());
    let vms: drainpipe_api_types::VmList = lab.json(&["vms"]);
    assert_eq!((vms.vms.len(), vms.vms[0].host.as_str(), vms.vms[0].state), (1, "a", VmState::Stopped));
}

fn says_that_cores_are_busy(lab: &TestLab) {
    let cores = available_parallelism().expect("the kernel counts cores").get();
    let _burning: Vec<Burner> = (0..2 * cores).map(|_| Burner::start()).collect();
    let hosts = ["a", "b"].map(|host| format!("the cores of {host} are busy"));
    eventually("the cores of both hosts are seen to be busy", || {
        let view: PlanView = lab.json(&["migrate", "web", "b", "--dry-run"]);
        hosts.iter().all(|words| view.warnings.iter().any(|warning| warning.starts_with(words)))
    });
    let output = lab.drainpipe(&["migrate", "web", "b", "--dry-run"]).done();
    for words in hosts {
        assert!(output.contains(&format!("warning: {words}")), "`{words}` is missing:\n{output}");
    }
}

fn bench_compares_and_reports(lab: &TestLab) {
    let page = lab.files().join("report.html");
    let client = lab.namespace("client");
    let report: BenchReport = lab.json(&[
        "bench",
        "web",
        "b",
        "--options",
        "tcp,multichannel",
        "--repeat",
        "1",
        "--heartbeat-ms",
        "10",
        "--report",
        page.to_str().unwrap(),
        "--client-namespace",
        client.to_str().unwrap(),
    ]);
    let made: Vec<_> =
        report.results.iter().map(|result| (result.choice.option, result.target.as_str())).collect();
    let options = [MigrationOption::Tcp, MigrationOption::Multichannel];
    assert_eq!(made, options.map(|option| [(option, "b"), (option, "a")]).concat());
    for result in &report.results {
        let verified = result.record.verified.expect("the guest checked its memory");
        assert!(verified.pages > 0 && verified.bad == 0, "{result:#?}");
        assert!(result.silence.guest_gap_ms.is_some_and(|gap_ms| gap_ms > 0.0), "{result:#?}");
    }
    let page = fs::read_to_string(page).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("multichannel"), "{page}");
    assert!(!page.contains("http://") && !page.contains("https://"), "the report opens offline");
}
