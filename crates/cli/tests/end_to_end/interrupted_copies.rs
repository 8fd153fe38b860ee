//! Copies of disks that are interrupted, and then continue or are given up.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;

use drainpipe_api_types::LeftDisk;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::Test;
use crate::copied_disks::{Apart, DISK_MIB, content, lab};
use crate::mute_qemu::Still;
use crate::program::Running;
use crate::support::{TestLab, eventually};

/// Tests that need a newer QEMU.
pub(crate) const WITH_NEWER_QEMU: &[Test] = &[
    ("a_copy_that_is_cancelled_goes_on_or_is_given_up", a_copy_that_is_cancelled_goes_on_or_is_given_up),
    ("a_copy_whose_agent_dies_goes_on", a_copy_whose_agent_dies_goes_on),
    ("a_copy_whose_target_dies_goes_on", a_copy_whose_target_dies_goes_on),
    ("a_copy_whose_links_fail_goes_on", a_copy_whose_links_fail_goes_on),
    ("a_vm_that_comes_back_brings_what_has_changed", a_vm_that_comes_back_brings_what_has_changed),
    ("nothing_is_kept_where_nobody_wants_it", nothing_is_kept_where_nobody_wants_it),
    ("an_agent_that_stands_still_holds_up_no_writes", an_agent_that_stands_still_holds_up_no_writes),
];

/// Slow enough for a test to see how far a copy is.
const SLOW_MBPS: &str = "10";

/// Slow enough for a test to act before the copy advances.
const SLOWEST_MBPS: &str = "1";

/// How much of the raw disk is copied when its copy is interrupted. Half of a disk is zeroes, which arrive first, since
/// there is nothing to send.
const COPIED_MIB: u64 = 16;

/// The most that tests write to a disk meanwhile.
const WRITTEN_MIB: u64 = 2;

impl Apart {
    /// Begins to move the VM, and all but stops when a part of each disk has arrived.
    #[track_caller]
    fn begin_slowly(&self) -> Running {
        self.set_links(SLOW_MBPS);
        let migrating = self.begin(COPIED_MIB);
        self.set_links(SLOWEST_MBPS);
        migrating
    }

    /// QEMU's other monitor, while no guard uses it.
    #[track_caller]
    pub(crate) fn monitor(&self) -> Monitor {
        Monitor::of(&self.lab, "a")
    }

    /// Fails the test unless the VM runs on `a` with its disks, and parts of them are kept on `b`. Returns how much
    /// these hold.
    #[track_caller]
    fn assert_kept(&self) -> [Vec<u8>; 2] {
        self.lab.assert_runs_on("web", "a");
        let are_kept = |names: &[String]| names.iter().all(|name| name.contains(".interrupted-"));
        eventually("parts are kept on b", || {
            let names = self.names("b");
            names.len() == 2 && are_kept(&names)
        });
        let left: Vec<LeftDisk> = self.lab.json(&["disk", "left", "b"]);
        assert!(left.len() == 2 && left.iter().all(|disk| disk.kept_until.is_some()), "{left:#?}");
        assert_eq!(self.names("a"), ["web.qcow2", "web.raw"]);
        let names = self.names("b");
        [fs::read(self.on("b", &names[1])).unwrap(), self.read_image("b", &names[0])]
    }

    /// Moves the VM with nothing in the way.
    #[track_caller]
    fn goes_on(&self) -> MigrationResult {
        self.set_links("unlimited");
        let copies = self.copies();
        let result = self.lab.migrate("web", "b", &copies.iter().map(String::as_str).collect::<Vec<&str>>());
        self.lab.assert_runs_on("web", "b");
        self.lab.drainpipe(&["vm", "stop", "web", "--force", "--agent", &self.lab.agent_socket("b")]).done();
        assert_eq!(self.names("b"), ["web.qcow2", "web.raw"]);
        assert_eq!(self.lab.json::<Vec<LeftDisk>>(&["disk", "left", "b"]), []);
        result
    }
}

