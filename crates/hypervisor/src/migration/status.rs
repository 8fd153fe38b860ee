//! What QEMU says about a migration, as far as any version says it.

use serde::Deserialize;

use crate::open_enum::open_enum;
use crate::qmp::{Event, EventName};

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
        /// The target runs and fetches pages.
        PostcopyActive = "postcopy-active",
        /// Waits for a device to be unplugged.
        WaitUnplug = "wait-unplug",
    }
}

impl MigrationStatus {
    /// Whether nothing more will happen by itself.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::None | Self::Completed | Self::Failed | Self::Cancelled)
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
    /// Share of their time for which the vCPUs are held back, in percent; absent while they are not.
    #[serde(default, rename = "cpu-throttle-percentage")]
    pub throttle_percent: Option<u8>,
    /// Memory, on the source while it travels and afterwards.
    #[serde(default)]
    pub ram: Option<RamStatus>,
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
    fn reads_events() {
        let event = |name: EventName| Event { name, data: json!({"status": "pre-switchover"}) };
        assert_eq!(
            MigrationStatus::from_event(&event(EventName::Migration)),
            Some(MigrationStatus::PreSwitchover)
        );
        assert_eq!(MigrationStatus::from_event(&event(EventName::Stop)), None);
    }
}
