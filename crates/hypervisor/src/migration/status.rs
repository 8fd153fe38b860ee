//! What QEMU says about a migration, as far as any version says it.

use serde::Deserialize;

use crate::open_enum::open_enum;
use crate::qmp::{Event, EventName};
use crate::vmm::RunState;

open_enum! {
    /// Status of a migration (`MigrationStatus` in QEMU's QMP reference).
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

    /// The status that a `MIGRATION` event reports; `None` for other events.
    pub fn from_event(event: &Event) -> Option<Self> {
        let status = event.data.get("status").and_then(serde_json::Value::as_str);
        (event.name == EventName::Migration).then_some(())?;
        status.map(|status| status.to_owned().into())
    }
}

/// State and counters of a migration (`query-migrate`). What a version of QEMU, or a phase, does
/// not report is 0 or `None`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TransferStatus {
    /// Where it stands.
    #[serde(default = "no_migration")]
    pub status: MigrationStatus,
    /// Why it failed.
    #[serde(default)]
    pub error_desc: Option<String>,
    /// Since its start, in ms.
    #[serde(default, rename = "total-time")]
    pub total_ms: Option<u64>,
    /// Spent on connections, in ms.
    #[serde(default, rename = "setup-time")]
    pub setup_ms: Option<u64>,
    /// How long the guest was stopped, as the source counts it, in ms; known at the end.
    #[serde(default, rename = "downtime")]
    pub downtime_ms: Option<u64>,
    /// How long it would be stopped now, in ms.
    #[serde(default, rename = "expected-downtime")]
    pub expected_downtime_ms: Option<u64>,
    /// Memory, on the source while it travels and afterwards.
    #[serde(default)]
    pub ram: Option<RamStatus>,
}

impl TransferStatus {
    /// Whether a source's switchover to post-copy has begun, so that it does not run its guest again, and the transfer
    /// has not completed. Of one that was cancelled nevertheless (QEMU 7.2 lets one) and has ended, nobody can tell.
    pub fn has_left_for_post_copy(&self) -> bool {
        self.status.is_post_copy() || (self.status == MigrationStatus::Cancelling && self.pages_followed())
    }

    /// Whether a source has put all memory on its connection.
    pub(super) fn has_sent_all(&self) -> bool {
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
#[derive(Debug, Clone, Copy, PartialEq, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct RamStatus {
    /// Guest memory, in bytes.
    #[serde(rename = "total")]
    pub total_bytes: u64,
    /// Put on the wire, in bytes, those of multifd included.
    #[serde(rename = "transferred")]
    pub transferred_bytes: u64,
    /// Still to be sent if the guest dirtied nothing more, in bytes.
    #[serde(rename = "remaining")]
    pub remaining_bytes: u64,
    /// Rounds over memory, the running one included.
    #[serde(rename = "dirty-sync-count")]
    pub rounds: u64,
    /// Put on the wire by multifd, in bytes; part of `transferred_bytes`.
    pub multifd_bytes: u64,
    /// Put on the wire after a switchover to post-copy, in bytes; part of `transferred_bytes`.
    #[serde(rename = "postcopy-bytes")]
    pub post_copy_bytes: u64,
    /// Pages of zeros, which cost next to nothing.
    #[serde(rename = "duplicate")]
    pub zero_pages: u64,
    /// Pages sent whole.
    #[serde(rename = "normal")]
    pub normal_pages: u64,
    /// Size of a page, in bytes.
    #[serde(rename = "page-size")]
    pub page_bytes: u64,
    /// Pages that the guest dirties per second, as of the last round.
    #[serde(rename = "dirty-pages-rate")]
    pub dirty_pages_per_second: u64,
    /// Throughput of late, in Mb/s.
    #[serde(rename = "mbps")]
    pub throughput_mbps: f64,
}

fn no_migration() -> MigrationStatus {
    MigrationStatus::None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reads_nothing_much_and_much() {
        let idle: TransferStatus = serde_json::from_value(json!({})).expect("no migration yet");
        assert_eq!(idle.status, MigrationStatus::None);

        let active: TransferStatus = serde_json::from_value(json!({
            "status": "active", "total-time": 5, "from-the-future": [],
            "ram": {"total": 100, "transferred": 40, "remaining": 60, "dirty-sync-count": 1,
                    "multifd-bytes": 30, "mbps": 1.5, "new-counter": 1},
        }))
        .expect("unknown fields are ignored");
        let ram = active.ram.expect("counters");
        assert_eq!((ram.transferred_bytes, ram.multifd_bytes, ram.rounds), (40, 30, 1));

        let new: TransferStatus = serde_json::from_value(json!({"status": "from-the-future"})).expect("open");
        assert_eq!(new.status, MigrationStatus::Other("from-the-future".into()));
        assert!(!new.status.is_final());
    }

    #[test]
    fn a_target_may_run_with_all_memory_or_with_a_source_that_sends_it() {
        use MigrationStatus::{Active, Completed, Failed, PostcopyActive, PostcopyPaused};
        for (status, state, may_run) in [
            (Completed, RunState::Paused, true),
            // As its source was.
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
        let read = |status: &str, bytes: u64| -> TransferStatus {
            let status = json!({ "status": status, "ram": { "postcopy-bytes": bytes } });
            serde_json::from_value(status).expect("a status")
        };
        for status in
            ["postcopy-active", "postcopy-paused", "postcopy-recover-setup", "postcopy-recover", "cancelling"]
        {
            let status = read(status, 1);
            assert!(status.has_left_for_post_copy() && !status.status.is_final(), "{status:?}");
        }
        for (status, bytes) in [("cancelling", 0), ("pre-switchover", 0), ("device", 0), ("completed", 1)] {
            assert!(!read(status, bytes).has_left_for_post_copy(), "{status}");
        }
    }

    #[test]
    fn a_source_has_let_go_once_pages_follow() {
        let read = |status: &str, bytes: u64| -> TransferStatus {
            let status = json!({ "status": status, "ram": { "postcopy-bytes": bytes } });
            serde_json::from_value(status).expect("a status")
        };
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
            assert_eq!(read(status, bytes).has_let_go(), has_let_go, "{status}, {bytes}");
        }
    }

    #[test]
    fn reads_events() {
        let event = |name: EventName| Event { name, data: json!({"status": "pre-switchover"}), at: None };
        assert_eq!(
            MigrationStatus::from_event(&event(EventName::Migration)),
            Some(MigrationStatus::PreSwitchover)
        );
        assert_eq!(MigrationStatus::from_event(&event(EventName::Stop)), None);
    }
}