/// Fails the test unless nothing was sent of what is kept and still the same. Zeroes are never compared, but sent as
/// zeroes.
#[track_caller]
fn assert_sent_only_the_rest(result: &MigrationResult, kept: &[Vec<u8>; 2], wanted: [&[u8]; 2]) {
    let is_kept = |(kept, wanted): &(&[u8], &[u8])| kept == wanted && wanted.iter().any(|byte| *byte != 0);
    let kept_mib = [0, 1].map(|disk| {
        let parts = kept[disk].chunks(1 << 20).zip(wanted[disk].chunks(1 << 20));
        parts.filter(is_kept).count() as u64
    });
    let same_mib: Vec<u64> = result.copied.disks.iter().map(|disk| disk.same_bytes >> 20).collect();
    assert_eq!(same_mib, kept_mib, "{result:#?}");
    // What an image's tables did not have yet is lost.
    assert!(kept_mib[0] + WRITTEN_MIB >= COPIED_MIB - DISK_MIB as u64 / 2, "{kept_mib:?} MiB were kept");
}

/// A client of QEMU's own protocol.
pub(crate) struct Monitor {
    heard: BufReader<UnixStream>,
    socket: UnixStream,
}

impl Monitor {
    /// Opens the disks of VM web on this host.
    #[track_caller]
    pub(crate) fn of(lab: &TestLab, host: &str) -> Self {
        let socket = UnixStream::connect(lab.directory(host).join("run/vms/web/guard.sock")).unwrap();
        let mut monitor = Self { heard: BufReader::new(socket.try_clone().unwrap()), socket };
        monitor.ask("qmp_capabilities", &json!({}));
        monitor
    }

    #[track_caller]
    pub(crate) fn ask(&mut self, command: &str, arguments: &Value) -> Value {
        self.try_ask(command, arguments).unwrap_or_else(|said| panic!("{command}: {said}"))
    }

    /// QEMU's answer, also if it refuses.
    #[track_caller]
    pub(crate) fn try_ask(&mut self, command: &str, arguments: &Value) -> Result<Value, Value> {
        writeln!(self.socket, "{}", json!({ "execute": command, "arguments": arguments })).unwrap();
        loop {
            let mut line = String::new();
            assert!(self.heard.read_line(&mut line).unwrap() > 0, "QEMU hangs up");
            let said: Value = serde_json::from_str(&line).unwrap();
            if said.get("error").is_some() {
                return Err(said);
            }
            if let Some(answer) = said.get("return") {
                return Ok(answer.clone());
            }
        }
    }

    /// Writes to one of the VM's disks, as its guest would, and waits until that is done.
    #[track_caller]
    fn write(&mut self, disk: usize, mebibyte: usize, byte: u8) {
        let what = if byte == 0 { "-z -u".into() } else { format!("-P {byte}") };
        let command = format!(
            "qemu-io -d /machine/peripheral/blk{disk}/virtio-backend \"write {what} {mebibyte}M 1M\""
        );
        let said = self.ask("human-monitor-command", &json!({ "command-line": command }));
        assert!(!said.to_string().contains("rror"), "{said}");
    }

    /// The jobs, nodes and bitmaps in QEMU that serve copies.
    #[track_caller]
    fn remains(&mut self) -> String {
        let nodes = self.ask("query-named-block-nodes", &json!({ "flat": true })).to_string();
        format!("{} {nodes}", self.ask("query-block-jobs", &json!({})))
    }
}

/// What [`Monitor::write`] makes of this content.
fn written(mut content: Vec<u8>, mebibyte: usize, byte: u8) -> Vec<u8> {
    content[mebibyte << 20..(mebibyte + 1) << 20].fill(byte);
    content
}

