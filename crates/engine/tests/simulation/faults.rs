//! What may go wrong in a run. A seed has a few kinds of faults; each may strike at any moment, and all stop after a
//! while.

use std::fmt;

use drainpipe_engine::migration::SourceAction;

use crate::random::Random;

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    // Any message, order or path may meet these.
    Lost,
    Duplicated,
    Delayed,
    Refused,
    RunRefused,
    DeadPath,
    /// With post-copy: the source sends the last byte, but takes the transfer for failed, and lets the VM run.
    FailsWhenSent,
    /// With post-copy: the connection breaks after all of the rest is sent, before the source hears that it arrived.
    LastWordBreaks,
    /// Nobody does anything until the next deadline.
    Slow,
    // These strike at any moment.
    Partition,
    StreamBreaks,
    SourceCrashes,
    SourceFreezes,
    SourceReboots,
    SourceDiskFull,
    SourceQemuMute,
    SourceQemuEnds,
    GuardEnds,
    GuardsAreSlow,
    /// The source's journal is replaced by one from before the hand-over.
    SourceJournalOlder,
    TargetCrashes,
    TargetFreezes,
    TargetReboots,
    TargetDiskFull,
    TargetQemuMute,
    TargetQemuEnds,
    TargetLost,
    TargetJournalLost,
    /// Somebody moves the VM on from its target to a third host, or tries to.
    MovesOn,
    /// The target forgets settled migrations.
    TargetForgets,
    /// A third host asks about the migration, and orders the target to discard it.
    Meddles,
    Cancelled,
    ClockJumps,
    // These strike a domain.
    /// libvirt is asked to end.
    SourceLibvirtTerminated,
    SourceLibvirtKilled,
    TargetLibvirtTerminated,
    TargetLibvirtKilled,
    /// The owner resumes the guest.
    OwnerResumes,
    /// The owner resumes the guest at its target, or waits there for libvirt to let him.
    OwnerResumesTarget,
    /// A VM of another host asks for memory, takes what it was promised, or gives it up.
    NeighbourGoesOn,
}

impl Fault {
    const BY_CHANCE: [Self; 9] = [
        Self::Lost,
        Self::Duplicated,
        Self::Delayed,
        Self::Refused,
        Self::RunRefused,
        Self::DeadPath,
        Self::FailsWhenSent,
        Self::LastWordBreaks,
        Self::Slow,
    ];
    const AT_SOURCE: [Self; 9] = [
        Self::SourceCrashes,
        Self::SourceFreezes,
        Self::SourceReboots,
        Self::SourceDiskFull,
        Self::SourceQemuMute,
        Self::SourceQemuEnds,
        Self::GuardEnds,
        Self::GuardsAreSlow,
        Self::SourceJournalOlder,
    ];
    const AT_TARGET: [Self; 12] = [
        Self::TargetCrashes,
        Self::TargetFreezes,
        Self::TargetReboots,
        Self::TargetDiskFull,
        Self::TargetQemuMute,
        Self::TargetQemuEnds,
        // Twice, since few targets that come back find that the VM was given back meanwhile.
        Self::TargetLost,
        Self::TargetLost,
        Self::TargetJournalLost,
        Self::MovesOn,
        Self::TargetForgets,
        Self::Meddles,
    ];
    const AT_DOMAINS_SOURCE: [Self; 10] = [
        Self::SourceLibvirtTerminated,
        Self::SourceLibvirtKilled,
        Self::OwnerResumes,
        Self::SourceCrashes,
        Self::SourceFreezes,
        Self::SourceReboots,
        Self::SourceDiskFull,
        Self::SourceQemuMute,
        Self::SourceQemuEnds,
        Self::GuardEnds,
    ];
    const AT_DOMAINS_TARGET: [Self; 10] = [
        Self::OwnerResumesTarget,
        Self::NeighbourGoesOn,
        Self::TargetLibvirtTerminated,
        Self::TargetLibvirtKilled,
        Self::TargetCrashes,
        Self::TargetFreezes,
        Self::TargetReboots,
        Self::TargetDiskFull,
        Self::TargetQemuMute,
        Self::TargetQemuEnds,
    ];
    /// These may come between a domain's end of sending and the record that it runs at its target.
    const AROUND_RUN: [Self; 9] = [
        Self::SourceCrashes,
        Self::Partition,
        Self::TargetLibvirtKilled,
        Self::TargetCrashes,
        Self::TargetFreezes,
        Self::TargetDiskFull,
        Self::TargetQemuMute,
        Self::TargetQemuMute,
        Self::TargetQemuEnds,
    ];
    const BETWEEN: [Self; 4] = [Self::Partition, Self::StreamBreaks, Self::Cancelled, Self::ClockJumps];
}

