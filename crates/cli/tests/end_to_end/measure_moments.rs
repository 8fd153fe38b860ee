//! Not a test: kills the source's agent at random moments around the pause, to see what becomes of the VM, for
//! `bench/`.
//!
//! `DRAINPIPE_MEASURE_MOMENTS=40 cargo test --release -p drainpipe-cli --test end_to_end` does so forty times in each
//! way and prints a table; `-- WORD` selects rows with that word. `DRAINPIPE_TEST_QEMU` names the QEMU to use.

use std::fmt::Write as _;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use drainpipe_agent::peers::client::ApiClient;
use drainpipe_api_types::MigrationView;
use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::step::Step;
use drainpipe_guest::protocol::Dirtying;
use rustix::process::{Signal, kill_process};
use tokio::runtime::Runtime;

use crate::measure_faults::{in_flight, spread};
use crate::options;
use crate::scene::{MEMORY_MIB, Scene, wait_until_told_to_run};
use crate::support::TestLab;

/// The speed of each of the two links: the rest of the memory, or what gets dirty, takes some seconds.
const LINK_MBPS: &str = "150";

/// More than one link carries.
const BUSY: Dirtying = Dirtying { mib_per_s: 60, locality_percent: 100 };

/// Less than one link carries, so that there is a pause.
const LIVELY: Dirtying = Dirtying { mib_per_s: 4, locality_percent: 100 };

/// What is not settled by then never will be.
const SETTLED_WITHIN: Duration = Duration::from_secs(90);
const FLIGHT_MAX: Duration = Duration::from_mins(2);

/// How long the agent stays down.
const GONE_FOR: Duration = Duration::from_secs(2);

/// When the agent is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// At most this many ms after the target has recorded that the VM runs there.
    Runs(u64),
    /// After the pause was seen. The agent stays down until the guest answers.
    Paused(u64),
}

struct Row {
    name: &'static str,
    arguments: &'static [&'static str],
    dirtying: Dirtying,
    moment: Moment,
}

const ROWS: [Row; 7] = [
    Row {
        name: "post-copy, encrypted: 0–60 ms after it runs there",
        arguments: &["--post-copy", "--encrypt"],
        dirtying: BUSY,
        moment: Moment::Runs(60),
    },
    Row {
        name: "post-copy: 0–60 ms after it runs there",
        arguments: &["--post-copy"],
        dirtying: BUSY,
        moment: Moment::Runs(60),
    },
    Row {
        name: "tcp: 0–60 ms after the pause",
        arguments: &["--option", "tcp"],
        dirtying: LIVELY,
        moment: Moment::Paused(60),
    },
    Row {
        name: "tcp, encrypted: 0–60 ms after the pause",
        arguments: &["--option", "tcp", "--encrypt"],
        dirtying: LIVELY,
        moment: Moment::Paused(60),
    },
    Row {
        name: "multichannel: 0–60 ms after the pause",
        arguments: &["--option", "multichannel"],
        dirtying: LIVELY,
        moment: Moment::Paused(60),
    },
    Row {
        name: "multichannel, encrypted: 0–60 ms after the pause",
        arguments: &["--option", "multichannel", "--encrypt"],
        dirtying: LIVELY,
        moment: Moment::Paused(60),
    },
    Row {
        name: "compression: 0–60 ms after the pause",
        arguments: &["--option", "compression"],
        dirtying: LIVELY,
        moment: Moment::Paused(60),
    },
];

/// The outcome of one kill.
struct Fate {
    after_ms: u64,
    outcome: Option<Outcome>,
    silence_ms: f64,
    /// The time from the agent's start until it is known where the VM runs.
    settled_ms: Option<f64>,
}

pub(crate) fn run(repeats: usize, word: &str) {
    println!("| killed | settled | on the target | longest silence, ms | settled after, ms |");
    println!("|---|---|---|---|---|");
    for row in ROWS.iter().filter(|row| row.name.contains(word)) {
        println!("{}", line(row, &repeat(row, repeats)));
    }
}

fn repeat(row: &Row, repeats: usize) -> Vec<Fate> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut fates = vec![];
    let mut scene = None;
    while fates.len() < repeats {
        let at = scene.get_or_insert_with(set);
        let Some(fate) = kill(at, &runtime, row) else { continue };
        eprintln!(
            "{} {}: killed after {} ms, {:?}, silence {:.0} ms, settled after {:?} ms",
            row.name,
            fates.len(),
            fate.after_ms,
            fate.outcome,
            fate.silence_ms,
            fate.settled_ms
        );
        if fate.settled_ms.is_none() {
            tell(at);
            scene = None;
        }
        fates.push(fate);
    }
    fates
}

fn set() -> Scene {
    let mut up = vec!["--link", LINK_MBPS, "--link", LINK_MBPS];
    let qemu = options::other_qemu();
    if let Some(qemu) = &qemu {
        up.extend(["--qemu", qemu]);
    }
    let lab = TestLab::up(&up);
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    Scene::of(lab, guest)
}

