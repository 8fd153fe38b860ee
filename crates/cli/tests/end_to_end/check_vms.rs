//! `drainpipe check` of running VMs, and its quick form before each migration.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use drainpipe_api_types::PlanView;
use drainpipe_engine::check::CheckReport;
use drainpipe_engine::finding::Finding;
use drainpipe_engine::migration::result::MigrationResult;
use rustix::process::Signal;

use crate::Test;
use crate::check::{assert_found, assert_silent, check, on, report};
use crate::options::other_qemu;
use crate::program::{BAD_INPUT, DRAINPIPE, REFUSED, WARNED};
use crate::support::TestLab;

pub(crate) const TESTS: &[Test] = &[
    ("a_vm_that_can_go_and_what_keeps_it", a_vm_that_can_go_and_what_keeps_it),
    ("what_vms_may_not_use_on_the_target", what_vms_may_not_use_on_the_target),
    ("a_qemu_that_is_replaced", a_qemu_that_is_replaced),
];

/// A VM on host `a` that runs only firmware, with a disk of the test's own.
#[track_caller]
pub(crate) fn start_vm(lab: &TestLab, name: &str, machine: &str, more: &str) -> String {
    let disk = lab.files().join("disks").join(format!("{name}.raw"));
    fs::create_dir_all(disk.parent().unwrap()).unwrap();
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let specification = format!(
        "name = \"{name}\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"{machine}\"\naccelerator = \"tcg\"\n{more}\n\
         [[disk]]\npath = \"{}\"\nformat = \"raw\"\n",
        disk.display()
    );
    lab.create(&specification, name);
    lab.drainpipe(&["vm", "start", name]).done();
    disk.display().to_string()
}

/// Restarts a host's agent after this shell command, which changes mounts for that agent alone.
#[track_caller]
pub(crate) fn restart_agent_with_mounts(lab: &TestLab, host: &str, command: &str) {
    lab.stop_agent(host, Signal::TERM);
    start_agent_with_mounts(lab, host, command);
}

/// Like the above, for an agent that has ended.
#[track_caller]
pub(crate) fn start_agent_with_mounts(lab: &TestLab, host: &str, command: &str) {
    // In a shell of its own, since the command may set positional parameters.
    let program = format!("({command}) && exec \"$0\" \"$@\"");
    lab.start_agent_by(host, &["unshare", "--mount", "bash", "-c", &program, DRAINPIPE]);
}

/// Fails the test unless the migration is refused for this reason in all its forms, and nothing is changed.
#[track_caller]
fn assert_refused(lab: &TestLab, vm: &str, said: &[&str]) {
    lab.drainpipe(&["migrate", vm, "b"]).refused(REFUSED, said);
    let dry_run = lab.drainpipe(&["migrate", vm, "b", "--dry-run"]);
    assert_eq!(dry_run.code, REFUSED, "{dry_run:#?}");
    assert!(said.iter().all(|part| dry_run.stderr.contains(part)), "{dry_run:#?}");
    lab.assert_runs_on(vm, "a");
}

fn a_vm_that_can_go_and_what_keeps_it() {
    let lab = TestLab::fast();
    let disk = start_vm(&lab, "web", "pc-q35-7.2", "");
    a_vm_that_can_go(&lab);
    warnings_before_a_migration(&lab);
    a_name_that_is_taken(&lab);
    a_disk_that_the_target_does_not_see(&lab, &disk);
    a_disk_that_is_another_one(&lab, &disk);
    lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
    a_bridge_that_the_target_does_not_have(&lab);
}

fn a_vm_that_can_go(lab: &TestLab) {
    assert_silent(lab);
    let report = report(lab, "a", "b", &["--vm", "web"]);
    let is_said = |finding: &Finding| finding.code == "vm-machine-old";
    assert!(report.findings.iter().any(is_said), "its machine type is older than 8.1: {report:#?}");
    lab.drainpipe(&["check", "a", "b", "--vm", "wbe"]).refused(BAD_INPUT, &["no VM wbe on a"]);
    lab.drainpipe(&["check", "b", "a", "--vm", "web"]).refused(BAD_INPUT, &["no VM web on b"]);
    let result = lab.migrate("web", "b", &[]);
    assert_eq!(result.record.findings, [], "nothing is said of healthy hosts");
    lab.migrate("web", "a", &[]);
}

