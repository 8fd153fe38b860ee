//! The wait for a migration's turn to send, with hosts that do what they are told.

use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::{Limits, Migration, SourceAction, SourceEvent, Stage, VmCondition};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::plan::{LimitKeeper, Paths, Plan, Protection, Transfer};
use drainpipe_engine::transfer::encryption::WhyClear;

fn a_plan() -> Plan {
    let path = Path {
        link: "e0".into(),
        address: [10, 0, 0, 1].into(),
        peer_link: "e0".into(),
        peer_address: [10, 0, 0, 2].into(),
        speed_mbps: None,
        is_standby: false,
        mtu_bytes: None,
    };
    Plan {
        requested_option: RequestedOption::Tcp,
        transfer: Transfer::OneConnection(Protection::Clear(WhyClear::NotRequired, LimitKeeper::Agents)),
        paths: Paths::try_from(vec![path]).expect("it carries"),
        disks: vec![],
        reasons: vec![],
    }
}

pub(crate) fn done(action: SourceAction) -> SourceEvent {
    match action {
        SourceAction::EstablishHosts => SourceEvent::Established(a_plan()),
        SourceAction::ConnectHosts => SourceEvent::Connected(a_plan()),
        SourceAction::LookAtVm => SourceEvent::VmIs(VmCondition::Runs),
        _ => SourceEvent::Done,
    }
}

/// A migration that waits for its turn.
pub(crate) fn waiting(limits: Limits, now_ms: f64) -> Migration {
    let (mut migration, mut action) = Migration::begin(limits);
    while action != SourceAction::AwaitTurn {
        action = migration.handle(now_ms, done(action)).expect("there is no transfer yet");
    }
    migration
}

#[test]
fn whoever_waits_for_its_turn_is_undone_at_once_and_the_vm_never_paused() {
    let limits = Limits { held_ms: 60_000.0, ..Limits::default() };
    for (end, outcome) in [
        (SourceEvent::CancelRequested, Outcome::Cancelled),
        (SourceEvent::Tick, Outcome::Failed),
        (SourceEvent::Done, Outcome::Completed),
    ] {
        let mut migration = waiting(limits, 0.0);
        assert_eq!(migration.handle(59_999.0, SourceEvent::Tick), Some(SourceAction::AwaitTurn));
        assert_eq!(migration.stage(), Stage::Ready);
        let mut actions = vec![];
        let mut next = migration.handle(60_000.0, end);
        while next != Some(SourceAction::Finish) {
            actions.extend(next);
            next = migration.handle(60_000.0, next.map_or(SourceEvent::Paused, done));
        }
        assert_eq!(migration.outcome(), Some(outcome));
        let undone = [SourceAction::DiscardTarget, SourceAction::PutBack, SourceAction::LookAtVm];
        assert_eq!(actions == undone, outcome != Outcome::Completed, "{actions:?}");
    }
}

#[test]
fn the_wait_for_its_turn_is_not_taken_from_its_time_to_send() {
    let limits = Limits { total_ms: 60_000.0, stall_ms: f64::INFINITY, ..Limits::default() };
    let mut migration = waiting(limits, 1_000.0);
    assert_eq!(migration.handle(3_600_000.0, SourceEvent::Done), Some(SourceAction::StartTransfer));
    assert_eq!(migration.handle(3_600_000.0, SourceEvent::Done), None);
    assert_eq!(migration.handle(3_658_000.0, SourceEvent::Tick), None);
    assert_eq!(migration.handle(3_659_000.0, SourceEvent::Tick), Some(SourceAction::StopTransfer));
}
