//! Labs that come up and go down, and that are killed meanwhile.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use drainpipe_lab::{CLIENT, Error, Lab, LabSpec, Removal};

use crate::support::{TestLab, eventually, link, skipped, unique_name};

/// Set for a copy of this program that makes a lab and is killed meanwhile.
pub(crate) const VICTIM: &str = "DRAINPIPE_LAB_TEST_VICTIM";

fn two_links(name: &str) -> LabSpec {
    LabSpec::of_two_hosts(name, vec![link(Some(1000)), link(None)])
}

pub(crate) fn remains(name: &str) -> Vec<PathBuf> {
    let of_lab = |path: &PathBuf| path.to_string_lossy().contains(name);
    ["/run/netns", "/run/drainpipe/lab"]
        .iter()
        .filter_map(|directory| fs::read_dir(directory).ok())
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(of_lab)
        .collect()
}

pub(crate) fn is_alive(pid: u32) -> bool {
    // A process that has ended but was not waited for has no namespace any more.
    fs::read_link(format!("/proc/{pid}/ns/net")).is_ok()
}

#[test]
fn a_lab_goes_up_and_leaves_nothing_when_it_goes_down() {
    if skipped() {
        return;
    }
    let name = unique_name();
    let lab = Lab::up(two_links(&name)).unwrap();
    assert_eq!(Lab::open(&name).unwrap().spec(), lab.spec());
    assert!(Lab::list().unwrap().iter().any(|lab| lab.name == name && lab.complete));
    let status = lab.status().unwrap();
    assert_eq!(status.hosts.len(), 2);
    assert!(status.hosts.iter().all(|host| host.links.iter().all(|link| link.faults.is_empty())));
    assert_eq!(Lab::down(&name).unwrap(), Removal { namespaces: 4, processes: 0 });
    assert_eq!(remains(&name), Vec::<PathBuf>::new());
    assert_eq!(Lab::down(&name).unwrap(), Removal { namespaces: 0, processes: 0 });
    assert_eq!(remains(&name), Vec::<PathBuf>::new());
    assert!(matches!(Lab::open(&name), Err(Error::NoSuchLab { .. })));
}

#[test]
fn a_lab_that_is_up_is_refused_and_goes_on() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(None)]);
    let error = Lab::up(lab.spec().clone()).unwrap_err();
    assert!(error.to_string().contains("drainpipe lab down"), "{error}");
    lab.status().unwrap();
}

#[test]
fn of_two_at_once_with_one_name_one_wins() {
    if skipped() {
        return;
    }
    let spec = two_links(&unique_name());
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(|| Lab::up(spec.clone()))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let winners = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    let refused = |outcome: &Result<Lab, Error>| matches!(outcome, Err(Error::AlreadyUp { .. }));
    assert_eq!((winners, outcomes.iter().filter(|o| refused(o)).count()), (1, 1), "{outcomes:?}");
    Lab::open(&spec.name).unwrap().status().unwrap();
    Lab::down(&spec.name).unwrap();
}

#[test]
fn a_lab_whose_name_begins_like_another_is_left_alone() {
    if skipped() {
        return;
    }
    let short = unique_name();
    let long = Lab::up(two_links(&format!("{short}-more"))).unwrap();
    Lab::up(two_links(&short)).unwrap();
    assert_eq!(Lab::down(&short).unwrap().namespaces, 4);
    long.status().unwrap();
    Lab::down(&long.spec().name).unwrap();
}

#[test]
fn every_process_in_the_lab_ends_with_it_and_no_other() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(None)]);
    let log = lab.node_dir("a").unwrap().join("daemon.log");
    let polite = lab.spawn("a", &["sleep", "600"], &log).unwrap();
    let script = "trap '' TERM; echo ready; while :; do sleep 1; done";
    let stubborn = lab.spawn(CLIENT, &["sh", "-c", script], &log).unwrap();
    eventually("the script starts", || fs::read_to_string(&log).unwrap().contains("ready"));
    let mut bystander = Command::new("sleep").arg("600").spawn().unwrap();

    let status = lab.status().unwrap();
    let in_a = &status.hosts[0].node.processes;
    assert_eq!((in_a[0].pid.unsigned_abs(), in_a[0].command.as_str()), (polite.id(), "sleep 600"));
    assert!(Lab::down(&lab.spec().name).unwrap().processes >= 2);

    assert!(!is_alive(polite.id()) && !is_alive(stubborn.id()));
    assert!(is_alive(bystander.id()));
    for mut child in [polite, stubborn] {
        child.wait().unwrap();
    }
    bystander.kill().unwrap();
    bystander.wait().unwrap();
}

