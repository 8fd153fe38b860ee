//! Planted bugs around the scheduler. Somebody could write each of them, and the simulation must find it.

/// A bug of what carries the scheduler's decisions out, or of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Planted {
    Nothing,
    /// The target answers a write when it has come, not when the disk has it.
    EarlyReply,
    /// The target answers a flush, and does nothing.
    LostFlush,
    /// Only one stream's flush reaches the disk.
    FlushOfOneStream,
    /// A flush is sent while writes before it are under way.
    FlushDoesNotWait,
    /// What a lost stream carried is sent again at once.
    NoFence,
    /// The target says that a stream has ended, and goes on to take from it.
    FenceNotHeeded,
    /// The target says that a stream has ended while the disk still has some of it to do.
    FenceDoesNotWait,
    /// The target ends a stream without a flush.
    FenceDoesNotFlush,
    /// Requests that share a byte are under way at the same time.
    OverlapsAtOnce,
    /// A durable write is sent as any other.
    FuaForgotten,
    /// A durable write is answered before those before it.
    FuaToldEarly,
    /// What a lost stream carried is taken for done when that is fenced.
    NotSentAgain,
    /// What differs from what was to be written is taken for the same.
    DifferenceMissed,
    /// A durable write is compared.
    DurableCompared,
    /// What an earlier attempt has left counts as there before it is durable.
    LeftNotDurable,
}

impl Planted {
    /// The rule that it breaks, in the words of the rule.
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
            Self::FuaToldEarly => "before a write before it",
        }
    }
}
