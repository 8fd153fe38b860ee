//! A domain's state, and the reason for it.

use drainpipe_hypervisor::{Hold, RunState};

/// `virDomainState`.
mod domain {
    pub(super) const RUNNING: i32 = 1;
    pub(super) const BLOCKED: i32 = 2;
    pub(super) const PAUSED: i32 = 3;
    pub(super) const SHUTDOWN: i32 = 4;
    pub(super) const SHUTOFF: i32 = 5;
    pub(super) const CRASHED: i32 = 6;
    pub(super) const PM_SUSPENDED: i32 = 7;
}

/// `virDomainPausedReason`. What is not here is a pause like any other.
mod paused {
    pub(super) const MIGRATION: i32 = 2;
    pub(super) const SAVE: i32 = 3;
    pub(super) const IO_ERROR: i32 = 5;
    pub(super) const WATCHDOG: i32 = 6;
    pub(super) const SHUTTING_DOWN: i32 = 8;
    pub(super) const SNAPSHOT: i32 = 9;
    pub(super) const CRASHED: i32 = 10;
    pub(super) const STARTING_UP: i32 = 11;
    pub(super) const POST_COPY: i32 = 12;
    pub(super) const POST_COPY_FAILED: i32 = 13;
}

/// `VIR_DOMAIN_SHUTOFF_MIGRATED`.
const SHUTOFF_MIGRATED: i32 = 4;

/// A domain's state and the reason for it, as `virDomainGetState` gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainState {
    /// `virDomainState`.
    pub state: i32,
    /// The reason, by the state's own list.
    pub reason: i32,
}

/// On which side of a migration a domain is. libvirt calls both paused for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It has run here.
    Source,
    /// It waits for its guest.
    Target,
}

impl DomainState {
    /// What the domain is doing; `None` if it has no process.
    pub fn run_state(self, side: Side) -> Option<RunState> {
        match self.state {
            domain::RUNNING | domain::BLOCKED => Some(RunState::Running),
            domain::PAUSED => Some(while_paused(self.reason, side)),
            domain::SHUTDOWN => Some(RunState::Shutdown),
            domain::SHUTOFF => None,
            domain::CRASHED => Some(RunState::GuestPanicked),
            domain::PM_SUSPENDED => Some(RunState::Suspended),
            other => Some(RunState::Other(format!("libvirt state {other}"))),
        }
    }

    /// Whose the domain is, on the source. `None` where its state does not say so: without a process, and while it is paused
    /// for a migration, which a cancelled one is too until libvirt lets it run again.
    pub fn hold(self) -> Option<Hold> {
        match (self.state, self.reason) {
            (domain::PAUSED, paused::MIGRATION) => None,
            (domain::PAUSED, paused::POST_COPY) | (domain::SHUTOFF, SHUTOFF_MIGRATED) => Some(Hold::LetGo),
            (domain::PAUSED, paused::POST_COPY_FAILED) => Some(Hold::Astray),
            (domain::RUNNING | domain::BLOCKED | domain::PAUSED | domain::PM_SUSPENDED, _) => {
                Some(Hold::Kept)
            }
            _ => None,
        }
    }

    /// Whether the guest stands still for the end of its migration.
    pub(super) fn is_paused_to_migrate(self) -> bool {
        self.state == domain::PAUSED && self.reason == paused::MIGRATION
    }

    /// Whether its source has left it for post-copy.
    pub(super) fn is_in_post_copy(self) -> bool {
        self.state == domain::PAUSED && self.reason == paused::POST_COPY
    }

    /// Whether post-copy has lost its connection.
    pub(super) fn has_post_copy_failed(self) -> bool {
        self.state == domain::PAUSED && self.reason == paused::POST_COPY_FAILED
    }
}

fn while_paused(reason: i32, side: Side) -> RunState {
    match (reason, side) {
        (paused::MIGRATION | paused::STARTING_UP, Side::Target) => RunState::Inmigrate,
        (paused::STARTING_UP, Side::Source) => RunState::Prelaunch,
        // QEMU's own word changes to `postmigrate` at the end, of which libvirt says nothing.
        (paused::MIGRATION | paused::POST_COPY | paused::POST_COPY_FAILED, Side::Source) => {
            RunState::FinishMigrate
        }
        (paused::SAVE | paused::SNAPSHOT, _) => RunState::Other("save-vm".to_owned()),
        (paused::IO_ERROR, _) => RunState::IoError,
        (paused::WATCHDOG, _) => RunState::Other("watchdog".to_owned()),
        (paused::SHUTTING_DOWN, _) => RunState::Shutdown,
        (paused::CRASHED, _) => RunState::GuestPanicked,
        _ => RunState::Paused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(state: i32, reason: i32) -> DomainState {
        DomainState { state, reason }
    }

    #[test]
    fn what_a_domain_does() {
        for (state, side, expected) in [
            (of(1, 1), Side::Source, Some(RunState::Running)),
            // In post-copy, on the target.
            (of(1, 10), Side::Target, Some(RunState::Running)),
            (of(3, 1), Side::Source, Some(RunState::Paused)),
            (of(3, 1), Side::Target, Some(RunState::Paused)),
            (of(3, 2), Side::Source, Some(RunState::FinishMigrate)),
            (of(3, 2), Side::Target, Some(RunState::Inmigrate)),
            (of(3, 11), Side::Target, Some(RunState::Inmigrate)),
            (of(3, 11), Side::Source, Some(RunState::Prelaunch)),
            (of(3, 12), Side::Source, Some(RunState::FinishMigrate)),
            (of(3, 13), Side::Target, Some(RunState::Paused)),
            (of(3, 5), Side::Source, Some(RunState::IoError)),
            (of(3, 10), Side::Source, Some(RunState::GuestPanicked)),
            (of(4, 1), Side::Source, Some(RunState::Shutdown)),
            (of(5, 4), Side::Source, None),
            (of(7, 0), Side::Source, Some(RunState::Suspended)),
            (of(0, 0), Side::Source, Some(RunState::Other("libvirt state 0".into()))),
        ] {
            assert_eq!(state.run_state(side), expected, "{state:?}, {side:?}");
        }
    }

    #[test]
    fn whose_a_domain_is() {
        for (state, expected) in [
            (of(1, 5), Some(Hold::Kept)),
            // After a migration that was cancelled.
            (of(1, 6), Some(Hold::Kept)),
            (of(3, 1), Some(Hold::Kept)),
            (of(3, 2), None),
            (of(3, 12), Some(Hold::LetGo)),
            (of(3, 13), Some(Hold::Astray)),
            (of(5, 4), Some(Hold::LetGo)),
            (of(5, 1), None),
            (of(6, 1), None),
        ] {
            assert_eq!(state.hold(), expected, "{state:?}");
        }
    }
}
