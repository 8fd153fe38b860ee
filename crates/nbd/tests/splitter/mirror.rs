//! QEMU's own mirror as the client, with the source's disk in a QEMU that runs no guest.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::support::{Bench, Settings, assert_same, eventually, has_qemu, image, in_time};

/// A QEMU that takes commands on its standard input. It ends when this is dropped.
struct Qemu {
    _process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Qemu {
    /// `None` without a QEMU.
    async fn start() -> Option<Self> {
        let program = std::env::var("DRAINPIPE_TEST_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into());
        let mut command = Command::new(program);
        command.args(["-S", "-nodefaults", "-display", "none", "-machine", "none", "-qmp", "stdio"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let Ok(mut process) = command.spawn() else {
            eprintln!("SKIPPED: no QEMU; install qemu-system-x86");
            return None;
        };
        let (input, output) = (process.stdin.take()?, BufReader::new(process.stdout.take()?).lines());
        let mut qemu = Self { _process: process, input, output };
        qemu.ask("qmp_capabilities", json!({})).await;
        Some(qemu)
    }

    async fn ask(&mut self, command: &str, arguments: Value) {
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        self.input.write_all(line.as_bytes()).await.unwrap();
        let said = self.until(|said| said.get("return").is_some() || said.get("error").is_some()).await;
        assert!(said.get("error").is_none(), "{command}: {said}");
    }

    async fn event(&mut self, name: &str) -> Value {
        self.until(|said| said["event"] == name).await
    }

    async fn until(&mut self, is_it: impl Fn(&Value) -> bool) -> Value {
        loop {
            let line = in_time(self.output.next_line()).await.unwrap().expect("QEMU runs");
            let said: Value = serde_json::from_str(&line).unwrap();
            if is_it(&said) {
                return said;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn qemus_mirror_fills_the_target_while_streams_come_and_go() {
    if !has_qemu() {
        return;
    }
    let mut bench = Bench::new(Settings { mebibytes: 48, ..Settings::default() }).await;
    let source = bench.path("source");
    image(&source, 48);
    let Some(mut qemu) = Qemu::start().await else { return };
    let mut wires = bench.connect_many(3).await;
    let (host, name) = bench.address().trim_start_matches("nbd://").split_once('/').unwrap();
    let (host, port) = host.split_once(':').unwrap();
    let file = json!({"driver": "file", "filename": source});
    qemu.ask("blockdev-add", json!({"node-name": "source", "driver": "raw", "file": file})).await;
    let server = json!({"type": "inet", "host": host, "port": port});
    let target =
        json!({"node-name": "target", "driver": "nbd", "server": server, "export": name, "discard": "unmap"});
    qemu.ask("blockdev-add", target).await;
    let mirror = json!({"job-id": "copy", "device": "source", "target": "target", "sync": "full"});
    qemu.ask("blockdev-mirror", mirror).await;
    eventually("it goes on", || bench.watch.counters().sent_bytes() >= 1 << 20).await;
    wires.remove(0).cut();
    bench.connect().await;
    qemu.event("BLOCK_JOB_READY").await;
    qemu.ask("block-job-cancel", json!({"device": "copy"})).await;
    let ended = qemu.event("BLOCK_JOB_COMPLETED").await;
    assert!(ended["data"].get("error").is_none(), "{ended}");
    qemu.ask("blockdev-del", json!({"node-name": "target"})).await;
    bench.ended().await.unwrap();
    bench.target.close().await.unwrap();
    assert_same(&source, &bench.path("target"));
}
