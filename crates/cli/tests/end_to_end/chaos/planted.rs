//! Tests that the monitor sees what it should.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{fs, thread};

use super::copies::Copies;
use super::monitor::{ASK_EVERY, Monitor};
use crate::options;
use crate::program::Running;
use crate::support::eventually;

/// Two QEMUs of one VM, on two hosts that are only directories, without an agent that could prevent that.
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

/// Two QEMUs end on request, one with its guest paused and one with its guest running, while the monitor is held up. It
/// still hears their last words.
pub(super) fn a_qemu_that_paused_its_guest_before_it_ended_is_not_lost() {
    for qemu in ["qemu-system-x86_64".into()].into_iter().chain(options::other_qemu()) {
        let directory = tempfile::TempDir::new().unwrap();
        let monitor = Monitor::start(directory.path()).unwrap();
        let wrapper = Monitor::wrapper(directory.path(), &qemu).unwrap();
        let lost_after = |host: &str, commands: &[&str]| {
            end_unheard(&monitor, &wrapper, directory.path(), host, commands);
            eventually("the monitor knows the end", || monitor.copies().living("web").count() == 0);
            monitor.copies().ended_while_running().count()
        };
        assert_eq!(lost_after("a", &["stop", "quit"]), 0, "{qemu}: {}", monitor.copies().tell());
        assert_eq!(lost_after("b", &["quit"]), 1, "{qemu}: {}", monitor.copies().tell());
    }
}

/// Gives these commands to a QEMU while the monitor is held up, until the QEMU has ended.
fn end_unheard(monitor: &Monitor, wrapper: &Path, directory: &Path, host: &str, commands: &[&str]) {
    let socket = directory.join(format!("{host}.sock"));
    let listener = UnixListener::bind(&socket).unwrap();
    let chardev = format!("socket,id=agent,path={}", socket.display());
    let qemu = start(wrapper, directory, host, &["-chardev", &chardev, "-mon", "chardev=agent,mode=control"]);
    eventually("it runs", || monitor.copies().runs_on("web") == Some(host));
    let (mut control, _) = listener.accept().unwrap();
    let held_up = monitor.copies();
    // The monitor then has an answer to take, and another question to ask.
    thread::sleep(ASK_EVERY * 4);
    for command in [&["qmp_capabilities"], commands].concat() {
        control.write_all(format!("{{\"execute\":\"{command}\"}}\n").as_bytes()).unwrap();
    }
    assert_eq!(qemu.wait().code, 0);
    drop(held_up);
}

/// Starts a QEMU without a guest: its firmware runs, too.
fn start(wrapper: &Path, directory: &Path, host: &str, more: &[&str]) -> Running {
    let files = directory.join(host).join("run/vms/web/qemu");
    fs::create_dir_all(&files).unwrap();
    let mut command = Command::new(wrapper);
    command.args(["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "16", "-machine", "pc"]);
    command.args(["-name", "web"]).args(more).current_dir(files).stderr(Stdio::inherit());
    Running::start(command)
}
