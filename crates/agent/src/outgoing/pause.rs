//! When the VM was paused on its source and ran there again, by the clock of its QEMU's events: an agent that stood still
//! meanwhile saw both too late, and its guard may have let the VM run.

use std::time::SystemTime;

use drainpipe_engine::migration::Timings;
use drainpipe_hypervisor::{Happening, MigrationStatus, VmEvent};

/// On the clock of the migration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Pause {
    paused: Option<Paused>,
    resumed_ms: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Paused {
    ms: f64,
    /// By the clock of the events.
    at: SystemTime,
}

impl Pause {
    /// Takes an event into account that was read at this time, by the migration's clock and by the host's. What cannot be,
    /// as the host's clock has been set, is not believed: then the event came when it was read.
    pub(super) fn note(&mut self, event: &VmEvent, now_ms: f64, now: SystemTime) {
        let Some(at) = event.at else { return };
        if event.what == Happening::Migration(MigrationStatus::PreSwitchover) {
            let ago = now.duration_since(at).unwrap_or_default();
            let ms = now_ms - ago.as_secs_f64() * 1000.0;
            let ms = if ms < 0.0 { now_ms } else { ms };
            *self = Self { paused: Some(Paused { ms, at }), resumed_ms: None };
        } else if event.what == Happening::Resumed
            && let Some(paused) = self.paused
        {
            let after_ms = at.duration_since(paused.at).ok().map(|after| after.as_secs_f64() * 1000.0);
            let after_ms = after_ms.filter(|after_ms| *after_ms <= now_ms);
            self.resumed_ms.get_or_insert(after_ms.map_or(now_ms, |after_ms| paused.ms + after_ms));
        }
    }

    /// What the engine has heard, and what the events say.
    pub(super) fn correct(&self, timings: Timings) -> Timings {
        Timings {
            paused_ms: self.paused.map(|paused| paused.ms).or(timings.paused_ms),
            resumed_here_ms: self.resumed_ms.or(timings.resumed_here_ms),
            ..timings
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const EPOCH: SystemTime = SystemTime::UNIX_EPOCH;

    const PAUSED: Happening = Happening::Migration(MigrationStatus::PreSwitchover);

    fn event(what: Happening, at_s: u64) -> VmEvent {
        VmEvent { what, at: Some(EPOCH + Duration::from_secs(at_s)) }
    }

    /// All events are read 30 s after the host's clock began, 20 s after the migration did.
    fn seen(events: &[VmEvent]) -> Option<f64> {
        let mut pause = Pause::default();
        for event in events {
            pause.note(event, 20_000.0, EPOCH + Duration::from_secs(30));
        }
        // The agent, too, saw both only now.
        let late =
            Timings { paused_ms: Some(20_000.0), resumed_here_ms: Some(20_001.0), ..Timings::default() };
        pause.correct(late).downtime_ms()
    }

    #[test]
    fn a_pause_that_its_guard_ended_is_as_long_as_it_was() {
        let paused = event(PAUSED, 15);
        let runs = event(Happening::Resumed, 19);
        let resumed_again = event(Happening::Resumed, 29);
        assert_eq!(seen(&[paused, runs, resumed_again]), Some(4_000.0));
    }

    #[test]
    fn what_no_event_says_the_agent_does() {
        let earlier = event(Happening::Resumed, 12);
        let unknown = VmEvent { at: None, ..event(PAUSED, 1) };
        assert_eq!(seen(&[earlier, unknown]), Some(1.0));
    }

    /// The VM is paused 10 s after the migration's begin, for 2 s, and both are read 3 s later.
    #[test]
    fn a_clock_that_is_set_makes_no_pause_of_hours_or_below_zero() {
        let paused = event(PAUSED, 10_010);
        let downtime_ms = |resumed_s, read_s| {
            let mut pause = Pause::default();
            for event in [&paused, &event(Happening::Resumed, resumed_s)] {
                pause.note(event, 15_000.0, EPOCH + Duration::from_secs(read_s));
            }
            pause.correct(Timings::default()).downtime_ms()
        };
        assert_eq!(downtime_ms(10_012, 10_015), Some(2_000.0));
        // While it was paused.
        assert_eq!(downtime_ms(13_612, 13_615), Some(0.0));
        assert_eq!(downtime_ms(6_412, 6_415), Some(0.0));
        // Between that and the reading.
        assert_eq!(downtime_ms(10_012, 13_615), Some(2_000.0));
        assert_eq!(downtime_ms(10_012, 6_415), Some(2_000.0));
    }
}
