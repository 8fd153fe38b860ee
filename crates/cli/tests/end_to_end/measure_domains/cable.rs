//! Moves whose cable is pulled in flight.

use std::thread::sleep;
use std::time::{Duration, Instant};

use drainpipe_engine::migration::result::Outcome;

use super::Promise;
use crate::program::Running;
use crate::scene::result_of;
use crate::support::TestLab;

const MEMORY_MIB: u64 = 256;

/// Slow enough for the domain to be in flight for long.
const SLOW_LINKS: [&str; 5] = ["--libvirt", "--link", "100", "--link", "100"];

/// By then, all of them are in flight.
const PULLED_AFTER: Duration = Duration::from_secs(2);

/// A move that is not over by then waits for the cable.
const WATCHED: Duration = Duration::from_mins(1);

/// How long TCP may take to try again once the cable is back.
const BACK_WITHIN: Duration = Duration::from_mins(3);

pub(super) fn run(_repeats: usize) -> Vec<Promise> {
    println!(
        "| a cable pulled 2 s after the command began, 256 MiB, 2 × 100 Mb/s | over after, s | how |\n|---|---|---|"
    );
    let (ended_s, how) = by_drainpipe();
    println!("| Drainpipe, `multichannel` | {ended_s:.1} | {how} |");
    for parallel in [&[][..], &["--parallel", "--parallel-connections", "16"]] {
        let (after, told) = by_virsh(parallel);
        println!("| `virsh migrate --live {}` | {after} | {told} |", parallel.join(" "));
    }
    println!();
    let holds = how == "completed";
    vec![Promise { what: "cable pulled in flight", promised: "ours completes", measured: how, holds }]
}

fn by_drainpipe() -> (f64, String) {
    let lab = TestLab::up(&SLOW_LINKS);
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "");
    lab.wait_for_domain("web");
    let began = Instant::now();
    let moving = lab.start(&["migrate", "web", "b", "--option", "multichannel", "--json"]);
    sleep(PULLED_AFTER);
    lab.fault("link-down b e0");
    let result = result_of(&moving.wait());
    let ended_s = began.elapsed().as_secs_f64();
    guest.assert_intact();
    let how = if result.outcome == Outcome::Completed {
        "completed".into()
    } else {
        format!("{:?}", result.failure.error)
    };
    (ended_s, how)
}

/// Moves over the link whose cable is pulled. The cable is put back if the move is not over after [`WATCHED`].
fn by_virsh(more: &[&str]) -> (String, String) {
    let lab = TestLab::up(&SLOW_LINKS);
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "");
    let began = Instant::now();
    let mut moving = lab.start_migrating_domain("web", "a", "b", "e0", more);
    sleep(PULLED_AFTER);
    lab.fault("link-down b e0");
    let ended_alone = ends_within(&mut moving, WATCHED);
    let ended_s = began.elapsed().as_secs_f64();
    let job = lab.virsh("a", &["domjobinfo", "web"]).stdout;
    lab.fault("heal b e0");
    let output = moving.wait_for(BACK_WITHIN);
    let back_s = began.elapsed().as_secs_f64();
    guest.assert_intact();
    let end = if output.code == 0 { "completed".into() } else { output.stderr.trim().replace('\n', " ") };
    if ended_alone {
        return (format!("{ended_s:.1}"), end);
    }
    let kind = job.lines().next().unwrap_or_default().replace("Job type:", "").trim().to_owned();
    let waited_s = WATCHED.as_secs();
    (
        format!("{back_s:.1}"),
        format!("after {waited_s} s without the cable its job was still {kind}; put back then: {end}"),
    )
}

fn ends_within(running: &mut Running, within: Duration) -> bool {
    let end = Instant::now() + within;
    while Instant::now() < end {
        if running.has_ended() {
            return true;
        }
        sleep(Duration::from_millis(50));
    }
    false
}
