//! Bugs between the engine and the world. Each is one that somebody could write, and that the simulation must find.

use crate::faults::Faults;
use crate::random::Random;

/// A bug of the agents that carry out the engine's actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    /// The target is ordered to run the VM before the hand-over is recorded.
    RunsBeforeRecord,
    /// A hand-over that could not be recorded is taken for recorded.
    UnrecordedHandOver,
    /// A restarted agent does not check whether the VM was handed over.
    ForgottenHandOver,
    /// The agent does not look for the VM on its source once it finds the hand-over recorded.
    VainHandOverBelieved,
    /// What is in doubt is undone.
    UndoneInDoubt,
    /// A target that does not say whether the VM runs is taken to have let it run.
    SilenceIsSuccess,
    /// A target that does not answer is taken to have discarded the VM.
    SilenceIsDiscarded,
    /// A target that has no record of the VM is taken to have discarded it.
    UnknownIsDiscarded,
    /// A target whose QEMU does not say what it has is ordered to discard it, though the source has nothing any more.
    DiscardsOnlyCopy,
    /// An agent waits for an answer without a deadline.
    NoDeadline,
    /// The target starts the VM on each order to run it.
    TwoStarts,
    /// The target says that it discarded the VM, but does not remember it.
    ForgottenDiscard,
    /// A target's restarted agent ends a VM that it was ordered to run.
    DroppedMigration,
    /// An agent trusts a journal from before the hand-over.
    OlderJournalBelieved,
    /// A VM is started without a question to the hosts that may have it.
    StartsUnasked,
    /// Records of unsettled migrations are forgotten.
    PrunesUnsettled,
    /// A host may order another host's migration given up.
    ThirdHostCloses,
    /// A question from another host counts as a sign of life of the source.
    ThirdHostIsSign,
    /// A VM that leaves its target for a third host leaves the migration that brought it open there.
    LeavingKeepsMigration,
    /// The target says that the VM runs when that is only recorded.
    BelievedRecord,
    /// The target settles a migration that is recorded as running, though nobody has let the VM run.
    SettledUnrun,
    /// The target takes the disks as soon as it has the VM's state.
    TakesDisksEarly,
    /// A VM whose QEMU ended before any order to run it counts as one that has run there.
    GoneIsRun,
    /// The target lets the VM run before it has all of its state.
    RunsIncomplete,
    /// With post-copy: the target says that the VM runs, but not that a part of it is still to come.
    RestForgotten,
    /// With post-copy: the target is ordered to run the VM, without a check whether the source has let it run on.
    RunsDoubted,
    /// With post-copy: the source counts as having let go of the VM as soon as its QEMU says that post-copy is active.
    StatusBelieved,
    /// With post-copy: only the hypervisor stops the VM, and lets it run on if its connection breaks at the end.
    StoppedByHypervisor,
    /// With post-copy: a target whose QEMU refuses to let the VM run discards it, though the source cannot run it.
    TakesPartBack,
    /// With post-copy: a target whose QEMU has been mute since the order to run says that it awaits that order.
    MuteIsReady,
    /// With post-copy: a target that is to end a VM with a missing part does not wait for the source's last bytes.
    EndsAtOnce,
    /// With post-copy: the target ends a VM whose QEMU is mute, and may have received everything.
    MuteIsEnded,
    /// With post-copy: the target listens again, but keeps the connection that looks whole.
    CutForgotten,
    /// With post-copy: the target takes up an attempt to connect again although there was a later one.
    LateAttempt,
    /// A second order to build the incoming VM replaces the first one's hypervisor.
    BuildsTwice,
    /// The guard lets the VM run without forbidding the hand-over.
    GuardDoesNotForbid,
    /// The guard of a paused VM cuts QEMU off only after twice the time that the QEMU of a running VM may take.
    GuardWaits,
    /// The guard orders the target to run a VM whose hand-over is recorded, without asking the source's QEMU.
    RecordBelieved,
    /// An agent that wakes up does not check whether its guard has acted.
    ForbiddenIgnored,
    /// The VM is reported as running on its source when nobody has looked.
    NotLookedAt,
    /// A VM that ended on its target after the order to run is reported as running there.
    EndedIsRunning,
    /// A host that does not answer counts as lost.
    LostTooSoon,
    /// The VM stays throttled while nothing arrives.
    ThrottleKept,
    /// The VM is still throttled after it has been sent, or when it stays.
    ThrottleLeft,
    /// The source ends the copies of disks after the hand-over is recorded.
    CopiesEndAfterRecord,
    /// The source ends the copies as soon as everything has been copied, while the VM still writes.
    CopiesEndEarly,
    /// With writes held back, the source ends the copies once the VM is paused, before everything written is there.
    HeldCopiesEndEarly,
    /// The VM's writes are still held back when it stays.
    WritesStayHeld,
    /// The target lets its source write to the disks of a running VM.
    DisksLeftOpen,
    /// A migration that is to be encrypted is not.
    Clear,
    /// Another option is used, and nobody hears of it.
    SilentFallback,
    /// The target promises memory, and does not remember it.
    Unreserved,
    // Bugs that only domains can show.
    /// The agent keeps libvirt's job, with its connection, when the hand-over is recorded.
    JobKept,
    /// The agent believes what a restarted libvirt says before it has looked after its domain.
    RestartedBelieved,
    /// The agent does not check that the guest still stands still when nobody can let it run any more.
    ResumedUnseen,
    /// The target's libvirt lets the guest run as soon as it has arrived.
    FinishLetsRun,
    /// The target's libvirt takes the last of the guest before the hand-over is recorded.
    TakesLastEarly,
    /// The target discards a domain without a look whether others have let it run.
    DiscardsUnlooked,
    /// The target forgets that others have let a domain run once its QEMU has ended.
    LetRunForgotten,
    /// What libvirt cannot end now is not noted, to be ended later.
    EndsUnnoted,
}

