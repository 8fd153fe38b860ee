//! Not a test: measures how VMs that write to their disks arrive with them, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_WRITERS=1 cargo test -p drainpipe-cli --test end_to_end` prints a table; `-- MBPS` selects links
//! with that rate. `DRAINPIPE_MEASURE_HELD_WRITERS=1` does so in the distribution's QEMU, in which writes cannot wait,
//! and also moves each VM once without its disks.

use std::time::{Duration, Instant};

use drainpipe_engine::migration::result::MigrationResult;

use crate::link_rate::LinkRate;
use crate::program::Running;
use crate::scene::result_of;
use crate::writing_guests::Writing;

/// The speed of each of two links in Mb/s, and how many times per second the guest writes 4 KiB.
const ROWS: [(&str, u32); 8] =
    [("20", 200), ("40", 0), ("40", 60), ("40", 200), ("40", 1000), ("500", 0), ("500", 200), ("500", 2000)];

/// A copy that is not over by then does not converge.
const DEADLINE_S: u64 = 120;

pub(crate) fn run(repeats: usize, word: &str) {
    println!(
        "| links, Mb/s | writes/s | outcome | whole, s | disks, s | sent, MB | written meanwhile/s | longest write, ms |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (mbps, writes_per_s) in ROWS.into_iter().filter(|(mbps, _)| word.is_empty() || *mbps == word) {
        (0..repeats).for_each(|_| measure(mbps, writes_per_s));
    }
}

fn measure(mbps: &str, writes_per_s: u32) {
    let writing = Writing::begin();
    writing.apart.set_links(mbps);
    writing.write(writes_per_s);
    let (before, began) = (writing.written(), Instant::now());
    let rate = LinkRate::watch(&writing.apart.lab, "a");
    let mut migrating = begin(&writing);
    let rate = rate.until(Duration::from_secs(2 * DEADLINE_S), || migrating.has_ended());
    let took_s = began.elapsed().as_secs_f64();
    let result: MigrationResult = result_of(&migrating.wait());
    let after = writing.written();
    let written = (after.acknowledged_writes - before.acknowledged_writes) as f64;
    writing.assert_intact();
    println!(
        "| 2 × {mbps} | {writes_per_s} | {:?} | {:.1} | {} | {:.0} | {:.0} | {} |",
        result.outcome,
        took_s,
        disks_s(&result),
        rate.sent_bytes() as f64 / 1e6,
        written / took_s,
        after.longest_write_ms,
    );
}

/// 76 writes are half of what links of 40 Mb/s carry, as a copy counts it.
const HELD_ROWS: [(&str, u32); 5] = [("40", 0), ("40", 76), ("40", 200), ("40", 1000), ("500", 200)];

pub(crate) fn run_held(repeats: usize, word: &str) {
    println!(
        "| links, Mb/s | writes/s | outcome | whole, s | disks, s | pause, ms | without disks | written meanwhile/s | \
         longest write, ms |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (mbps, writes_per_s) in HELD_ROWS.into_iter().filter(|(mbps, _)| word.is_empty() || *mbps == word) {
        (0..repeats).for_each(|_| measure_held(mbps, writes_per_s));
    }
}

fn measure_held(mbps: &str, writes_per_s: u32) {
    let without = Writing::begin_in_any_qemu();
    without.apart.set_links(mbps);
    without.write(writes_per_s);
    let shared: MigrationResult =
        result_of(&without.apart.lab.start(&["migrate", "web", "b", "--json"]).wait());
    drop(without);
    let writing = Writing::begin_in_any_qemu();
    writing.apart.set_links(mbps);
    writing.write(writes_per_s);
    let (before, began) = (writing.written(), Instant::now());
    let result: MigrationResult = result_of(&begin(&writing).wait());
    let took_s = began.elapsed().as_secs_f64();
    let after = writing.written();
    let written = (after.acknowledged_writes - before.acknowledged_writes) as f64;
    writing.assert_intact();
    let pause = |result: &MigrationResult| {
        result.silence.downtime_ms.map_or("–".into(), |pause_ms| format!("{pause_ms:.0}"))
    };
    println!(
        "| 2 × {mbps} | {writes_per_s} | {:?} | {took_s:.1} | {} | {} | {} | {:.0} | {} |",
        result.outcome,
        disks_s(&result),
        pause(&result),
        pause(&shared),
        written / took_s,
        after.longest_write_ms,
    );
    let held = result.record.events.iter().filter(|event| event.what.contains("held back to"));
    held.for_each(|event| eprintln!("{:.0} ms: {}", event.ms, event.what));
}

fn begin(writing: &Writing) -> Running {
    let (copies, deadline) = (writing.apart.copies(), DEADLINE_S.to_string());
    let given = ["migrate", "web", "b", "--json", "--deadline", &deadline];
    let arguments: Vec<&str> = given.into_iter().chain(copies.iter().map(String::as_str)).collect();
    writing.apart.lab.start(&arguments)
}

/// The time until all disks were copied.
fn disks_s(result: &MigrationResult) -> String {
    let ready_ms: Option<Vec<f64>> = result.copied.disks.iter().map(|disk| disk.ready_ms).collect();
    ready_ms.map_or("–".into(), |each| format!("{:.1}", each.into_iter().fold(0.0, f64::max) / 1000.0))
}
