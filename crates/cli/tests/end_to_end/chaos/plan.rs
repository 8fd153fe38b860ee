//! What happens next: decisions that depend on a seed alone. The same seed gives the same rounds.

use std::fmt;
use std::time::Duration;

use super::ledger::Promise;
use super::random::Random;

/// Random faults begin within this time and last at most as long; then all of them are lifted.
const STORM_MAX: Duration = Duration::from_secs(25);

const FAULT_MS_MIN: u64 = 200;
const FAULT_MS_MAX: u64 = 20_000;

/// Errands begin within this many ms, so that they overlap.
const BEGIN_MS_MAX: u64 = 5_000;

/// Faults that are not aimed at a moment begin within this many ms.
const UNAIMED_MS_MAX: u64 = 12_000;

/// The longest time between a moment and a fault that is aimed at it.
const AIMED_MS_MAX: u64 = 80;

/// The same for a fault that is aimed at the flight.
const FLIGHT_MS_MAX: u64 = 3_000;

/// A while of errands and faults. At its end, all faults are lifted, and everything must settle.
#[derive(Debug, Clone)]
pub(super) struct Round {
    pub(super) errands: Vec<Planned>,
    pub(super) faults: Vec<Fault>,
    /// All faults are lifted after this time at the latest.
    pub(super) storm_max: Duration,
    /// Whether faults last their full time even when all errands are over.
    pub(super) outlasts_errands: bool,
    pub(super) promise: Promise,
}

/// An errand and when it begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planned {
    pub(super) after: Duration,
    pub(super) errand: Errand,
}

/// An operator's request.
#[derive(Debug, Clone, Copy)]
pub(super) enum Errand {
    /// A VM moves to the host that is `turn` places after its own.
    Move { vm: usize, turn: usize, way: MoveOptions, next: Option<Next> },
    /// A host is drained, and its VMs are then brought back.
    DrainAndBack { host: usize, post_copy: bool, encrypt: bool },
}

/// A second move of the same VM.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next {
    pub(super) turn: usize,
    /// Whether it begins as soon as the VM runs on its first target, and not when that move is over.
    pub(super) at_once: bool,
    /// Whether a refused request is repeated while the storm lasts.
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

/// A fault, by the roles of an errand's hosts.
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
    /// This long after the beginning of the round.
    At(Duration),
    /// This long after something that the monitor sees of the errand.
    After(Moment, Duration),
}

/// Something that the monitor sees of a VM on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moment {
    /// The target has a QEMU for the VM.
    IncomingVm,
    /// The VM's memory is being sent.
    Active,
    /// The VM stands still on the source.
    Paused,
    /// The VM runs on the target.
    Resumed,
    /// The source's QEMU has ended.
    Left,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostRole {
    Source,
    Target,
    /// The host that takes no part in the errand.
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
    /// A host's agent is killed, and finds this journal when it comes back.
    SpoilJournal(Spoil),
    /// Many programs want all of the machine's CPU time.
    BusyMachine,
    /// A host's wall clock differs from those of the other hosts; its clock since boot does not.
    Clock {
        ahead_s: i64,
    },
    /// An uninvolved host orders thousands of migrations discarded that never existed, and begins one.
    FloodOfDeletes,
}

/// What happens to a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spoil {
    Delete,
    Empty,
    /// It is replaced by a copy from the beginning of the round.
    PutBackOlder,
}

/// The kinds of faults with their weights. Which of the two links fails, and how wrong a clock is, is drawn later.
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

/// The certificates of a lab are valid from an hour before they are made, for a year.
const VALID_BEFORE_S: i64 = 3_600;

/// How wrong clocks may be. Even after an hour's run, only the first is before the certificates are valid.
const CLOCKS_AHEAD_S: [i64; 8] = [-14_400, -3_000, -90, -5, 5, 90, 3_600, 86_400];

/// The moments at which faults are aimed: the hand-over more often than the rest.
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

/// The limits of the decisions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    pub(super) vms: usize,
    pub(super) hosts: usize,
    pub(super) links: usize,
    /// The most moves at a time, without drains.
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

/// Moves of different VMs: a second migration of the same VM would be refused, which shows nothing.
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
    // Post-copy uses one connection.
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

/// Half of the faults strike at moments of the hand-over, which a random time seldom meets.
fn when(random: &mut Random) -> When {
    if random.chance(30) {
        return When::At(milliseconds(random, 0, UNAIMED_MS_MAX));
    }
    let moment = MOMENTS[random.index(MOMENTS.len())];
    let max = if moment == Moment::Active { FLIGHT_MS_MAX } else { AIMED_MS_MAX };
    When::After(moment, milliseconds(random, 0, max))
}

/// Short and long times are equally likely.
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
    /// Whether no certificate is valid yet by that clock.
    pub(super) fn is_before_certificates(self) -> bool {
        matches!(self, Self::Clock { ahead_s } if ahead_s < -VALID_BEFORE_S)
    }

    /// The name under which it is counted.
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
