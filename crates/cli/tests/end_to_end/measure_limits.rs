//! Not a test: measures whether bandwidth limits hold, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_LIMITS=1 cargo test --release -p drainpipe-cli --test end_to_end` prints a table; with `-- WORD`,
//! of the options with that word. With `DRAINPIPE_MEASURE_ENCRYPTED=1` migrations are encrypted.

use std::thread;
use std::time::Duration;

use crate::link_rate::LinkRate;
use crate::program::Running;
use crate::support::{TestLab, lab_for_measuring};

const LIMITS_MBPS: [u64; 4] = [10, 30, 100, 300];

const MEMORY_MIB: u64 = 160;

/// What is not over by then at a low limit goes on without one, unmeasured.
const WATCHED_FOR: Duration = Duration::from_secs(20);

pub(crate) fn run(repeats: usize, word: &str) {
    let lab = lab_for_measuring();
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    println!("| option | limit, Mb/s | most in any second, Mb/s | of the limit | mean, Mb/s |");
    println!("|---|---|---|---|---|");
    for option in ["tcp", "compression", "multichannel"].into_iter().filter(|option| option.contains(word)) {
        for limit_mbps in LIMITS_MBPS {
            for _ in 0..repeats {
                let rate = measure(&lab, option, limit_mbps);
                let most_mbps = rate.most_in_a_second_mbps();
                println!(
                    "| {option} | {limit_mbps} | {most_mbps:.1} | {:.2} | {:.1} |",
                    most_mbps / limit_mbps as f64,
                    rate.mean_mbps(),
                );
                guest.assert_intact();
            }
        }
    }
}

fn measure(lab: &TestLab, option: &str, limit_mbps: u64) -> LinkRate {
    lab.drainpipe(&["limit", "a", &limit_mbps.to_string()]).done();
    let rate = LinkRate::watch(lab, "a");
    let mut migrating = lab.start(&["migrate", "web", "b", "--option", option, "--json"]);
    let rate = rate.until(WATCHED_FOR, || migrating.has_ended());
    lab.drainpipe(&["limit", "a", "off"]).done();
    end(migrating);
    lab.migrate("web", "a", &["--option", "multichannel"]);
    // What the links still carry is no part of the next row.
    thread::sleep(Duration::from_millis(300));
    rate
}

fn end(migrating: Running) {
    drop(crate::scene::result_of(&migrating.wait()));
}
