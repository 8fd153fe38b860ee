//! What happens next: decisions from a seed, and from nothing else. The same seed gives the same rounds.

use std::fmt;
use std::time::Duration;

use super::ledger::Promise;
use super::random::Random;

/// Faults that are drawn begin, and last, at most this long: then all of them are lifted.
const STORM_MAX: Duration = Duration::from_secs(25);

const FAULT_MS_MIN: u64 = 200;
const FAULT_MS_MAX: u64 = 20_000;

/// Errands begin within so many ms, so that they overlap.
const BEGIN_MS_MAX: u64 = 5_000;

/// Faults that are not aimed at a moment begin within so many ms.
const UNAIMED_MS_MAX: u64 = 12_000;

/// Between a moment and a fault that is aimed at it.
const AIMED_MS_MAX: u64 = 80;

/// What a fault can be aimed at from longer away.
const FLIGHT_MS_MAX: u64 = 3_000;

/// A while of errands and faults. When it is over, all faults are lifted, and everything must settle.
#[derive(Debug, Clone)]
pub(super) struct Round {
    pub(super) errands: Vec<Planned>,
    pub(super) faults: Vec<Fault>,
    /// After that, all faults are lifted at the latest.
    pub(super) storm_max: Duration,
    /// Faults last for as long as they are to, also when all errands are over.
    pub(super) outlasts_errands: bool,
    pub(super) promise: Promise,
}

/// An errand and when it begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planned {
    pub(super) after: Duration,
    pub(super) errand: Errand,
}

/// What an operator asks for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Errand {
    /// A VM goes to the host that is `turn` further on than its own.
    Move { vm: usize, turn: usize, way: MoveOptions, next: Option<Next> },
    /// A host is emptied, and what left it is fetched back.
    DrainAndBack { host: usize, post_copy: bool, encrypt: bool },
}

/// A second move of the same VM.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next {
    pub(super) turn: usize,
    /// It begins as soon as the VM runs on its first target, instead of when that move is over.
    pub(super) at_once: bool,
    /// A refused request is repeated, for as long as the storm lasts.
    pub(super) insists: bool,
    pub(super) way: MoveOptions,
}

/// How a VM is moved.
#[derive(Debug, Clone, Copy)]
pub(super) struct MoveOptions {
    pub(super) option: &'static str,
    pub(super) encrypt: bool,
    pub(super) post_copy: bool,
    pub(super) throttle_percent: Option<u8>,
    pub(super) deadline_s: u64,
}

/// One fault, in the words of an errand's source and target.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fault {
    pub(super) errand: usize,
    pub(super) when: When,
    pub(super) place: HostRole,
    pub(super) kind: FaultKind,
    pub(super) lasts: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    /// So long after the round's begin.
    At(Duration),
    /// So long after something that the monitor sees of the errand.
    After(Moment, Duration),
}

/// Something that the monitor sees of a VM on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    /// The target has a QEMU for it.
    IncomingVm,
    /// Its memory is being sent.
    Active,
    /// It stands still on the source.
    Paused,
    /// It runs on the target.
    Resumed,
    /// The source's QEMU has ended.
    Left,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostRole {
    Source,
    Target,
    /// The host that has no part in the errand.
    Third,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultKind {
    KillAgent,
    FreezeAgent,
    KillGuard,
    FreezeGuard,
    KillQemu,
    FreezeQemu,
    LinkDown {
        link: usize,
    },
    AllLinksDown,
    Silent {
        link: usize,
        direction: &'static str,
    },
    AllLinksSilent,
    LargeFramesVanish {
        link: usize,
    },
    AllLargeFramesVanish,
    Loss {
        link: usize,
        percent: u8,
    },
    FullJournal,
    /// Its agent is killed, and comes back to what is then there.
    SpoilJournal(Spoil),
    /// Many programs want all that the machine's cores can do.
    BusyMachine,
    /// It differs from those of the other hosts; the clock since boot does not.
    Clock {
        ahead_s: i64,
    },
    /// A host with no part in it has thousands of migrations discarded that there have never been, and begins one.
    FloodOfDeletes,
}

/// What becomes of a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spoil {
    Delete,
    Empty,
    /// As it was when the round began.
    PutBackOlder,
}

