//! What libvirt says of a domain and its job, in neutral words; pure.

use std::time::Duration;

use drainpipe_hypervisor::{Happening, MigrationStatus, RamStatus, RunState, TransferStatus};
use drainpipe_libvirt::{DomainState, DomainStatus, JobStats, Lifecycle};

/// Details of [`Lifecycle::Suspended`] (`VIR_DOMAIN_EVENT_SUSPENDED_…`).
const SUSPENDED_BY_MIGRATION: i32 = 1;

/// Details of [`Lifecycle::Stopped`] (`VIR_DOMAIN_EVENT_STOPPED_…`).
const STOPPED_CRASHED: i32 = 2;
const STOPPED_FAILED: i32 = 5;

/// Why a domain is paused (`VIR_DOMAIN_PAUSED_…`).
const PAUSED_BY_IO_ERROR: i32 = 5;

/// The state of a domain; `has_job` says whether a job of libvirt's has it.
pub(crate) fn run_state(state: DomainStatus, has_job: bool) -> RunState {
    match state.state {
        DomainState::Running | DomainState::Blocked | DomainState::NoState => RunState::Running,
        DomainState::Paused if state.is_paused_by_migration() && has_job => RunState::FinishMigrate,
        DomainState::Paused if state.is_paused_by_migration() => RunState::Postmigrate,
        DomainState::Paused if state.reason == PAUSED_BY_IO_ERROR => RunState::IoError,
        DomainState::Paused => RunState::Paused,
        DomainState::ShuttingDown | DomainState::Off => RunState::Shutdown,
        DomainState::Crashed => RunState::GuestPanicked,
        DomainState::Suspended => RunState::Suspended,
        DomainState::Unknown(_) => RunState::InternalError,
    }
}

/// What has happened to a domain.
pub(crate) fn happening(change: Lifecycle, detail: i32) -> Happening {
    match change {
        Lifecycle::Suspended if detail == SUSPENDED_BY_MIGRATION => {
            Happening::Migration(MigrationStatus::PreSwitchover)
        }
        Lifecycle::Resumed => Happening::Resumed,
        // An end that nobody asked for is unexpected.
        Lifecycle::Stopped if matches!(detail, STOPPED_CRASHED | STOPPED_FAILED) => {
            Happening::Other("STOPPED".into())
        }
        Lifecycle::Stopped | Lifecycle::ShutDown => Happening::Ending,
        other => Happening::Other(format!("{other:?}").to_uppercase()),
    }
}

/// What can be left to send of a guest that is paused for its switch-over: less than goes in this time, and not this much.
const LEFT_AT_SWITCH_OVER_MAX: Duration = Duration::from_secs(2);
const LEFT_AT_SWITCH_OVER_BYTES: u64 = 16 << 20;

/// Whether a guest that stands still while it is sent was suspended by its owner. libvirt calls both a pause by migration,
/// but so much is left to send only of one that was running when it was paused.
pub(crate) fn is_suspended_in_flight(state: DomainStatus, job: &JobStats) -> bool {
    let speed = job.memory.bytes_per_second.unwrap_or(0);
    let goes_soon = speed.saturating_mul(LEFT_AT_SWITCH_OVER_MAX.as_secs());
    let left_max = goes_soon.saturating_add(LEFT_AT_SWITCH_OVER_BYTES);
    let is_much_left = job.memory.remaining_bytes.is_some_and(|left| left > left_max);
    state.is_paused_by_migration() && (is_much_left || copies_disks_alone(job))
}

/// Whether disks are copied, and memory is still to follow.
fn copies_disks_alone(job: &JobStats) -> bool {
    let some = |bytes: Option<u64>| bytes.is_some_and(|bytes| bytes > 0);
    some(job.disk_total_bytes) && !some(job.memory.total_bytes)
}

