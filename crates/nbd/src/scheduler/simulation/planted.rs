//! Planted bugs around the scheduler. Somebody could write each of them, and the simulation must find it.

/// A bug in what carries out the scheduler's decisions, or in the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Planted {
    Nothing,
    /// The target answers a write when it has arrived, before the disk has it.
    EarlyReply,
    /// The target answers a flush, and does nothing.
    LostFlush,
    /// Only one stream's flush reaches the disk.
    FlushOfOneStream,
    /// A flush is sent while writes before it are under way.
    FlushDoesNotWait,
    /// What a lost stream carried is sent again at once.
    NoFence,
    /// The target says that a stream has ended, and still takes requests from it.
    FenceNotHeeded,
    /// The target says that a stream has ended while the disk still works for it.
    FenceDoesNotWait,
    /// The target ends a stream without a flush.
    FenceDoesNotFlush,
    /// Requests that share a byte are under way at the same time.
    OverlapsAtOnce,
    /// A durable write is sent like any other.
    FuaForgotten,
    /// A durable write is answered before those before it.
    FuaReportedEarly,
    /// What a lost stream carried counts as done when that stream is fenced.
    NotSentAgain,
    /// A difference is missed, and what was to be written counts as present.
    DifferenceMissed,
    /// A durable write is compared.
    DurableCompared,
    /// What an earlier attempt left counts as present before it is durable.
    LeftNotDurable,
}

impl Planted {
    /// The rule that the bug breaks, in the rule's own words.
    pub(super) fn shows_as(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::EarlyReply | Self::NotSentAgain | Self::DifferenceMissed => {
                "acknowledged write is not at the disk"
            }
            Self::LostFlush
            | Self::FlushOfOneStream
            | Self::FlushDoesNotWait
            | Self::FenceDoesNotFlush
            | Self::LeftNotDurable => "flush is answered, but",
            Self::NoFence | Self::FenceNotHeeded | Self::FenceDoesNotWait => {
                "older write came after a newer one"
            }
            Self::OverlapsAtOnce => "order",
            Self::FuaForgotten | Self::DurableCompared => "durable write is answered, but",
            Self::FuaReportedEarly => "before a write before it",
        }
    }
}
