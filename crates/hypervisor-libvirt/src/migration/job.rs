//! The statistics of a domain's job, as `virDomainGetJobStats` gives them.

use drainpipe_hypervisor::{MigrationStatus, RamStatus, TransferStatus};

use super::state::DomainState;

/// `virDomainJobType`. 0 is no job, and so is what is not here.
mod kind {
    pub(super) const BOUNDED: i32 = 1;
    pub(super) const UNBOUNDED: i32 = 2;
    pub(super) const COMPLETED: i32 = 3;
    pub(super) const FAILED: i32 = 4;
    pub(super) const CANCELLED: i32 = 5;
}

/// `virDomainJobOperation`: a migration to here, and one from here.
const MIGRATIONS: [u64; 2] = [4, 5];

/// Statistics of a domain's job. What libvirt does not report is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobStatistics {
    /// `virDomainJobType`.
    pub kind: i32,
    /// `virDomainJobOperation`.
    pub operation: Option<u64>,
    /// Why it failed.
    pub error: Option<String>,
    /// Since its start.
    pub elapsed_ms: Option<u64>,
    /// Spent before memory travels.
    pub setup_ms: Option<u64>,
    /// How long the guest is expected to stand still, or has stood still once all has travelled.
    pub downtime_ms: Option<u64>,
    /// Guest memory.
    pub memory_total_bytes: Option<u64>,
    /// Put on the wire.
    pub memory_processed_bytes: Option<u64>,
    /// Still to be sent.
    pub memory_remaining_bytes: Option<u64>,
    /// Rounds over memory.
    pub memory_iteration: Option<u64>,
    /// Pages that are one byte over and over.
    pub memory_constant_pages: Option<u64>,
    /// Pages sent whole.
    pub memory_normal_pages: Option<u64>,
    /// Size of a page.
    pub memory_page_bytes: Option<u64>,
    /// Pages that the guest dirties per second.
    pub memory_dirty_pages_per_second: Option<u64>,
    /// Throughput.
    pub memory_bytes_per_second: Option<u64>,
    /// Pages that the target has asked for in post-copy.
    pub post_copy_requests: Option<u64>,
}

