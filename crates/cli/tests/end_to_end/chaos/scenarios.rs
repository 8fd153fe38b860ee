//! Not a test: the same faults again and again at moments that are drawn, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_SCENARIOS=200 cargo test --release -p drainpipe-cli --test end_to_end` makes each of them 200 times
//! with the QEMU that `DRAINPIPE_TEST_QEMU` names, and prints a table; with `-- WORD`, of the rows with that word.
//! `DRAINPIPE_MEASURE_LABS=4` has four labs at once. What is found does not end it: it is counted, and the next run has a
//! new lab. `DRAINPIPE_CHAOS_SEED` makes the same decisions again, in however many labs.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::monitor::Monitor;
use super::plan::{Errand, Fault, FaultKind, Moment, Next, Place, Planned, Round, Spoil, Way, When};
use super::random::Random;
use super::silences::SILENCE_MIN;
use super::violation::Violation;
use super::world::{Setting, TOLD_AS_LOST, World};
use super::{lab, number, seed};
use crate::options;

/// Faults at a random moment of one migration of one VM.
struct Scenario {
    name: &'static str,
    /// How fast the VM rewrites its memory.
    dirty_mib_per_s: u32,
    way: Way,
    /// The VM goes on to the third host as soon as it runs on the second one.
    goes_on: bool,
    fault: Aimed,
    also: Option<Aimed>,
}

/// What happens where, so many ms after which moment, and for how many ms.
type Aimed = (FaultKind, Place, Moment, Range<u64>, u64);

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
    Scenario {
        fault: (FaultKind::FreezeAgent, Place::Source, Moment::Resumed, 0..50, 5_000),
        also: Some((FaultKind::SpoilJournal(Spoil::Delete), Place::Target, Moment::Resumed, 0..100, 2_000)),
        ..killed(
            "target's journal deleted as the VM runs there, source's agent frozen",
            Moment::Resumed,
            MULTICHANNEL,
        )
    },
    spoiled("source's journal deleted as the VM runs on the target", Spoil::Delete),
    spoiled("source's journal replaced by an older one as the VM runs on the target", Spoil::PutBackOlder),
];

/// The source's journal, adopted by an operator as soon as its agent, back after 2 s, says that it is not believed.
const fn spoiled(name: &'static str, way: Spoil) -> Scenario {
    let mut scenario = killed(name, Moment::Resumed, MULTICHANNEL);
    scenario.fault.0 = FaultKind::SpoilJournal(way);
    scenario
}

/// Of a VM that is throttled: up to 15 s after its memory began to be sent.
const fn outage(name: &'static str, kind: FaultKind, way: Way) -> Scenario {
    Scenario {
        name,
        dirty_mib_per_s: BUSY,
        way,
        goes_on: false,
        fault: (kind, Place::Source, Moment::Active, 3_000..15_000, OUTAGE_MS),
        also: None,
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
        also: None,
    }
}

impl Scenario {
    fn round(&self, random: &mut Random) -> Round {
        let way = self.way;
        let next = self.goes_on.then_some(Next { turn: 1, at_once: true, way });
        let errand = Errand::Move { vm: 0, turn: 1, way, next };
        let faults = [Some(&self.fault), self.also.as_ref()].into_iter().flatten();
        Round {
            errands: vec![Planned { after: Duration::ZERO, errand }],
            faults: faults.map(|aimed| fault(random, aimed)).collect(),
        }
    }
}

fn fault(random: &mut Random, (kind, place, moment, within_ms, lasts_ms): &Aimed) -> Fault {
    let after_ms = within_ms.start + random.below(within_ms.end - within_ms.start);
    Fault {
        errand: 0,
        when: When::After(*moment, Duration::from_millis(after_ms)),
        place: *place,
        kind: *kind,
        lasts: Duration::from_millis(*lasts_ms),
    }
}

/// What came of the runs of one scenario.
#[derive(Default)]
struct Found {
    runs: usize,
    faults: usize,
    told_as_lost: usize,
    lost: usize,
    two_copies: usize,
    silent_for_too_long: usize,
    untrue: usize,
    endless: usize,
    broken: usize,
    /// The longest one of each run.
    silences: Vec<Duration>,
}

