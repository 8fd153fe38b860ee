//! The state of a VM, and of its migration.

use crate::open_enum::open_enum;

open_enum! {
    /// The state of a VM, in the words of QEMU's `RunState`.
    pub enum RunState {
        /// The guest runs.
        Running = "running",
        /// The guest is stopped by a command.
        Paused = "paused",
        /// Started with `-S`, and the guest has never run.
        Prelaunch = "prelaunch",
        /// Waits for the state of a guest.
        Inmigrate = "inmigrate",
        /// The guest is stopped for the last part of its migration.
        FinishMigrate = "finish-migrate",
        /// The guest's state has gone to another QEMU.
        Postmigrate = "postmigrate",
        /// The guest has powered off.
        Shutdown = "shutdown",
        /// The guest sleeps.
        Suspended = "suspended",
        /// The guest's kernel panicked.
        GuestPanicked = "guest-panicked",
        /// A disk failed and the guest waits.
        IoError = "io-error",
        /// QEMU failed.
        InternalError = "internal-error",
    }
}

open_enum! {
    /// The state of a migration, in the words of QEMU's `MigrationStatus`.
    pub enum MigrationStatus {
        /// None was begun.
        None = "none",
        /// Connections are being made.
        Setup = "setup",
        /// Memory travels while the guest runs.
        Active = "active",
        /// The source's guest is stopped and waits for `switch_over`.
        PreSwitchover = "pre-switchover",
        /// The last memory and the devices' state travel.
        Device = "device",
        /// All has travelled.
        Completed = "completed",
        /// It failed; `error_desc` says why.
        Failed = "failed",
        /// Being cancelled.
        Cancelling = "cancelling",
        /// Cancelled.
        Cancelled = "cancelled",
        /// What the target needs to run is being sent (QEMU 10.2).
        PostcopyDevice = "postcopy-device",
        /// After the switchover to post-copy: the target has the guest's state and fetches its pages.
        PostcopyActive = "postcopy-active",
        /// As before, but the connection broke. Both sides wait for another one.
        PostcopyPaused = "postcopy-paused",
        /// The connection that is to take the place of a broken one is being made.
        PostcopyRecoverSetup = "postcopy-recover-setup",
        /// The two sides find out which pages are still to come.
        PostcopyRecover = "postcopy-recover",
        /// Waits for a device to be unplugged.
        WaitUnplug = "wait-unplug",
    }
}

impl MigrationStatus {
    /// Whether nothing more will happen by itself.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::None | Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// Whether the guest's state is on the target, and pages of its memory are still to come. Whether the source may
    /// run it again all the same, [`TransferStatus::has_let_go`] says.
    pub fn is_post_copy(&self) -> bool {
        matches!(
            self,
            Self::PostcopyActive | Self::PostcopyPaused | Self::PostcopyRecoverSetup | Self::PostcopyRecover
        )
    }

    /// Whether a target that is in run state `state` has all that its guest needs to run: the whole guest, or its state
    /// and a source that sends the pages.
    pub fn lets_run(&self, state: &RunState) -> bool {
        match self {
            Self::Completed => *state != RunState::Inmigrate,
            // Said before the devices' state is loaded; and by the source too, which is in finish-migrate. Should the
            // connection be broken, pages come once there is another.
            status => status.is_post_copy() && *state == RunState::Paused,
        }
    }
}

/// Which host a VM belongs to, as its source's hypervisor says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The guest is here, and may run here.
    Kept,
    /// The guest is left to the target, and does not run here again by itself.
    LetGo,
    /// Nobody can tell: a switchover to post-copy has failed.
    Astray,
}

/// State and counters of a migration. What a hypervisor, or a phase, does not report is 0 or `None`.
#[derive(Debug, Clone, PartialEq)]
pub struct TransferStatus {
    /// Where it stands.
    pub status: MigrationStatus,
    /// Why it failed.
    pub error_desc: Option<String>,
    /// Since its start, in ms.
    pub total_ms: Option<u64>,
    /// Spent on connections, in ms.
    pub setup_ms: Option<u64>,
    /// How long the guest was stopped, as the source counts it, in ms; known at the end.
    pub downtime_ms: Option<u64>,
    /// How long it would be stopped now, in ms.
    pub expected_downtime_ms: Option<u64>,
    /// Memory, on the source while it travels and afterwards.
    pub ram: Option<RamStatus>,
}

impl TransferStatus {
    /// Without any counters.
    pub fn of(status: MigrationStatus) -> Self {
        Self {
            status,
            error_desc: None,
            total_ms: None,
            setup_ms: None,
            downtime_ms: None,
            expected_downtime_ms: None,
            ram: None,
        }
    }

