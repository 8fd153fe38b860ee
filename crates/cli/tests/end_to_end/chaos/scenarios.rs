//! Fixed rounds: the same faults during the same migration, at random moments. Each says how long its VM may be silent,
//! by what the agents promise.

use std::ops::Range;
use std::time::Duration;

use super::ledger::{Bound, Promise};
use super::measure::Bed;
use super::plan::{
    Errand, Fault, FaultKind, HostRole, Moment, MoveOptions, Next, Planned, Round, Spoil, When,
};
use super::random::Random;

/// Faults at a random moment of one migration of one VM.
pub(super) struct Scenario {
    pub(super) name: &'static str,
    pub(super) bed: Bed,
    /// How fast the VM rewrites its memory.
    pub(super) dirty_mib_per_s: u32,
    way: MoveOptions,
    goes_on: GoesOn,
    faults: [Option<Aimed>; 2],
    /// Whether the faults last their full time even when the migration is over.
    outlasts_errands: bool,
    promise: Promise,
    /// Whether the migration must complete despite the fault.
    pub(super) completes: bool,
    /// Whether all paths must stay in use.
    pub(super) keeps_paths: bool,
}

/// Whether the VM goes on to the third host.
#[derive(Clone, Copy)]
enum GoesOn {
    No,
    /// As soon as it runs on the second host.
    AtOnce,
    /// As soon as the program says that it is there.
    WhenTold,
}

/// A fault and its place, how many ms after which moment it strikes, and for how many ms.
struct Aimed {
    kind: FaultKind,
    place: HostRole,
    moment: Moment,
    after_ms: Range<u64>,
    lasts_ms: Range<u64>,
}

const MULTICHANNEL: MoveOptions = MoveOptions {
    option: "multichannel",
    encrypt: false,
    post_copy: false,
    throttle_percent: None,
    deadline_s: 60,
};
const TCP: MoveOptions = MoveOptions { option: "tcp", ..MULTICHANNEL };
const COMPRESSION: MoveOptions = MoveOptions { option: "compression", ..MULTICHANNEL };
const ENCRYPTED: MoveOptions = MoveOptions { encrypt: true, ..MULTICHANNEL };
const POST_COPY: MoveOptions = MoveOptions { post_copy: true, ..TCP };
const ENCRYPTED_POST_COPY: MoveOptions = MoveOptions { encrypt: true, ..POST_COPY };

/// A VM is in flight for a second on these links.
const FAST: Bed = Bed { link_mbps: "400", stall_s: None };
/// A busy VM does not converge over one of these links.
const SLOW: Bed = Bed { link_mbps: "200", stall_s: None };
/// Outages end before the source gives up, or after.
const IMPATIENT: Bed = Bed { link_mbps: "100", stall_s: Some(7) };

/// A sixth of what two fast links carry.
const QUIET: u32 = 16;
/// As much of what slow links carry.
const QUIET_ON_SLOW_LINKS: u32 = 8;
/// More than both links carry where sources are impatient, so that the VM is throttled.
const BUSY: u32 = 30;

/// As long as the first two rounds of a busy VM take.
const LATER_ROUND_MS: Range<u64> = 4_000..8_000;
const OUTAGE_MS: Range<u64> = 4_000..10_000;

/// Longer than a guard waits for its agent.
const FROZEN_MS: Range<u64> = 4_000..4_001;

const IN_FLIGHT_MS: Range<u64> = 0..1_500;

/// The times within which a fault meets the hand-over. It lasts from the pause on for as long as this machine needs,
/// which is three times as long over one connection or through a relay; and then from the moment at which the VM runs
/// on its target.
const PAUSED_MS: Range<u64> = 0..100;
const PAUSED_LONG_MS: Range<u64> = 0..400;
const RESUMED_MS: Range<u64> = 0..50;

/// What a machine with two cores, no KVM and other work may add.
const SLACK_S: u64 = 2;

