//! QEMU's reports about a migration, for all versions.

use drainpipe_hypervisor::{MigrationStatus, RamStatus, TransferStatus};
use serde::Deserialize;

/// The answer to `query-migrate`. What a version of QEMU, or a phase, does not report is 0 or `None`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
#[derive(Default)]
pub(super) struct MigrationInfo {
    status: Option<MigrationStatus>,
    error_desc: Option<String>,
    total_time: Option<u64>,
    setup_time: Option<u64>,
    downtime: Option<u64>,
    expected_downtime: Option<u64>,
    ram: Option<MigrationStats>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct MigrationStats {
    total: u64,
    transferred: u64,
    remaining: u64,
    dirty_sync_count: u64,
    multifd_bytes: u64,
    postcopy_bytes: u64,
    duplicate: u64,
    normal: u64,
    page_size: u64,
    dirty_pages_rate: u64,
    mbps: f64,
}

impl From<MigrationInfo> for TransferStatus {
    fn from(info: MigrationInfo) -> Self {
        Self {
            status: info.status.unwrap_or(MigrationStatus::None),
            error_desc: info.error_desc,
            total_ms: info.total_time,
            setup_ms: info.setup_time,
            downtime_ms: info.downtime,
            expected_downtime_ms: info.expected_downtime,
            ram: info.ram.map(RamStatus::from),
        }
    }
}

impl From<MigrationStats> for RamStatus {
    fn from(stats: MigrationStats) -> Self {
        Self {
            total_bytes: stats.total,
            transferred_bytes: stats.transferred,
            remaining_bytes: stats.remaining,
            rounds: stats.dirty_sync_count,
            parallel_bytes: stats.multifd_bytes,
            post_copy_bytes: stats.postcopy_bytes,
            zero_pages: stats.duplicate,
            normal_pages: stats.normal,
            page_bytes: stats.page_size,
            dirty_pages_per_second: stats.dirty_pages_rate,
            throughput_mbps: stats.mbps,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(answer: Value) -> TransferStatus {
        serde_json::from_value::<MigrationInfo>(answer).expect("an answer to query-migrate").into()
    }

    #[test]
    fn reads_nothing_much_and_much() {
        assert_eq!(read(json!({})), TransferStatus::of(MigrationStatus::None));

        let active = read(json!({
            "status": "active", "total-time": 5, "from-the-future": [],
            "ram": {"total": 100, "transferred": 40, "remaining": 60, "dirty-sync-count": 1,
                    "multifd-bytes": 30, "postcopy-bytes": 7, "mbps": 1.5, "new-counter": 1},
        }));
        assert_eq!((active.status, active.total_ms), (MigrationStatus::Active, Some(5)));
        let ram = active.ram.expect("counters");
        assert_eq!((ram.transferred_bytes, ram.parallel_bytes, ram.rounds), (40, 30, 1));
        assert_eq!((ram.total_bytes, ram.remaining_bytes, ram.post_copy_bytes), (100, 60, 7));

        let new = read(json!({"status": "from-the-future"}));
        assert_eq!(new.status, MigrationStatus::Other("from-the-future".into()));
        assert!(!new.status.is_final());
    }
}
