//! Not a test: measures what migrations in both directions at once cost each other, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_BOTH=5 cargo test --release -p drainpipe-cli --test end_to_end` prints a table.

use drainpipe_engine::migration::result::{MigrationResult, Outcome};

use crate::measure_faults::{large_guest, spread};
use crate::program::Running;
use crate::scene::result_of;
use crate::support::{TestLab, eventually, lab_for_measuring};

/// Two guests, which change places.
const GUESTS: [&str; 2] = ["web", "db"];

pub(crate) fn run(repeats: usize) {
    let lab = lab_for_measuring();
    let guests = GUESTS.map(|name| large_guest(&lab, name));
    migrate(&lab, "db", "b");
    let (mut alone, mut at_once) = (vec![], vec![]);
    for _ in 0..repeats {
        alone.push(migrate(&lab, "web", "b"));
        alone.push(migrate(&lab, "db", "a"));
        let both = [("web", "a"), ("db", "b")].map(|(name, host)| begin(&lab, name, host));
        at_once.extend(both.map(end));
        for guest in &guests {
            eventually("the guest is reached", || guest.control().is_some());
            guest.assert_intact();
        }
    }
    println!("| | throughput of each, Gb/s |");
    println!("|---|---|");
    println!("| one direction alone | {} |", spread(alone.into_iter(), 3));
    println!("| both at once | {} |", spread(at_once.into_iter(), 3));
}

fn migrate(lab: &TestLab, name: &str, host: &str) -> f64 {
    end(begin(lab, name, host))
}

fn begin(lab: &TestLab, name: &str, host: &str) -> Running {
    lab.start(&["migrate", name, host, "--option", "multichannel", "--json"])
}

fn end(migrating: Running) -> f64 {
    let result: MigrationResult = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    result.memory.throughput_gbps
}
