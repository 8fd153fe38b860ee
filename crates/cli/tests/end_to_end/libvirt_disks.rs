//! libvirt's domains that move with their disks, beyond what they share with Drainpipe's own VMs (`writing_guests`).

use std::fs;

use drainpipe_api_types::{LeftDisk, PlanView};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};

use crate::Test;
use crate::backend::Backend;
use crate::bandwidth::says;
use crate::copied_disks::{Apart, content, disk_names, lab};
use crate::program::REFUSED;
use crate::scene::result_of;
use crate::support::eventually;
use crate::writing_guests::Writing;

/// Tests that need a newer QEMU.
pub(crate) const WITH_NEWER_QEMU: &[Test] = &[
    ("a_drain_takes_disks_along", || Backend::Libvirt.run(a_drain_takes_disks_along)),
    ("a_limit_is_kept_by_the_agents", || Backend::Libvirt.run(a_limit_is_kept_by_the_agents)),
    ("what_is_not_copied_is_refused", || Backend::Libvirt.run(what_is_not_copied_is_refused)),
];

const MEMORY_MIB: u64 = 128;

/// So low that a copy takes longer than a look at it, and yet several times what its guest writes.
const LIMIT_MBPS: &str = "400";

fn a_drain_takes_disks_along() {
    let writing = Writing::begin();
    let apart = &writing.apart;
    let lab = &apart.lab;
    let output = lab.drainpipe(&["drain", "a", "--copy-storage", "--dry-run"]).done();
    assert!(output.contains("web takes vda") && output.contains("b does not see it"), "{output}");
    assert_eq!(apart.names("b"), [""; 0], "a dry run makes nothing");
    lab.drainpipe(&["drain", "a", "--copy-storage", "--yes"]).done();
    lab.assert_runs_on("web", "b");
    assert_eq!(lab.domain_state("a", "web"), None);
    writing.wait_for_writes();
    writing.assert_intact();
    assert_eq!(apart.names("b"), disk_names());
    let left: Vec<LeftDisk> = lab.json(&["disk", "left", "a"]);
    assert!(left.len() == 2 && left.iter().all(|disk| disk.path.contains(".migrated-")), "{left:#?}");
    // Nobody writes to its disks any more.
    let asked = r#"{"execute":"query-block-exports"}"#;
    let exports = lab.virsh("b", &["qemu-monitor-command", "web", asked]).done();
    assert!(exports.contains(r#""return":[]"#), "{exports}");
}

/// libvirt would limit its copies to what memory may use.
fn a_limit_is_kept_by_the_agents() {
    let writing = Writing::begin();
    let apart = &writing.apart;
    let lab = &apart.lab;
    lab.drainpipe(&["limit", "a", LIMIT_MBPS]).done();
    let migrating = lab.start(&["migrate", "web", "b", "--copy-storage", "--json"]);
    eventually("libvirt copies as fast as it can", || {
        let job = lab.virsh("a", &["blockjob", "web", "vda", "--info", "--raw"]);
        let bandwidth = job.stdout.split("bandwidth=").nth(1).and_then(|rest| rest.split_whitespace().next());
        bandwidth.is_some_and(|bytes| bytes.parse::<u64>().is_ok_and(|bytes| bytes == 0 || bytes > 1 << 40))
    });
    let result: MigrationResult = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert!(says(&result, "limited to 400 Mb/s"), "{result:#?}");
    writing.wait_for_writes();
    writing.assert_intact();
}

fn what_is_not_copied_is_refused() {
    let apart = Apart::bound_with(lab(), [&content(7), &content(8)]);
    let lab = &apart.lab;
    apart.make_qcow2(&content(9));
    let disks = ["web.raw", "web.qcow2"].map(|name| apart.path("a", name));
    lab.start_domain_with_disks("a", "web", MEMORY_MIB, "", &disks);
    lab.wait_for_domain("web");
    let migrate = |arguments: &[&str]| lab.drainpipe(&[&["migrate", "web", "b"], arguments].concat());
    migrate(&[]).refused(REFUSED, &["b does not see"]);
    let image = migrate(&["--copy-storage"]);
    // A QEMU newer than any present one may be safe.
    if image.code != 0 {
        image.refused(REFUSED, &["vdb of VM web", "may lose writes", "convert it to raw"]);
        let drained = lab.drainpipe(&["drain", "a", "--copy-storage", "--dry-run"]);
        let output = format!("{}{}", drained.stdout, drained.stderr);
        assert!(output.contains("may lose writes"), "{output}");
        lab.assert_runs_on("web", "a");
    }
    assert_eq!(apart.names("b"), [""; 0], "nothing is made");

    lab.virsh("a", &["destroy", "web"]).done();
    lab.virsh("a", &["undefine", "web"]).done();
    eventually("it is in no list any more", || lab.vms().vms.is_empty());
    fs::remove_file(apart.on("a", "web.qcow2")).unwrap();
    apart.boot(MEMORY_MIB);
    let place = format!("vda={}", apart.path("b", "other.raw"));
    migrate(&["--disk", &place]).refused(REFUSED, &["keep their paths"]);
    migrate(&["--copy-storage", "--post-copy"]).refused(REFUSED, &["post-copy"]);
    let plan: PlanView = lab.json(&["migrate", "web", "b", "--copy-storage", "--dry-run"]);
    let copied: Vec<String> = plan.plan.disks.iter().map(|disk| disk.disk.to_string()).collect();
    assert_eq!(copied, ["vda", "vdb"]);
    assert_eq!(apart.names("b"), [""; 0], "a dry run makes nothing");
    lab.assert_runs_on("web", "a");
}
