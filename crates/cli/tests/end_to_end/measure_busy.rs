//! Not a test: measures what a migration costs a guest that begins to need all CPU of its host in flight, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_BUSY=5 cargo test --release -p drainpipe-cli --test end_to_end` prints a table.

use std::thread;
use std::time::{Duration, Instant};

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_guest::dirtier::PAGES_PER_MIB;
use drainpipe_guest::protocol::Dirtying;
use rustix::process::Signal;

use crate::guest::Guest;
use crate::measure_faults::{in_flight, spread};
use crate::measured_guest::{MeasuredGuest, OS_LIKE, set_aside};
use crate::options;
use crate::scene::result_of;
use crate::support::{TestLab, eventually};

/// A way to run the guest.
struct BusyCase {
    name: &'static str,
    option: &'static str,
    /// Both agents restart before each flight. The QEMUs, started by the agents before, are then in other sessions; and
    /// if the kernel groups tasks by session, the agents' priorities mean nothing to them.
    is_agent_new: bool,
}

const CASES: [BusyCase; 3] = [
    BusyCase { name: "`multichannel`", option: "multichannel", is_agent_new: false },
    BusyCase { name: "`compression`", option: "compression", is_agent_new: false },
    BusyCase { name: "`compression`, agents started anew", option: "compression", is_agent_new: true },
];

/// As much as it has CPU time for, in so little of its memory that the migration ends.
const BUSY: Dirtying = Dirtying { mib_per_s: 1 << 20, locality_percent: 1 };

/// Agents count the cores that VMs leave free over 5 s in which nothing moves.
const REST: Duration = Duration::from_secs(12);

/// How long its work is counted while nothing moves.
const AT_REST: Duration = Duration::from_secs(5);

/// One migration.
struct Flight {
    result: MigrationResult,
    /// How many MiB/s of its memory the guest rewrote in flight.
    work_mib_per_s: f64,
}

pub(crate) fn run(repeats: usize) {
    let huge_pages = set_aside(2 * OS_LIKE.memory_mib);
    let qemu = options::other_qemu().unwrap_or_else(|| "qemu-system-x86_64".into());
    let lab = TestLab::up(&["--link", "1000", "--link", "1000", "--own-cpus", "--qemu", &qemu]);
    let guest = MeasuredGuest { is_in_huge_pages: huge_pages.is_some(), ..OS_LIKE }.start(&lab);
    guest.wait_until_ready();
    let at_rest_mib_per_s = at_rest(&guest);
    let mut flights = CASES.map(|_| vec![]);
    for _ in 0..repeats {
        // There and back, so that each goes in both directions.
        for (case, flights) in CASES.iter().zip(&mut flights) {
            flights.extend([(); 2].map(|()| fly(&lab, &guest, case)));
        }
    }
    println!("at rest: {at_rest_mib_per_s:.0} MiB/s\n");
    println!(
        "| | rewritten in flight, MiB/s | total, s | packed, MiB | CPU of the source's agent, s | paused, ms |"
    );
    println!("|---|---|---|---|---|---|");
    for (case, flights) in CASES.iter().zip(&flights) {
        println!("{}", line(case, flights));
    }
}

fn at_rest(guest: &Guest) -> f64 {
    let before = set(guest, BUSY);
    let began = Instant::now();
    thread::sleep(AT_REST);
    (set(guest, Dirtying::IDLE) - before) / began.elapsed().as_secs_f64()
}

fn fly(lab: &TestLab, guest: &Guest, case: &BusyCase) -> Flight {
    if case.is_agent_new {
        for host in ["a", "b"] {
            lab.stop_agent(host, Signal::TERM);
            lab.start_agent(host);
        }
    }
    thread::sleep(REST);
    let [source, target] = if lab.qemu_pid("a", "web").is_some() { ["a", "b"] } else { ["b", "a"] };
    let migrating = lab.start(&["migrate", "web", target, "--option", case.option, "--json"]);
    in_flight(lab, source);
    let before = set(guest, BUSY);
    let began = Instant::now();
    let result = result_of(&migrating.wait());
    eventually("the guest is reached", || guest.control().is_some());
    let work_mib_per_s = (set(guest, Dirtying::IDLE) - before) / began.elapsed().as_secs_f64();
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    guest.assert_intact();
    eprintln!("{}: {work_mib_per_s:.0} MiB/s, {:.1} s", case.name, result.times.total_ms / 1000.0);
    Flight { result, work_mib_per_s }
}

/// Makes the guest rewrite its memory like this from now on. Returns how many MiB it has rewritten so far.
fn set(guest: &Guest, dirtying: Dirtying) -> f64 {
    guest.set_dirty(dirtying).rewritten_pages as f64 / PAGES_PER_MIB as f64
}

fn line(case: &BusyCase, flights: &[Flight]) -> String {
    let of = |quantity: fn(&Flight) -> f64, digits| spread(flights.iter().map(quantity), digits);
    let packed_mib = |flight: &Flight| {
        let packed = flight.result.connection_use.compression;
        packed.map_or(0.0, |packed| (packed.lz4_bytes + packed.zstd_bytes) as f64 / f64::from(1 << 20))
    };
    format!(
        "| {} | {} | {} | {} | {} | {} |",
        case.name,
        of(|flight| flight.work_mib_per_s, 0),
        of(|flight| flight.result.times.total_ms / 1000.0, 2),
        of(packed_mib, 0),
        of(|flight| flight.result.host_use.cpu_seconds.source_agent, 2),
        of(|flight| flight.result.silence.downtime_ms.unwrap_or(f64::NAN), 0),
    )
}
