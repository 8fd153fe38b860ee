//! Not a test: compares encryption with QEMU's own TLS, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_TLS=5 cargo test --release -p drainpipe-cli --test end_to_end` prints a table. Drainpipe does not
//! offer QEMU's TLS. Here, the hosts' QEMU is a script that gives certificates and a monitor to the real one, and makes
//! a target accept only TLS as long as a file of that name exists.

mod qemu;

use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_report::summary::Spread;

use crate::measure_faults::spread;
use crate::measured_guest::{MeasuredGuest, set_aside};
use crate::options;
use crate::support::{TestLab, eventually};
use qemu::TlsQemu;

const GUEST: MeasuredGuest<'_> = MeasuredGuest {
    name: "web",
    memory_mib: 1536,
    filled_mib: 1152,
    mix: "random:100",
    kernel_parameters: "",
    is_in_huge_pages: true,
};
const GIB: f64 = (1_u64 << 30) as f64;

/// The links between the hosts, each of which has a core of its own.
const LINKS: [(&str, &[&str]); 2] =
    [("unlimited", &["--link", "unlimited"]), ("2 × 5 Gb/s", &["--link", "5000", "--link", "5000"])];

/// How the memory travels, 16 connections each.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WireEncryption {
    InTheClear,
    Drainpipe,
    Qemu,
}

const WAYS: [WireEncryption; 3] =
    [WireEncryption::InTheClear, WireEncryption::Drainpipe, WireEncryption::Qemu];

pub(crate) fn run(repeats: usize) {
    println!("| links, figure | promise | in the clear | `--encrypt` | QEMU's TLS | ÷ QEMU's | holds |");
    println!("|---|---|---|---|---|---|---|");
    for (name, links) in LINKS {
        let results = measure(repeats, links);
        let gbps = |result: &MigrationResult| result.memory.throughput_gbps;
        println!(
            "{}",
            line(&format!("{name}: throughput, Gb/s"), &results, gbps, "≥ 1.5", |ratio| ratio >= 1.5)
        );
        let what = format!("{name}: CPU of both hosts, s per GiB");
        println!("{}", line(&what, &results, cpu_s_per_gib, "≤ 0.7", |ratio| ratio <= 0.7));
    }
}

/// Takes turns, so that each way goes in both directions: there are three, and each turn is the next one's way back.
fn measure(repeats: usize, links: &[&str]) -> [Vec<MigrationResult>; 3] {
    let qemu = TlsQemu::new(options::other_qemu().as_deref().unwrap_or("qemu-system-x86_64"));
    let huge_pages = set_aside(2 * GUEST.memory_mib);
    let lab = TestLab::up(&[&["--own-cpus", "--qemu", qemu.program()], links].concat());
    let guest = MeasuredGuest { is_in_huge_pages: huge_pages.is_some(), ..GUEST }.start(&lab);
    guest.wait_until_ready();
    let mut results = [vec![], vec![], vec![]];
    // The first there and back does not count, since it touches memory for the first time.
    for _ in 0..2 {
        migrate(&lab, &qemu, WireEncryption::InTheClear);
    }
    for _ in 0..repeats {
        for (way, results) in WAYS.into_iter().zip(&mut results) {
            results.push(migrate(&lab, &qemu, way));
            eventually("the guest is reached", || guest.control().is_some());
            guest.assert_intact();
        }
    }
    results
}

fn migrate(lab: &TestLab, qemu: &TlsQemu, way: WireEncryption) -> MigrationResult {
    let (source, target) = if lab.qemu_pid("a", "web").is_some() { ("a", "b") } else { ("b", "a") };
    let source_pid = lab.qemu_pid(source, "web").expect("the guest runs on one of them");
    qemu.set_tls(source_pid, way == WireEncryption::Qemu);
    let encrypt: &[&str] = if way == WireEncryption::Drainpipe { &["--encrypt"] } else { &[] };
    let result = lab.migrate("web", target, &[&["--option", "multichannel"], encrypt].concat());
    let is_encrypted = result.connection_use.encryption.as_ref().is_some_and(|used| used.is_encrypted);
    assert_eq!(is_encrypted, way == WireEncryption::Drainpipe, "{result:#?}");
    result
}

fn cpu_s_per_gib(result: &MigrationResult) -> f64 {
    let used = result.host_use.cpu_seconds;
    let cpu_s = used.source_vmm + used.source_agent + used.target_vmm + used.target_agent;
    cpu_s / (result.memory.wire_bytes as f64 / GIB)
}

fn line(
    what: &str,
    results: &[Vec<MigrationResult>; 3],
    quantity: fn(&MigrationResult) -> f64,
    promise: &str,
    holds: fn(f64) -> bool,
) -> String {
    let of = |way: usize| results[way].iter().map(quantity);
    let median = |way: usize| Spread::of(of(way)).map_or(f64::NAN, |spread| spread.median);
    let ratio = median(1) / median(2);
    let [clear, drainpipe, qemu] = [0, 1, 2].map(|way| spread(of(way), 2));
    let verdict = if holds(ratio) { "yes" } else { "**no**" };
    format!("| {what} | {promise} | {clear} | {drainpipe} | {qemu} | {ratio:.2} | {verdict} |")
}