/// A VM that its QEMU has not paused has no reason to be silent. It gets the slack, and as much again if it is
/// throttled.
const UNDISTURBED: Duration = Duration::from_secs(2 * SLACK_S + 1);

/// `guard.rs`: during or before the hand-over, a guard acts after 3 s (`SILENCE_MAX`), or at once if its agent has
/// ended.
const BY_GUARD: Promise = promise(Bound::InAll(Duration::from_secs(3 + SLACK_S)));

/// `ending.rs`: 15 s for the last bytes (`SWITCH_OVER_DEADLINE`), 3 s more for the target's answer
/// (`RECEIVED_ANSWER_DEADLINE`), and 2 s for a QEMU that waits (`MUTE_AFTER`). The length of the outage does not
/// matter, since agents reach each other over another network.
const BY_SOURCE: Promise = promise(Bound::InAll(Duration::from_secs(15 + 3 + 2 + SLACK_S)));

/// `executor.rs`: a target that is back is asked after 5 s at the latest (`IN_DOUBT_PAUSE`), and by `order.rs` it says
/// within 4 s whether the VM runs (`RUNS_WITHIN`).
const BY_TARGET: Promise = promise(Bound::BeyondFaults(Duration::from_secs(5 + 4 + SLACK_S)));

/// `executor/post_copy.rs`: a source that is back connects within 5 s (`RECONNECTED_WITHIN`) to a target that it asks
/// every 5 s (`IN_DOUBT_PAUSE`). Meanwhile the VM waits for pages, but is not paused.
const BY_CONNECTION: Promise =
    Promise { not_paused: None, ..promise(Bound::BeyondFaults(Duration::from_secs(5 + 5 + SLACK_S))) };

const fn promise(disturbed: Bound) -> Promise {
    Promise { undisturbed: UNDISTURBED, disturbed, not_paused: Some(UNDISTURBED) }
}

