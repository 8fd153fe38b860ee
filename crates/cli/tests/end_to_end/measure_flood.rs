//! Not a test: measures how an operator is answered beside silent connections without a certificate, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_FLOOD=20 cargo test --release -p drainpipe-cli --test end_to_end` prints a table of that many
//! requests beside each number of connections.

use std::time::{Duration, Instant};

use drainpipe_report::summary::Spread;

use crate::bad_input::over_tls;
use crate::flooded::{Flood, operator, scene};

const SILENT: [usize; 4] = [0, 300, 1_500, 5_000];

/// All connections arrive within the 3 s after which an agent closes silent ones.
const ALL_WITHIN: Duration = Duration::from_millis(2_500);

pub(crate) fn run(repeats: usize) {
    let scene = scene();
    let ann = operator(&scene.lab);
    println!("| silent connections | requests that failed | answered after, ms: median (least–most) |");
    println!("|---|---|---|");
    for count in SILENT {
        let flood = u32::try_from(count)
            .ok()
            .filter(|count| *count > 0)
            .map(|each| Flood::silent(&scene.lab, count, ALL_WITHIN / each));
        let mut answered_ms = vec![];
        for _ in 0..repeats {
            let began = Instant::now();
            if over_tls(&scene.lab, &ann, &["limit", "a"]).code == 0 {
                answered_ms.push(began.elapsed().as_secs_f64() * 1e3);
            }
        }
        if let Some(flood) = flood {
            flood.end();
        }
        let spread = Spread::of(answered_ms.iter().copied())
            .map_or("–".into(), |Spread { median, min, max }| format!("{median:.0} ({min:.0}–{max:.0})"));
        println!("| {count} | {} of {repeats} | {spread} |", repeats - answered_ms.len());
    }
}