/// `None` if the moment was missed.
fn kill(scene: &Scene, runtime: &Runtime, row: &Row) -> Option<Fate> {
    let lab = &scene.lab;
    scene.guest.set_dirty(row.dirtying);
    let agent = lab.agent_pid("a").expect("it runs");
    let heartbeat = scene.guest.heartbeat();
    let migrating = lab.start(&[&["migrate", "web", "b", "--json"], row.arguments].concat());
    in_flight(lab, "a");
    let (is_met, most_ms) = match row.moment {
        Moment::Runs(most_ms) => (wait_until_told_to_run(lab), most_ms),
        Moment::Paused(most_ms) => (wait_until_paused(lab, runtime), most_ms),
    };
    let after_ms = random_below(most_ms + 1);
    thread::sleep(Duration::from_millis(after_ms));
    kill_process(agent, Signal::KILL).unwrap();
    let killed_at = Instant::now();
    thread::sleep(GONE_FOR);
    let is_guarded = matches!(row.moment, Moment::Paused(_));
    while is_guarded && scene.guest.control().is_none() && killed_at.elapsed() < SETTLED_WITHIN {}
    lab.start_agent("a");
    let started_at = Instant::now();
    let settled = || {
        let newest = lab.migrations("a").into_iter().next()?;
        newest.progress.is_none().then_some(newest.result?.outcome)
    };
    let mut outcome = settled();
    while outcome.is_none() && started_at.elapsed() < SETTLED_WITHIN {
        thread::sleep(Duration::from_millis(50));
        outcome = settled();
    }
    drop(migrating);
    let settled_ms = outcome.map(|_| started_at.elapsed().as_secs_f64() * 1000.0);
    let is_whole = outcome.is_some() && answers(scene);
    let silence_ms = heartbeat.stop().longest_gap_ms;
    if is_whole {
        scene.guest.set_dirty(Dirtying::IDLE);
        let host = if outcome == Some(Outcome::Completed) { "b" } else { "a" };
        scene.assert_settled(host);
        if host == "b" {
            lab.migrate("web", "a", &["--option", "multichannel"]);
        }
    }
    is_met.then_some(Fate { after_ms, outcome, silence_ms, settled_ms: settled_ms.filter(|_| is_whole) })
}

fn answers(scene: &Scene) -> bool {
    (0..10).any(|_| scene.guest.control().is_some())
}

fn wait_until_paused(lab: &TestLab, runtime: &Runtime) -> bool {
    let client = ApiClient::over_socket(lab.agent_socket("a").as_ref()).unwrap();
    let began = Instant::now();
    while began.elapsed() < FLIGHT_MAX {
        let list: Vec<MigrationView> = runtime.block_on(client.get("/v1/migrations?limit=1")).unwrap();
        match list.into_iter().next().map(|view| view.progress) {
            Some(Some(progress)) if progress.step < Step::Downtime => thread::sleep(Duration::from_millis(1)),
            Some(Some(progress)) => return progress.step == Step::Downtime,
            _ => return false,
        }
    }
    panic!("the VM is not paused within {FLIGHT_MAX:?}");
}

fn random_below(limit: u64) -> u64 {
    u64::from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos()) / 1000 % limit
}

/// Prints what is left of a run that did not settle.
fn tell(scene: &Scene) {
    let mut report = String::new();
    for view in scene.lab.vms().vms {
        let _ = writeln!(report, "{} on {}: {:?}", view.name, view.host, view.state);
    }
    for host in ["a", "b"] {
        let log = scene.lab.agent_log(host);
        let lines: Vec<&str> = log.lines().collect();
        let _ = writeln!(report, "log of {host}:\n{}", lines[lines.len().saturating_sub(12)..].join("\n"));
        if let Some(qemu) = scene.lab.qemu_pid(host, "web") {
            for thread in std::fs::read_dir(format!("/proc/{qemu}/task")).unwrap().flatten() {
                let read = |file| std::fs::read_to_string(thread.path().join(file)).unwrap_or_default();
                let _ = writeln!(report, "{host} {:20} {}", read("comm").trim(), read("wchan"));
            }
        }
    }
    eprintln!("{report}");
}

fn line(row: &Row, fates: &[Fate]) -> String {
    let settled = fates.iter().filter(|fate| fate.settled_ms.is_some()).count();
    let there = fates.iter().filter(|fate| fate.outcome == Some(Outcome::Completed)).count();
    format!(
        "| {} | {settled} of {} | {there} | {} | {} |",
        row.name,
        fates.len(),
        spread(fates.iter().map(|fate| fate.silence_ms), 0),
        spread(fates.iter().filter_map(|fate| fate.settled_ms), 0),
    )
}
