//! When to look for QEMU's connections: each look goes through all connections of the host, and QEMU makes
//! them all at once when a transfer begins.

/// Looks in quick succession, as often as the caller comes by.
const QUICK_LOOKS: u8 = 20;

/// Between two looks after these.
const LOOK_EVERY_MS: f64 = 1_000.0;

/// Quick looks at first, and slow ones from then on.
#[derive(Debug, Default)]
pub(crate) struct LookPace {
    quick_looks_left: u8,
    next_look_ms: f64,
}

impl LookPace {
    /// Connections are about to be made.
    pub(crate) fn quick() -> Self {
        Self { quick_looks_left: QUICK_LOOKS, next_look_ms: 0.0 }
    }

    /// Whether it is time for a look, which is then counted.
    pub(crate) fn is_due(&mut self, now_ms: f64) -> bool {
        if now_ms < self.next_look_ms {
            return false;
        }
        self.quick_looks_left = self.quick_looks_left.saturating_sub(1);
        if self.quick_looks_left == 0 {
            self.next_look_ms = now_ms + LOOK_EVERY_MS;
        }
        true
    }

    /// The connections are there.
    pub(crate) fn slow_down(&mut self) {
        self.quick_looks_left = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(pace: &mut LookPace, ticks: std::ops::Range<u32>) -> usize {
        ticks.filter(|tick| pace.is_due(f64::from(*tick) * 50.0)).count()
    }

    #[test]
    fn looks_are_quick_at_first_and_slow_then() {
        let mut pace = LookPace::quick();
        assert_eq!(looks(&mut pace, 0..20), 20);
        assert_eq!(looks(&mut pace, 20..100), 4);
        let mut pace = LookPace::quick();
        assert_eq!(looks(&mut pace, 0..2), 2);
        pace.slow_down();
        assert_eq!(looks(&mut pace, 2..42), 2);
        assert_eq!(looks(&mut LookPace::default(), 0..40), 2);
    }
}
