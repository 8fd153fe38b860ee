//! What libvirt reports by itself of a domain's life.

use drainpipe_hypervisor::{Happening, MigrationStatus};

/// `virDomainEventType`, each with the names of its details.
const EVENTS: [(&str, &[&str]); 9] = [
    ("defined", &["added", "updated", "renamed", "from snapshot"]),
    ("undefined", &["removed", "renamed"]),
    ("started", &["booted", "migrated", "restored", "from snapshot", "woken up"]),
    (
        "suspended",
        &[
            "paused",
            "to migrate",
            "I/O error",
            "watchdog",
            "restored",
            "from snapshot",
            "error of an API call",
            "post-copy",
            "post-copy failed",
        ],
    ),
    ("resumed", &["unpaused", "migrated", "from snapshot", "post-copy", "post-copy failed"]),
    ("stopped", &["shut down", "destroyed", "crashed", "migrated", "saved", "failed", "from snapshot"]),
    ("shutting down", &["finished", "by the guest", "by the host"]),
    ("guest suspended", &["to memory", "to disk"]),
    ("guest crashed", &["panicked", "crash kernel loaded"]),
];

const SUSPENDED: i32 = 3;
const RESUMED: i32 = 4;
const STOPPED: i32 = 5;
const SHUTTING_DOWN: i32 = 6;

const SUSPENDED_TO_MIGRATE: i32 = 1;
const SUSPENDED_FOR_POST_COPY: i32 = 7;
const SUSPENDED_POST_COPY_FAILED: i32 = 8;
const RESUMED_POST_COPY_FAILED: i32 = 4;
const STOPPED_CRASHED: i32 = 2;
const STOPPED_FAILED: i32 = 5;

/// What a lifecycle event of this number (`virDomainEventType`), with this detail, is.
///
/// A guest that is suspended to migrate is where QEMU alone would be in pre-switchover: its pause has begun.
pub fn happening(event: i32, detail: i32) -> Happening {
    match (event, detail) {
        (SUSPENDED, SUSPENDED_TO_MIGRATE) => Happening::Migration(MigrationStatus::PreSwitchover),
        (SUSPENDED, SUSPENDED_FOR_POST_COPY) => Happening::Migration(MigrationStatus::PostcopyActive),
        // The guest runs on at the target, until it needs a page that is not there.
        (SUSPENDED, SUSPENDED_POST_COPY_FAILED) | (RESUMED, RESUMED_POST_COPY_FAILED) => {
            Happening::Migration(MigrationStatus::PostcopyPaused)
        }
        (RESUMED, _) => Happening::Resumed,
        (SHUTTING_DOWN, _) => Happening::Ending,
        // An end that nobody asked for is none to expect.
        (STOPPED, detail) if !matches!(detail, STOPPED_CRASHED | STOPPED_FAILED) => Happening::Ending,
        _ => Happening::Other(name(event, detail)),
    }
}

fn name(event: i32, detail: i32) -> String {
    let place = |number: i32| usize::try_from(number).ok();
    let Some((event_name, details)) = place(event).and_then(|event| EVENTS.get(event)) else {
        return format!("libvirt event {event}, detail {detail}");
    };
    match place(detail).and_then(|detail| details.get(detail)) {
        Some(detail) => format!("{event_name}: {detail}"),
        None => format!("{event_name}: detail {detail}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_those_of_every_hypervisor() {
        let other = |name: &str| Happening::Other(name.to_owned());
        for (event, detail, expected) in [
            (3, 1, Happening::Migration(MigrationStatus::PreSwitchover)),
            (3, 7, Happening::Migration(MigrationStatus::PostcopyActive)),
            (3, 8, Happening::Migration(MigrationStatus::PostcopyPaused)),
            (4, 4, Happening::Migration(MigrationStatus::PostcopyPaused)),
            (4, 0, Happening::Resumed),
            (4, 1, Happening::Resumed),
            (4, 3, Happening::Resumed),
            (5, 3, Happening::Ending),
            (6, 0, Happening::Ending),
            (5, 2, other("stopped: crashed")),
            (5, 5, other("stopped: failed")),
            (3, 0, other("suspended: paused")),
            (3, 2, other("suspended: I/O error")),
            (2, 1, other("started: migrated")),
            (8, 9, other("guest crashed: detail 9")),
            (-1, 0, other("libvirt event -1, detail 0")),
            (9, 1, other("libvirt event 9, detail 1")),
        ] {
            assert_eq!(happening(event, detail), expected, "{event}, {detail}");
        }
    }
}
