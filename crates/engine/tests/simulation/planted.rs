//! Bugs between the engine and the world. Each is one that somebody could write, and the simulation must find.

use crate::faults::Faults;
use crate::random::Random;

/// A bug of the agents that carry the engine's actions out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    /// The target is told to run, and then the hand-over is recorded.
    RunsBeforeRecord,
    /// A hand-over that could not be recorded is taken for recorded.
    UnrecordedHandOver,
    /// An agent that starts anew does not look whether the VM was handed over.
    ForgottenHandOver,
    /// A VM whose hand-over is found to be recorded is not looked for where it was.
    VainHandOverBelieved,
    /// What is in doubt is undone.
    UndoneInDoubt,
    /// A target that does not say whether the VM runs is taken to have let it run.
    SilenceIsSuccess,
    /// A target that does not answer is taken to have discarded the VM.
    SilenceIsDiscarded,
    /// A target that has no record of the VM is taken to have discarded it.
    UnknownIsDiscarded,
    /// A target whose QEMU does not say what it has is told to discard it, though the source has nothing any more.
    DiscardsOnlyCopy,
    /// An answer is waited for without end.
    NoDeadline,
    /// The target starts the VM each time it is told to.
    TwoStarts,
    /// The target says that it discarded the VM, and does not keep it in mind.
    ForgottenDiscard,
    /// A target's agent that starts anew ends what was told to run before.
    DroppedArrival,
    /// An agent goes by a journal from before the hand-over.
    OlderJournalBelieved,
    /// A VM is started without asking whether another host has it.
    StartsUnasked,
    /// Records of migrations are forgotten that are not settled.
    PrunesUnsettled,
    /// A host has another one's migration given up.
    ThirdHostCloses,
    /// A question of another host is taken for a sign of life of the source.
    ThirdHostIsSign,
    /// A VM that leaves its target for a third host leaves its arrival there open.
    LeavingKeepsArrival,
    /// The target says that the VM runs when that is only recorded.
    BelievedRecord,
    /// What is recorded to run is settled, though nobody has let it run.
    SettledUnrun,
    /// The target takes the disks when the state is there.
    TakesDisksEarly,
    /// A VM whose QEMU has ended before anybody told it to run is taken for one that has run there.
    GoneIsRun,
    /// Not all state is there, and the target lets the VM run.
    RunsIncomplete,
    /// With post-copy: the target says that the VM runs, and not that a part of it is still to come.
    RestForgotten,
    /// With post-copy: whether the source has let the VM run on is not looked at before the target is told to run it.
    RunsDoubted,
    /// With post-copy: the source is taken to have let go of the VM as soon as its QEMU says that post-copy is active.
    StatusBelieved,
    /// With post-copy: the hypervisor alone stops the VM, and lets it run on if its connection breaks at the end.
    StoppedByHypervisor,
    /// With post-copy: a target whose QEMU does not let the VM run discards it, though the source cannot run it.
    TakesPartBack,
    /// With post-copy: a target whose QEMU is mute since it was told to run says that it waits to be told.
    MuteIsReady,
    /// With post-copy: a target that is to end what lacks a part does not wait for the last bytes of its source.
    EndsAtOnce,
    /// With post-copy: it ends what says nothing, and may have got all.
    MuteIsEnded,
    /// With post-copy: it listens again, and leaves the connection that looks whole.
    CutForgotten,
    /// A second order to build the incoming VM has another hypervisor take the place of the first one.
    BuildsTwice,
    /// The guard lets the VM run without forbidding the hand-over.
    GuardDoesNotForbid,
    /// The guard of a paused VM waits twice for as long as QEMU may take that runs it, before it cuts it off.
    GuardWaits,
    /// The guard has the target run what is recorded to be handed over, without asking the source's QEMU.
    RecordBelieved,
    /// An agent that was asleep does not look whether its guard has acted.
    ForbiddenIgnored,
    /// The VM is said to run on its source where nobody has looked.
    NotLookedAt,
    /// A VM that has ended on its target since it was told to run is said to run there.
    EndedIsRunning,
    /// A host that does not answer is taken for lost.
    LostTooSoon,
    /// The VM is throttled as it was while nothing arrives.
    ThrottleKept,
    /// The VM is throttled once it has been sent, or stays.
    ThrottleLeft,
    /// The source ends the copies of disks once the hand-over is recorded.
    CopiesEndAfterRecord,
    /// It ends them as soon as all is there, while the VM writes.
    CopiesEndEarly,
    /// Where its writes were held back, it ends them once the VM is paused, and not once what was written is there.
    HeldCopiesEndEarly,
    /// What the VM writes is held back once it stays.
    WritesStayHeld,
    /// The target lets its source write to the disks of a VM that runs.
    DisksLeftOpen,
    /// Encryption is left out where it was asked for.
    Clear,
    /// Another option is used, and nobody is told.
    SilentFallback,
    /// The target promises memory, and does not keep that in mind.
    Unreserved,
    // Of domains.
    /// The agent keeps libvirt's job, with its connection, as the hand-over is recorded.
    JobKept,
    /// What a libvirt says that has just been started anew is believed before it has looked after its domain.
    RestartedBelieved,
    /// Whether the guest still stands still is not looked at once nobody can let it run any more.
    ResumedUnseen,
    /// The target's libvirt lets the guest run as soon as all of it is there.
    FinishLetsRun,
    /// What libvirt cannot end now is not noted to be ended later.
    EndsUnnoted,
}

