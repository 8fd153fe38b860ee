//! Hosts that cannot take part: no agent, no free port, no good configuration.

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::{fs, thread};

use drainpipe_lab::Lab;
use rustix::process::Signal;

use super::certificates::bad_certificates;
use crate::guest::Guest;
use crate::program::{BAD_INPUT, FAILED, REFUSED, drainpipe};
use crate::support::TestLab;

pub(super) fn targets_that_cannot_take_part() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", 160, "");
    an_agent_that_does_not_answer(&lab);
    bad_certificates(&lab);
    guest.assert_intact();
    migration_ports_all_taken(&lab, &guest);
    lab.migrate("web", "b", &[]);
    guest.assert_intact();
}

fn an_agent_that_does_not_answer(lab: &TestLab) {
    drainpipe(&["--agent", "/nonexistent/agent.sock", "vms"])
        .refused(FAILED, &["no agent at /nonexistent/agent.sock", "drainpipe agent --config"]);
    drainpipe(&["--agent", "a@nowhere", "vms"]).refused(BAD_INPUT, &["a@nowhere", "NAME@ADDRESS:PORT"]);

    lab.stop_agent("b", Signal::TERM);
    lab.drainpipe(&["migrate", "web", "b"])
        .refused(FAILED, &["the agent of b at 10.77.0.12:7420 cannot be reached", "refused"]);
    lab.assert_runs_on("web", "a");
    let hosts = lab.drainpipe(&["hosts"]);
    assert!(hosts.code == FAILED && hosts.stdout.contains("unreachable"), "{hosts:#?}");
    assert!(hosts.stderr.contains("the agent of b at 10.77.0.12:7420 cannot be reached"), "{hosts:#?}");

    let socket = lab.agent_socket("b");
    lab.drainpipe(&["vms", "--agent", &socket]).refused(FAILED, &[&socket]);
    lab.start_agent("b");
}

fn migration_ports_all_taken(lab: &TestLab, guest: &Guest) {
    let before = lab.network();
    lab.stop_agent("b", Signal::TERM);
    lab.configure("b", "migration_address", "migration_ports = \"50000-50001\"\nmigration_address");
    lab.start_agent("b");
    let _taken = [50_000, 50_001].map(|port| listen(lab, "b", port));
    for option in ["tcp", "multichannel"] {
        lab.drainpipe(&["migrate", "web", "b", "--option", option])
            .refused(FAILED, &["all migration ports of b are taken", "web", "it runs on a"]);
        lab.assert_runs_on("web", "a");
    }
    lab.assert_network_as(&before);
    guest.assert_intact();
}

fn listen(lab: &TestLab, host: &str, port: u16) -> TcpListener {
    let lab = Lab::open(lab.name()).unwrap();
    lab.run_in(host, || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))).unwrap().unwrap()
}

pub(super) fn configurations_that_start_no_agent() {
    let lab = TestLab::fast();
    let refused = |from: &str, to: &str, code: i32, words: &[&str]| {
        let file = lab.directory("b").join("agent.toml");
        let good = fs::read_to_string(&file).unwrap();
        lab.configure("b", from, to);
        lab.refused_agent("b").refused(code, words);
        fs::write(&file, good).unwrap();
    };
    // Another agent already serves the host.
    refused("name = \"b\"", "name = \"b\"", REFUSED, &["another agent serves", "agent.sock"]);
    lab.stop_agent("b", Signal::TERM);

    refused("name = \"b\"", "name = b", BAD_INPUT, &["agent.toml", "line 1"]);
    refused("[qemu]", "[qmeu]", BAD_INPUT, &["agent.toml", "qmeu", "qemu"]);
    refused("10.77.255.12", "127.0.0.1", BAD_INPUT, &["migration_address 127.0.0.1", "private"]);
    refused("name = \"b\"", "name = \"c\"", REFUSED, &["host b", "configured as c", "pki host c"]);
    refused("10.77.0.12:", "10.77.0.99:", FAILED, &["10.77.0.99:7420", "no such address", "`listen`"]);
    refused("qemu-system-x86_64", "/nonexistent/qemu", REFUSED, &["/nonexistent/qemu", "install QEMU"]);
    let old = old_qemu(&lab);
    refused("qemu-system-x86_64", &old, REFUSED, &[&old, "QEMU 5.2.0", "too old", "7.2 or newer"]);
    let port = listen(&lab, "b", lab.agent_address("b").port());
    refused("name = \"b\"", "name = \"b\"", FAILED, &["10.77.0.12:7420", "another program has the port"]);
    drop(port);
    drainpipe(&["agent", "--config", "/nonexistent/agent.toml"])
        .refused(BAD_INPUT, &["/nonexistent/agent.toml", "agent --help"]);

    lab.start_agent("b");
}

/// A program that greets like QEMU 5.2 on its connection, and then says no more.
fn old_qemu(lab: &TestLab) -> String {
    let script = r#"#!/usr/bin/perl
open(my $client, "+<&=", 0) or die;
syswrite($client, '{"QMP": {"version": {"qemu": {"major": 5, "minor": 2, "micro": 0}, "package": ""}, '
    . '"capabilities": []}}' . "\r\n");
while (sysread($client, my $command, 4096)) {
    my $id = $command =~ /"id":\s*("[^"]*"|\d+)/ ? ", \"id\": $1" : "";
    syswrite($client, "{\"return\": {}$id}\r\n");
}
"#;
    let file = lab.write("old-qemu", script);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    // A program cannot be executed while any process holds it open for writing, as a child of another thread does
    // between fork and exec.
    thread::sleep(std::time::Duration::from_millis(50));
    file
}
