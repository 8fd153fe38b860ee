//! What may go wrong in a run, and how likely.

use crate::random::Random;

/// Chances in percent of the steps of a migration, of the messages, or of the turns of the simulation; where a comment
/// says so, per thousand turns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Faults {
    /// A migration fails.
    pub fail: u64,
    /// A target stops or begins to answer.
    pub vanish: u64,
    /// Somebody else takes or gives back memory of a target.
    pub taken: u64,
    /// A message that may be lost is lost.
    pub lost: u64,
    /// A message arrives a second time, at any later moment; or the operator names a target twice.
    pub doubled: u64,
    /// A plan cannot be made.
    pub no_plan: u64,
    /// Somebody cancels the drain, per thousand turns.
    pub cancel: u64,
    /// The agent is restarted, sometimes with its host, per thousand turns.
    pub restart: u64,
    /// A target takes no more VMs when a migration asks it for a place.
    pub busy: u64,
    /// Somebody else moves a VM by hand, per thousand turns. Such VMs may also be others than the drain's.
    pub moved: u64,
    /// A VM dirties its memory nearly as fast as it is sent, or faster: percent of the VMs.
    pub endless: u64,
    /// The journal cannot be written for a while, per thousand turns.
    pub disk_full: u64,
    /// The agent hangs for a while, per thousand turns.
    pub frozen: u64,
    /// The host is suspended, the agent is woken late, or no time passes for a while, per thousand turns.
    pub clock: u64,
    /// A target's agent hangs for a while, per thousand turns.
    pub target_frozen: u64,
    /// A target is itself drained for a while, per thousand turns.
    pub target_drained: u64,
    /// A target's host reboots, per thousand turns.
    pub target_reboots: u64,
    /// A VM can no longer be moved, or can be moved again, because it is paused or arriving; per thousand turns.
    pub immovable: u64,
    /// Somebody cancels the migration of one VM, per thousand turns.
    pub cancel_one: u64,
    /// A VM is stopped on this host, or its QEMU ends, per thousand turns.
    pub ends: u64,
    /// A drain that has ended is begun again.
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

    /// Faults of migrations, targets and messages only.
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

    /// A few kinds, mainly of hosts, clocks and disks. With all kinds at once, hardly any drain would come far enough
    /// to meet the later ones.
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

/// Something rare that has happened in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sight {
    /// A message that changes what is under way arrived twice.
    EndHeardTwice,
    PlanHeardTwice,
    /// A VM ran on its target before all its memory was there.
    InParts,
    /// An action waited for the disk.
    HeldByDisk,
    /// A migration was cancelled while its start waited for the disk.
    CancelledAhead,
    /// A migration could not begin because the disk was full.
    BegunWithoutDisk,
    /// The end of a migration could not be recorded at once.
    EndUnrecorded,
    /// The agent was restarted before it could record what had happened.
    CrashUnwritten,
    /// The guard acted while the agent hung.
    GuardActed,
    /// The agent heard several things at once when it woke up.
    HeardAtOnce,
    Suspended,
    WokenLate,
    /// A migration waited for a target that hung.
    AwaitedFrozen,
    /// A target that was itself drained refused a VM.
    RefusedByDrained,
    /// A VM that had moved left its target again.
    MovedOn,
    TargetRebooted,
    HostRebooted,
    /// A VM that the plan was to move was gone.
    BegunWhenGone,
    /// Somebody else moved a VM that the drain was to move.
    MovedByHand,
    /// Somebody else moved a VM that the drain was just about to move.
    BegunWhenMovedByHand,
    /// A restarted agent found that somebody else had moved a VM.
    FoundMovedByHand,
    /// As many VMs left the host as may at a time, some of them moved by others.
    OutboundByOthers,
    /// A drain was continued after an earlier life of the agent had moved VMs.
    CarriedOn,
    /// Somebody cancelled a migration of the drain.
    CancelledByOther,
    /// An outcome that was in doubt became known.
    Settled,
    /// The target had not let the VM run.
    Revoked,
    /// A VM moved together with its disk.
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
