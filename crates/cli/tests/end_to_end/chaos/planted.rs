//! That the monitor sees what it is there for.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::copies::Copies;
use super::monitor::Monitor;
use crate::program::Running;
use crate::support::eventually;

/// Two QEMUs of one VM, on two hosts that are but directories, and no agent that could do better.
pub(super) fn the_monitor_sees_two_copies_and_a_lost_one() {
    let directory = tempfile::TempDir::new().unwrap();
    let monitor = Monitor::start(directory.path()).unwrap();
    let wrapper = Monitor::wrapper(directory.path(), "qemu-system-x86_64").unwrap();
    let start = |host: &str, more: &[&str]| start(&wrapper, directory.path(), host, more);
    let runs = |wanted: &str| {
        let copies = monitor.copies();
        copies.living("web").any(|copy| copy.identity.host == wanted && copy.is_running())
    };
    let one = start("a", &[]);
    eventually("the first one runs", || runs("a"));
    let _waiting = start("b", &["-S"]);
    eventually("the second one is there", || monitor.copies().living("web").count() == 2);
    assert_eq!(monitor.copies().two_at_once(), None);
    let _two = start("c", &[]);
    eventually("both run", || monitor.copies().two_at_once().is_some());
    let lost = |copies: &Copies| copies.ended_while_running().count();
    assert_eq!(lost(&monitor.copies()), 0);
    drop(one);
    eventually("the first one has ended", || lost(&monitor.copies()) == 1);
}

/// Without a guest: firmware runs, too.
fn start(wrapper: &Path, directory: &Path, host: &str, more: &[&str]) -> Running {
    let files = directory.join(host).join("run/vms/web/qemu");
    fs::create_dir_all(&files).unwrap();
    let mut command = Command::new(wrapper);
    command.args(["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "16", "-machine", "pc"]);
    command.args(["-name", "web"]).args(more).current_dir(files).stderr(Stdio::inherit());
    Running::start(command)
}