/// Undisturbed, a migration is over within this many steps.
const STEPS_MIN: u64 = 100;

/// The chance of a fault per step in the moment at which faults gather.
const GATHERING_PER_MILLE: u64 = 150;

/// The moments at which faults may gather.
const MOMENTS: [SourceAction; 20] = [
    SourceAction::CheckPermissions,
    SourceAction::BuildIncomingVm,
    SourceAction::ConnectHosts,
    SourceAction::StartTransfer,
    SourceAction::BeginPostCopy,
    SourceAction::SwitchOver,
    SourceAction::RecordHandOver,
    SourceAction::ResumeOnTarget,
    SourceAction::AskSource,
    SourceAction::AskTarget,
    SourceAction::Reconnect,
    SourceAction::EndOnTarget,
    SourceAction::EndOnSource,
    SourceAction::RevokeHandOver,
    SourceAction::CleanUp,
    SourceAction::StopTransfer,
    SourceAction::ResumeOnSource,
    SourceAction::DiscardTarget,
    SourceAction::PutBack,
    SourceAction::Finish,
];

/// The faults of one run.
#[derive(Debug, Clone)]
pub(crate) struct Faults {
    by_chance: Vec<Fault>,
    percent: u64,
    sudden: Vec<Fault>,
    per_mille: u64,
    steps_left: u64,
    moment: Option<SourceAction>,
    density: Density,
    are_of_domain: bool,
}

/// How often faults strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Density {
    Few,
    /// While the VM's owner is being decided, which takes few steps of many.
    Many,
    /// In the moment at which faults are to gather.
    Gathering,
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?} at {} %, {:?}", self.by_chance, self.percent, self.sudden)
    }
}

impl Faults {
    pub(crate) fn none() -> Self {
        Self {
            by_chance: vec![],
            percent: 0,
            sudden: vec![],
            per_mille: 0,
            steps_left: STEPS_MIN,
            moment: None,
            density: Density::Few,
            are_of_domain: false,
        }
    }

    pub(crate) fn none_of_domain() -> Self {
        Self { are_of_domain: true, ..Self::none() }
    }

    /// Somebody cancels, once or several times; nothing else goes wrong.
    pub(crate) fn only_cancelled() -> Self {
        Self { sudden: vec![Fault::Cancelled], per_mille: 10, ..Self::none() }
    }

    /// A few kinds of faults, at one place or at several. With all kinds at once, hardly any migration would come far
    /// enough to meet the later ones.
    pub(crate) fn draw(random: &mut Random) -> Self {
        Self::draw_at(&[&Fault::AT_SOURCE, &Fault::AT_TARGET, &Fault::BETWEEN], random)
    }

    pub(crate) fn draw_of_domain(random: &mut Random) -> Self {
        let places: [&[Fault]; 3] = [&Fault::AT_DOMAINS_SOURCE, &Fault::AT_DOMAINS_TARGET, &Fault::BETWEEN];
        Self { are_of_domain: true, ..Self::draw_at(&places, random) }
    }

