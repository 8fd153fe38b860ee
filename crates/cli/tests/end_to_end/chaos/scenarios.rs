//! Not a test: the same faults again and again at moments that are drawn, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_SCENARIOS=200 cargo test --release -p drainpipe-cli --test end_to_end` makes each of them 200 times
//! with the QEMU that `DRAINPIPE_TEST_QEMU` names, and prints a table; with `-- WORD`, of the rows with that word. What is
//! found does not end it: it is counted, and the next run has a new lab.

use std::ops::Range;
use std::time::Duration;

use super::monitor::Monitor;
use super::plan::{Errand, Fault, FaultKind, Moment, Next, Place, Planned, Round, Way, When};
use super::random::Random;
use super::violation::Violation;
use super::world::{Setting, World};
use super::{lab, seed};
use crate::options;

/// Faults at a random moment of one migration of one VM.
struct Scenario {
    name: &'static str,
    /// How fast the VM rewrites its memory.
    dirty_mib_per_s: u32,
    way: Way,
    /// The VM goes on to the third host as soon as it runs on the second one.
    goes_on: bool,
    /// What happens so many ms after which moment, and for how long.
    fault: (FaultKind, Place, Moment, Range<u64>, u64),
}

const MULTICHANNEL: Way =
    Way { option: "multichannel", encrypt: false, post_copy: false, throttle_percent: None, deadline_s: 120 };
const TCP: Way = Way { option: "tcp", ..MULTICHANNEL };
const COMPRESSION: Way = Way { option: "compression", ..MULTICHANNEL };
const ENCRYPTED: Way = Way { encrypt: true, ..MULTICHANNEL };
const POST_COPY: Way = Way { post_copy: true, ..TCP };
const ENCRYPTED_POST_COPY: Way = Way { encrypt: true, ..POST_COPY };

/// More than both links carry, so that the VM is throttled; and less than one does.
const BUSY: u32 = 30;
const QUIET: u32 = 4;

const MEMORY_MIB: u64 = 160;
const LINK_MBPS: &str = "100";

const OUTAGE_MS: u64 = 20_000;

const SCENARIOS: &[Scenario] = &[
    outage("all links down in a later round, multichannel", FaultKind::AllLinksDown, MULTICHANNEL),
    outage("all links down in a later round, encrypted", FaultKind::AllLinksDown, ENCRYPTED),
    outage("all links silent in a later round, tcp", FaultKind::AllLinksSilent, TCP),
    outage(
        "large frames vanish on all links in a later round",
        FaultKind::AllLargeFramesVanish,
        MULTICHANNEL,
    ),
    Scenario {
        fault: (FaultKind::LargeFramesVanish { link: 0 }, Place::Source, Moment::Active, 0..4_000, OUTAGE_MS),
        ..outage("large frames vanish on one link", FaultKind::AllLinksDown, MULTICHANNEL)
    },
    killed("source's agent as the VM runs on the target, post-copy", Moment::Resumed, POST_COPY),
    killed(
        "source's agent as the VM runs on the target, encrypted post-copy",
        Moment::Resumed,
        ENCRYPTED_POST_COPY,
    ),
    Scenario {
        goes_on: true,
        ..killed(
            "source's agent as the VM runs on the target, which it leaves at once",
            Moment::Resumed,
            MULTICHANNEL,
        )
    },
    killed("source's agent just after the pause, tcp", Moment::Paused, TCP),
    killed("source's agent just after the pause, compression", Moment::Paused, COMPRESSION),
    killed("source's agent just after the pause, multichannel", Moment::Paused, MULTICHANNEL),
    killed("source's agent just after the pause, encrypted", Moment::Paused, ENCRYPTED),
    killed("source's agent in flight, multichannel", Moment::Active, MULTICHANNEL),
    killed("source's agent in flight, encrypted", Moment::Active, ENCRYPTED),
    Scenario {
        fault: (FaultKind::KillAgent, Place::Target, Moment::Paused, 0..100, 2_000),
        ..killed("target's agent just after the pause", Moment::Paused, MULTICHANNEL)
    },
    Scenario {
        fault: (FaultKind::KillQemu, Place::Source, Moment::Active, 0..3_000, 0),
        ..killed("source's QEMU", Moment::Active, MULTICHANNEL)
    },
    Scenario {
        fault: (FaultKind::KillQemu, Place::Target, Moment::Active, 0..3_000, 0),
        ..killed("target's QEMU", Moment::Active, MULTICHANNEL)
    },
];