fn a_copy_that_is_cancelled_goes_on_or_is_given_up() {
    let apart = Apart::over(SLOW_MBPS);
    let cancel = || {
        let migrating = apart.begin_slowly();
        let id = apart.lab.migrations("a").remove(0).id;
        apart.lab.drainpipe(&["cancel", &id]).done();
        migrating.wait();
        assert_eq!(apart.last_result().outcome, Outcome::Cancelled);
        apart.assert_kept()
    };
    cancel();
    apart.lab.drainpipe(&["disk", "left", "b", "--remove", "--agent", &apart.lab.agent_socket("b")]).done();
    assert_eq!(apart.names("b"), [""; 0]);
    let kept = cancel();
    let mut monitor = apart.monitor();
    // One write to what is there already, and one to what is not.
    monitor.write(0, 2, 0x5a);
    monitor.write(1, 11, 0x5b);
    // Holes.
    monitor.write(0, 4, 0);
    monitor.write(1, 4, 0);
    let remains = monitor.remains();
    assert!(!remains.contains("copy") && !remains.contains("bitmap"), "{remains}");
    drop(monitor);
    let contents = [written(content(7), 2, 0x5a), written(content(8), 11, 0x5b)];
    let contents = contents.map(|content| written(content, 4, 0));
    assert_sent_only_the_rest(&apart.goes_on(), &kept, [&contents[0], &contents[1]]);
    apart.assert_has("b", ["web.raw", "web.qcow2"], [&contents[0], &contents[1]]);
}

fn a_copy_whose_agent_dies_goes_on() {
    for host in ["a", "b"] {
        let apart = Apart::over(SLOW_MBPS);
        let migrating = apart.begin_slowly();
        apart.lab.stop_agent(host, Signal::KILL);
        apart.lab.start_agent(host);
        migrating.wait();
        assert_eq!(apart.last_result().outcome, Outcome::Failed, "the agent of {host} has died");
        let kept = apart.assert_kept();
        // The next agent, too, knows whose name it was.
        apart.lab.stop_agent("b", Signal::KILL);
        apart.lab.start_agent("b");
        let contents = [content(7), content(8)];
        let contents = [contents[0].as_slice(), &contents[1]];
        assert_sent_only_the_rest(&apart.goes_on(), &kept, contents);
        apart.assert_has("b", ["web.raw", "web.qcow2"], contents);
    }
}

/// As in a power cut, except that nothing in the host's page cache is lost.
fn a_copy_whose_target_dies_goes_on() {
    let apart = Apart::over(SLOW_MBPS);
    let migrating = apart.begin_slowly();
    let qemu = apart.lab.qemu_pid("b", "web").unwrap();
    apart.lab.stop_agent("b", Signal::KILL);
    kill_process(qemu, Signal::KILL).unwrap();
    apart.lab.start_agent("b");
    migrating.wait();
    assert_eq!(apart.last_result().outcome, Outcome::Failed);
    let kept = apart.assert_kept();
    assert_sent_only_the_rest(&apart.goes_on(), &kept, [&content(7), &content(8)]);
    let mend =
        Command::new("qemu-img").args(["check", "-r", "leaks"]).arg(apart.on("b", "web.qcow2")).output();
    assert!(mend.unwrap().status.success());
    apart.assert_whole("b", ["web.raw", "web.qcow2"]);
}

fn a_copy_whose_links_fail_goes_on() {
    let apart = Apart::over(SLOW_MBPS);
    apart.lab.configure("a", "[tls]", "[limits]\nstall_s = 4\n\n[tls]");
    apart.lab.stop_agent("a", Signal::TERM);
    apart.lab.start_agent("a");
    let migrating = apart.begin_slowly();
    for link in ["e0", "e1"] {
        apart.lab.fault(&format!("link-down b {link}"));
    }
    apart.monitor().write(0, 1, 0x5c);
    migrating.wait();
    assert_eq!(apart.last_result().outcome, Outcome::Failed);
    for link in ["e0", "e1"] {
        apart.lab.fault(&format!("link-up b {link}"));
    }
    let kept = apart.assert_kept();
    let contents = [written(content(7), 1, 0x5c), content(8)];
    assert_sent_only_the_rest(&apart.goes_on(), &kept, [&contents[0], &contents[1]]);
    apart.assert_has("b", ["web.raw", "web.qcow2"], [&contents[0], &contents[1]]);
}