    /// The owner resumes the domain at its target, and little else goes wrong but around the order to run.
    pub(crate) fn draw_of_resumed_domain(random: &mut Random) -> Self {
        let by_chance = [Fault::Lost, Fault::Duplicated, Fault::Delayed, Fault::RunRefused];
        let mut sudden = vec![Fault::OwnerResumesTarget];
        let kinds = 1 + random.below(3);
        sudden.extend((0..kinds).map(|_| Fault::AROUND_RUN[random.index(Fault::AROUND_RUN.len())]));
        let moments = [SourceAction::ResumeOnTarget, SourceAction::AskTarget];
        Self {
            by_chance: by_chance.into_iter().filter(|_| random.chance(50)).collect(),
            percent: 2 + random.below(30),
            sudden,
            per_mille: [2, 4, 8, 16][random.index(4)],
            steps_left: STEPS_MIN + random.below(200),
            moment: Some(moments[random.index(moments.len())]),
            ..Self::none_of_domain()
        }
    }

    /// Connections break again and again, and messages come late or twice, some after an attempt to connect again.
    pub(crate) fn draw_of_attempts(random: &mut Random) -> Self {
        let sudden = [Fault::StreamBreaks, Fault::Partition, Fault::SourceFreezes, Fault::SourceCrashes];
        Self {
            by_chance: vec![Fault::Delayed, Fault::Duplicated],
            percent: 20 + random.below(40),
            sudden: vec![Fault::StreamBreaks, sudden[random.index(sudden.len())]],
            per_mille: [2, 4, 8][random.index(3)],
            steps_left: STEPS_MIN + random.below(600),
            moment: random.chance(50).then_some(SourceAction::Reconnect),
            ..Self::none()
        }
    }

    fn draw_at(places: &[&[Fault]], random: &mut Random) -> Self {
        let by_chance = Fault::BY_CHANCE.into_iter().filter(|_| random.chance(30)).collect();
        let mut sudden = vec![];
        for place in places {
            let kinds = if random.chance(50) { random.below(4) } else { 0 };
            sudden.extend((0..kinds).map(|_| place[random.index(place.len())]));
        }
        Self {
            by_chance,
            percent: 2 + random.below(30),
            sudden,
            per_mille: [2, 4, 8, 16][random.index(4)],
            steps_left: STEPS_MIN + random.below(200),
            moment: random.chance(50).then(|| MOMENTS[random.index(MOMENTS.len())]),
            density: Density::Few,
            are_of_domain: false,
        }
    }

    pub(crate) fn are_of_domain(&self) -> bool {
        self.are_of_domain
    }

    /// Sets how often faults strike from now on.
    pub(crate) fn gather(&mut self, action: Option<SourceAction>, is_being_decided: bool) {
        self.density = match (self.moment, is_being_decided) {
            (Some(moment), _) if action == Some(moment) => Density::Gathering,
            (_, true) => Density::Many,
            _ => Density::Few,
        };
    }

    pub(crate) fn guards_are_slow(&self) -> bool {
        self.sudden.contains(&Fault::GuardsAreSlow)
    }

    /// Whether this fault strikes the message, order or path at hand.
    pub(crate) fn meets(&self, fault: Fault, random: &mut Random) -> bool {
        let per_mille = if self.density == Density::Few { 2 * self.percent } else { 10 * self.percent };
        !self.are_over() && self.by_chance.contains(&fault) && random.below(1_000) < per_mille
    }

    /// The fault that strikes in this step, if any.
    pub(crate) fn strike(&mut self, random: &mut Random) -> Option<Fault> {
        self.steps_left = self.steps_left.saturating_sub(1);
        let per_mille = match self.density {
            Density::Few => self.per_mille,
            Density::Many => 10 * self.per_mille,
            Density::Gathering => GATHERING_PER_MILLE,
        };
        let strikes = !self.are_over() && !self.sudden.is_empty() && random.below(1_000) < per_mille;
        strikes.then(|| self.sudden[random.index(self.sudden.len())])
    }

    /// Whether nothing goes wrong any more.
    pub(crate) fn are_over(&self) -> bool {
        self.steps_left == 0
    }
}