/// Kinds of faults with their weights: a link of the two, and how wrong a clock is, is drawn later.
const KINDS: [(FaultKind, u64); 18] = [
    (FaultKind::KillAgent, 18),
    (FaultKind::FreezeAgent, 12),
    (FaultKind::KillGuard, 4),
    (FaultKind::FreezeGuard, 4),
    (FaultKind::KillQemu, 5),
    (FaultKind::FreezeQemu, 7),
    (FaultKind::LinkDown { link: 0 }, 7),
    (FaultKind::AllLinksDown, 6),
    (FaultKind::Silent { link: 0, direction: "both" }, 8),
    (FaultKind::AllLinksSilent, 6),
    (FaultKind::LargeFramesVanish { link: 0 }, 7),
    (FaultKind::AllLargeFramesVanish, 4),
    (FaultKind::Loss { link: 0, percent: 5 }, 6),
    (FaultKind::FullJournal, 6),
    (FaultKind::SpoilJournal(Spoil::Delete), 4),
    (FaultKind::SpoilJournal(Spoil::Empty), 2),
    (FaultKind::SpoilJournal(Spoil::PutBackOlder), 5),
    (FaultKind::Clock { ahead_s: 0 }, 8),
];

/// Certificates of a lab are valid from an hour before they are made, and for a year.
const VALID_BEFORE_S: i64 = 3_600;

/// How wrong clocks are. Before certificates are valid there is only the first: after an hour's run, too.
const CLOCKS_AHEAD_S: [i64; 8] = [-14_400, -3_000, -90, -5, 5, 90, 3_600, 86_400];

/// What faults are aimed at, the hand-over more often than the rest.
const MOMENTS: [Moment; 8] = [
    Moment::IncomingVm,
    Moment::Active,
    Moment::Active,
    Moment::Paused,
    Moment::Paused,
    Moment::Resumed,
    Moment::Resumed,
    Moment::Left,
];

/// What there is to decide about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) vms: usize,
    pub(super) hosts: usize,
    pub(super) links: usize,
    /// At a time, without drains.
    pub(super) moves_max: usize,
}

/// The next round.
pub(super) fn round(random: &mut Random, bounds: Bounds) -> Round {
    let errands = if random.chance(20) { vec![drain(random, bounds)] } else { moves(random, bounds) };
    let count = 1 + random.index(6);
    let faults = (0..count).map(|_| fault(random, bounds, errands.len())).collect();
    Round {
        errands,
        faults,
        storm_max: STORM_MAX,
        outlasts_errands: false,
        promise: Promise::WHATEVER_HAPPENS,
    }
}

fn drain(random: &mut Random, bounds: Bounds) -> Planned {
    let errand = Errand::DrainAndBack {
        host: random.index(bounds.hosts),
        post_copy: random.chance(30),
        encrypt: random.chance(30),
    };
    Planned { after: Duration::ZERO, errand }
}

/// Each of another VM: who asks for two migrations of one VM at a time is refused, which is no news.
fn moves(random: &mut Random, bounds: Bounds) -> Vec<Planned> {
    let mut vms: Vec<usize> = (0..bounds.vms).collect();
    let count = 1 + random.index(bounds.moves_max.min(bounds.vms));
    (0..count)
        .map(|_| {
            let vm = vms.swap_remove(random.index(vms.len()));
            let errand =
                Errand::Move { vm, turn: turn(random, bounds), way: way(random), next: next(random, bounds) };
            Planned { after: milliseconds(random, 0, BEGIN_MS_MAX), errand }
        })
        .collect()
}

fn next(random: &mut Random, bounds: Bounds) -> Option<Next> {
    random.chance(35).then(|| Next {
        turn: turn(random, bounds),
        at_once: random.chance(60),
        insists: false,
        way: way(random),
    })
}

fn turn(random: &mut Random, bounds: Bounds) -> usize {
    1 + random.index(bounds.hosts - 1)
}

fn way(random: &mut Random) -> MoveOptions {
    let option = ["tcp", "compression", "multichannel", "auto"][random.index(4)];
    let encrypt = random.chance(40);
    // It goes over one connection.
    let post_copy = random.chance(25);
    MoveOptions {
        option: if post_copy { "tcp" } else { option },
        encrypt,
        post_copy,
        throttle_percent: [None, Some(0), Some(99)][random.index(3)],
        deadline_s: 30 + random.below(60),
    }
}

