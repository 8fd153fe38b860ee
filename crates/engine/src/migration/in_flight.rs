//! Migrations for tests, that are under way.

use super::{Action, Event, Limits, Migration, Stage, VmCondition};
use crate::encryption::Encryption;
use crate::option::{MigrationOption, RequestedOption};
use crate::plan::{Plan, Spread};

/// When one that is in flight has to be over.
pub(super) const DEADLINE_MS: f64 = 20_000.0;

/// What is done well, and the VM runs.
pub(super) fn well(action: Action) -> Event {
    if action == Action::LookAtVm { Event::VmIs(VmCondition::Runs) } else { Event::Done }
}

fn plan() -> Plan {
    Plan {
        requested_option: RequestedOption::Auto,
        option: MigrationOption::Tcp,
        reason: None,
        paths: vec![],
        spread: Spread::InTurn,
        multifd_channels: None,
        is_compressed: false,
        encryption: Encryption::default(),
        post_copy: false,
    }
}

/// A migration whose memory is being copied since 1 s.
pub(super) fn copying() -> Migration {
    copying_by(&plan())
}

/// The same, and post-copy is allowed.
pub(super) fn copying_with_post_copy() -> Migration {
    copying_by(&Plan { post_copy: true, ..plan() })
}

fn copying_by(plan: &Plan) -> Migration {
    let (mut migration, _) = Migration::begin(Limits { total_ms: DEADLINE_MS, ..Limits::default() });
    let mut event = Event::Established(plan.clone());
    while let Some(action) = migration.handle(1_000.0, event) {
        event = if action == Action::ConnectHosts { Event::Connected(plan.clone()) } else { Event::Done };
    }
    assert_eq!(migration.stage(), Stage::Sending);
    migration
}
