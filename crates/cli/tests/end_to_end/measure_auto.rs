//! Not a test: measures what the option that `auto` chooses costs, on quiet cores and on busy ones, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_AUTO=5 cargo test --release -p drainpipe-cli --test end_to_end` prints a table; `-- WORD` selects
//! the cores with that word.

use std::thread;
use std::time::{Duration, Instant};

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_report::summary::Spread;

use crate::burner::Burner;
use crate::guest::Guest;
use crate::measure_faults::{in_flight, spread};
use crate::measured_guest::{MeasuredGuest, OS_LIKE, set_aside};
use crate::scene::result_of;
use crate::support::{TestLab, eventually, lab_for_measuring};

/// `auto`, and the options that it may choose.
const OPTIONS: [&str; 3] = ["auto", "multichannel", "compression"];

/// Twice as many programs as the machine has cores, which both hosts share.
const BURNING: usize = 4;

/// Agents count the free cores over 5 s.
const SEEN_AFTER: Duration = Duration::from_secs(12);

/// When the other programs start.
#[derive(Clone, Copy, PartialEq)]
enum Busy {
    Never,
    Before,
    InFlight,
}

const PLACES: [(&str, Busy); 3] =
    [("quiet", Busy::Never), ("busy from before", Busy::Before), ("busy from in flight on", Busy::InFlight)];

pub(crate) fn run(repeats: usize, word: &str) {
    let huge_pages = set_aside(2 * OS_LIKE.memory_mib);
    let lab = lab_for_measuring();
    let guest = MeasuredGuest { is_in_huge_pages: huge_pages.is_some(), ..OS_LIKE }.start(&lab);
    guest.wait_until_ready();
    println!(
        "| cores | option | chosen | predicted, s | took, s | of the faster of the two | others lost, s of a core | % |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (place, busy) in PLACES.into_iter().filter(|(place, _)| place.contains(word)) {
        let mut flights = OPTIONS.map(|_| vec![]);
        for _ in 0..repeats {
            for (option, flights) in OPTIONS.iter().zip(&mut flights) {
                flights.push(fly(&lab, &guest, option, busy));
            }
        }
        let fastest_ms = flights[1..].iter().map(|of_option| median_ms(of_option)).fold(f64::NAN, f64::min);
        for (option, flights) in OPTIONS.iter().zip(&flights) {
            println!("| {place} | `{option}` | {} |", line(flights, fastest_ms));
        }
    }
}

/// One migration, and the CPU time that it cost the other programs.
struct Flight {
    result: MigrationResult,
    loss: Option<Loss>,
}

/// How much less of the cores the others had during the migration than before it.
#[derive(Clone, Copy)]
struct Loss {
    cores_s: f64,
    share: f64,
}

impl Loss {
    fn of(before: Ran, during: Ran) -> Self {
        let usual_s = before.cores() * during.passed_s;
        Self { cores_s: usual_s - during.ran_s, share: 1.0 - during.ran_s / usual_s }
    }
}

/// How long programs were on a core within some time.
#[derive(Clone, Copy)]
struct Ran {
    ran_s: f64,
    passed_s: f64,
}

impl Ran {
    fn cores(self) -> f64 {
        self.ran_s / self.passed_s
    }
}

/// Counts from now on how long these programs run.
struct Counter<'a> {
    burning: &'a [Burner],
    ran_s: f64,
    since: Instant,
}

impl<'a> Counter<'a> {
    fn begin(burning: &'a [Burner]) -> Self {
        Self { burning, ran_s: ran_s(burning), since: Instant::now() }
    }

    fn end(self) -> Ran {
        Ran { ran_s: ran_s(self.burning) - self.ran_s, passed_s: self.since.elapsed().as_secs_f64() }
    }
}

fn ran_s(burning: &[Burner]) -> f64 {
    burning.iter().map(Burner::ran_s).sum()
}

fn fly(lab: &TestLab, guest: &Guest, option: &str, busy: Busy) -> Flight {
    let burn = || (0..BURNING).map(|_| Burner::start()).collect::<Vec<_>>();
    let burning = if busy == Busy::Before { burn() } else { vec![] };
    let resting = Counter::begin(&burning);
    thread::sleep(SEEN_AFTER);
    let before = resting.end();
    let flying = Counter::begin(&burning);
    let [source, target] = if lab.qemu_pid("a", OS_LIKE.name).is_some() { ["a", "b"] } else { ["b", "a"] };
    let migrating = lab.start(&["migrate", OS_LIKE.name, target, "--option", option, "--json"]);
    let begun = (busy == Busy::InFlight).then(|| {
        in_flight(lab, source);
        burn()
    });
    let result = result_of(&migrating.wait());
    let loss = (busy == Busy::Before).then(|| Loss::of(before, flying.end()));
    drop((burning, begun));
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    eventually("the guest is reached", || guest.control().is_some());
    guest.assert_intact();
    eprintln!(
        "{option}: by {}, {:.0} ms, predicted {:?}",
        result.choice.option, result.times.total_ms, result.times.predicted_total_ms
    );
    Flight { result, loss }
}

fn median_ms(flights: &[Flight]) -> f64 {
    let total_ms = flights.iter().map(|flight| flight.result.times.total_ms);
    Spread::of(total_ms).map_or(f64::NAN, |spread| spread.median)
}

fn line(flights: &[Flight], fastest_ms: f64) -> String {
    let results = || flights.iter().map(|flight| &flight.result);
    let mut chosen: Vec<String> = results().map(|result| result.choice.option.to_string()).collect();
    chosen.sort();
    let by_number =
        chosen.chunk_by(|one, other| one == other).map(|alike| format!("{} × {}", alike.len(), alike[0]));
    let seconds =
        |of: fn(&MigrationResult) -> Option<f64>| spread(results().filter_map(of).map(|ms| ms / 1000.0), 2);
    let lost =
        |of: fn(Loss) -> f64, digits| spread(flights.iter().filter_map(|flight| flight.loss).map(of), digits);
    format!(
        "{} | {} | {} | {:.2} | {} | {}",
        by_number.collect::<Vec<_>>().join(", "),
        seconds(|result| result.times.predicted_total_ms),
        seconds(|result| Some(result.times.total_ms)),
        median_ms(flights) / fastest_ms,
        lost(|loss| loss.cores_s, 2),
        lost(|loss| 100.0 * loss.share, 0)
    )
}
