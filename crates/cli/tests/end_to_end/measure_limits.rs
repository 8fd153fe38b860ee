//! Not a test: measures whether bandwidth limits hold, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_LIMITS=1 cargo test --release -p drainpipe-cli --test end_to_end` prints a table; `-- WORD`
//! selects the options with that word. With `DRAINPIPE_MEASURE_ENCRYPTED=1`, migrations are encrypted.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_report::summary::Spread;

use crate::guest::Guest;
use crate::link_rate::LinkRate;
use crate::measured_guest::{MeasuredGuest, set_aside};
use crate::program::Running;
use crate::scene::result_of;
use crate::support::{TestLab, lab_for_measuring};

/// The last is near what two links of 1 Gb/s carry.
const LIMITS_MBPS: [u64; 6] = [10, 30, 100, 300, 1000, 1800];

const GUEST: MeasuredGuest<'_> = MeasuredGuest {
    name: "web",
    memory_mib: 1280,
    filled_mib: 1024,
    mix: "random:50,text:50",
    kernel_parameters: "",
    is_in_huge_pages: true,
};

/// The VMs that share a limit.
const SHARING: [&str; 3] = ["web", "mail", "wiki"];

/// A migration that is not over by then at a low limit continues without one, unmeasured.
const WATCHED_FOR: Duration = Duration::from_secs(20);

/// First, only QEMU's header is sent, while its connections are found. Migrations that join others get their share
/// within two seconds.
const BEGINS_WITHIN: Duration = Duration::from_millis(500);
const SHARES_WITHIN: Duration = Duration::from_millis(2500);

pub(crate) fn run(repeats: usize, word: &str) {
    // One more, since a VM that has just left still holds its pages for a moment.
    let huge_pages = set_aside((2 * SHARING.len() as u64 + 1) * GUEST.memory_mib);
    let lab = lab_for_measuring();
    println!(
        "| option | VMs | limit, Mb/s | most in any second, of the limit | in seconds of the transfer, of the limit: median (least–most) |"
    );
    println!("|---|---|---|---|---|");
    let start = |name| {
        let guest = MeasuredGuest { name, is_in_huge_pages: huge_pages.is_some(), ..GUEST }.start(&lab);
        guest.wait_until_ready();
        guest
    };
    let mut guests = vec![start(SHARING[0])];
    let options =
        || ["tcp", "compression", "multichannel"].into_iter().filter(|option| option.contains(word));
    for limit_mbps in LIMITS_MBPS {
        for option in options() {
            (0..repeats).for_each(|_| measure(&lab, &guests, option, limit_mbps));
        }
    }
    guests.extend(SHARING[1..].iter().map(|name| start(name)));
    for limit_mbps in LIMITS_MBPS.into_iter().filter(|mbps| (30..=1000).contains(mbps)) {
        for option in options() {
            (0..repeats).for_each(|_| measure(&lab, &guests, option, limit_mbps));
        }
    }
}

fn measure(lab: &TestLab, guests: &[Guest], option: &str, limit_mbps: u64) {
    lab.drainpipe(&["limit", "a", &limit_mbps.to_string()]).done();
    let began = (SystemTime::now(), Instant::now());
    let rate = LinkRate::watch(lab, "a");
    let migrate = |guest: &Guest| lab.start(&["migrate", &guest.name, "b", "--option", option, "--json"]);
    let mut migrating: Vec<Running> = guests.iter().map(migrate).collect();
    let rate = rate.until(WATCHED_FOR, || migrating.iter_mut().any(Running::has_ended));
    let watched_until = Instant::now();
    lab.drainpipe(&["limit", "a", "off"]).done();
    let results: Vec<MigrationResult> = migrating.into_iter().map(|one| result_of(&one.wait())).collect();
    assert!(results.iter().all(|result| result.outcome == Outcome::Completed), "{results:#?}");
    let begins_within = if guests.len() > 1 { SHARES_WITHIN } else { BEGINS_WITHIN };
    let [from, until] = transfer(&results, began).unwrap_or([watched_until; 2]);
    let seconds = rate.seconds_between_mbps(from + begins_within, until.min(watched_until));
    let of_limit = |mbps: f64| mbps / limit_mbps as f64;
    println!(
        "| {option} | {} | {limit_mbps} | {:.2} | {} |",
        guests.len(),
        of_limit(rate.most_in_a_second_mbps()),
        seconds.map_or("–".into(), |Spread { median, min, max }| {
            format!("{:.2} ({:.2}–{:.2})", of_limit(median), of_limit(min), of_limit(max))
        }),
    );
    for guest in guests {
        guest.assert_intact();
        lab.migrate(&guest.name, "a", &["--option", "multichannel"]);
    }
    // What the links still carry does not belong to the next row.
    thread::sleep(Duration::from_millis(300));
}

/// From the moment when all of them send until the first pauses its VM.
fn transfer(results: &[MigrationResult], began: (SystemTime, Instant)) -> Option<[Instant; 2]> {
    let at = |result: &MigrationResult, ms: f64| {
        let started: jiff::Timestamp = result.started_at.parse().ok()?;
        let since = SystemTime::from(started).duration_since(began.0).unwrap_or_default();
        Some(began.1 + since + Duration::from_secs_f64(ms / 1000.0))
    };
    let sends = results.iter().map(|result| at(result, result.times.setup_ms + result.times.held_ms));
    let pauses = results.iter().map(|result| {
        let paused = result.record.events.iter().find(|event| event.what.starts_with("the VM is paused"));
        at(result, paused?.ms)
    });
    Some([sends.max()??, pauses.min()??])
}
