//! How much of this host's cores each VM uses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use drainpipe_hypervisor::Machine;

/// CPU that each QEMU has used since it was started, all at one time.
#[derive(Debug)]
pub(crate) struct VmCpu {
    at: Instant,
    // In seconds, by process id.
    seconds: BTreeMap<u32, f64>,
}

impl VmCpu {
    /// The cores of these QEMUs, except those that have ended.
    pub(crate) fn of(machines: &[Arc<dyn Machine>]) -> Self {
        let at = Instant::now();
        let used = |vmm: &Arc<dyn Machine>| Some((vmm.pid(), vmm.cpu_seconds().ok()?));
        Self { at, seconds: machines.iter().filter_map(used).collect() }
    }

    /// Cores that each took since `before`, by process id; without those that were started or went meanwhile.
    pub(crate) fn cores_since(&self, before: &Self) -> BTreeMap<u32, f64> {
        let passed_s = self.at.saturating_duration_since(before.at).as_secs_f64();
        let cores = |(pid, seconds): (&u32, &f64)| {
            // A QEMU of the same process id that has used less is another one.
            let used = seconds - before.seconds.get(pid).filter(|before| *before <= seconds)?;
            (passed_s > 0.0).then(|| (*pid, used / passed_s))
        };
        self.seconds.iter().filter_map(cores).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_who_ran_all_the_time_is_counted() {
        let begin = Instant::now();
        let at = |passed_s, seconds: &[(u32, f64)]| VmCpu {
            at: begin + Duration::from_secs(passed_s),
            seconds: seconds.iter().copied().collect(),
        };
        let before = at(0, &[(1, 10.0), (2, 7.0), (3, 20.0), (5, 9.0)]);
        // 2 has gone, 4 was started, and 5 is another process than before.
        let now = at(5, &[(1, 15.0), (3, 21.0), (4, 3.0), (5, 1.0)]);
        assert_eq!(now.cores_since(&before), BTreeMap::from([(1, 1.0), (3, 0.2)]));
        assert_eq!(before.cores_since(&before), BTreeMap::new());
    }
}
