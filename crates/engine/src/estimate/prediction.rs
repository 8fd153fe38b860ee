//! Predicts how long a migration will take, by its plan, its memory's content, and the cores that are there for it.

use super::cores::{are_busy, cores_had};
use super::sending::{copied_ms, sent_ms};
use crate::host::facts::HostFacts;
use crate::plan::{Plan, PlanRequest};
use crate::transfer::relayed::Verdict;

/// On busy cores, nearly all migrations took at most so many times as long as predicted: docs/decisions/0104.
const LONGEST_WHERE_BUSY: f64 = 2.0;

/// The most that one between these hosts takes of which so long is predicted; none where no cores are busy.
pub fn most_ms(source: &HostFacts, target: &HostFacts, predicted_ms: f64) -> Option<f64> {
    cores_had(source, target).filter(|cores| are_busy(*cores)).map(|_| LONGEST_WHERE_BUSY * predicted_ms)
}

/// From the request to the end of a migration by this plan, of a VM that rests and waits for no turn, the copies of its
/// disks included; none where it is not known what its memory holds, or what the paths carry.
pub fn total_ms(
    source: &HostFacts,
    target: &HostFacts,
    plan: &Plan,
    request: &PlanRequest,
    memory_bytes: u64,
) -> Option<f64> {
    let limits = source.limits_to(target);
    let paths_mbps =
        limits.all_mbps.into_iter().chain([plan.carried_mbps()?]).min().filter(|mbps| *mbps > 0)?;
    let zero_share = request.zero_share.filter(|share| (0.0..=1.0).contains(share))?;
    let relay = || request.relay_means(source, target, plan.carrying(), plan.is_encrypted());
    let wire_share =
        match plan.is_compressed().then(relay).flatten().map(|relay| relay.verdict(request.memory)) {
            Some(Verdict::Compressed { wire_share }) => wire_share,
            _ => 1.0,
        };
    let bytes = memory_bytes as f64 * (1.0 - zero_share);
    let free_cores = cores_had(source, target);
    let disk_bytes: f64 = plan.disks.iter().map(|disk| disk.allocated_bytes as f64).sum();
    let disks_mbps = paths_mbps.min(limits.storage_mbps.unwrap_or(u64::MAX)).max(1);
    let disks_ms = copied_ms(disk_bytes, disks_mbps as f64, free_cores);
    Some(sent_ms(bytes, wire_share, paths_mbps as f64, free_cores) + disks_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn a_migration_may_take_longer_where_either_host_has_busy_cores() {
        let host =
            |share: f64| HostFacts { idle_cores: Some(0.0), core_share: Some(share), ..fixtures::host("a") };
        assert_eq!(most_ms(&host(0.1), &host(1.0), 500.0), Some(1_000.0));
        assert_eq!(most_ms(&host(1.0), &host(0.1), 500.0), Some(1_000.0));
        assert_eq!(most_ms(&host(1.0), &host(1.0), 500.0), None);
        assert_eq!(most_ms(&host(0.1), &fixtures::host("b"), 500.0), None, "an agent that does not know yet");
    }
}