impl JobStatistics {
    /// Those of a job of this `virDomainJobType`, with all numbers that libvirt reports of it, by its names. Others are passed
    /// over.
    pub fn new<'a>(kind: i32, numbers: impl IntoIterator<Item = (&'a str, u64)>) -> Self {
        let mut statistics = Self { kind, ..Self::default() };
        for (name, number) in numbers {
            if let Some(field) = statistics.field(name) {
                *field = Some(number);
            }
        }
        statistics
    }

    fn field(&mut self, name: &str) -> Option<&mut Option<u64>> {
        Some(match name {
            "operation" => &mut self.operation,
            "time_elapsed" => &mut self.elapsed_ms,
            "setup_time" => &mut self.setup_ms,
            "downtime" => &mut self.downtime_ms,
            "memory_total" => &mut self.memory_total_bytes,
            "memory_processed" => &mut self.memory_processed_bytes,
            "memory_remaining" => &mut self.memory_remaining_bytes,
            "memory_iteration" => &mut self.memory_iteration,
            "memory_constant" => &mut self.memory_constant_pages,
            "memory_normal" => &mut self.memory_normal_pages,
            "memory_page_size" => &mut self.memory_page_bytes,
            "memory_dirty_rate" => &mut self.memory_dirty_pages_per_second,
            "memory_bps" => &mut self.memory_bytes_per_second,
            "memory_postcopy_requests" => &mut self.post_copy_requests,
            _ => return None,
        })
    }

    /// How far a migration is, of a domain in this state.
    pub fn transfer(&self, domain: DomainState) -> TransferStatus {
        let status = self.status(domain);
        let is_over = status == MigrationStatus::Completed;
        TransferStatus {
            error_desc: self.error.clone(),
            total_ms: self.elapsed_ms,
            setup_ms: self.setup_ms,
            downtime_ms: self.downtime_ms.filter(|_| is_over),
            expected_downtime_ms: self.downtime_ms.filter(|_| !is_over),
            ram: self.memory_total_bytes.map(|total_bytes| self.memory(total_bytes)),
            status,
        }
    }

    fn status(&self, domain: DomainState) -> MigrationStatus {
        // Another job may be a dump, or a backup.
        if self.operation.is_some_and(|operation| !MIGRATIONS.contains(&operation)) {
            return MigrationStatus::None;
        }
        match self.kind {
            kind::BOUNDED => MigrationStatus::Setup,
            kind::UNBOUNDED => self.while_active(domain),
            kind::COMPLETED => MigrationStatus::Completed,
            kind::FAILED => MigrationStatus::Failed,
            kind::CANCELLED => MigrationStatus::Cancelled,
            _ => MigrationStatus::None,
        }
    }

    /// libvirt has one word for all of it. That it switches over by itself, nobody waits for: so there is no pre-switchover.
    fn while_active(&self, domain: DomainState) -> MigrationStatus {
        if domain.is_in_post_copy() {
            MigrationStatus::PostcopyActive
        } else if domain.has_post_copy_failed() {
            MigrationStatus::PostcopyPaused
        } else if domain.is_paused_to_migrate() {
            MigrationStatus::Device
        } else if self.memory_total_bytes.unwrap_or(0) == 0 {
            MigrationStatus::Setup
        } else {
            MigrationStatus::Active
        }
    }

    fn memory(&self, total_bytes: u64) -> RamStatus {
        let page_bytes = self.memory_page_bytes.unwrap_or(0);
        let bits_per_second = self.memory_bytes_per_second.unwrap_or(0) as f64 * 8.0;
        RamStatus {
            total_bytes,
            transferred_bytes: self.memory_processed_bytes.unwrap_or(0),
            remaining_bytes: self.memory_remaining_bytes.unwrap_or(0),
            rounds: self.memory_iteration.unwrap_or(0),
            parallel_bytes: 0,
            // What was asked for has been sent, at least, apart from the last of it.
            post_copy_bytes: self.post_copy_requests.unwrap_or(0).saturating_mul(page_bytes),
            zero_pages: self.memory_constant_pages.unwrap_or(0),
            normal_pages: self.memory_normal_pages.unwrap_or(0),
            page_bytes,
            dirty_pages_per_second: self.memory_dirty_pages_per_second.unwrap_or(0),
            throughput_mbps: bits_per_second / 1e6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: DomainState = DomainState { state: 1, reason: 1 };
    const PAUSED_TO_MIGRATE: DomainState = DomainState { state: 3, reason: 2 };

    fn outgoing(kind: i32) -> JobStatistics {
        let numbers = [
            ("operation", 5),
            ("time_elapsed", 1500),
            ("downtime", 300),
            ("memory_total", 1 << 30),
            ("memory_processed", 600),
            ("memory_remaining", 400),
            ("memory_iteration", 3),
            ("memory_page_size", 4096),
            ("memory_bps", 125_000_000),
            ("disk_total", 7),
        ];
        JobStatistics::new(kind, numbers)
    }

    #[test]
    fn counters_are_those_of_every_hypervisor() {
        let status = outgoing(2).transfer(RUNNING);
        assert_eq!((&status.status, status.total_ms), (&MigrationStatus::Active, Some(1500)));
        assert_eq!((status.downtime_ms, status.expected_downtime_ms), (None, Some(300)));
        let ram = status.ram.expect("counters");
        assert_eq!((ram.total_bytes, ram.transferred_bytes, ram.remaining_bytes), (1 << 30, 600, 400));
        assert_eq!((ram.rounds, ram.page_bytes, ram.post_copy_bytes), (3, 4096, 0));
        assert!((ram.throughput_mbps - 1000.0).abs() < 1e-9);
        let over = outgoing(3).transfer(PAUSED_TO_MIGRATE);
        assert_eq!((over.downtime_ms, over.expected_downtime_ms), (Some(300), None));
    }

    #[test]
    fn where_a_migration_stands_is_said_by_its_job_and_its_domain() {
        let post_copy = |reason| DomainState { state: 3, reason };
        let dump = JobStatistics::new(2, [("operation", 8), ("memory_total", 1)]);
        for (statistics, domain, expected) in [
            (JobStatistics::default(), RUNNING, MigrationStatus::None),
            (outgoing(1), RUNNING, MigrationStatus::Setup),
            (JobStatistics::new(2, [("operation", 5)]), RUNNING, MigrationStatus::Setup),
            (outgoing(2), RUNNING, MigrationStatus::Active),
            (outgoing(2), PAUSED_TO_MIGRATE, MigrationStatus::Device),
            (outgoing(2), post_copy(12), MigrationStatus::PostcopyActive),
            (outgoing(2), post_copy(13), MigrationStatus::PostcopyPaused),
            (outgoing(3), PAUSED_TO_MIGRATE, MigrationStatus::Completed),
            (outgoing(4), RUNNING, MigrationStatus::Failed),
            (outgoing(5), RUNNING, MigrationStatus::Cancelled),
            (dump, RUNNING, MigrationStatus::None),
        ] {
            assert_eq!(statistics.transfer(domain).status, expected, "{statistics:?}, {domain:?}");
        }
    }

    #[test]
    fn a_source_has_let_go_once_its_target_asks_for_pages() {
        let post_copy = DomainState { state: 3, reason: 12 };
        let mut statistics = outgoing(2);
        assert!(!statistics.transfer(post_copy).has_let_go());
        statistics.post_copy_requests = Some(1);
        assert!(statistics.transfer(post_copy).has_let_go());
    }
}