impl Planted {
    /// The faults with which it is looked for.
    pub(crate) fn draw(self) -> fn(&mut Random) -> Faults {
        match self {
            Self::Unreserved
            | Self::JobKept
            | Self::RestartedBelieved
            | Self::ResumedUnseen
            | Self::FinishLetsRun
            | Self::EndsUnnoted => Faults::draw_of_domain,
            _ => Faults::draw,
        }
    }

    /// The rules that it breaks, by a word of them.
    pub(crate) fn shows_as(self) -> &'static [&'static str] {
        match self {
            Self::Nothing => &[],
            Self::RunsBeforeRecord | Self::UnrecordedHandOver | Self::FinishLetsRun => &["before the hand-over is recorded"],
            Self::ForgottenHandOver
            | Self::UndoneInDoubt
            | Self::SilenceIsDiscarded
            | Self::UnknownIsDiscarded
            | Self::LeavingKeepsArrival
            | Self::TwoStarts
            | Self::GuardDoesNotForbid
            | Self::ForbiddenIgnored
            | Self::StoppedByHypervisor
            | Self::OlderJournalBelieved
            | Self::StartsUnasked
            | Self::JobKept
            | Self::RestartedBelieved
            | Self::ResumedUnseen
            | Self::LostTooSoon => &["I1"],
            Self::Unreserved => &["memory is promised twice"],
            Self::SilenceIsSuccess
            // These three: the VM runs in part, and the source that has failed cannot send it the rest.
            | Self::RunsDoubted
            | Self::StatusBelieved
            | Self::RecordBelieved
            | Self::DiscardsOnlyCopy
            | Self::DroppedArrival
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
            | Self::TakesPartBack => &["I3"],
            // Of one in parts: what is there is ended, though the source has the rest.
            Self::VainHandOverBelieved => &["I1", "I3"],
            Self::PrunesUnsettled => &["does not know that the VM runs there", "I1", "I3"],
            Self::ForgottenDiscard => &["I1", "I5"],
            Self::BelievedRecord => &["I3", "I5"],
            Self::TakesDisksEarly
            | Self::CopiesEndAfterRecord
            | Self::CopiesEndEarly
            | Self::HeldCopiesEndEarly
            | Self::DisksLeftOpen => &["I2"],
            Self::RunsIncomplete => &["I4"],
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
