//! Copies of disks within bandwidth limits: by the host's clock and by hand, at either end, during the copy.

use std::time::Duration;

use drainpipe_api_types::PlanView;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use rustix::process::Signal;

use crate::Test;
use crate::bandwidth::{assert_keeps_to, says};
use crate::copied_disks::Apart;
use crate::link_rate::LinkRate;
use crate::options::other_qemu;
use crate::program::Running;
use crate::scene::result_of;
use crate::support::{TestLab, eventually};

pub(crate) const WITH_NEWER_QEMU: &[Test] = &[
    (
        "a_copy_keeps_the_limits_of_both_hosts_while_they_change",
        a_copy_keeps_the_limits_of_both_hosts_while_they_change,
    ),
    ("a_copy_yields_to_another_vms_memory", a_copy_yields_to_another_vms_memory),
];

/// Links that carry far more than the limits, with a queue that counts.
const LINK_MBPS: &str = "1000";

/// The limits: by the clock, all day; then by hand, at the source and at the target. Each is lower than the one before,
/// so that much is left to be copied.
const BY_CLOCK_MBPS: u64 = 10;
const OF_ALL_MBPS: u64 = 5;
const OF_TARGET_MBPS: u64 = 3;

const WATCHED: Duration = Duration::from_secs(3);

/// A limit of which another VM's memory takes seven eighths, for over a minute.
const SHARED_MBPS: u64 = 8;

const MEMORY_MIB: u64 = 160;

fn lab() -> TestLab {
    let qemu = other_qemu().expect("these tests run only where there is one");
    TestLab::up(&["--link", LINK_MBPS, "--link", LINK_MBPS, "--qemu", &qemu])
}

fn a_copy_keeps_the_limits_of_both_hosts_while_they_change() {
    let lab = lab();
    limit_disks_by_clock(&lab);
    let apart = Apart::under_two_paths(lab);
    let lab = &apart.lab;
    assert_plan_knows_limits(&apart);
    let mut migrating = apart.begin(0);
    assert_is_limited_to(lab, &mut migrating, BY_CLOCK_MBPS, "by the source's clock");
    lab.drainpipe(&["limit", "a", &OF_ALL_MBPS.to_string()]).done();
    assert_is_limited_to(lab, &mut migrating, OF_ALL_MBPS, "by the source's limit for all, which is lower");
    let agent_of_b = lab.agent_socket("b");
    let of_target = OF_TARGET_MBPS.to_string();
    lab.drainpipe(&["limit", "b", &of_target, "--storage", "--agent", &agent_of_b]).done();
    assert_is_limited_to(lab, &mut migrating, OF_TARGET_MBPS, "by the target's limit for disks");
    lab.drainpipe(&["limit", "b", "off", "--storage", "--agent", &agent_of_b]).done();
    lab.drainpipe(&["limit", "a", "off"]).done();
    lab.drainpipe(&["limit", "a", "off", "--storage"]).done();
    let result: MigrationResult = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert!(says(&result, "no bandwidth limit any longer"), "{result:#?}");
    lab.drainpipe(&["vm", "stop", "web", "--force", "--agent", &agent_of_b]).done();
    apart.assert_whole("b", ["web.raw", "web.qcow2"]);
}

/// A dry run predicts at least the time of the disks.
#[track_caller]
fn assert_plan_knows_limits(apart: &Apart) {
    let copies = apart.copies();
    let arguments: Vec<&str> =
        ["migrate", "web", "b", "--dry-run"].into_iter().chain(copies.iter().map(String::as_str)).collect();
    // A busy host may have no time to sample the VM's memory, and then predicts nothing.
    eventually("a time is foreseen, and told", || {
        let output = apart.lab.drainpipe(&arguments).done();
        assert!(output.contains("limit    10 Mb/s for disks now"), "{output}");
        output.contains("takes    some ")
    });
    let mut foreseen = None;
    eventually("a time is foreseen", || {
        let view: PlanView = apart.lab.json(&arguments);
        assert_eq!((view.bandwidth_limit_mbps, view.storage_limit_mbps), (None, Some(BY_CLOCK_MBPS)));
        foreseen = view.predicted_total_ms.map(|predicted_ms| (predicted_ms, view.plan.disks));
        foreseen.is_some()
    });
    let (predicted_ms, disks) = foreseen.unwrap();
    let bytes: u64 = disks.iter().map(|disk| disk.allocated_bytes).sum();
    assert!(
        predicted_ms > bytes as f64 / (BY_CLOCK_MBPS * 125) as f64,
        "{predicted_ms} ms for {bytes} bytes"
    );
}

/// Uses a window that covers all day, below the general limit.
fn limit_disks_by_clock(lab: &TestLab) {
    let bandwidth = format!(
        "[bandwidth]\nstorage_mbps = 9000\n\n[[bandwidth.window]]\nstorage_mbps = {BY_CLOCK_MBPS}\nfrom = \"00:00\"\n\
         until = \"00:00\"\n\n[tls]"
    );
    lab.configure("a", "[tls]", &bandwidth);
    lab.stop_agent("a", Signal::TERM);
    lab.start_agent("a");
}

/// The limit holds within a while, and no second after that has more.
#[track_caller]
fn assert_is_limited_to(lab: &TestLab, migrating: &mut Running, limit_mbps: u64, what: &str) {
    eventually("it keeps to its limit", || {
        let progress = lab.migrations("a").remove(0).progress;
        progress.is_some_and(|progress| progress.limit_mbps == Some(limit_mbps))
    });
    let rate = LinkRate::watch(lab, "a").until(WATCHED, || migrating.has_ended());
    assert_keeps_to(limit_mbps, &rate, what);
}

fn a_copy_yields_to_another_vms_memory() {
    let apart = Apart::under_two_paths(lab());
    let lab = &apart.lab;
    let guest = lab.start_guest("db", MEMORY_MIB, "");
    lab.drainpipe(&["limit", "a", &SHARED_MBPS.to_string()]).done();
    let memory = lab.start(&["migrate", "db", "b", "--option", "multichannel", "--json"]);
    let limit_of = |vm: &str| {
        let views = lab.migrations("a");
        views.into_iter().find(|view| view.vm == vm)?.progress?.limit_mbps
    };
    eventually("the memory has all of it", || limit_of("db") == Some(SHARED_MBPS));
    let disks = apart.begin(0);
    let shares = [SHARED_MBPS - SHARED_MBPS / 8, SHARED_MBPS / 8].map(Some);
    eventually("most is for the memory", || [limit_of("db"), limit_of("web")] == shares);
    lab.drainpipe(&["limit", "a", "off"]).done();
    for moving in [memory, disks] {
        let result: MigrationResult = result_of(&moving.wait());
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    }
    guest.assert_intact();
}
