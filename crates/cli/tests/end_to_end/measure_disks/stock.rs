//! QEMU's own mirror of a VM's disk, over one link, as a script uses it: Drainpipe's copies are compared with this.

use std::fs::{self, File};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::{Copied, Moved, content};
use crate::interrupted_copies::Monitor;
use crate::support::eventually;

/// How long a guest without KVM may read.
pub(super) const PATIENCE: Duration = Duration::from_mins(10);

const PORT: u16 = 10809;

/// The process that serves the copy on `b`.
struct Server {
    process: Child,
    file: std::path::PathBuf,
}

impl Server {
    fn start(moved: &Moved) -> Self {
        let file = moved.lab.files().join("b/stock.raw");
        File::create(&file).unwrap().set_len(moved.size_bytes).unwrap();
        let mut command: Command = moved.lab.lab().command("b", "qemu-nbd").unwrap();
        command.args([
            "--format=raw",
            "--cache=none",
            "--discard=unmap",
            "--export-name=disk",
            "--persistent",
        ]);
        command.args(["--bind", &address(moved), "--port", &PORT.to_string()]).arg(&file);
        let server = Self { process: command.spawn().unwrap(), file };
        let listens = format!("sport = :{PORT}");
        eventually("it listens", || {
            !moved.lab.exec("b", &["ss", "-Htln", &listens]).done().trim().is_empty()
        });
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
        drop(fs::remove_file(&self.file));
    }
}

fn address(moved: &Moved) -> String {
    moved.lab.lab().spec().link_address("b", "e0").unwrap().to_string()
}

/// Returns when everything is copied; the copy is compared, and then removed.
pub(super) fn mirror(moved: &Moved) -> Copied {
    let server = Server::start(moved);
    let qemu = moved.lab.qemu_pid("a", "web").unwrap();
    let nbd = Pid::from_raw(server.process.id().cast_signed()).unwrap();
    let before = [qemu, nbd].map(cpu_s);
    let (mut monitor, began) = begin(moved);
    while !is_ready(&mut monitor) {
        assert!(began.elapsed() < PATIENCE, "it is copied");
        thread::sleep(Duration::from_millis(20));
    }
    let until_ready = began.elapsed().as_secs_f64();
    let after = [qemu, nbd].map(cpu_s);
    end(&mut monitor);
    kill_process(nbd, Signal::TERM).unwrap();
    content::assert_same(&moved.path("a"), &server.file);
    let cpu_of_qemus = after.iter().zip(before).map(|(after, before)| after - before).sum();
    Copied { until_ready, cpu_of_agents: 0.0, cpu_of_qemus }
}

fn begin(moved: &Moved) -> (Monitor, Instant) {
    let mut monitor = Monitor::of(&moved.lab, "a");
    let server = json!({ "type": "inet", "host": address(moved), "port": PORT.to_string() });
    let node = json!({ "driver": "nbd", "node-name": "stock", "server": server, "export": "disk" });
    monitor.ask("blockdev-add", &node);
    let began = Instant::now();
    let job =
        json!({ "job-id": "stock", "device": disk_node(&mut monitor), "target": "stock", "sync": "full" });
    monitor.ask("blockdev-mirror", &job);
    (monitor, began)
}

/// The top node of the VM's device.
fn disk_node(monitor: &mut Monitor) -> String {
    let devices = monitor.ask("query-block", &json!({}));
    let inserted =
        devices.as_array().unwrap().iter().find_map(|device| device["inserted"]["node-name"].as_str());
    inserted.expect("a disk").to_owned()
}

fn is_ready(monitor: &mut Monitor) -> bool {
    monitor.ask("query-block-jobs", &json!({}))[0]["ready"].as_bool().expect("the mirror goes on")
}

fn end(monitor: &mut Monitor) {
    monitor.ask("block-job-cancel", &json!({ "device": "stock", "force": true }));
    eventually("the mirror ends", || {
        monitor.ask("query-block-jobs", &json!({})).as_array().unwrap().is_empty()
    });
    monitor.ask("blockdev-del", &json!({ "node-name": "stock" }));
}

/// The CPU time of all of its threads, in user and system mode.
fn cpu_s(pid: Pid) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    let ticks: f64 = fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap()).sum();
    ticks / rustix::param::clock_ticks_per_second() as f64
}
