//! How much CPU a migration gets on two hosts, and what few cores do to it.

use crate::host::facts::HostFacts;

/// Core-seconds that a byte takes in QEMU on either host: 1.2 for each GiB, half of it on each.
const MOVING_S: f64 = 0.6 / (1_u64 << 30) as f64;

/// What a migration gets of the cores of a host that has none to spare, and does not say among how many the kernel shares
/// them out.
const UNKNOWN_SHARE: f64 = 0.25;

/// Nobody can tell what comes of a smaller share.
const LEAST_CORES: f64 = 0.01;

/// Other migrations of a drain on the same cores: a target takes four at a time, unless somebody has set it.
const OTHER_MIGRATIONS: f64 = 3.0;

/// A host on which one thread more gets less than this of a core is busy.
const BUSY_BELOW: f64 = 0.7;

/// What QEMU carries with so many free cores, in bytes per ms; without an end where these are not known. Many threads send
/// and receive, and they go first at the beginning. So what one more thread gets of busy cores says little of them.
pub fn carried_bytes_per_ms(free_cores: Option<f64>) -> f64 {
    had(free_cores).map_or(f64::INFINITY, |cores| cores.max(UNKNOWN_SHARE) / MOVING_S / 1e3)
}

/// What a migration does beside sending.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// How long it takes with a core at once whenever it wants one.
    pub ms: f64,
    /// How much longer it takes for each other thread that wants the same core. This is less than `ms`: the kernel lets a
    /// thread go first that has slept, and waiting for timers or for the other host takes no longer.
    pub per_other_ms: f64,
}

impl Work {
    /// How long it takes with so many free cores.
    pub fn with_ms(self, free_cores: Option<f64>) -> f64 {
        let others = had(free_cores).map_or(0.0, |cores| 1.0 / cores.min(1.0) - 1.0);
        self.ms + self.per_other_ms * others
    }
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

/// A warning for each of the two hosts whose cores are busy, since a prediction between them is less certain.
pub fn busy_warnings(source: &HostFacts, target: &HostFacts) -> Vec<String> {
    [source, target].into_iter().filter_map(busy_warning).collect()
}

fn busy_warning(host: &HostFacts) -> Option<String> {
    let cores = on(host).filter(|cores| are_busy(*cores))?;
    Some(format!(
        "the cores of {} are busy: a migration gets about {cores:.2} of one there as long as others want as \
        much as now, so it takes longer; how much longer depends on what they do meanwhile",
        host.name
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

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
    }

    #[test]
    fn each_host_with_busy_cores_is_warned_of_with_what_a_migration_gets_there() {
        let host = |name, share| HostFacts {
            idle_cores: Some(0.0),
            core_share: Some(share),
            ..fixtures::host(name)
        };
        let idle = HostFacts { idle_cores: Some(6.0), ..fixtures::host("a") };
        assert_eq!(busy_warnings(&idle, &idle), [""; 0]);
        assert_eq!(busy_warnings(&idle, &fixtures::host("b")), [""; 0], "an agent that does not know yet");
        let one = busy_warnings(&idle, &host("b", 0.03));
        assert!(
            one.len() == 1 && one[0].contains("cores of b are busy") && one[0].contains("0.03 of one"),
            "{one:?}"
        );
        let both = busy_warnings(&host("a", 0.25), &host("b", 0.03));
        assert!(both.len() == 2 && both[0].contains("cores of a are busy"), "{both:?}");
    }
}
