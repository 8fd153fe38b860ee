//! How long requests wait for streams and for answers, and lost streams for their fences. Pure.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::SplitterError;
use crate::frame::StreamNumber;
use crate::limits::{FENCE, UNANSWERED, WITHOUT_STREAM};

/// How often somebody looks.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// How it stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sight {
    pub(super) is_idle: bool,
    pub(super) live_streams: usize,
    /// How often anything was answered, ever, or went on within a limit.
    pub(super) advances: u64,
    /// The first of the lost streams that is not confirmed to have ended.
    pub(super) awaits_fence: Option<StreamNumber>,
}

/// Since when it stands like that.
#[derive(Debug, Default)]
pub(super) struct Patience {
    without_stream: Option<Instant>,
    // With how many advances.
    unanswered: Option<(u64, Instant)>,
    fence: Option<(StreamNumber, Instant)>,
}

impl Patience {
    /// Fails when it has stood like that for too long.
    pub(super) fn look(&mut self, sight: Sight, now: Instant) -> Result<(), SplitterError> {
        let is_stuck = !sight.is_idle && sight.live_streams == 0;
        self.without_stream = is_stuck.then(|| self.without_stream.unwrap_or(now));
        let waits = (!sight.is_idle && sight.live_streams > 0).then_some(sight.advances);
        let still = self.unanswered.filter(|(advances, _)| Some(*advances) == waits);
        self.unanswered = still.or(waits.map(|advances| (advances, now)));
        // Without a stream, there is none for a fence either.
        let awaited = sight.awaits_fence.filter(|_| sight.live_streams > 0);
        let same = self.fence.filter(|(number, _)| Some(*number) == awaited);
        self.fence = same.or(awaited.map(|number| (number, now)));
        if self.without_stream.is_some_and(|since| now - since >= WITHOUT_STREAM) {
            return Err(SplitterError::NoStream);
        }
        if self.unanswered.is_some_and(|(_, since)| now - since >= UNANSWERED) {
            return Err(SplitterError::Unanswered);
        }
        if self.fence.is_some_and(|(_, since)| now - since >= FENCE) {
            return Err(SplitterError::NoFence);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Sight = Sight { is_idle: false, live_streams: 1, advances: 0, awaits_fence: None };
    const ALONE: Sight = Sight { live_streams: 0, ..GOOD };

    #[test]
    fn requests_wait_a_while_for_a_stream() {
        let begin = Instant::now();
        let mut patience = Patience::default();
        patience.look(ALONE, begin).unwrap();
        patience.look(ALONE, begin + WITHOUT_STREAM / 2).unwrap();
        patience.look(GOOD, begin + WITHOUT_STREAM).unwrap();
        patience.look(ALONE, begin + WITHOUT_STREAM).unwrap();
        patience.look(Sight { is_idle: true, ..ALONE }, begin + 3 * WITHOUT_STREAM).unwrap();
        patience.look(ALONE, begin + 3 * WITHOUT_STREAM).unwrap();
        assert!(matches!(patience.look(ALONE, begin + 4 * WITHOUT_STREAM), Err(SplitterError::NoStream)));
    }

    #[test]
    fn each_fence_has_its_own_time() {
        let begin = Instant::now();
        let mut patience = Patience::default();
        let fence = |number| Sight { is_idle: true, awaits_fence: Some(number), ..GOOD };
        patience.look(fence(1), begin).unwrap();
        patience.look(fence(2), begin + FENCE).unwrap();
        assert!(matches!(patience.look(fence(2), begin + 2 * FENCE), Err(SplitterError::NoFence)));
    }

    #[test]
    fn a_disk_that_answers_nothing_is_given_up() {
        let begin = Instant::now();
        let mut patience = Patience::default();
        let answered = |advances| Sight { advances, ..GOOD };
        patience.look(GOOD, begin).unwrap();
        patience.look(answered(1), begin + UNANSWERED).unwrap();
        patience.look(Sight { is_idle: true, ..answered(1) }, begin + 2 * UNANSWERED).unwrap();
        patience.look(answered(1), begin + 2 * UNANSWERED).unwrap();
        // What is lost with a stream is requested again.
        patience.look(Sight { live_streams: 0, ..answered(1) }, begin + 3 * UNANSWERED).unwrap();
        patience.look(answered(1), begin + 3 * UNANSWERED).unwrap();
        let silent = patience.look(answered(1), begin + 4 * UNANSWERED);
        assert!(matches!(silent, Err(SplitterError::Unanswered)));
    }
}