impl Planted {
    /// The faults under which the bug is sought.
    pub(crate) fn draw(self) -> fn(&mut Random) -> Faults {
        match self {
            Self::Unreserved
            | Self::JobKept
            | Self::RestartedBelieved
            | Self::ResumedUnseen
            | Self::FinishLetsRun
            | Self::EndsUnnoted => Faults::draw_of_domain,
            Self::TakesLastEarly | Self::DiscardsUnlooked | Self::LetRunForgotten => {
                Faults::draw_of_resumed_domain
            }
            Self::LateAttempt => Faults::draw_of_attempts,
            _ => Faults::draw,
        }
    }

    /// The rules that the bug breaks, each by words of its message.
    pub(crate) fn shows_as(self) -> &'static [&'static str] {
        match self {
            Self::Nothing => &[],
            Self::RunsBeforeRecord | Self::UnrecordedHandOver | Self::FinishLetsRun | Self::TakesLastEarly => &["before the hand-over is recorded"],
            Self::ForgottenHandOver
            | Self::UndoneInDoubt
            | Self::SilenceIsDiscarded
            | Self::UnknownIsDiscarded
            | Self::LeavingKeepsMigration
            | Self::TwoStarts
            | Self::GuardDoesNotForbid
            | Self::ForbiddenIgnored
            | Self::StoppedByHypervisor
            | Self::OlderJournalBelieved
            | Self::StartsUnasked
            | Self::JobKept
            | Self::RestartedBelieved
            | Self::ResumedUnseen
            | Self::DiscardsUnlooked
            | Self::LostTooSoon => &["I1"],
            Self::Unreserved => &["memory is promised twice"],
            Self::SilenceIsSuccess
            // With these three, the VM runs in part, and the source that has failed cannot send it the rest.
            | Self::RunsDoubted
            | Self::StatusBelieved
            | Self::RecordBelieved
            | Self::DiscardsOnlyCopy
            | Self::DroppedMigration
            | Self::GoneIsRun
            | Self::RestForgotten
            | Self::ThrottleKept
            | Self::ThrottleLeft
            | Self::WritesStayHeld
            | Self::GuardWaits
            | Self::ThirdHostCloses
            | Self::EndsAtOnce
            | Self::BuildsTwice
            | Self::MuteIsEnded
            | Self::LateAttempt
            | Self::TakesPartBack => &["I3"],
            // I3 when the VM is in parts: what is there is ended, though the source has the rest.
            Self::VainHandOverBelieved => &["I1", "I3"],
            Self::PrunesUnsettled => &["does not know that the VM runs there", "I1", "I3"],
            Self::ForgottenDiscard => &["I1", "I5"],
            Self::BelievedRecord => &["I3", "I5"],
            Self::TakesDisksEarly
            | Self::CopiesEndAfterRecord
            | Self::CopiesEndEarly
            | Self::HeldCopiesEndEarly
            | Self::DisksLeftOpen => &["I2"],
            // The source runs on with what its guest was before it ran at the target.
            Self::RunsIncomplete | Self::LetRunForgotten => &["I4"],
            Self::NotLookedAt | Self::EndedIsRunning => &["was seen as"],
            Self::EndsUnnoted => &["which is not so"],
            Self::NoDeadline
            | Self::SettledUnrun
            | Self::MuteIsReady
            | Self::CutForgotten
            | Self::ThirdHostIsSign => &["I5"],
            Self::Clear | Self::SilentFallback => &["I6"],
        }
    }
}
