//! Throttles the VM's CPUs as the engine says.

use drainpipe_engine::migration::SourceEvent;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::{VcpuThrottle, VmError};
use tokio::task::block_in_place;
use tracing::warn;

use super::Executor;
use crate::vms::QMP_DEADLINE;

/// How it is held back now.
#[derive(Debug, Default)]
pub(super) struct CpuThrottle {
    // From the first time on.
    vcpus: Option<Box<dyn VcpuThrottle>>,
    percent: Option<u8>,
}

impl Executor {
    /// Sees to it that the VM's CPUs are held back for this share of their time, or not; the news, if it is some.
    pub(super) async fn follow_cpu_throttle(&mut self, percent: Option<u8>) -> Option<SourceEvent> {
        let is_news = percent != self.settings.cpu_throttle.percent;
        let done = match percent {
            Some(percent) => self.hold_back(percent).await,
            None if is_news => self.settings.cpu_throttle.lift(),
            None => return None,
        };
        if let Err(problem) = done {
            warn!(vm = self.running.vm, %problem, "its CPUs cannot be throttled as planned");
            // Some of its CPUs may be throttled already.
            drop(self.settings.cpu_throttle.lift());
            self.settings.cpu_throttle.percent = None;
            return Some(SourceEvent::NotThrottled(problem));
        }
        self.settings.cpu_throttle.percent = percent;
        is_news.then_some(SourceEvent::Throttled(percent))
    }

    /// Again and again: a guard may have taken this agent for dead meanwhile, and let them run.
    async fn hold_back(&mut self, percent: u8) -> Result<(), Problem> {
        if self.settings.cpu_throttle.vcpus.is_none() {
            let vcpus = self.vmm()?.vcpu_throttle(QMP_DEADLINE).await.map_err(Problem::failed)?;
            self.settings.cpu_throttle.vcpus = Some(vcpus);
        }
        self.settings.cpu_throttle.on_vcpus(|vcpus| vcpus.hold(percent))
    }
}

impl CpuThrottle {
    fn lift(&self) -> Result<(), Problem> {
        self.on_vcpus(|vcpus| vcpus.lift())
    }

    fn on_vcpus(&self, act: impl FnOnce(&dyn VcpuThrottle) -> Result<(), VmError>) -> Result<(), Problem> {
        // The kernel may have other work first that concerns control groups.
        self.vcpus.as_ref().map_or(Ok(()), |vcpus| block_in_place(|| act(&**vcpus)).map_err(Problem::failed))
    }
}

/// A task that crashes leaves no VM held back.
impl Drop for CpuThrottle {
    fn drop(&mut self) {
        if self.percent.is_some()
            && let Err(problem) = self.lift()
        {
            warn!(%problem, "a VM's CPUs stay throttled until the agent restarts");
        }
    }
}
