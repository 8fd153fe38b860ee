//! Not a test: measures how long each option pauses a guest, on quiet cores and on busy ones, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_PAUSE=5 cargo test --release -p drainpipe-cli --test end_to_end` prints a table; `-- WORD`
//! selects the links and cores with that word. `DRAINPIPE_TEST_QEMU` names the QEMU to use.
//! `DRAINPIPE_MEASURE_PAUSE_MIB=8192` uses a guest with that much memory, half of it filled.

use std::env;
use std::thread;
use std::time::Duration;

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_report::summary::Spread;

use crate::burner::Burner;
use crate::guest::Guest;
use crate::measure_faults::spread;
use crate::measured_guest::{MeasuredGuest, set_aside};
use crate::options;
use crate::scene::result_of;
use crate::support::{TestLab, eventually};

const GUEST: MeasuredGuest<'_> = MeasuredGuest {
    name: "web",
    memory_mib: 1280,
    filled_mib: 1280 / 2,
    mix: "random:100",
    kernel_parameters: "",
    is_in_huge_pages: true,
};

/// The first way is the one with which all others are compared.
const WAYS: [(&str, &[&str]); 4] = [
    ("tcp", &["--option", "tcp"]),
    ("multichannel", &["--option", "multichannel"]),
    ("compression", &["--option", "compression"]),
    ("multichannel, encrypted", &["--option", "multichannel", "--encrypt"]),
];

/// Twice as many programs as the machine has cores, which both hosts share.
const BURNING: usize = 4;

/// Often enough to see a pause, and little work for a guest without KVM.
const BEAT: Duration = Duration::from_millis(10);

/// Links and cores on which it is measured.
struct PauseCase {
    name: &'static str,
    rate: &'static str,
    burning: usize,
}

const CASES: [PauseCase; 4] = [
    PauseCase { name: "2 × 1 Gb/s, quiet", rate: "1000", burning: 0 },
    PauseCase { name: "2 × 1 Gb/s, busy", rate: "1000", burning: BURNING },
    PauseCase { name: "unshaped, quiet", rate: "unlimited", burning: 0 },
    PauseCase { name: "unshaped, busy", rate: "unlimited", burning: BURNING },
];

/// One migration.
struct Flight {
    result: MigrationResult,
    silence_ms: f64,
}

pub(crate) fn run(repeats: usize, word: &str) {
    let memory_mib = env::var("DRAINPIPE_MEASURE_PAUSE_MIB")
        .map_or(GUEST.memory_mib, |memory_mib| memory_mib.parse().expect("a number"));
    let huge_pages = set_aside(2 * memory_mib);
    let qemu = options::other_qemu().unwrap_or_else(|| "qemu-system-x86_64".into());
    let lab = TestLab::up(&["--link", "1000", "--link", "1000", "--qemu", &qemu]);
    let guest = MeasuredGuest {
        memory_mib,
        filled_mib: memory_mib / 2,
        is_in_huge_pages: huge_pages.is_some(),
        ..GUEST
    }
    .start(&lab);
    guest.wait_until_ready();
    println!(
        "| links and cores | option | paused, ms | of tcp's | silent, ms | all state is there after, ms |"
    );
    println!("|---|---|---|---|---|---|");
    for case in CASES.iter().filter(|case| case.name.contains(word)) {
        for link in ["e0", "e1"] {
            lab.fault(&format!("rate {link} {}", case.rate));
        }
        let mut flights = WAYS.map(|_| vec![]);
        for _ in 0..repeats {
            let burning: Vec<Burner> = (0..case.burning).map(|_| Burner::start()).collect();
            for ((_, arguments), flights) in WAYS.iter().zip(&mut flights) {
                flights.push(fly(&lab, &guest, arguments));
            }
            drop(burning);
            eventually("the guest is reached", || guest.control().is_some());
            guest.assert_intact();
        }
        let of_tcp = paused(&flights[0]).map_or(f64::NAN, |paused| paused.median);
        for ((name, _), flights) in WAYS.iter().zip(&flights) {
            println!("| {} | {name} | {} |", case.name, line(flights, of_tcp));
        }
    }
}

fn fly(lab: &TestLab, guest: &Guest, arguments: &[&str]) -> Flight {
    let target = if lab.qemu_pid("a", GUEST.name).is_some() { "b" } else { "a" };
    let heartbeat = guest.heartbeat_every(BEAT);
    let arguments = [&["migrate", GUEST.name, target, "--json"], arguments].concat();
    let result = result_of(&lab.start(&arguments).wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    // The guest that runs again has to catch up.
    thread::sleep(Duration::from_millis(500));
    let flight = Flight { result, silence_ms: heartbeat.stop().longest_gap_ms };
    let [paused_ms, state_ms] = [flight.result.silence.downtime_ms.unwrap_or(f64::NAN), flight.state_ms()];
    eprintln!(
        "{}: paused {paused_ms:.0} ms, all state after {state_ms:.0}, silent {:.0}",
        arguments[4..].join(" "),
        flight.silence_ms
    );
    flight
}

impl Flight {
    /// The time from the pause until the target has all state.
    fn state_ms(&self) -> f64 {
        let at = |what: &str| self.result.record.events.iter().find(|event| event.what.starts_with(what));
        let ms = |what| at(what).map_or(f64::NAN, |event| event.ms);
        ms("all state is on the target") - ms("the VM is paused")
    }
}

fn paused(flights: &[Flight]) -> Option<Spread> {
    Spread::of(flights.iter().filter_map(|flight| flight.result.silence.downtime_ms))
}

fn line(flights: &[Flight], of_tcp_ms: f64) -> String {
    let of = |quantity: fn(&Flight) -> f64| spread(flights.iter().map(quantity), 0);
    format!(
        "{} | {:.2} | {} | {}",
        of(|flight| flight.result.silence.downtime_ms.unwrap_or(f64::NAN)),
        paused(flights).map_or(f64::NAN, |paused| paused.median) / of_tcp_ms,
        of(|flight| flight.silence_ms),
        of(Flight::state_ms),
    )
}
