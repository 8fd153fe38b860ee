//! Labs whose hosts have a libvirt each. Its domains run, move, outlive their daemons, and end with the lab.

use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::process::Pid;
use serde_json::Value;

use crate::Test;
use crate::lab_cli::{assert_nothing_is_left, is_zombie};
use crate::options;
use crate::program::{BAD_INPUT, drainpipe};
use crate::support::{TestLab, eventually};
use crate::with_libvirt;

pub(crate) const TESTS: &[Test] = &[
    ("a_domain_moves_between_hosts", a_domain_moves_between_hosts),
    ("a_domain_outlives_its_daemon", a_domain_outlives_its_daemon),
    ("domains_end_with_the_lab", domains_end_with_the_lab),
    ("a_lab_without_libvirt_says_so", a_lab_without_libvirt_says_so),
];

fn a_domain_moves_between_hosts() {
    let lab = TestLab::with_libvirt();
    let guest = lab.start_domain("a", "web", 160, "");
    guest.assert_intact();
    for (source, target) in [("a", "b"), ("b", "a")] {
        let before = sent_bytes(&lab, source, 0);
        lab.migrate_domain("web", source, target, "e0");
        assert_eq!(lab.domain_state(target, "web").as_deref(), Some("running"));
        assert_eq!(lab.domain_state(source, "web"), None);
        guest.assert_intact();
        let sent = sent_bytes(&lab, source, 0) - before;
        assert!(sent > 32 << 20, "its memory went over the link: {sent} bytes");
    }
}

pub(crate) fn a_domain_moves_with_another_qemu() {
    let qemu = options::other_qemu().expect("the test runs only where there is one");
    let lab = TestLab::up(&["--libvirt", "--no-agents", "--link", "unlimited", "--qemu", &qemu]);
    let guest = lab.start_domain("a", "web", 160, "");
    let used = lab.virsh("a", &["qemu-monitor-command", "web", "--hmp", "info version"]).done();
    let version = Command::new(&qemu).arg("--version").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    // As in "7.2.22Debian 1:7.2+dfsg-7+deb12u18" and in "QEMU emulator version 7.2.22 (Debian …".
    let number = used.split("Debian").next().unwrap().trim();
    assert!(version.contains(&format!("version {number} ")), "{used}: {version}");
    lab.migrate_domain("web", "a", "b", "e0");
    guest.assert_intact();
}

fn sent_bytes(lab: &TestLab, host: &str, link: usize) -> u64 {
    let status = lab.lab().status().unwrap();
    let host = status.hosts.into_iter().find(|status| status.node.name == host).unwrap();
    host.links[link].sent_bytes
}

fn a_domain_outlives_its_daemon() {
    let lab = TestLab::with_libvirt();
    let guest = lab.start_domain("a", "web", 160, "");
    let qemu = lab.qemu_pid("a", "web").expect("its QEMU is seen from outside");
    let status = || lab.json::<Value>(&["lab", "status", lab.name()])["hosts"][0]["libvirt"].clone();
    for end in ["libvirt-stop a", "libvirt-kill a"] {
        let daemon = lab.lab().libvirt_pid("a").unwrap().expect("it runs");
        assert_eq!(status()["pid"], daemon.as_raw_pid());
        lab.fault(end);
        // Twice is the same as once.
        lab.fault(end);
        assert_eq!(status()["pid"], Value::Null);
        guest.assert_answers();
        assert_ne!(lab.virsh("a", &["list"]).code, 0, "nobody is to answer");
        lab.fault("libvirt-start a");
        lab.fault("libvirt-start a");
        assert_ne!(lab.lab().libvirt_pid("a").unwrap(), Some(daemon));
        assert_eq!(lab.domain_state("a", "web").as_deref(), Some("running"), "after {end}");
        assert_eq!(lab.qemu_pid("a", "web"), Some(qemu));
    }
    guest.assert_intact();
    assert!(control_socket(&lab, "a", "web"), "QEMU's control socket is a file outside too");
    lab.virsh("a", &["destroy", "web"]).done();
    assert_eq!(lab.qemu_pid("a", "web"), None);
}

fn control_socket(lab: &TestLab, host: &str, name: &str) -> bool {
    let domains = fs::read_dir(lab.directory(host).join("libvirt/lib/qemu")).unwrap();
    let names = domains.map(|entry| entry.unwrap().path());
    let mut of_domain = names.filter(|path| path.to_string_lossy().ends_with(&format!("-{name}")));
    of_domain.any(|path| path.join("monitor.sock").exists())
}

fn domains_end_with_the_lab() {
    let lab = TestLab::with_libvirt();
    lab.start_domain("a", "web", 160, "");
    let pids: Vec<Pid> = ["a", "b"].iter().flat_map(|host| lab.pids(host, &[])).collect();
    // For each host: unshare, sh, sleep and libvirtd, or `virtqemud` and three others.
    let of_host = if with_libvirt::is_modular() { 7 } else { 4 };
    assert_eq!(pids.len(), 2 * of_host + 1, "{pids:?}");
    drainpipe(&["lab", "down", lab.name()]).done();
    assert_nothing_is_left(lab.name());
    for pid in pids {
        let process = format!("/proc/{}", pid.as_raw_nonzero());
        eventually("all processes are gone", || !Path::new(&process).exists() || is_zombie(pid));
    }
}

fn a_lab_without_libvirt_says_so() {
    let lab = TestLab::up(&["--no-agents"]);
    let fault = |words: &[&str]| drainpipe(&[&["lab", "fault", lab.name()], words].concat());
    fault(&["libvirt-kill", "a"]).refused(BAD_INPUT, &["has no libvirt", "lab up --libvirt"]);
    fault(&["libvirt-kill", "c"]).refused(BAD_INPUT, &["no host \"c\"", "a, b"]);
}
