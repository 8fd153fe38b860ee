//! Not a test: measures how a guest fares that rewrites its memory faster than the links carry it, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_POST_COPY=3 cargo test --release -p drainpipe-cli --test end_to_end` prints a table.

use std::time::{Duration, Instant};

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_guest::dirtier::PAGES_PER_MIB;
use drainpipe_guest::protocol::Dirtying;

use crate::guest::Guest;
use crate::measure_faults::{in_flight, spread};
use crate::measured_guest::MeasuredGuest;
use crate::options;
use crate::scene::result_of;
use crate::support::{TestLab, eventually};

const GUEST: MeasuredGuest<'_> = MeasuredGuest {
    name: "web",
    memory_mib: 896,
    filled_mib: 640,
    mix: "random:100",
    kernel_parameters: "",
    // With pages of 2 MiB, it would wait for 2 MiB each time.
    is_in_huge_pages: false,
};

/// More than twice what both links carry, anywhere in the filled memory.
const BUSY: Dirtying = Dirtying { mib_per_s: 500, locality_percent: 100 };

/// A VM that has not arrived by then does not converge.
const DEADLINE_S: &str = "60";

const HEARTBEAT_EVERY: Duration = Duration::from_millis(20);

const WAYS: [(&str, &[&str]); 5] = [
    ("`multichannel`, not throttled", &["--option", "multichannel", "--throttle", "0"]),
    ("`multichannel`, throttled by 80 % at most", &["--option", "multichannel"]),
    ("`multichannel`, by 99 %", &["--option", "multichannel", "--throttle", "99"]),
    ("`--post-copy`, one link", &["--post-copy"]),
    ("`--post-copy --encrypt`, one link", &["--post-copy", "--encrypt"]),
];

/// One migration.
struct Flight {
    result: MigrationResult,
    silence_ms: f64,
    /// How many MiB/s of its memory the guest rewrote in flight.
    work_mib_per_s: f64,
}

pub(crate) fn run(repeats: usize) {
    let qemu = options::other_qemu().unwrap_or_else(|| "qemu-system-x86_64".into());
    let lab = TestLab::up(&["--link", "1000", "--link", "1000", "--own-cpus", "--qemu", &qemu]);
    let guest = GUEST.start(&lab);
    guest.wait_until_ready();
    let mut flights = WAYS.map(|_| vec![]);
    for _ in 0..repeats {
        // There and back, so that each goes in both directions.
        for ((name, arguments), flights) in WAYS.iter().zip(&mut flights) {
            flights.extend([(); 2].map(|()| fly(&lab, &guest, name, arguments)));
        }
    }
    println!(
        "| | arrived | total, s | ran there before all was there, s | paused, ms | longest silence, ms | rewritten \
         in flight, MiB/s | sent, MiB |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for ((name, _), flights) in WAYS.iter().zip(&flights) {
        println!("{}", line(name, flights));
    }
}

fn fly(lab: &TestLab, guest: &Guest, name: &str, arguments: &[&str]) -> Flight {
    let [source, target] = if lab.qemu_pid("a", "web").is_some() { ["a", "b"] } else { ["b", "a"] };
    let before = set(guest, BUSY);
    let heartbeat = guest.heartbeat_every(HEARTBEAT_EVERY);
    let began = Instant::now();
    let migrate = ["migrate", "web", target, "--deadline", DEADLINE_S, "--json"];
    let migrating = lab.start(&[&migrate, arguments].concat());
    in_flight(lab, source);
    let result = result_of(&migrating.wait());
    eventually("the guest is reached", || guest.control().is_some());
    let work_mib_per_s = (set(guest, Dirtying::IDLE) - before) / began.elapsed().as_secs_f64();
    let silence_ms = heartbeat.stop().longest_gap_ms;
    guest.assert_intact();
    eprintln!(
        "{name}: {:?}, {:.1} s, silence {silence_ms:.0} ms, {work_mib_per_s:.0} MiB/s",
        result.outcome,
        result.times.total_ms / 1000.0
    );
    Flight { result, silence_ms, work_mib_per_s }
}

/// Makes the guest rewrite its memory like this from now on. Returns how many MiB it has rewritten so far.
fn set(guest: &Guest, dirtying: Dirtying) -> f64 {
    guest.set_dirty(dirtying).rewritten_pages as f64 / PAGES_PER_MIB as f64
}

fn line(name: &str, flights: &[Flight]) -> String {
    let of = |quantity: fn(&Flight) -> f64, digits| spread(flights.iter().map(quantity), digits);
    let arrived = flights.iter().filter(|flight| flight.result.outcome == Outcome::Completed).count();
    format!(
        "| {name} | {arrived} of {} | {} | {} | {} | {} | {} | {} |",
        flights.len(),
        of(|flight| flight.result.times.total_ms / 1000.0, 1),
        of(|flight| flight.result.times.post_copy_ms.unwrap_or(0.0) / 1000.0, 1),
        of(|flight| flight.result.silence.downtime_ms.unwrap_or(f64::NAN), 0),
        of(|flight| flight.silence_ms, 0),
        of(|flight| flight.work_mib_per_s, 0),
        of(|flight| flight.result.memory.wire_bytes as f64 / f64::from(1 << 20), 0),
    )
}