#[test]
fn a_command_sees_only_its_hosts_interfaces() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(None)]);
    let output = lab.command("a", "ls").unwrap().arg("/sys/class/net").output().unwrap();
    let mut seen: Vec<_> = std::str::from_utf8(&output.stdout).unwrap().split_whitespace().collect();
    seen.sort_unstable();
    assert_eq!(seen, ["e0", "guests", "lo", "mgmt", "uplink"]);
    let unknown = lab.command("z", "ls").unwrap_err().to_string();
    assert!(unknown.contains("its hosts are a, b"), "{unknown}");
}

/// Not a test by itself: a copy of this program runs it, as another process that uses labs.
#[test]
fn hosts_with_a_cpu_of_their_own_run_on_no_other() {
    if skipped() {
        return;
    }
    let spec = LabSpec { own_cpus: true, ..LabSpec::of_two_hosts(unique_name(), vec![link(None)]) };
    if thread::available_parallelism().unwrap().get() < spec.hosts.len() {
        let refused = Lab::up(spec).unwrap_err().to_string();
        assert!(refused.contains("giving each of 2 hosts its own CPU needs as many CPUs"), "{refused}");
        return;
    }
    let lab = TestLab::of(spec);
    let [a, b] = ["a", "b"].map(|host| {
        let output =
            lab.command(host, "grep").unwrap().args(["Cpus_allowed_list", "/proc/self/status"]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    });
    assert!(a != b && [&a, &b].iter().all(|cpus| !cpus.contains(['-', ','])), "{a} {b}");
}

#[test]
fn victim() {
    let Ok(name) = env::var(VICTIM) else { return };
    for _ in 0..1000 {
        if let Err(error) = Lab::up(two_links(&name)) {
            println!("{error}");
            return;
        }
        Lab::down(&name).unwrap();
    }
}

/// The command that makes and removes the lab `name` in another process until it is killed.
fn victim_command(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "lifecycle::victim", "--nocapture"]).env(VICTIM, name);
    command.stderr(Stdio::null());
    command
}

#[test]
fn a_lab_killed_in_the_making_is_cleared_by_the_next_up_or_down() {
    if skipped() {
        return;
    }
    let name = unique_name();
    for delay_ms in (0..120).step_by(6) {
        let mut victim = victim_command(&name).stdout(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(delay_ms));
        victim.kill().unwrap();
        victim.wait().unwrap();
        match Lab::up(two_links(&name)) {
            Ok(lab) => drop(lab.status().unwrap()),
            // It was killed after the lab was complete.
            Err(Error::AlreadyUp { .. }) => drop(Lab::open(&name).unwrap().status().unwrap()),
            Err(error) => panic!("killed after {delay_ms} ms: {error}"),
        }
        if delay_ms % 4 == 0 {
            Lab::down(&name).unwrap();
            assert_eq!(remains(&name), Vec::<PathBuf>::new(), "killed after {delay_ms} ms");
        }
    }
    Lab::down(&name).unwrap();
    assert_eq!(remains(&name), Vec::<PathBuf>::new());
}

#[test]
pub(crate) fn remains_of_an_earlier_boot_are_cleared() {
    if skipped() {
        return;
    }
    let name = unique_name();
    Lab::up(two_links(&name)).unwrap();
    let record = Path::new("/run/drainpipe/lab").join(&name).join("lab.json");
    let text = fs::read_to_string(&record).unwrap();
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    fs::write(&record, text.replace(boot_id.trim(), "earlier")).unwrap();
    assert!(matches!(Lab::open(&name), Err(Error::Incomplete { .. })));
    Lab::up(two_links(&name)).unwrap();
    Lab::down(&name).unwrap();
}

#[test]
fn a_lab_that_fails_half_way_is_undone_and_says_what_the_kernel_lacks() {
    if skipped() {
        return;
    }
    let name = unique_name();
    let programs = env::temp_dir().join(&name);
    fs::create_dir(&programs).unwrap();
    let tc = programs.join("tc");
    fs::write(&tc, "#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 1\n").unwrap();
    fs::set_permissions(&tc, fs::Permissions::from_mode(0o700)).unwrap();
    let path = format!("{}:{}", programs.display(), env::var("PATH").unwrap());
    let output = victim_command(&name).env("PATH", path).output().unwrap();
    fs::remove_dir_all(&programs).unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("modprobe sch_tbf"), "{said}");
    assert_eq!(remains(&name), Vec::<PathBuf>::new());
}