fn a_name_that_is_taken(lab: &TestLab) {
    let other =
        lab.write("other.toml", "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-7.2\"\n");
    let agent_of_b = lab.agent_socket("b");
    lab.drainpipe(&["vm", "create", &other, "--agent", &agent_of_b]).done();
    assert_found(lab, REFUSED, "vm-name-taken", &["b VM web"], "b has a VM web already");
    lab.drainpipe(&["vm", "rm", "web", "--agent", &agent_of_b]).done();
}

fn a_bridge_that_the_target_does_not_have(lab: &TestLab) {
    on(lab, "a", "ip link add only-a type bridge && ip link set only-a up");
    start_vm(lab, "bridged", "pc-q35-7.2", "[[nic]]\nbridge = \"only-a\"\n");
    assert_found(lab, REFUSED, "vm-bridge-missing", &["b VM bridged"], "b has no bridge only-a");
    assert_refused(lab, "bridged", &["b has no bridge only-a", "ip link add only-a type bridge"]);
    on(lab, "b", "ip link add only-a type bridge && ip link set only-a up");
    lab.migrate("bridged", "b", &[]);
}

fn a_disk_that_the_target_does_not_see(lab: &TestLab, disk: &str) {
    let directory = Path::new(disk).parent().unwrap().display().to_string();
    restart_agent_with_mounts(lab, "b", &format!("mount -t tmpfs none {directory}"));
    assert_found(lab, REFUSED, "vm-file-missing", &["b VM web"], disk);
    assert_refused(lab, "web", &["b does not see", disk, "both hosts must see it under the same path"]);
}

fn a_disk_that_is_another_one(lab: &TestLab, disk: &str) {
    let copy = lab.files().join("copy.raw").display().to_string();
    fs::copy(disk, &copy).unwrap();
    assert_ne!(fs::metadata(disk).unwrap().ino(), fs::metadata(&copy).unwrap().ino());
    restart_agent_with_mounts(lab, "b", &format!("mount --bind {copy} {disk}"));
    assert_found(lab, REFUSED, "vm-disk-differs", &["b VM web"], "is not the same on a and b");
    assert_refused(lab, "web", &["is not the same on a and b"]);
}

fn what_vms_may_not_use_on_the_target() {
    let lab = TestLab::fast();
    on(&lab, "a", "ip link add office type bridge && ip link set office up");
    on(&lab, "b", "ip link add office type bridge && ip link set office up");
    let disk = start_vm(&lab, "web", "pc-q35-7.2", "[[nic]]\nbridge = \"office\"\n");
    lab.stop_agent("b", Signal::TERM);
    lab.configure("b", "directories = [\"/\"]", "directories = [\"/srv\"]\nbridges = [\"guests\"]");
    lab.start_agent("b");
    let (code, findings) = check(&lab, "a", "b");
    let of_vms: Vec<&str> = findings
        .iter()
        .map(|finding| finding.code.as_str())
        .filter(|code| code.ends_with("-not-allowed"))
        .collect();
    assert_eq!(
        (code, of_vms),
        (REFUSED, vec!["vm-bridge-not-allowed", "vm-file-not-allowed"]),
        "{findings:#?}"
    );
    assert_refused(
        &lab,
        "web",
        &[&disk, "not in a directory", "to `directories`", "agent.toml of b", "to `bridges`"],
    );

    lab.stop_agent("b", Signal::TERM);
    lab.configure("b", "\"/srv\"]\nbridges = [\"guests\"]", "\"/\"]");
    lab.start_agent("b");
    lab.migrate("web", "b", &[]);
}

