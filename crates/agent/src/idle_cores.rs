//! Cores that are left to whoever packs memory, and those that the VMs take, as they were before migrations took
//! some of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use drainpipe_relay::HostCpu;
use tokio::time::sleep;

use crate::agent::Agent;
use crate::vm_cores::VmCpu;

/// Over such times cores are counted: what a VM did for longer than that is likely to go on.
const COUNT_FOR: Duration = Duration::from_secs(5);

/// What was counted last while no VM was on its way.
#[derive(Debug, Default)]
pub(crate) struct IdleCores(Mutex<Option<f64>>);

impl IdleCores {
    /// Those that may pack, by the configuration; none until they were counted.
    pub(crate) fn known(&self) -> Option<f64> {
        *self.lock()
    }

    fn count(&self, idle: f64) {
        *self.lock() = Some(idle);
    }

    fn lock(&self) -> MutexGuard<'_, Option<f64>> {
        // One assignment leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts until it is dropped.
pub(crate) async fn keep_counting(agent: Arc<Agent>, cpus: Vec<usize>) {
    let most = agent.config.compression.cores.map_or(f64::MAX, f64::from);
    let mut host = HostCpu::new(cpus);
    let mut vms_before = VmCpu::read(&agent.vms);
    let mut was_migrating = true;
    loop {
        let (idle, vms, is_migrating) = (host.idle_cores(), VmCpu::read(&agent.vms), agent.is_migrating());
        if !was_migrating && !is_migrating {
            if let Some(idle) = idle {
                agent.idle_cores.count(idle.min(most));
            }
            agent.vms.count_cores(&vms.cores_since(&vms_before));
        }
        (was_migrating, vms_before) = (is_migrating, vms);
        sleep(COUNT_FOR).await;
    }
}