fn fault(random: &mut Random, bounds: Bounds, errands: usize) -> Fault {
    let kind = kind(random, bounds);
    let place = [HostRole::Source, HostRole::Source, HostRole::Target, HostRole::Target, HostRole::Third]
        [random.index(5)];
    Fault {
        errand: random.index(errands),
        when: when(random),
        place: if is_of_a_vm(kind) && place == HostRole::Third { HostRole::Source } else { place },
        kind,
        lasts: lasts(random),
    }
}

fn is_of_a_vm(kind: FaultKind) -> bool {
    matches!(
        kind,
        FaultKind::KillGuard | FaultKind::FreezeGuard | FaultKind::KillQemu | FaultKind::FreezeQemu
    )
}

/// Half of them at moments of the hand-over, which a time drawn at random meets seldom.
fn when(random: &mut Random) -> When {
    if random.chance(30) {
        return When::At(milliseconds(random, 0, UNAIMED_MS_MAX));
    }
    let moment = MOMENTS[random.index(MOMENTS.len())];
    let max = if moment == Moment::Active { FLIGHT_MS_MAX } else { AIMED_MS_MAX };
    When::After(moment, milliseconds(random, 0, max))
}

/// As many short ones as long ones.
fn lasts(random: &mut Random) -> Duration {
    let scale = [1_000, 4_000, FAULT_MS_MAX][random.index(3)];
    milliseconds(random, FAULT_MS_MIN, scale)
}

fn kind(random: &mut Random, bounds: Bounds) -> FaultKind {
    let total = KINDS.iter().map(|(_, weight)| weight).sum();
    let mut drawn = random.below(total);
    let (kind, _) = KINDS
        .iter()
        .find(|(_, weight)| {
            let is_it = drawn < *weight;
            drawn = drawn.saturating_sub(*weight);
            is_it
        })
        .expect("what is drawn is below the sum");
    let link = random.index(bounds.links);
    match kind {
        FaultKind::LinkDown { .. } => FaultKind::LinkDown { link },
        FaultKind::Silent { .. } => {
            FaultKind::Silent { link, direction: ["both", "receive", "send"][random.index(3)] }
        }
        FaultKind::LargeFramesVanish { .. } => FaultKind::LargeFramesVanish { link },
        FaultKind::Loss { .. } => FaultKind::Loss { link, percent: [1, 5, 20][random.index(3)] },
        FaultKind::Clock { .. } => {
            FaultKind::Clock { ahead_s: CLOCKS_AHEAD_S[random.index(CLOCKS_AHEAD_S.len())] }
        }
        other => *other,
    }
}

fn milliseconds(random: &mut Random, min: u64, max: u64) -> Duration {
    Duration::from_millis(min + random.below(max - min + 1))
}

impl FaultKind {
    /// No certificate is valid yet by that clock.
    pub(super) fn is_before_certificates(self) -> bool {
        matches!(self, Self::Clock { ahead_s } if ahead_s < -VALID_BEFORE_S)
    }

    /// What it is counted as.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::KillAgent => "agent killed, started again later",
            Self::FreezeAgent => "agent frozen",
            Self::KillGuard => "guard killed",
            Self::FreezeGuard => "guard frozen",
            Self::KillQemu => "QEMU killed",
            Self::FreezeQemu => "QEMU frozen",
            Self::LinkDown { .. } => "link down",
            Self::AllLinksDown => "all links of a host down",
            Self::Silent { .. } => "link silent",
            Self::AllLinksSilent => "all links of a host silent",
            Self::LargeFramesVanish { .. } => "link drops large frames",
            Self::AllLargeFramesVanish => "all links of a host drop large frames",
            Self::Loss { .. } => "packets lost",
            Self::FullJournal => "journal's disk full",
            Self::SpoilJournal(Spoil::Delete) => "journal deleted, its agent killed",
            Self::SpoilJournal(Spoil::Empty) => "journal emptied, its agent killed",
            Self::SpoilJournal(Spoil::PutBackOlder) => "older journal put back, its agent killed",
            Self::BusyMachine => "machine busy",
            Self::Clock { .. } if self.is_before_certificates() => "clock put back before the certificates",
            Self::Clock { ahead_s } if ahead_s < 0 => "clock put back",
            Self::Clock { .. } => "clock put forward",
            Self::FloodOfDeletes => "flood of deletes",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { errand, when, place, kind, lasts } = self;
        write!(f, "{kind:?} at {place:?} of errand {errand}, {when:?}, for {lasts:?}")
    }
}
