//! Not a test: measures what tracked connections cost a guest's pause, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_CONNTRACK=5 cargo test --release -p drainpipe-cli --test end_to_end` prints a table.
//! `DRAINPIPE_TEST_QEMU` names the QEMU to use.

use std::fs::File;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;

use drainpipe_engine::migration::result::{MigrationResult, TrackedUse};
use drainpipe_guest::protocol::HEARTBEAT_PORT;
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::guest::Guest;
use crate::guest_network::{get_to_know, put_up_firewalls};
use crate::measure_faults::spread;
use crate::measured_guest::{MeasuredGuest, set_aside};
use crate::options;
use crate::support::TestLab;

const GUEST: MeasuredGuest<'_> = MeasuredGuest {
    name: "web",
    memory_mib: 512,
    filled_mib: 256,
    mix: "random:100",
    kernel_parameters: "",
    is_in_huge_pages: true,
};

const CONNECTIONS: [u16; 4] = [0, 100, 1_000, 10_000];

/// The client's first port.
const FIRST_PORT: u16 = 20_000;

pub(crate) fn run(repeats: usize) {
    let huge_pages = set_aside(2 * GUEST.memory_mib);
    let qemu = options::other_qemu().unwrap_or_else(|| "qemu-system-x86_64".into());
    let lab = TestLab::up(&["--link", "1000", "--link", "1000", "--qemu", &qemu]);
    assert!(put_up_firewalls(&lab), "without firewalls there is nothing to measure");
    let guest = MeasuredGuest { is_in_huge_pages: huge_pages.is_some(), ..GUEST }.start(&lab);
    guest.wait_until_ready();
    println!("| connections | go along | listed and loaded after, ms | waited for, ms | paused, ms |");
    println!("|---|---|---|---|---|");
    for connections in CONNECTIONS {
        table_row(&connections.to_string(), &flights(&lab, &guest, connections, repeats));
    }
    for host in ["a", "b"] {
        lab.stop_agent(host, Signal::TERM);
        lab.configure(host, "[vms]\n", "[vms]\nconntrack = false\n");
        lab.start_agent(host);
    }
    table_row("10000, stay behind", &flights(&lab, &guest, 10_000, repeats));
}

fn flights(lab: &TestLab, guest: &Guest, connections: u16, repeats: usize) -> Vec<MigrationResult> {
    let there_and_back = (0..repeats).map(|_| {
        let source = if lab.qemu_pid("a", GUEST.name).is_some() { "a" } else { "b" };
        get_to_know(lab, source, guest);
        connect(lab, guest, connections);
        lab.migrate(GUEST.name, if source == "a" { "b" } else { "a" }, &["--option", "multichannel"])
    });
    there_and_back.collect()
}

fn table_row(name: &str, results: &[MigrationResult]) {
    let of_used = |quantity: fn(&TrackedUse) -> f64| {
        spread(
            results
                .iter()
                .filter_map(|result| result.connection_use.tracked_connections.as_ref())
                .map(quantity),
            1,
        )
    };
    println!(
        "| {name} | {} | {} | {} | {} |",
        of_used(|used| used.along as f64),
        of_used(|used| used.took_ms.unwrap_or(f64::NAN)),
        of_used(|used| used.waited_ms),
        spread(results.iter().filter_map(|result| result.silence.downtime_ms), 0),
    );
}

/// Simulates this many clients that have just asked the guest something.
fn connect(lab: &TestLab, guest: &Guest, connections: u16) {
    let namespace = File::open(lab.namespace("client")).unwrap();
    let to = SocketAddr::new(IpAddr::V4(guest.address()), HEARTBEAT_PORT);
    let asking = thread::spawn(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        for port in FIRST_PORT..FIRST_PORT + connections {
            let socket = UdpSocket::bind(SocketAddr::from(([0, 0, 0, 0], port))).unwrap();
            // Whatever it answers, the firewall has seen it.
            let _ = socket.send_to(&[0; 8], to);
        }
    });
    asking.join().unwrap();
}
