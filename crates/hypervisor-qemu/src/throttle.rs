//! How much of their time a guest's vCPUs may run: a quota on each one's thread, by the kernel's control groups.
//!
//! QEMU's own way (`auto-converge`) is not used. Since 9.2 it looks for changed memory in its main loop every 5 s, and
//! waits there for its migration thread: if nobody takes what that sends, guest and QMP stand still, and a QEMU whose
//! migration is cancelled meanwhile fails an assertion (docs/decisions/0053).
//!
//! The group is its own record: its name shows anybody which threads are throttled, and where they came from.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::control_groups::{Hierarchy, Quota, QuotaError, ThreadGroup};
use crate::paths::RuntimePaths;
use crate::privileges::Privileges;
use crate::process::Process;
use crate::qmp::QmpError;
use crate::vcpus::vcpu_threads;
use crate::vmm::Vmm;

const GROUP_PREFIX: &str = "drainpipe-vcpu-";

/// A thread whose quota is used up may hold QEMU's big lock: short, since QMP and the pause then wait for its next turn.
const PERIOD: Duration = Duration::from_millis(10);

/// The kernel knows no shorter quota.
const RUNS_MIN: Duration = Duration::from_millis(1);

/// Why vCPUs are not held back.
#[derive(Debug, thiserror::Error)]
pub enum ThrottleError {
    /// QEMU does not say which its threads are.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The kernel does not hold them back.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// Its QEMU cannot be found.
    #[error("cannot reach its QEMU: {0}")]
    Process(std::io::Error),
}

/// The vCPUs of a guest, to be held back.
#[derive(Debug)]
pub struct VcpuThrottle {
    hierarchy: Hierarchy,
    process: u32,
    groups: Vec<ThreadGroup>,
}

impl VcpuThrottle {
    /// The throttle of a VM whose vCPUs run freely.
    pub async fn of(vmm: &Vmm, deadline: Duration) -> Result<Self, ThrottleError> {
        Self::of_threads(vmm.pid(), vcpu_threads(vmm, deadline).await?)
    }

    /// Throttles these threads of a process.
    pub fn of_threads(process: u32, threads: BTreeSet<u32>) -> Result<Self, ThrottleError> {
        let hierarchy = Hierarchy::find()?;
        let group = |thread| hierarchy.group_for(process, thread, group_name(thread));
        let groups = threads.into_iter().map(group).collect::<Result<_, _>>()?;
        Ok(Self { hierarchy, process, groups })
    }

    /// Holds each vCPU back for this share of its time from now on, in percent. May be repeated, with another one too.
    pub fn hold(&self, percent: u8) -> Result<(), ThrottleError> {
        let quota = quota(percent);
        for group in &self.groups {
            self.hierarchy.limit(self.process, group, quota)?;
        }
        Ok(())
    }

    /// Lets them run as they like. May be repeated, also when QEMU has ended.
    pub fn lift(&self) -> Result<(), ThrottleError> {
        remove_all(&self.hierarchy, &self.groups)
    }
}

/// Lets the vCPUs of a VM run as they like, whoever held them back, also if its QEMU answers nothing.
pub fn lift_throttle(privileges: &Privileges, paths: &RuntimePaths) -> Result<(), ThrottleError> {
    let found =
        Process::find(privileges, &paths.pid_file(), paths.log_file()).map_err(ThrottleError::Process)?;
    found.map_or(Ok(()), |process| lift_throttle_of(&process))
}

/// The same of a process that is held.
pub fn lift_throttle_of(process: &Process) -> Result<(), ThrottleError> {
    let Ok(hierarchy) = Hierarchy::find() else { return Ok(()) };
    let groups = hierarchy.groups_with(process.pid(), group_name)?;
    remove_all(&hierarchy, &groups)
}

/// Removes what is left of QEMUs that have ended while their vCPUs were held back by nobody who still lives.
pub fn sweep_throttles() -> Result<(), ThrottleError> {
    match Hierarchy::find() {
        Ok(hierarchy) => Ok(hierarchy.sweep(GROUP_PREFIX)?),
        Err(QuotaError::NotMounted) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The rest too if one fails.
fn remove_all(hierarchy: &Hierarchy, groups: &[ThreadGroup]) -> Result<(), ThrottleError> {
    let removed: Vec<_> = groups.iter().map(|group| hierarchy.remove(group)).collect();
    Ok(removed.into_iter().collect::<Result<(), QuotaError>>()?)
}

fn group_name(thread: u32) -> String {
    format!("{GROUP_PREFIX}{thread}")
}

fn quota(percent: u8) -> Quota {
    let runs_percent = u32::from(100_u8.saturating_sub(percent).max(1));
    let runs = PERIOD * runs_percent / 100;
    if runs >= RUNS_MIN {
        return Quota { runs, period: PERIOD };
    }
    Quota { runs: RUNS_MIN, period: RUNS_MIN * 100 / runs_percent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_as_short_as_the_kernel_takes() {
        for (percent, runs_us, period_us) in [
            (30, 7_000, 10_000),
            (80, 2_000, 10_000),
            (90, 1_000, 10_000),
            (99, 1_000, 100_000),
            (100, 1_000, 100_000),
        ] {
            let quota = quota(percent);
            let us = [quota.runs, quota.period].map(|time| time.as_micros());
            assert_eq!(us, [runs_us, period_us], "{percent} %");
        }
    }
}
