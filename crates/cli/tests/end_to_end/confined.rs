//! What a VM's QEMU may do by itself: hardly anything.

use std::fs;
use std::path::Path;

use drainpipe_hypervisor_qemu::QemuUser;
use rustix::process::Pid;

use crate::Test;
use crate::options;
use crate::support::TestLab;

pub(crate) const TESTS: &[Test] =
    &[("qemu_has_no_rights_but_to_what_it_was_given", qemu_has_no_rights_but_to_what_it_was_given)];

const DISK_BYTES: u64 = 1 << 20;

fn qemu_has_no_rights_but_to_what_it_was_given() {
    for qemu in [Some("qemu-system-x86_64".into()), options::other_qemu()].into_iter().flatten() {
        let lab = TestLab::up(&["--link", "unlimited", "--qemu", &qemu]);
        let disk = lab.write("disk", "");
        fs::File::options().write(true).open(&disk).unwrap().set_len(DISK_BYTES).unwrap();
        lab.create(&specification("web", &disk), "web");
        lab.create(&specification("thief", &disk), "thief");
        lab.drainpipe(&["vm", "start", "web"]).done();
        let user = QemuUser::of_lab(Path::new(&qemu)).uid.to_string();
        assert_confined(&lab, "a", &user);
        // Another QEMU with the same disk is refused, and the error names the file.
        lab.drainpipe(&["vm", "start", "thief"]).refused(1, &["write", "lock", &disk]);
        for (from, to) in [("a", "b"), ("b", "a")] {
            lab.migrate("web", to, &["--option", "multichannel"]);
            assert_confined(&lab, to, &user);
            assert_eq!(lab.qemu_pid(from, "web"), None);
        }
        lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
        lab.drainpipe(&["vm", "start", "thief"]).done();
        lab.drainpipe(&["vm", "stop", "thief", "--force"]).done();
    }
}

fn specification(name: &str, disk: &str) -> String {
    format!(
        "name = \"{name}\"\nmemory_mib = 16\nvcpus = 1\nmachine = \"pc-q35-7.2\"\naccelerator = \"tcg\"\n\
         [[disk]]\npath = \"{disk}\"\nformat = \"raw\"\n[[nic]]\nbridge = \"guests\"\n"
    )
}

#[track_caller]
fn assert_confined(lab: &TestLab, host: &str, user: &str) {
    let pid = lab.qemu_pid(host, "web").expect("it runs");
    let none = "0000000000000000";
    for (field, wanted) in [
        ("Uid", [user; 4].join("\t")),
        ("Gid", [user; 4].join("\t")),
        ("CapInh", none.into()),
        ("CapPrm", none.into()),
        ("CapEff", none.into()),
        ("CapBnd", none.into()),
        ("CapAmb", none.into()),
        ("NoNewPrivs", "1".into()),
        ("Seccomp", "2".into()),
    ] {
        assert_eq!(status(pid, field), wanted, "{field}");
    }
    let own = lab.directory(host).join("run/vms/web/qemu");
    assert_eq!(fs::read_link(of(pid, "cwd")).unwrap(), own);
    let open = fs::read_dir(of(pid, "fd")).unwrap().flatten();
    let files: Vec<_> = open.filter_map(|number| fs::read_link(number.path()).ok()).collect();
    let log = lab.directory(host).join("run/vms/web/qemu.log");
    let disk = lab.files().join("disk");
    let of_the_lab = |file: &&std::path::PathBuf| {
        [Path::new("/run/drainpipe"), lab.files()].iter().any(|directory| file.starts_with(directory))
    };
    for file in files.iter().filter(of_the_lab) {
        assert!([&log, &disk].contains(&file), "it has {} open", file.display());
    }
    assert!(files.contains(&disk), "{files:?}");
}

fn of(pid: Pid, file: &str) -> String {
    format!("/proc/{}/{file}", pid.as_raw_nonzero())
}

#[track_caller]
fn status(pid: Pid, field: &str) -> String {
    let status = fs::read_to_string(of(pid, "status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.expect("the kernel tells").trim().to_owned()
}
