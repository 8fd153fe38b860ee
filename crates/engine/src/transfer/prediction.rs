//! What a migration will take, by its plan, by what its memory holds, and by the cores that are there for it.

use crate::drain::{copied_ms, sent_ms};
use crate::host::facts::HostFacts;
use crate::plan::{Plan, Request};
use crate::transfer::relayed::{RelayMeans, Verdict};

/// Core-seconds that a byte takes in QEMU on either host: 1.2 for each GiB, half of it on each.
const MOVING_S: f64 = 0.6 / (1_u64 << 30) as f64;

/// What a migration gets of the cores of a host that has none to spare, and does not say among how many the kernel shares
/// them out.
pub(crate) const UNKNOWN_SHARE: f64 = 0.25;

/// Nobody can tell what comes of a smaller share.
const LEAST_CORES: f64 = 0.01;

/// Other migrations of a drain on the same cores: a target takes four at a time, unless somebody has set it.
const OTHER_MIGRATIONS: f64 = 3.0;

/// A host on which one thread more gets less than this of a core is busy.
const BUSY_BELOW: f64 = 0.7;

/// What QEMU carries with so many free cores, in bytes per ms; without an end where these are not known.
pub fn carried_bytes_per_ms(free_cores: Option<f64>) -> f64 {
    had(free_cores).map_or(f64::INFINITY, |cores| cores / MOVING_S / 1e3)
}

/// How long something takes that wants one core for `ms`.
pub fn slowed_ms(ms: f64, free_cores: Option<f64>) -> f64 {
    had(free_cores).map_or(ms, |cores| ms / cores.min(1.0))
}

fn had(free_cores: Option<f64>) -> Option<f64> {
    free_cores.filter(|cores| cores.is_finite()).map(|cores| cores.max(LEAST_CORES))
}

/// Whether so many cores are so few that nobody can say well how long something takes there.
pub fn are_busy(cores: f64) -> bool {
    cores < BUSY_BELOW
}

/// What a migration of a drain has instead of its share of busy cores, if others want half as much from now on: VMs that
/// leave want nothing there any more.
pub fn eased(share: f64) -> f64 {
    (2.0 * share).min(1.0)
}

/// The same if others want as much as now all the time, and other migrations of the drain share the core too.
pub fn busiest(share: f64) -> f64 {
    1.0 / (1.0 / share.max(LEAST_CORES) + OTHER_MIGRATIONS)
}

/// Cores that a migration has on the host where it has fewer; absent where one does not say.
pub fn cores_had(source: &HostFacts, target: &HostFacts) -> Option<f64> {
    on(source).zip(on(target)).map(|(source, target)| source.min(target))
}

/// Those that are free, or its share of those that others want too.
fn on(host: &HostFacts) -> Option<f64> {
    let share = share(host).unwrap_or(UNKNOWN_SHARE);
    host.idle_cores.filter(|cores| cores.is_finite()).map(|idle| idle.max(share))
}

fn share(host: &HostFacts) -> Option<f64> {
    host.core_share.filter(|share| (0.0..=1.0).contains(share))
}

/// What to know of this host's cores before a drain that needs them.
pub fn busy_told(host: &HostFacts) -> Option<String> {
    let cores = on(host).filter(|cores| are_busy(*cores))?;
    Some(format!(
        "the cores of {} are busy: a migration has about {cores:.2} of one there, as others want them now, so it takes \
         longer; how much depends on what they do meanwhile",
        host.name
    ))
}

/// From the request to the end of a migration by this plan, of a VM that rests and waits for no turn, the copies of its
/// disks included; none where it is not known what its memory holds, or what the paths carry.
pub fn total_ms(
    source: &HostFacts,
    target: &HostFacts,
    plan: &Plan,
    request: &Request,
    memory_bytes: u64,
) -> Option<f64> {
    let limits = source.limits_to(target);
    let paths_mbps =
        limits.all_mbps.into_iter().chain([plan.carried_mbps()?]).min().filter(|mbps| *mbps > 0)?;
    let zero_share = request.zero_share.filter(|share| (0.0..=1.0).contains(share))?;
    let relay = || RelayMeans::of(source, target, plan.carrying(), plan.encryption.is_encrypted, request);
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
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures;

    proptest! {
        #[test]
        fn fewer_cores_never_make_it_faster(
            bytes in 0.0_f64..1e13,
            paths_mbps in 1.0_f64..1e6,
            cores in -1.0_f64..512.0,
            more in 0.0_f64..512.0,
        ) {
            let of = |cores| sent_ms(bytes, 1.0, paths_mbps, cores);
            prop_assert!(of(Some(cores)) >= of(Some(cores + more)) - 1e-6);
            prop_assert!(of(Some(cores)).is_finite() && of(Some(cores)) >= of(None) - 1e-6);
        }
    }

    #[test]
    fn few_cores_are_the_limit_of_fast_links_only() {
        const GIB: f64 = (1_u64 << 30) as f64;
        let of = |paths_mbps, cores| sent_ms(GIB, 1.0, paths_mbps, Some(cores));
        assert!((of(2_000.0, 8.0) - of(2_000.0, 1.0)).abs() < 1.0);
        let (idle, busy) = (of(100_000.0, 8.0), of(100_000.0, 0.5));
        assert!(busy > idle + 1_000.0, "half a core takes 1.2 s for a GiB: {busy} ms, not {idle}");
        for (cores, slowed) in [(0.25, 400.0), (0.0, 10_000.0), (f64::NAN, 100.0), (3.0, 100.0)] {
            assert!((slowed_ms(100.0, Some(cores)) - slowed).abs() < 1e-9, "{cores} cores");
        }
    }

    #[test]
    fn a_migration_has_what_is_free_or_its_share_on_the_host_where_that_is_less() {
        let host = |idle_cores, core_share| HostFacts { idle_cores, core_share, ..fixtures::host("b") };
        let idle = host(Some(6.0), Some(1.0));
        let had = |target: &HostFacts| cores_had(&idle, target);
        assert_eq!(had(&idle), Some(6.0));
        assert_eq!(had(&host(Some(0.0), Some(0.03))), Some(0.03), "64 others want its two cores");
        assert_eq!(had(&host(Some(0.1), Some(0.5))), Some(0.5));
        assert_eq!(had(&host(Some(0.0), None)), Some(0.25), "an older agent does not say");
        assert_eq!((had(&host(None, Some(0.5))), had(&host(Some(0.0), Some(f64::NAN)))), (None, Some(0.25)));
        assert_eq!(busy_told(&idle), None);
        let reason = busy_told(&host(Some(0.0), Some(0.03))).unwrap();
        assert!(reason.contains("cores of b are busy") && reason.contains("0.03 of one"), "{reason}");
    }
}
