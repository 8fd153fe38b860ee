//! Not a test: measures what the option costs that `auto` chooses, on quiet cores and on busy ones, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_AUTO=5 cargo test --release -p drainpipe-cli --test end_to_end` prints a table; with `-- WORD`, of
//! the cores with that word.

use std::thread;
use std::time::Duration;

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_report::summary::Spread;

use crate::burner::Burner;
use crate::guest::Guest;
use crate::measure_faults::{in_flight, spread};
use crate::measured_guest::{MeasuredGuest, OS_LIKE, set_aside};
use crate::scene::result_of;
use crate::support::{TestLab, eventually, lab_for_measuring};

/// `auto`, and what it may choose.
const OPTIONS: [&str; 3] = ["auto", "multichannel", "compression"];

/// Twice as many as the machine has cores, which both hosts share.
const BURNING: usize = 4;

/// Agents count over 5 s what is left of the cores.
const SEEN_AFTER: Duration = Duration::from_secs(12);

/// When the other programs begin.
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
    println!("| cores | option | chosen | predicted, s | took, s | of the faster of the two |");
    println!("|---|---|---|---|---|---|");
    for (place, busy) in PLACES.into_iter().filter(|(place, _)| place.contains(word)) {
        let mut results = OPTIONS.map(|_| vec![]);
        for _ in 0..repeats {
            for (option, results) in OPTIONS.iter().zip(&mut results) {
                results.push(fly(&lab, &guest, option, busy));
            }
        }
        let fastest_ms = results[1..].iter().map(|of_option| median_ms(of_option)).fold(f64::NAN, f64::min);
        for (option, results) in OPTIONS.iter().zip(&results) {
            println!("| {place} | `{option}` | {} |", line(results, fastest_ms));
        }
    }
}

fn fly(lab: &TestLab, guest: &Guest, option: &str, busy: Busy) -> MigrationResult {
    let burn = || (0..BURNING).map(|_| Burner::start()).collect::<Vec<_>>();
    let mut burning = if busy == Busy::Before { burn() } else { vec![] };
    thread::sleep(SEEN_AFTER);
    let [source, target] = if lab.qemu_pid("a", OS_LIKE.name).is_some() { ["a", "b"] } else { ["b", "a"] };
    let migrating = lab.start(&["migrate", OS_LIKE.name, target, "--option", option, "--json"]);
    if busy == Busy::InFlight {
        in_flight(lab, source);
        burning = burn();
    }
    let result = result_of(&migrating.wait());
    drop(burning);
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    eventually("the guest is reached", || guest.control().is_some());
    guest.assert_intact();
    eprintln!(
        "{option}: by {}, {:.0} ms, predicted {:?}",
        result.choice.option, result.times.total_ms, result.times.predicted_total_ms
    );
    result
}

fn median_ms(results: &[MigrationResult]) -> f64 {
    Spread::of(results.iter().map(|result| result.times.total_ms)).map_or(f64::NAN, |spread| spread.median)
}

fn line(results: &[MigrationResult], fastest_ms: f64) -> String {
    let mut chosen: Vec<String> = results.iter().map(|result| result.choice.option.to_string()).collect();
    chosen.sort();
    let by_number =
        chosen.chunk_by(|one, other| one == other).map(|alike| format!("{} × {}", alike.len(), alike[0]));
    let seconds = |of: fn(&MigrationResult) -> Option<f64>| {
        spread(results.iter().filter_map(of).map(|ms| ms / 1000.0), 2)
    };
    format!(
        "{} | {} | {} | {:.2}",
        by_number.collect::<Vec<_>>().join(", "),
        seconds(|result| result.times.predicted_total_ms),
        seconds(|result| Some(result.times.total_ms)),
        median_ms(results) / fastest_ms
    )
}