/// Of a VM that is throttled: up to 15 s after its memory began to be sent.
const fn outage(name: &'static str, kind: FaultKind, way: Way) -> Scenario {
    Scenario {
        name,
        dirty_mib_per_s: BUSY,
        way,
        goes_on: false,
        fault: (kind, Place::Source, Moment::Active, 3_000..15_000, OUTAGE_MS),
    }
}

/// The source's agent, which is started again 2 s later.
const fn killed(name: &'static str, moment: Moment, way: Way) -> Scenario {
    // A post-copy begins with a VM that does not converge.
    let dirty_mib_per_s = if way.post_copy { BUSY } else { QUIET };
    let within_ms = match moment {
        Moment::Active => 0..3_000,
        _ => 0..100,
    };
    Scenario {
        name,
        dirty_mib_per_s,
        way,
        goes_on: false,
        fault: (FaultKind::KillAgent, Place::Source, moment, within_ms, 2_000),
    }
}

impl Scenario {
    fn round(&self, random: &mut Random) -> Round {
        let Self { way, fault: (kind, place, moment, within_ms, lasts_ms), .. } = self;
        let after_ms = within_ms.start + random.below(within_ms.end - within_ms.start);
        let next = self.goes_on.then_some(Next { turn: 1, at_once: true, way: *way });
        Round {
            errands: vec![Planned {
                after: Duration::ZERO,
                errand: Errand::Move { vm: 0, turn: 1, way: *way, next },
            }],
            faults: vec![Fault {
                errand: 0,
                when: When::After(*moment, Duration::from_millis(after_ms)),
                place: *place,
                kind: *kind,
                lasts: Duration::from_millis(*lasts_ms),
            }],
        }
    }
}

/// What came of the runs of one scenario.
#[derive(Default)]
struct Found {
    faults: usize,
    told_as_lost: usize,
    lost: usize,
    two_copies: usize,
    silent_for_too_long: usize,
    untrue: usize,
    endless: usize,
    broken: usize,
    longest_silence: Duration,
}

impl Found {
    fn take(&mut self, world: &World<'_>) {
        self.faults += world.faults_done();
        self.told_as_lost += world.counted(super::world::TOLD_AS_LOST);
        self.longest_silence = self.longest_silence.max(world.longest_silence());
    }

    fn count(&mut self, violation: &Violation) {
        let count = match violation {
            Violation::TwoCopies(_) => &mut self.two_copies,
            Violation::Lost(_) => &mut self.lost,
            Violation::Silent(_) => &mut self.silent_for_too_long,
            Violation::Untrue(_) => &mut self.untrue,
            Violation::Endless(_) => &mut self.endless,
            Violation::Broken(_) => &mut self.broken,
        };
        *count += 1;
    }
}

/// Each scenario whose name contains `word`, so often; prints a table.
pub(crate) fn measure(repeats: usize, word: &str) {
    let qemu = options::other_qemu().unwrap_or_else(|| "qemu-system-x86_64".into());
    println!("With {qemu}\n");
    println!(
        "| what happens | runs | met its moment | killed with its QEMU, told so | lost | two copies | silent for too long | \
         untrue | not settled | broken | longest silence, s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (number, scenario) in SCENARIOS.iter().enumerate().filter(|(_, one)| one.name.contains(word)) {
        let found = repeat(scenario, number, repeats);
        println!(
            "| {} | {repeats} | {} | {} | {} | {} | {} | {} | {} | {} | {:.1} |",
            scenario.name,
            found.faults,
            found.told_as_lost,
            found.lost,
            found.two_copies,
            found.silent_for_too_long,
            found.untrue,
            found.endless,
            found.broken,
            found.longest_silence.as_secs_f64()
        );
    }
}

fn repeat(scenario: &Scenario, number: usize, repeats: usize) -> Found {
    let seed = seed();
    let mut random = Random(seed);
    let mut found = Found::default();
    let mut left = repeats;
    while left > 0 {
        let directory = tempfile::TempDir::new().unwrap();
        let monitor = Monitor::start(directory.path()).unwrap();
        let lab = lab(directory.path(), LINK_MBPS);
        let setting = Setting {
            memory_mib: MEMORY_MIB,
            dirty_mib_per_s: vec![scenario.dirty_mib_per_s],
            name: format!("scenario-{number}-{seed}-{left}"),
        };
        let mut world = World::set(&lab, monitor, &setting);
        while left > 0 {
            let ended = world.round(repeats - left + 1, &scenario.round(&mut random));
            left -= 1;
            if let Err(violation) = ended {
                let kept = world.keep(&violation);
                eprintln!("{}: {violation}; see {}", scenario.name, kept.display());
                found.count(&violation);
                break;
            }
        }
        found.take(&world);
    }
    found
}
