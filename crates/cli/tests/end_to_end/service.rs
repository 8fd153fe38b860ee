//! The agent as a service manager sees it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::process::Command;

use rustix::process::Signal;

use crate::Test;
use crate::program::DRAINPIPE;
use crate::support::{PATIENCE, TestLab};

pub(crate) const TESTS: &[Test] = &[
    ("the_agent_says_when_it_serves", the_agent_says_when_it_serves),
    ("the_units_leave_little_open", the_units_leave_little_open),
    ("the_unit_lets_the_agent_open_files", the_unit_lets_the_agent_open_files),
    ("what_others_may_write_to_is_not_believed", what_others_may_write_to_is_not_believed),
];

/// The most exposure by `systemd-analyze security`, in tenths. The agent's is mostly due to the host's network and
/// files, which it is there to change; the keeper's, to becoming QEMU's user and reaching into its processes.
const EXPOSURE_MAX: [(&str, &str); 2] = [("drainpipe.service", "30"), ("drainpipe-keeper@.service", "28")];

const PACKAGING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging");

/// systemd enforces this setting by making every `openat2` fail, which is not documented.
fn the_unit_lets_the_agent_open_files() {
    let unit = fs::read_to_string(format!("{PACKAGING}/drainpipe.service")).unwrap();
    assert!(!unit.contains("\nRestrictSUIDSGID="));
}

fn the_units_leave_little_open() {
    for (unit, exposure_max) in EXPOSURE_MAX {
        assert_exposure(unit, exposure_max);
    }
}

#[track_caller]
fn assert_exposure(unit: &str, exposure_max: &str) {
    let threshold = format!("--threshold={exposure_max}");
    let unit = format!("{PACKAGING}/{unit}");
    let looked = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", &threshold, &unit])
        .output();
    match looked {
        Err(error) => eprintln!("SKIPPED: systemd-analyze: {error}"),
        Ok(output) => {
            let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{printed}");
            assert!(!printed.contains("ignoring"), "{printed}");
        }
    }
}

fn what_others_may_write_to_is_not_believed() {
    let lab = TestLab::fast();
    lab.stop_agent("a", Signal::TERM);
    let directory = lab.directory("a");
    for (file, mode) in [
        ("state/journal.sqlite", 0o666),
        ("state", 0o777),
        ("run", 0o777),
        ("agent.toml", 0o666),
        ("pki/host.key", 0o602),
        ("pki/ca.pem", 0o646),
    ] {
        let path = directory.join(file);
        let before = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let config = directory.join("agent.toml");
        let output = lab.exec("a", &[DRAINPIPE, "agent", "--config", config.to_str().unwrap()]);
        let words = format!("{output:?}");
        assert!(output.code != 0 && words.contains("chmod") && words.contains(file), "{words}");
        fs::set_permissions(&path, before).unwrap();
    }
    lab.start_agent("a");
    lab.drainpipe(&["vms"]).done();
}

fn the_agent_says_when_it_serves() {
    let lab = TestLab::fast();
    lab.stop_agent("a", Signal::TERM);
    let directory = lab.directory("a");
    let manager = UnixDatagram::bind(directory.join("notify.sock")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let socket = format!("NOTIFY_SOCKET={}", directory.join("notify.sock").display());
    lab.spawn_agent("a", &["env", &socket, "WATCHDOG_USEC=4000000", DRAINPIPE]);

    let mut said = [0; 64];
    for expected in ["READY=1", "WATCHDOG=1", "WATCHDOG=1"] {
        let length = manager.recv(&mut said).unwrap();
        assert_eq!(String::from_utf8_lossy(&said[..length]).trim(), expected);
    }
    lab.drainpipe(&["vms"]).done();
}