/// The first ones represent each kind of fault.
pub(super) const SCENARIOS: &[Scenario] = &[
    killed("source's agent just after the pause, tcp", Moment::Paused, PAUSED_LONG_MS, TCP),
    outage("all links down in a later round, multichannel", FaultKind::AllLinksDown, MULTICHANNEL),
    killed(
        "source's agent as the VM runs on the target, encrypted post-copy",
        Moment::Resumed,
        RESUMED_MS,
        ENCRYPTED_POST_COPY,
    ),
    Scenario {
        goes_on: GoesOn::AtOnce,
        ..killed(
            "source's agent as the VM runs on the target, which it leaves at once",
            Moment::Resumed,
            RESUMED_MS,
            MULTICHANNEL,
        )
    },
    Scenario {
        goes_on: GoesOn::WhenTold,
        faults: at(FaultKind::FullJournal, HostRole::Target, Moment::Resumed, RESUMED_MS, 200..600),
        ..quiet("target's journal disk full as the VM runs there, which it leaves as soon as that is said")
    },
    Scenario {
        faults: [
            Some(aimed(FaultKind::FreezeAgent, HostRole::Source, Moment::Resumed, RESUMED_MS, FROZEN_MS)),
            Some(aimed(
                FaultKind::SpoilJournal(Spoil::Delete),
                HostRole::Target,
                Moment::Resumed,
                RESUMED_MS,
                GONE_MS,
            )),
        ],
        ..quiet("target's journal deleted as the VM runs there, source's agent frozen")
    },
    spoiled("source's journal replaced by an older one as the VM runs on the target", Spoil::PutBackOlder),
    Scenario {
        faults: [
            Some(aimed(FaultKind::FreezeAgent, HostRole::Source, Moment::Resumed, RESUMED_MS, FROZEN_MS)),
            Some(aimed(FaultKind::FloodOfDeletes, HostRole::Target, Moment::Resumed, RESUMED_MS, GONE_MS)),
        ],
        outlasts_errands: true,
        ..quiet("2500 deletes of a third host as the VM runs on the target, source's agent frozen")
    },
    Scenario {
        bed: SLOW,
        dirty_mib_per_s: QUIET_ON_SLOW_LINKS,
        faults: at(
            FaultKind::LargeFramesVanish { link: 0 },
            HostRole::Source,
            Moment::Active,
            0..1_500,
            8_000..8_001,
        ),
        promise: BY_SOURCE,
        completes: true,
        ..quiet("large frames vanish on one link")
    },
    Scenario {
        bed: SLOW,
        dirty_mib_per_s: QUIET_ON_SLOW_LINKS,
        faults: at(FaultKind::BusyMachine, HostRole::Source, Moment::IncomingVm, 0..1_500, 3_000..6_000),
        completes: true,
        keeps_paths: true,
        ..quiet("16 programs want both cores, paths are healthy")
    },
    Scenario {
        faults: [
            Some(aimed(HOUR_AHEAD, HostRole::Source, Moment::Active, IN_FLIGHT_MS, WRONG_MS)),
            Some(aimed(FIFTY_MINUTES_BEHIND, HostRole::Target, Moment::Active, IN_FLIGHT_MS, WRONG_MS)),
        ],
        outlasts_errands: true,
        completes: true,
        keeps_paths: true,
        ..quiet("source's clock an hour ahead in flight, target's fifty minutes behind")
    },
    Scenario {
        faults: at(FaultKind::KillQemu, HostRole::Source, Moment::Active, IN_FLIGHT_MS, 0..1),
        ..quiet("source's QEMU")
    },
    Scenario { completes: true, keeps_paths: true, ..quiet("nothing, for comparison") },
    // The rest.
    Scenario {
        faults: at(FaultKind::KillQemu, HostRole::Target, Moment::Active, IN_FLIGHT_MS, 0..1),
        ..quiet("target's QEMU")
    },
    killed("source's agent just after the pause, multichannel", Moment::Paused, PAUSED_MS, MULTICHANNEL),
    killed("source's agent just after the pause, encrypted", Moment::Paused, PAUSED_LONG_MS, ENCRYPTED),
    killed("source's agent just after the pause, compression", Moment::Paused, PAUSED_LONG_MS, COMPRESSION),
    killed("source's agent in flight, multichannel", Moment::Active, IN_FLIGHT_MS, MULTICHANNEL),
    killed("source's agent in flight, encrypted", Moment::Active, IN_FLIGHT_MS, ENCRYPTED),
    killed("source's agent as the VM runs on the target, post-copy", Moment::Resumed, RESUMED_MS, POST_COPY),
    Scenario {
        faults: at(FaultKind::KillAgent, HostRole::Target, Moment::Paused, PAUSED_MS, GONE_MS),
        promise: BY_TARGET,
        ..quiet("target's agent just after the pause")
    },
    Scenario {
        faults: at(BEFORE_CERTIFICATES, HostRole::Source, Moment::Paused, PAUSED_MS, WRONG_MS),
        promise: BY_TARGET,
        outlasts_errands: true,
        ..quiet("source's clock before its certificates just after the pause")
    },
    spoiled("source's journal deleted as the VM runs on the target", Spoil::Delete),
    outage("all links down in a later round, encrypted", FaultKind::AllLinksDown, ENCRYPTED),
    outage("all links silent in a later round, tcp", FaultKind::AllLinksSilent, TCP),
    outage(
        "large frames vanish on all links in a later round",
        FaultKind::AllLargeFramesVanish,
        MULTICHANNEL,
    ),
];

/// A clock by which all certificates are valid.
const HOUR_AHEAD: FaultKind = FaultKind::Clock { ahead_s: 3_600 };
const FIFTY_MINUTES_BEHIND: FaultKind = FaultKind::Clock { ahead_s: -3_000 };
/// A clock by which no certificate is valid.
const BEFORE_CERTIFICATES: FaultKind = FaultKind::Clock { ahead_s: -14_400 };
const WRONG_MS: Range<u64> = 2_000..8_000;