fn a_vm_that_comes_back_brings_what_has_changed() {
    let apart = Apart::under_two_paths(lab());
    let lab = &apart.lab;
    let migrate = |host: &str| {
        let copies = apart.copies_to(host);
        lab.migrate("web", host, &copies.iter().map(String::as_str).collect::<Vec<&str>>())
    };
    migrate("b");
    assert_eq!(lab.json::<Vec<LeftDisk>>(&["disk", "left", "a"]).len(), 2);
    let mut monitor = Monitor::of(lab, "b");
    monitor.write(0, 2, 0x5a);
    monitor.write(1, 11, 0x5b);
    // New holes, and what was one before.
    monitor.write(0, 4, 0);
    monitor.write(1, 4, 0);
    monitor.write(0, DISK_MIB - 1, 0x5c);
    drop(monitor);
    let result = migrate("a");
    let of_raw = written(written(content(7), 2, 0x5a), DISK_MIB - 1, 0x5c);
    let contents = [of_raw, written(content(8), 11, 0x5b)].map(|content| written(content, 4, 0));
    // All of the half that is not zeroes, except for what was written to it.
    let same_mib: Vec<u64> = result.copied.disks.iter().map(|disk| disk.same_bytes >> 20).collect();
    assert!(same_mib.iter().all(|mib| mib + WRITTEN_MIB >= DISK_MIB as u64 / 2), "{result:#?}");
    assert_eq!(lab.json::<Vec<LeftDisk>>(&["disk", "left", "a"]), []);
    assert_eq!(apart.names("a"), ["web.qcow2", "web.raw"]);
    lab.assert_runs_on("web", "a");
    lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
    apart.assert_has("a", ["web.raw", "web.qcow2"], [&contents[0], &contents[1]]);
}

fn nothing_is_kept_where_nobody_wants_it() {
    let apart = Apart::over(SLOW_MBPS);
    apart.lab.configure("b", "[tls]", "[disks]\nkeep_interrupted_h = 0\n\n[tls]");
    apart.lab.stop_agent("b", Signal::TERM);
    apart.lab.start_agent("b");
    let migrating = apart.begin(0);
    let id = apart.lab.migrations("a").remove(0).id;
    apart.lab.drainpipe(&["cancel", &id]).done();
    migrating.wait();
    eventually("nothing is left on b", || apart.names("b").is_empty());
    apart.lab.assert_runs_on("web", "a");
}

/// By then, each write goes to both disks, through the agent.
fn an_agent_that_stands_still_holds_up_no_writes() {
    let apart = Apart::over(SLOW_MBPS);
    let migrating = apart.begin(11);
    // On slow links, memory takes a while, even for a test on a busy machine.
    apart.set_links("2");
    apart.wait_for_memory();
    let mut monitor = apart.monitor();
    let agent = Still::of(apart.lab.agent_pid("a").unwrap());
    let writing = thread::spawn(move || {
        monitor.write(0, 1, 0x5d);
        monitor.write(1, 1, 0x5e);
    });
    eventually("the writes are done", || writing.is_finished());
    writing.join().unwrap();
    drop(agent);
    migrating.wait();
    assert_eq!(apart.last_result().outcome, Outcome::Failed);
    apart.lab.assert_runs_on("web", "a");
    apart.lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
    let contents = [written(content(7), 1, 0x5d), written(content(8), 1, 0x5e)];
    apart.assert_has("a", ["web.raw", "web.qcow2"], [&contents[0], &contents[1]]);
}