/// How far a migration is, by what libvirt counts.
pub(crate) fn transfer(status: MigrationStatus, job: &JobStats) -> TransferStatus {
    TransferStatus {
        total_ms: job.time_elapsed_ms,
        setup_ms: job.setup_ms,
        downtime_ms: job.downtime_ms,
        expected_downtime_ms: job.downtime_expected_ms,
        ram: ram(job),
        ..TransferStatus::of(status)
    }
}

fn ram(job: &JobStats) -> Option<RamStatus> {
    let (total_bytes, remaining_bytes) = (job.memory.total_bytes?, job.memory.remaining_bytes?);
    let of = |figure: Option<u64>| figure.unwrap_or(0);
    // Bits of less than a byte a second are lost.
    #[expect(clippy::cast_precision_loss, reason = "a speed, to three digits")]
    let throughput_mbps = of(job.memory.bytes_per_second) as f64 * 8.0 / 1e6;
    Some(RamStatus {
        total_bytes,
        remaining_bytes,
        transferred_bytes: of(job.memory.processed_bytes),
        rounds: of(job.memory.iteration),
        zero_pages: of(job.memory.constant_pages),
        normal_pages: of(job.memory.normal_pages),
        page_bytes: of(job.memory.page_bytes),
        dirty_pages_per_second: of(job.memory.dirty_pages_per_second),
        throughput_mbps,
        ..RamStatus::default()
    })
}

#[cfg(test)]
mod tests {
    use drainpipe_libvirt::MemoryStats;

    use super::*;

    #[test]
    fn who_has_a_paused_domain_its_reason_and_its_job_say() {
        let paused = |reason| DomainStatus { state: DomainState::Paused, reason };
        for (state, has_job, expected) in [
            (paused(2), true, RunState::FinishMigrate),
            (paused(2), false, RunState::Postmigrate),
            // Somebody has paused it, whatever else goes on.
            (paused(1), true, RunState::Paused),
            (paused(5), false, RunState::IoError),
            (DomainStatus { state: DomainState::Running, reason: 1 }, true, RunState::Running),
            (DomainStatus { state: DomainState::Off, reason: 0 }, false, RunState::Shutdown),
        ] {
            assert_eq!(run_state(state, has_job), expected, "{state:?}, {has_job}");
        }
    }

    #[test]
    fn a_guest_of_which_much_is_left_was_suspended_by_its_owner() {
        let paused = DomainStatus { state: DomainState::Paused, reason: 2 };
        let running = DomainStatus { state: DomainState::Running, reason: 1 };
        let of_memory = |memory| JobStats { memory, ..JobStats::default() };
        let left = |mib: u64, mib_per_s: Option<u64>| {
            of_memory(MemoryStats {
                remaining_bytes: Some(mib << 20),
                bytes_per_second: mib_per_s.map(|speed| speed << 20),
                ..MemoryStats::default()
            })
        };
        assert!(is_suspended_in_flight(paused, &left(100, Some(15))));
        assert!(is_suspended_in_flight(paused, &left(17, None)));
        assert!(!is_suspended_in_flight(paused, &left(40, Some(15))));
        assert!(!is_suspended_in_flight(running, &left(100, Some(15))));
        let disks = JobStats { disk_total_bytes: Some(1), ..JobStats::default() };
        assert!(is_suspended_in_flight(paused, &disks), "memory is still to follow");
        let memory = MemoryStats { total_bytes: Some(100 << 20), ..MemoryStats::default() };
        assert!(!is_suspended_in_flight(paused, &JobStats { memory, ..disks }));
        assert!(!is_suspended_in_flight(paused, &JobStats::default()), "nothing is known of it");
    }

    #[test]
    fn only_a_migrations_pause_is_one() {
        let pre_switchover = Happening::Migration(MigrationStatus::PreSwitchover);
        assert_eq!(happening(Lifecycle::Suspended, 1), pre_switchover);
        assert_ne!(happening(Lifecycle::Suspended, 0), pre_switchover);
        assert_eq!(happening(Lifecycle::Resumed, 1), Happening::Resumed);
    }
}