/// How many ms later a killed agent is restarted.
const GONE_MS: Range<u64> = 2_000..2_001;

const fn aimed(
    kind: FaultKind,
    place: HostRole,
    moment: Moment,
    after_ms: Range<u64>,
    lasts_ms: Range<u64>,
) -> Aimed {
    Aimed { kind, place, moment, after_ms, lasts_ms }
}

const fn at(
    kind: FaultKind,
    place: HostRole,
    moment: Moment,
    after_ms: Range<u64>,
    lasts_ms: Range<u64>,
) -> [Option<Aimed>; 2] {
    [Some(aimed(kind, place, moment, after_ms, lasts_ms)), None]
}

/// A VM in flight for a second, without any fault.
const fn quiet(name: &'static str) -> Scenario {
    Scenario {
        name,
        bed: FAST,
        dirty_mib_per_s: QUIET,
        way: MULTICHANNEL,
        goes_on: GoesOn::No,
        faults: [None, None],
        outlasts_errands: false,
        promise: BY_GUARD,
        completes: false,
        keeps_paths: false,
    }
}

/// The source's journal is spoiled. An operator adopts it as soon as the agent, back after 2 s, says that it does not
/// believe it.
const fn spoiled(name: &'static str, way: Spoil) -> Scenario {
    let mut scenario = quiet(name);
    scenario.faults =
        at(FaultKind::SpoilJournal(way), HostRole::Source, Moment::Resumed, RESUMED_MS, GONE_MS);
    scenario
}

/// An outage, during which a VM is throttled.
const fn outage(name: &'static str, kind: FaultKind, way: MoveOptions) -> Scenario {
    let mut scenario = quiet(name);
    (scenario.bed, scenario.dirty_mib_per_s, scenario.way) = (IMPATIENT, BUSY, way);
    scenario.faults = at(kind, HostRole::Source, Moment::Active, LATER_ROUND_MS, OUTAGE_MS);
    scenario.outlasts_errands = true;
    scenario.promise = BY_SOURCE;
    scenario
}

/// The source's agent is killed.
const fn killed(name: &'static str, moment: Moment, after_ms: Range<u64>, way: MoveOptions) -> Scenario {
    let mut scenario = quiet(name);
    scenario.way = way;
    if way.post_copy {
        // It begins with a VM that does not converge.
        (scenario.bed, scenario.dirty_mib_per_s, scenario.promise) = (SLOW, BUSY, BY_CONNECTION);
    }
    scenario.faults = at(FaultKind::KillAgent, HostRole::Source, moment, after_ms, GONE_MS);
    scenario
}

/// When all faults are lifted at the latest: longer than any migration here takes together with its outage.
const STORM_MAX: Duration = Duration::from_secs(70);

impl Scenario {
    pub(super) fn round(&self, random: &mut Random) -> Round {
        let way = self.way;
        let next = |at_once| Some(Next { turn: 1, at_once, insists: true, way });
        let next = match self.goes_on {
            GoesOn::No => None,
            GoesOn::AtOnce => next(true),
            GoesOn::WhenTold => next(false),
        };
        let errand = Errand::Move { vm: 0, turn: 1, way, next };
        Round {
            errands: vec![Planned { after: Duration::ZERO, errand }],
            faults: self.faults.iter().flatten().map(|aimed| aimed.fault(random)).collect(),
            storm_max: STORM_MAX,
            outlasts_errands: self.outlasts_errands,
            promise: self.promise,
        }
    }
}

impl Aimed {
    fn fault(&self, random: &mut Random) -> Fault {
        let mut within = |ms: &Range<u64>| Duration::from_millis(ms.start + random.below(ms.end - ms.start));
        Fault {
            errand: 0,
            when: When::After(self.moment, within(&self.after_ms)),
            place: self.place,
            kind: self.kind,
            lasts: within(&self.lasts_ms),
        }
    }
}
