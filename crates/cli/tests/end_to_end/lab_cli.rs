//! `drainpipe lab …` and `drainpipe demo`: labs come, go, and leave nothing.

use std::path::Path;

use drainpipe_api_types::VmList;
use rustix::process::{Pid, Signal, test_kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::Test;
use crate::guest::image;
use crate::program::{BAD_INPUT, Output, REFUSED, Running, command, drainpipe};
use crate::support::{TestLab, eventually, unique_name};

pub(crate) const TESTS: &[Test] = &[
    ("a_lab_can_be_seen_used_and_broken", a_lab_can_be_seen_used_and_broken),
    ("labs_do_not_see_each_other", labs_do_not_see_each_other),
    ("bad_words_are_refused", bad_words_are_refused),
    ("a_demo_stopped_by_ctrl_c_leaves_nothing", a_demo_stopped_by_ctrl_c_leaves_nothing),
    ("a_killed_demo_is_cleared", a_killed_demo_is_cleared),
    ("a_demo_shows_all_options", a_demo_shows_all_options),
];

fn a_lab_can_be_seen_used_and_broken() {
    let lab = TestLab::up(&["--link", "1000", "--link", "500:9000"]);
    let name = lab.name();
    let labs: Value = lab.json(&["lab", "status"]);
    let listed = labs.as_array().unwrap().iter().find(|listed| listed["name"] == name).unwrap();
    assert_eq!((&listed["hosts"], &listed["complete"]), (&serde_json::json!(["a", "b"]), &Value::Bool(true)));

    let link = |host: usize, link: usize| -> Value {
        lab.json::<Value>(&["lab", "status", name])["hosts"][host]["links"][link].clone()
    };
    assert_eq!((&link(0, 0)["rate_mbps"], &link(0, 0)["mtu_bytes"]), (&1000.into(), &1500.into()));
    assert_eq!((&link(1, 1)["rate_mbps"], &link(1, 1)["mtu_bytes"]), (&500.into(), &9000.into()));
    lab.fault("rate e0 200");
    lab.fault("link-down a e1");
    assert_eq!(link(0, 0)["rate_mbps"], 200);
    assert_eq!((&link(0, 1)["state"], &link(1, 1)["state"]), (&"down".into(), &"no-carrier".into()));
    let output = lab.drainpipe(&["lab", "status", name]).done();
    assert!(output.contains("200 Mb/s") && output.contains("link-down a e1"), "{output}");
    lab.fault("link-up a e1");
    assert_eq!(link(0, 1)["state"], "up");

    let Output { code, stdout, .. } = lab.exec("a", &["sh", "-c", "ip -brief address show e0; exit 7"]);
    assert!(code == 7 && stdout.contains("10.77.1.11/24"), "{code}: {stdout}");

    let env = lab.drainpipe(&["lab", "env", name]).done();
    let script = format!("{env}\"{}\" hosts", crate::program::DRAINPIPE);
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &script]);
    let hosts = Running::start(shell).wait().done();
    assert!(hosts.contains("10.77.0.11:7420") && hosts.contains("10.77.0.12:7420"), "{hosts}");
    assert!(env.contains(lab.namespace("client").to_str().unwrap()), "{env}");
}

fn labs_do_not_see_each_other() {
    let one = TestLab::fast();
    let other = TestLab::fast();
    let idle =
        "name = \"idle\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-7.2\"\naccelerator = \"tcg\"\n";
    one.create(idle, "idle");
    one.drainpipe(&["vm", "start", "idle"]).done();
    assert!(other.json::<VmList>(&["vms"]).vms.is_empty());
    let output = drainpipe(&["lab", "down", other.name()]).done();
    assert!(output.contains("2 processes ended"), "its two agents: {output}");
    one.assert_runs_on("idle", "a");
    one.migrate("idle", "b", &[]);
}

fn bad_words_are_refused() {
    let lab = TestLab::fast();
    let name = lab.name();
    drainpipe(&["lab", "up", name]).refused(REFUSED, &[name, "is up already", "drainpipe lab down"]);
    let fault = |words: &[&str]| drainpipe(&[&["lab", "fault", name], words].concat());
    fault(&["explode"]).refused(BAD_INPUT, &["unknown fault \"explode\"", "link-down HOST LINK"]);
    fault(&["link-down", "a"]).refused(BAD_INPUT, &["not complete", "link-down HOST LINK"]);
    fault(&["link-down", "a", "e7"]).refused(BAD_INPUT, &["no link \"e7\"", "e0, e1"]);
    fault(&["link-down", "c", "e0"]).refused(BAD_INPUT, &["no host \"c\"", "a, b"]);
    fault(&["rate", "e0", "fast"]).refused(BAD_INPUT, &["whole number", "\"fast\""]);
    fault(&["blackhole", "a", "e0", "up"]).refused(BAD_INPUT, &["receive or send", "\"up\""]);
    drainpipe(&["lab", "exec", name, "c", "--", "true"]).refused(BAD_INPUT, &["no host \"c\""]);
    let up = |arguments: &[&str]| drainpipe(&[&["lab", "up", &unique_name()], arguments].concat());
    up(&["--link", "fast"]).refused(BAD_INPUT, &["--link fast", "MBPS:MTU"]);
    up(&["--link", "0"]).refused(BAD_INPUT, &["0 Mb/s", "out of range"]);
    up(&["--hosts", "a"]).refused(BAD_INPUT, &["2 to 64 hosts"]);
    for command in ["status", "env"] {
        drainpipe(&["lab", command, "nowhere"]).refused(BAD_INPUT, &["no lab nowhere is up"]);
    }
    drainpipe(&["lab", "fault", "nowhere", "heal", "a", "e0"]).refused(BAD_INPUT, &["no lab nowhere is up"]);

    let broken = unique_name();
    drainpipe(&["lab", "up", &broken, "--qemu", "/nonexistent/qemu"])
        .refused(1, &["the agent of a did not start", "/nonexistent/qemu"]);
    assert_nothing_is_left(&broken);
}

