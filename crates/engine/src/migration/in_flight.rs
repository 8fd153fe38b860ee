//! Migrations in flight, for tests.

use super::{Limits, Migration, SourceAction, SourceEvent, Stage, VmCondition};
use crate::fixtures::path;
use crate::option::RequestedOption;
use crate::plan::{LimitKeeper, Paths, Plan, Protection, Transfer};
use crate::storage::{CopyReason, DiskCopy, DiskImage, DiskName};
use crate::transfer::encryption::{Encryption, WhyClear};

/// When one that is in flight has to be over.
pub(super) const DEADLINE_MS: f64 = 20_000.0;

/// What is done well, and the VM runs.
pub(super) fn well(action: SourceAction) -> SourceEvent {
    if action == SourceAction::LookAtVm { SourceEvent::VmIs(VmCondition::Runs) } else { SourceEvent::Done }
}

const OVER_ONE_CONNECTION: Transfer =
    Transfer::OneConnection(Protection::Clear(WhyClear::NotRequired, LimitKeeper::Agents));
const BY_POST_COPY: Transfer = Transfer::PostCopy {
    encryption: Encryption::Clear(WhyClear::NotRequired),
    limit_keeper: LimitKeeper::Agents,
};

fn plan(transfer: Transfer) -> Plan {
    Plan {
        requested_option: RequestedOption::Auto,
        transfer,
        paths: Paths::try_from(vec![path("e0")]).unwrap(),
        disks: vec![],
        reasons: vec![],
    }
}

/// A migration whose memory is being copied since 1 s.
pub(super) fn copying() -> Migration {
    copying_by(&plan(OVER_ONE_CONNECTION))
}

/// The same, and post-copy is allowed.
pub(super) fn copying_with_post_copy() -> Migration {
    copying_by(&plan(BY_POST_COPY))
}

/// A migration that has been copying a disk of 1 GB for 1 s.
pub(super) fn copying_disks() -> Migration {
    copying_by(&with_disk())
}

/// A migration that begins to copy such a disk now.
pub(super) fn starting_disk_copies() -> Migration {
    begun(&with_disk(), Some(SourceAction::StartDiskCopies))
}

fn with_disk() -> Plan {
    let disk = DiskCopy {
        disk: DiskName::at(0).unwrap(),
        from: "/srv/web.raw".into(),
        to: "/srv/web.raw".into(),
        image: DiskImage::Raw,
        size_bytes: 1_000_000_000,
        allocated_bytes: 500_000_000,
        why: CopyReason::NotSeen,
        is_flattened: false,
        from_device: None,
    };
    Plan { disks: vec![disk], ..plan(OVER_ONE_CONNECTION) }
}

/// Up to this action, or until nothing is to be done.
fn begun(plan: &Plan, until: Option<SourceAction>) -> Migration {
    let (mut migration, _) = Migration::begin(Limits { total_ms: DEADLINE_MS, ..Limits::default() });
    let mut event = SourceEvent::Established(plan.clone());
    loop {
        let next = migration.handle(1_000.0, event);
        if next == until {
            return migration;
        }
        let is_connecting = next == Some(SourceAction::ConnectHosts);
        event = if is_connecting { SourceEvent::Connected(plan.clone()) } else { SourceEvent::Done };
    }
}

fn copying_by(plan: &Plan) -> Migration {
    let migration = begun(plan, None);
    let first = if plan.disks.is_empty() { Stage::Sending } else { Stage::CopyingDisks };
    assert_eq!(migration.stage(), first);
    migration
}