impl Found {
    fn take(&mut self, ran: &Ran) {
        self.runs += 1;
        self.faults += ran.faults;
        self.told_as_lost += ran.told_as_lost;
        self.silences.push(ran.longest_silence);
        let Some(violation) = &ran.violation else { return };
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

    fn row(mut self, name: &str) -> String {
        self.silences.sort();
        let seconds = |silence: Option<&Duration>| {
            let silence = silence.copied().unwrap_or_default();
            if silence.is_zero() {
                format!("< {:.1}", SILENCE_MIN.as_secs_f64())
            } else {
                format!("{:.1}", silence.as_secs_f64())
            }
        };
        format!(
            "| {name} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            self.runs,
            self.faults,
            self.told_as_lost,
            self.lost,
            self.two_copies,
            self.silent_for_too_long,
            self.untrue,
            self.endless,
            self.broken,
            seconds(self.silences.get(self.silences.len() / 2)),
            seconds(self.silences.last())
        )
    }
}

/// What came of one run.
#[derive(Default)]
struct Ran {
    faults: usize,
    told_as_lost: usize,
    longest_silence: Duration,
    violation: Option<Violation>,
}

/// Each scenario whose name contains `word`, so often; prints a table.
pub(crate) fn measure(repeats: usize, word: &str) {
    let qemu = options::other_qemu().unwrap_or_else(|| "qemu-system-x86_64".into());
    let labs = number("DRAINPIPE_MEASURE_LABS").map_or(1, |labs| usize::try_from(labs).unwrap());
    let seed = seed();
    println!("With {qemu}, {labs} labs at once, DRAINPIPE_CHAOS_SEED={seed}\n");
    println!(
        "| what happens | runs | faults done | killed with its QEMU, told so | lost | two copies | silent for too long | \
         untrue | not settled | broken | longest silence of a run, median, s | worst, s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (number, scenario) in SCENARIOS.iter().enumerate().filter(|(_, one)| one.name.contains(word)) {
        println!("{}", Repeated { scenario, number, repeats, seed }.run(labs).row(scenario.name));
    }
}

/// A scenario again and again.
struct Repeated {
    scenario: &'static Scenario,
    /// Which row of the table it is.
    number: usize,
    repeats: usize,
    seed: u64,
}

impl Repeated {
    /// In so many labs at once.
    fn run(&self, labs: usize) -> Found {
        let (found, next) = (Mutex::new(Found::default()), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..labs.min(self.repeats) {
                scope.spawn(|| self.work(&next, &found));
            }
        });
        found.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// One lab after the other, until all runs are done.
    fn work(&self, next: &AtomicUsize, found: &Mutex<Found>) {
        let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|run| *run < self.repeats);
        let tell = |ran: &Ran| found.lock().unwrap_or_else(PoisonError::into_inner).take(ran);
        while let Some(run) = take() {
            // A test's own assertion counts as a finding like any other.
            let ended = catch_unwind(AssertUnwindSafe(|| self.in_one_lab(run, &take, &tell)));
            if ended.is_err() {
                let violation = Some(Violation::Broken("a test's assertion".into()));
                tell(&Ran { violation, ..Ran::default() });
            }
        }
    }

    /// Until something is found, or all runs are done.
    fn in_one_lab(&self, first: usize, take: &impl Fn() -> Option<usize>, tell: &impl Fn(&Ran)) {
        let directory = tempfile::TempDir::new().unwrap();
        let monitor = Monitor::start(directory.path()).unwrap();
        let lab = lab(directory.path(), LINK_MBPS);
        let setting = Setting {
            memory_mib: MEMORY_MIB,
            dirty_mib_per_s: vec![self.scenario.dirty_mib_per_s],
            name: format!("scenario-{}-{}-{first}", self.number, self.seed),
        };
        let mut world = World::set(&lab, monitor, &setting);
        let mut next = Some(first);
        while let Some(run) = next {
            let before = (world.faults_done(), world.counted(TOLD_AS_LOST));
            let violation = world.round(run, &self.scenario.round(&mut self.random(run))).err();
            if let Some(violation) = &violation {
                let kept = world.keep(violation);
                eprintln!("{}, run {run}: {violation}; see {}", self.scenario.name, kept.display());
            }
            let is_over = violation.is_some();
            tell(&Ran {
                faults: world.faults_done() - before.0,
                told_as_lost: world.counted(TOLD_AS_LOST) - before.1,
                longest_silence: world.take_longest_silence(),
                violation,
            });
            next = if is_over { None } else { take() };
        }
    }

    /// What a run decides does not depend on the runs before it, nor on which lab makes it.
    fn random(&self, run: usize) -> Random {
        let [number, run] = [self.number, run].map(|number| number as u64);
        Random(Random(self.seed ^ (number << 32 | run)).next())
    }
}
