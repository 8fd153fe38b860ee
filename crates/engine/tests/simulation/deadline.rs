//! The deadline of a migration that does not finish, with hosts that do what they are told.

use drainpipe_engine::migration::progress::PathCounter;
use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::{Limits, SourceAction, SourceEvent};
use drainpipe_engine::transfer::transferred::Transferred;

use crate::turns::{done, waiting};

const LIMITS: Limits = Limits {
    disks_take_longer: true,
    total_ms: 120_000.0,
    held_ms: 60_000.0,
    stall_ms: 600_000.0,
    decision_ms: 5_000.0,
    throttle_percent: 0,
};

/// How often somebody looks at the transfer.
const LOOK_EVERY_MS: u32 = 100;

/// When the path e1 begins to lose what is sent over it. Soon after, the other one has delivered all that may be sent
/// without it.
const LOST_FROM_MS: u32 = 100_000;

/// What the source sees: bytes arrive over both paths, until none arrive.
fn look(now_ms: u32) -> SourceEvent {
    let arrived_bytes = u64::from(now_ms.min(LOST_FROM_MS)) * 1_000;
    let counter = |link: &str, is_waiting| PathCounter {
        link: link.into(),
        peer_link: link.into(),
        arrived_bytes,
        is_waiting,
    };
    let transferred = Transferred {
        sent_bytes: 2 * arrived_bytes,
        remaining_bytes: 1 << 30,
        total_bytes: 1 << 30,
        rounds: 1,
        passed_bytes: 2 * arrived_bytes,
        dirty_bytes_per_s: 0,
    };
    SourceEvent::Progress(transferred, vec![counter("e0", now_ms < LOST_FROM_MS), counter("e1", true)])
}

#[test]
fn the_deadline_is_kept_and_the_error_names_the_path_that_holds_all_up_and_no_other() {
    // A hypervisor that reports nothing is no reason to wait for it.
    for says_nothing_from_ms in [u32::MAX, 110_000] {
        let mut migration = waiting(LIMITS, 0.0);
        assert_eq!(migration.handle(0.0, SourceEvent::Done), Some(SourceAction::StartTransfer));
        let mut now_ms = 0;
        let mut next = migration.handle(0.0, SourceEvent::Done);
        while next.is_none() {
            now_ms += LOOK_EVERY_MS;
            let seen = if now_ms < says_nothing_from_ms { look(now_ms) } else { SourceEvent::Tick };
            next = migration.handle(f64::from(now_ms), seen);
        }
        assert!(f64::from(now_ms) < LIMITS.total_ms + f64::from(LOOK_EVERY_MS), "{now_ms}");
        let mut actions = vec![];
        while next != Some(SourceAction::Finish) {
            actions.extend(next);
            next = next.and_then(|action| migration.handle(f64::from(now_ms), done(action)));
        }
        let back = [
            SourceAction::StopTransfer,
            SourceAction::ResumeOnSource,
            SourceAction::DiscardTarget,
            SourceAction::PutBack,
            SourceAction::LookAtVm,
        ];
        assert_eq!(actions, back);
        assert_eq!(migration.outcome(), Some(Outcome::Failed));
        let error = migration.error().map(ToString::to_string).unwrap_or_default();
        assert!(error.contains("not over within 120 s: nothing has arrived for 20 s over e1–e1;"), "{error}");
        assert!(!error.contains("e0"), "{error}");
    }
}
