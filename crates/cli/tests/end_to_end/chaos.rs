//! Random faults while hosts pass VMs around, and a monitor that does not depend on the agents: `make chaos`.
//!
//! ```text
//! plan        what happens next, from the seed alone: errands of operators, and faults
//! operations  runs the errands with the program itself; what it says about them must be true
//! faults      causes the faults, and repairs them
//! journals    journals that are lost, older or on full disks, and what an operator then does
//! clocks      hosts' clocks that are set forward and back
//! busy, flood further faults: a machine without a free core, and a host that sends thousands of requests
//! monitor     listens to each QEMU over its own control connection ─► copies: which guests ran when
//! course      an errand of the round, as far as it has come
//! silences    a client of every VM
//! ledger      what was done to whom: how long may a VM be silent?
//! world       a lab with its VMs, where all of that comes together, round by round
//! settled     after each round all faults are lifted: is everything over, and reported as it is?
//! ```
//!
//! `scenarios` are fixed rounds: the same faults again and again, at random moments. `measure` runs them in several
//! labs at once, and `tally` counts the outcomes. `planted` shows that the monitor sees what it should.
//!
//! `DRAINPIPE_CHAOS_SECONDS=3600` runs it for an hour; `DRAINPIPE_CHAOS_SEED` repeats the decisions of an earlier run.
//! It stops at the first violation, and leaves everything that helps to understand it in a directory of its own below
//! `target/chaos`, or below the directory that `DRAINPIPE_CHAOS_DIRECTORY` names.

mod busy;
mod clocks;
mod copies;
mod course;
mod faults;
mod flood;
mod journals;
mod ledger;
mod measure;
mod monitor;
mod operations;
mod plan;
mod planted;
#[path = "../../../engine/tests/support/random.rs"]
mod random;
mod scenarios;
mod settled;
mod silences;
mod tally;
mod violation;
mod world;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use self::monitor::Monitor;
use self::random::Random;
use self::world::{Setting, World};
use crate::Test;
use crate::options;
use crate::support::TestLab;
use crate::whole;

pub(crate) use self::measure::measure;

pub(crate) const TESTS: &[Test] = &[
    ("for_a_while", for_a_while),
    (
        "agents_and_guards_have_the_clock_of_their_host",
        clocks::agents_and_guards_have_the_clock_of_their_host,
    ),
    ("the_monitor_sees_two_copies_and_a_lost_one", planted::the_monitor_sees_two_copies_and_a_lost_one),
    (
        "a_qemu_that_paused_its_guest_before_it_ended_is_not_lost",
        planted::a_qemu_that_paused_its_guest_before_it_ended_is_not_lost,
    ),
];

/// Three hosts, so that a VM that arrives can leave for another one at once.
const HOSTS: [&str; 3] = ["a", "b", "c"];

/// How fast the VMs rewrite their memory, in MiB/s, in turn. The last one does so faster than a link carries.
const DIRTY_MIB_PER_S: [u32; 5] = [0, 1, 0, 4, 12];

/// All but 112 MiB are filled, so a VM is in flight for a second over both links.
const MEMORY_MIB: u64 = 128;

const LINK_MBPS: &str = "80";

/// Runs for a minute, or for half of it in the short form.
fn for_a_while() {
    run(Duration::from_secs(if whole::is_wanted() { 60 } else { 30 }), 3);
}

pub(crate) fn run_for(seconds: usize) {
    let seconds = u64::try_from(seconds).expect("no machine has a wider usize");
    let vms = number("DRAINPIPE_CHAOS_VMS").unwrap_or(10);
    println!("{}", run(Duration::from_secs(seconds), usize::try_from(vms).unwrap()));
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().expect("a number"))
}

/// `DRAINPIPE_CHAOS_SEED`, or a seed that no other run has.
fn seed() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    number("DRAINPIPE_CHAOS_SEED").unwrap_or((now.as_secs() << 16) | u64::from(now.subsec_micros() >> 4))
}

/// The directory for what helps to understand runs.
fn directory() -> PathBuf {
    let named = std::env::var_os("DRAINPIPE_CHAOS_DIRECTORY").filter(|path| !path.is_empty());
    named.map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/chaos"), PathBuf::from)
}

/// Returns a table of what was done; fails the test at the first violation.
fn run(lasts: Duration, vms: usize) -> String {
    let seed = seed();
    eprintln!("chaos: DRAINPIPE_CHAOS_SEED={seed}");
    let directory = tempfile::TempDir::new().unwrap();
    let monitor = Monitor::start(directory.path()).unwrap();
    let lab = lab(directory.path(), LINK_MBPS);
    let guests = (0..vms).map(|number| DIRTY_MIB_PER_S[number % DIRTY_MIB_PER_S.len()]).collect();
    // If a seed runs again with another QEMU or program, what the earlier run found stays.
    let name = format!("{seed}-{}", std::process::id());
    let setting = Setting { memory_mib: MEMORY_MIB, dirty_mib_per_s: guests, name, machine: Arc::default() };
    let mut world = World::set(&lab, monitor, &setting);
    let end = Instant::now() + lasts;
    let mut random = Random(seed);
    let mut rounds = 0;
    while Instant::now() < end {
        let round = plan::round(&mut random, world.bounds());
        rounds += 1;
        if let Err(violation) = world.round(rounds, &round) {
            let kept = world.keep(&violation);
            panic!(
                "chaos, seed {seed}, round {rounds}: {violation}\nwhat there is of it is in {}",
                kept.display()
            );
        }
    }
    let table = world.table();
    format!("Seed {seed}, {rounds} rounds, {vms} VMs, nothing found.\n\n{table}")
}

/// A lab whose QEMUs report to a monitor in this directory.
fn lab(directory: &Path, link_mbps: &str) -> TestLab {
    let qemu = options::other_qemu().unwrap_or_else(|| "qemu-system-x86_64".into());
    let wrapper = Monitor::wrapper(directory, &qemu).unwrap().display().to_string();
    TestLab::up(&["--hosts", &HOSTS.join(","), "--link", link_mbps, "--link", link_mbps, "--qemu", &wrapper])
}