    /// Whether a source's switchover to post-copy has begun, so that it does not run its guest again, and the transfer
    /// has not completed. If somebody cancelled it nevertheless (QEMU 7.2 allows it) and it has ended, nobody can tell.
    pub fn has_left_for_post_copy(&self) -> bool {
        self.status.is_post_copy() || (self.status == MigrationStatus::Cancelling && self.pages_followed())
    }

    /// Whether a source has put all memory on its connection.
    pub fn has_sent_all(&self) -> bool {
        self.ram.is_some_and(|ram| ram.remaining_bytes == 0)
    }

    /// Whether a source has left its guest to the target, though its connection breaks.
    ///
    /// With post-copy `postcopy-active` alone does not say so (7.2, 10.0): QEMU says that before it looks at its connection
    /// for the last time, and if that is broken, it calls the migration failed and the guest runs on. Seen in two of 25
    /// kills of an agent that was the connection, on busy cores. The thread that looks sends the pages after that.
    pub fn has_let_go(&self) -> bool {
        match &self.status {
            MigrationStatus::PostcopyActive => self.pages_followed(),
            status => status.is_post_copy() || *status == MigrationStatus::Completed,
        }
    }

    fn pages_followed(&self) -> bool {
        self.ram.is_some_and(|ram| ram.post_copy_bytes > 0)
    }
}

/// Counters of a migration's memory.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RamStatus {
    /// Guest memory, in bytes.
    pub total_bytes: u64,
    /// Put on the wire, in bytes, by all connections.
    pub transferred_bytes: u64,
    /// Still to be sent if the guest dirtied nothing more, in bytes.
    pub remaining_bytes: u64,
    /// Rounds over memory, the running one included.
    pub rounds: u64,
    /// Put on the wire by connections for memory alone, in bytes; part of `transferred_bytes`.
    pub parallel_bytes: u64,
    /// Put on the wire after a switchover to post-copy, in bytes; part of `transferred_bytes`.
    pub post_copy_bytes: u64,
    /// Pages of zeros, which cost next to nothing.
    pub zero_pages: u64,
    /// Pages sent whole.
    pub normal_pages: u64,
    /// Size of a page, in bytes.
    pub page_bytes: u64,
    /// Pages that the guest dirties per second, as of the last round.
    pub dirty_pages_per_second: u64,
    /// Throughput recently, in Mb/s.
    pub throughput_mbps: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after_pages(status: &str, post_copy_bytes: u64) -> TransferStatus {
        let ram = Some(RamStatus { post_copy_bytes, ..RamStatus::default() });
        TransferStatus { ram, ..TransferStatus::of(status.to_owned().into()) }
    }

    #[test]
    fn a_target_may_run_with_all_memory_or_with_a_source_that_sends_it() {
        use MigrationStatus::{Active, Completed, Failed, PostcopyActive, PostcopyPaused};
        for (status, state, may_run) in [
            (Completed, RunState::Paused, true),
            // Like its source.
            (Completed, RunState::Prelaunch, true),
            (Completed, RunState::Inmigrate, false),
            (PostcopyActive, RunState::Paused, true),
            (PostcopyActive, RunState::Inmigrate, false),
            (PostcopyActive, RunState::FinishMigrate, false),
            (PostcopyPaused, RunState::Paused, true),
            (PostcopyPaused, RunState::FinishMigrate, false),
            (Active, RunState::Inmigrate, false),
            (Failed, RunState::Paused, false),
        ] {
            assert_eq!(status.lets_run(&state), may_run, "{status}, {state}");
        }
    }

    #[test]
    fn a_source_that_left_for_post_copy_is_told_from_one_that_is_only_cancelled() {
        for status in
            ["postcopy-active", "postcopy-paused", "postcopy-recover-setup", "postcopy-recover", "cancelling"]
        {
            let status = after_pages(status, 1);
            assert!(status.has_left_for_post_copy() && !status.status.is_final(), "{status:?}");
        }
        for (status, bytes) in [("cancelling", 0), ("pre-switchover", 0), ("device", 0), ("completed", 1)] {
            assert!(!after_pages(status, bytes).has_left_for_post_copy(), "{status}");
        }
    }

    #[test]
    fn a_source_has_let_go_once_pages_follow() {
        for (status, bytes, has_let_go) in [
            ("postcopy-active", 1, true),
            ("postcopy-active", 0, false),
            // It was past its last look when the connection broke.
            ("postcopy-paused", 0, true),
            ("completed", 0, true),
            ("device", 0, false),
            ("postcopy-device", 1, false),
            ("failed", 1, false),
        ] {
            assert_eq!(after_pages(status, bytes).has_let_go(), has_let_go, "{status}, {bytes}");
        }
    }
}
