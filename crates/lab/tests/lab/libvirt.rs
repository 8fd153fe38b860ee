//! Labs whose hosts have a libvirt: they come up and go down completely, even when killed.

use std::env;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use drainpipe_lab::{Error, Lab, LabSpec};
use rustix::process::{Pid, Signal, kill_process};

use crate::lifecycle::{VICTIM, is_alive, remains};
use crate::support::{TestLab, eventually, link, skipped, unique_name};

fn spec(name: &str) -> LabSpec {
    LabSpec { libvirt: true, ..LabSpec::of_two_hosts(name, vec![link(None)]) }
}

/// Prints why, and returns `true`, if libvirt cannot run here.
#[expect(clippy::explicit_write, reason = "the test harness hides what a passing test prints by macro")]
fn skipped_with_libvirt() -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let is_installed = |tool: &str| env::split_paths(&path).any(|directory| directory.join(tool).is_file());
    let absent = ["libvirtd", "virsh"].into_iter().find(|tool| !is_installed(tool));
    if let Some(absent) = absent {
        writeln!(io::stderr(), "SKIPPED: {absent} is not installed: run scripts/setup").unwrap();
    }
    absent.is_some() || skipped()
}

/// The processes on both hosts, by the kernel's numbers.
fn pids(lab: &Lab) -> Vec<u32> {
    let processes = ["a", "b"].into_iter().flat_map(|host| lab.processes(host).unwrap());
    processes.map(|process| process.pid.unsigned_abs()).collect()
}

fn hostname(lab: &Lab, host: &str) -> String {
    let uri = format!("qemu:///system?socket={}", lab.libvirt_socket(host).unwrap().display());
    let output = Command::new("virsh").args(["--connect", &uri, "hostname"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn each_host_has_a_libvirt_that_has_its_name() {
    if skipped_with_libvirt() {
        return;
    }
    let lab = TestLab::of(spec(&unique_name()));
    assert_eq!(["a", "b"].map(|host| hostname(&lab, host)), ["a", "b"]);
    let daemons = ["a", "b"].map(|host| lab.libvirt_pid(host).unwrap().unwrap());
    let reported = lab.status().unwrap().hosts.into_iter().map(|host| host.libvirt.unwrap().pid.unwrap());
    assert_eq!(reported.collect::<Vec<_>>(), daemons.map(Pid::as_raw_pid));
    let unknown = lab.libvirt_socket("z").unwrap_err().to_string();
    assert!(unknown.contains("its hosts are a, b"), "{unknown}");
}

#[test]
fn a_libvirt_ends_with_the_process_that_holds_it() {
    if skipped_with_libvirt() {
        return;
    }
    let lab = TestLab::of(spec(&unique_name()));
    let before = pids(&lab);
    let is_holder = |command: &str| command.starts_with("unshare ");
    let holder = lab.processes("a").unwrap().into_iter().find(|process| is_holder(&process.command));
    kill_process(Pid::from_raw(holder.unwrap().pid).unwrap(), Signal::KILL).unwrap();
    eventually("all on the host end", || lab.processes("a").unwrap().is_empty());
    assert_eq!(pids(&lab).len(), before.len() / 2, "the other host's goes on");
    assert_eq!(lab.libvirt_pid("a").unwrap(), None);
}

/// Not a test by itself: see `lifecycle::victim`.
#[test]
fn victim() {
    let Ok(name) = env::var(VICTIM) else { return };
    for _ in 0..1000 {
        Lab::up(spec(&name)).unwrap();
        Lab::down(&name).unwrap();
    }
}

#[test]
fn a_lab_killed_in_the_making_leaves_no_libvirt() {
    if skipped_with_libvirt() {
        return;
    }
    let name = unique_name();
    for delay_ms in (60..600).step_by(60) {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "libvirt::victim", "--nocapture"]).env(VICTIM, &name);
        let mut victim = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(delay_ms));
        victim.kill().unwrap();
        victim.wait().unwrap();
        let lab = match Lab::up(spec(&name)) {
            // It was killed after the lab was complete.
            Err(Error::AlreadyUp { .. }) => Lab::open(&name).unwrap(),
            up => up.unwrap(),
        };
        assert_eq!(["a", "b"].map(|host| hostname(&lab, host)), ["a", "b"], "killed after {delay_ms} ms");
        let pids = pids(&lab);
        // For each host: unshare, sh, sleep, libvirtd.
        assert_eq!(pids.len(), 8, "killed after {delay_ms} ms");
        Lab::down(&name).unwrap();
        assert_eq!(remains(&name), Vec::<PathBuf>::new(), "killed after {delay_ms} ms");
        assert!(!pids.into_iter().any(is_alive), "killed after {delay_ms} ms");
    }
}
