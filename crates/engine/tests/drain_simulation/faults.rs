//! What may go wrong in a run, and how likely.

use crate::random::Random;

/// Chances in percent: of each step of a migration, of each message, or of each turn of the simulation; per thousand
/// turns where that is said.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Faults {
    /// A migration fails.
    pub fail: u64,
    /// A target stops or begins to answer.
    pub vanish: u64,
    /// Somebody else takes or gives back memory of a target.
    pub taken: u64,
    /// A message that may be lost is.
    pub lost: u64,
    /// A message comes once more, at any time later; a target is named twice.
    pub doubled: u64,
    /// A plan cannot be made.
    pub no_plan: u64,
    /// Somebody cancels the drain, per thousand turns.
    pub cancel: u64,
    /// The agent is started anew, sometimes with its host, per thousand turns.
    pub restart: u64,
    /// Its target takes no more VMs at a time when a migration asks for its place.
    pub busy: u64,
    /// Somebody else moves a VM by hand, per thousand turns; others leave this host beside those of the drain.
    pub moved: u64,
    /// A VM's memory gets dirty nearly as fast as it is sent, or faster: percent of the VMs.
    pub endless: u64,
    /// The journal cannot be written for a while, per thousand turns.
    pub disk_full: u64,
    /// The agent stands still for a while, per thousand turns.
    pub frozen: u64,
    /// The host is suspended, the agent is woken late, or no time passes for a while, per thousand turns.
    pub clock: u64,
    /// A target's agent stands still for a while, per thousand turns.
    pub target_frozen: u64,
    /// A target is drained itself, for a while, per thousand turns.
    pub target_drained: u64,
    /// A target's host reboots, per thousand turns.
    pub target_reboots: u64,
    /// A VM becomes one that cannot be moved, or can be moved again: it is paused, or arrives. Per thousand turns.
    pub immovable: u64,
    /// Somebody cancels the migration of one VM, per thousand turns.
    pub cancel_one: u64,
    /// A VM is stopped here, or its QEMU ends, per thousand turns.
    pub ends: u64,
    /// What has ended is begun again.
    pub again: u64,
}

impl Faults {
    pub(crate) const NONE: Self = Self {
        fail: 0,
        vanish: 0,
        taken: 0,
        lost: 0,
        doubled: 0,
        no_plan: 0,
        cancel: 0,
        restart: 0,
        busy: 0,
        moved: 0,
        endless: 0,
        disk_full: 0,
        frozen: 0,
        clock: 0,
        target_frozen: 0,
        target_drained: 0,
        target_reboots: 0,
        immovable: 0,
        cancel_one: 0,
        ends: 0,
        again: 0,
    };

    /// Of migrations, targets and messages.
    pub(crate) fn up_to(percent: u64) -> Self {
        Self {
            fail: percent,
            vanish: percent / 2,
            taken: percent / 2,
            lost: percent,
            doubled: percent,
            no_plan: percent,
            cancel: percent / 4,
            restart: percent / 4,
            busy: percent * 3,
            moved: percent,
            endless: percent,
            ..Self::NONE
        }
    }

    /// A few kinds, of hosts, clocks and disks above all: with all of them at once hardly a drain would come far
    /// enough to meet the later ones.
    pub(crate) fn draw(random: &mut Random) -> Self {
        let few = [0, 1, 5][random.index(3)];
        let mut some = |most: u64| if random.chance(35) { 1 + random.below(most) } else { 0 };
        Self {
            doubled: some(60),
            restart: some(12),
            disk_full: some(20),
            frozen: some(20),
            clock: some(20),
            target_frozen: some(20),
            target_drained: some(20),
            target_reboots: some(8),
            immovable: some(20),
            cancel_one: some(20),
            ends: some(6),
            moved: some(20),
            again: some(80),
            ..Self::up_to(few)
        }
    }

    /// Whether somebody but this drain may take a target's memory.
    pub(crate) fn memory_is_taken(&self) -> bool {
        self.taken > 0 || self.target_drained > 0
    }
}

/// That this seldom thing has happened in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sight {
    /// A message came twice that changes what is under way.
    EndHeardTwice,
    PlanHeardTwice,
    /// A VM ran on its target before all its memory was there.
    InParts,
    /// Something that was to be done waited for the disk.
    HeldByDisk,
    /// It was cancelled meanwhile.
    CancelledAhead,
    /// A migration could not be begun, since the disk was full.
    BegunWithoutDisk,
    /// How a migration ended could not be written down at once.
    EndUnrecorded,
    /// What was not written down, and then the agent was started anew.
    CrashUnwritten,
    /// The guard has acted while the agent stood still.
    GuardActed,
    /// Several things were heard at once when the agent woke up.
    HeardAtOnce,
    Suspended,
    WokenLate,
    /// A migration waited for a target that stood still.
    AwaitedFrozen,
    /// A target that is drained itself refused a VM.
    RefusedByDrained,
    /// A VM that had moved went on from its target.
    MovedOn,
    TargetRebooted,
    HostRebooted,
    /// A VM that was planned to move was gone.
    BegunWhenGone,
    /// A VM that was to move was moved by somebody else.
    MovedByHand,
    /// It was to be begun just then.
    BegunWhenMovedByHand,
    /// An agent that started anew found that somebody else had moved a VM.
    FoundMovedByHand,
    /// As many left as may, by migrations of somebody else too.
    OutboundByOthers,
    /// A drain was carried on with what an earlier life had moved.
    CarriedOn,
    /// Somebody has cancelled a migration of the drain.
    CancelledByOther,
    /// An outcome that was not known is.
    Settled,
    /// The target had not let it run.
    Revoked,
    /// A VM went with its disk.
    DiskCopied,
}

impl Sight {
    pub(crate) const ALL: [Self; 27] = [
        Self::EndHeardTwice,
        Self::PlanHeardTwice,
        Self::InParts,
        Self::HeldByDisk,
        Self::CancelledAhead,
        Self::BegunWithoutDisk,
        Self::EndUnrecorded,
        Self::CrashUnwritten,
        Self::GuardActed,
        Self::HeardAtOnce,
        Self::Suspended,
        Self::WokenLate,
        Self::AwaitedFrozen,
        Self::RefusedByDrained,
        Self::MovedOn,
        Self::TargetRebooted,
        Self::HostRebooted,
        Self::BegunWhenGone,
        Self::MovedByHand,
        Self::BegunWhenMovedByHand,
        Self::FoundMovedByHand,
        Self::OutboundByOthers,
        Self::CarriedOn,
        Self::CancelledByOther,
        Self::Settled,
        Self::Revoked,
        Self::DiskCopied,
    ];
}