/// A demo under way. Its lab is removed with the test if the demo does not do so.
struct Demo {
    program: Option<Running>,
    lab: String,
    output: TempDir,
}

impl Demo {
    fn start(rate_mbps: &str) -> Self {
        let [kernel, initramfs] = image();
        let output = TempDir::new().unwrap();
        let mut demo = command(&["demo", "--memory-mib", "512", "--link", rate_mbps, "--link", rate_mbps]);
        // What costs a guest without KVM least.
        demo.args(["--mix", "random:10,text:10,zero:80", "--heartbeat-ms", "10"]);
        demo.arg("--output").arg(output.path());
        demo.arg("--kernel").arg(kernel).arg("--initramfs").arg(initramfs);
        let program = Running::start(demo);
        Self { lab: format!("demo-{}", program.pid()), program: Some(program), output }
    }

    /// Starts a demo, and waits until it has its agents and its guest.
    fn start_with_guest() -> Self {
        let demo = Self::start("20");
        let guest = Path::new("/run/drainpipe/lab").join(&demo.lab).join("a/run/vms/demo/pid");
        eventually("the demo boots its guest", || guest.exists());
        demo
    }

    fn end(&mut self, signal: Option<Signal>) -> Output {
        let program = self.program.take().expect("a demo ends once");
        if let Some(signal) = signal {
            program.signal(signal);
        }
        program.wait()
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        drop(self.program.take());
        drainpipe(&["lab", "down", &self.lab]);
    }
}

fn a_demo_stopped_by_ctrl_c_leaves_nothing() {
    let mut demo = Demo::start_with_guest();
    demo.end(Some(Signal::INT)).refused(1, &["Ctrl-C", "the lab was removed"]);
    assert_nothing_is_left(&demo.lab);
}

fn a_killed_demo_is_cleared() {
    let mut demo = Demo::start_with_guest();
    demo.end(Some(Signal::KILL));
    let status = drainpipe(&["lab", "status", &demo.lab, "--json"]).done();
    let status: Value = serde_json::from_str(&status).unwrap();
    let processes = status["hosts"][0]["processes"].as_array().unwrap();
    let pids: Vec<Pid> = processes
        .iter()
        .map(|process| Pid::from_raw(process["pid"].as_i64().unwrap().try_into().unwrap()).unwrap())
        .collect();
    assert_eq!(pids.len(), 2, "agent and QEMU outlive the demo: {status:#}");
    drainpipe(&["lab", "down", &demo.lab]).done();
    assert_nothing_is_left(&demo.lab);
    for pid in pids {
        eventually("agent and QEMU are gone", || test_kill_process(pid).is_err() || is_zombie(pid));
    }
}

/// Whether the process has ended, but its parent, which is not this one, has not waited for it yet.
pub(crate) fn is_zombie(pid: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    status.contains(") Z ")
}

fn a_demo_shows_all_options() {
    let mut demo = Demo::start("10000");
    let output = demo.end(None).done();
    let text = std::fs::read_to_string(demo.output.path().join("results.json")).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    for option in ["tcp", "compression", "multichannel", "direct"] {
        assert!(output.contains(option), "{output}");
        let results = report["results"].as_array().unwrap();
        let made = results.iter().filter(|result| result["requested_option"] == option);
        assert_eq!(made.count(), 2, "there and back by {option}: {report:#}");
    }
    assert!(demo.output.path().join("report.html").exists());
    assert_nothing_is_left(&demo.lab);
}

/// Fails the test if anything of the lab is left.
#[track_caller]
pub(crate) fn assert_nothing_is_left(lab: &str) {
    drainpipe(&["lab", "status", lab]).refused(BAD_INPUT, &["no lab"]);
    assert!(!Path::new("/run/drainpipe/lab").join(lab).exists());
    let namespaces = std::fs::read_dir("/run/netns").unwrap();
    let prefix = format!("drainpipe-{lab}-");
    let left: Vec<_> = namespaces
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(&prefix))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}