fn a_qemu_that_is_replaced() {
    let lab = TestLab::fast();
    let qemu = lab.write("qemu", "#!/bin/sh\nexec qemu-system-x86_64 \"$@\"\n");
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
    lab.stop_agent("b", Signal::TERM);
    lab.configure("b", "\"qemu-system-x86_64\"", &format!("\"{qemu}\""));
    lab.start_agent("b");
    assert_silent(&lab);
    fs::copy(&qemu, format!("{qemu}.new")).unwrap();
    fs::rename(format!("{qemu}.new"), &qemu).unwrap();
    assert_found(&lab, WARNED, "qemu-replaced", &["b"], "systemctl restart drainpipe");
    lab.stop_agent("b", Signal::TERM);
    lab.start_agent("b");
    assert_silent(&lab);
}

fn warnings_before_a_migration(lab: &TestLab) {
    on(lab, "b", "sysctl -qw net.ipv4.conf.e0.rp_filter=1");
    let plan: PlanView = lab.json(&["migrate", "web", "b", "--dry-run"]);
    let [planned] = plan.findings.as_slice() else { panic!("{plan:#?}") };
    assert_eq!(planned.code, "reverse-path-filter");
    let result: MigrationResult = lab.migrate("web", "b", &[]);
    assert_eq!(result.record.findings, plan.findings);
    let logged = result.record.events.iter().any(|event| event.what.contains("(reverse-path-filter)"));
    assert!(logged, "{result:#?}");
    let output = lab.drainpipe(&["migrate", "web", "a"]);
    assert_eq!(output.code, 0, "{output:#?}");
    assert!(output.stderr.contains("warning: e0 of b filters strictly"), "{output:#?}");
    on(lab, "b", "sysctl -qw net.ipv4.conf.e0.rp_filter=2");
}

/// A newer QEMU has something that the target's lacks.
pub(crate) fn an_older_qemu() {
    let newer = other_qemu().expect("the test runs only where there is one");
    let lab = TestLab::up(&["--link", "unlimited", "--link", "unlimited", "--qemu", &newer]);
    lab.stop_agent("b", Signal::TERM);
    lab.configure("b", &newer, "qemu-system-x86_64");
    lab.start_agent("b");
    let codes = |vm: &str| -> Vec<String> {
        let output = lab.drainpipe(&["check", "a", "b", "--vm", vm, "--json"]);
        assert_eq!(output.code, REFUSED, "{output:#?}");
        let report: CheckReport = serde_json::from_str(&output.stdout).unwrap();
        assert!(report.findings.iter().any(|finding| finding.code == "target-qemu-older"), "{report:#?}");
        let vms = report.findings.iter().filter(|finding| finding.code.starts_with("vm-"));
        vms.map(|finding| finding.code.clone()).filter(|code| code != "vm-machine-old").collect()
    };
    start_vm(&lab, "new", "pc-q35-8.2", "memory_padding_kib = 8");
    assert_eq!(codes("new"), ["vm-machine-unknown"]);
    assert_refused(&lab, "new", &["no machine type pc-q35-8.2", "its newest of this kind"]);
    start_vm(&lab, "max", "pc-q35-7.2", "memory_padding_kib = 8\ncpu_model = \"max\"");
    assert_eq!(codes("max"), ["vm-cpu-features"]);
    assert_refused(&lab, "max", &["CPU features that b cannot give it (max)", "sha-ni"]);
    start_vm(&lab, "loses", "pc-q35-7.2", "");
    assert_eq!(codes("loses"), ["vm-writes-lost"]);
    start_vm(&lab, "genoa", "pc-q35-7.2", "memory_padding_kib = 8\ncpu_model = \"EPYC-Genoa\"");
    assert_eq!(codes("genoa"), ["vm-cpu-unknown"]);
    let (_, findings) = check(&lab, "a", "b");
    let refusing = findings.iter().filter(|finding| finding.refuses_migration);
    assert_eq!(refusing.count(), 4, "one for each VM: {findings:#?}");

    // The package is downgraded on the source too, while its VMs go on running in the newer QEMU.
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", &newer, "qemu-system-x86_64");
    lab.start_agent("a");
    let (_, findings) = check(&lab, "a", "b");
    let downgraded = findings.iter().filter(|finding| finding.code == "vm-qemu-newer");
    assert_eq!(downgraded.count(), 4, "{findings:#?}");
}
