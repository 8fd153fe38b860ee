//! Cores that are left to migrations, and those that the VMs take, as they were before migrations took some of them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use drainpipe_relay::HostCpu;
use tokio::time::{Instant, sleep};

use crate::agent::Agent;
use crate::cpu_list::CpuList;
use crate::lock::lock;
use crate::relay::own_cpus;
use crate::vm_cores::VmCpu;

/// Over such times cores are counted: what a VM did for longer than that is likely to go on.
const COUNT_FOR: Duration = Duration::from_secs(5);

/// The first time: `auto` compresses nothing before it is known.
const FIRST_COUNT_FOR: Duration = Duration::from_secs(1);

/// How often it is looked meanwhile whether a VM is on its way. What such a one takes within less is little of it.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What was counted last while no VM was on its way; or the first time, whatever was.
#[derive(Debug, Default)]
pub(crate) struct IdleCores(Mutex<Option<f64>>);

impl IdleCores {
    /// Of those on which the agent may run, whether they may pack or only pass on; none until they were counted.
    pub(crate) fn known(&self) -> Option<f64> {
        *lock(&self.0)
    }

    fn count(&self, idle: f64) {
        *lock(&self.0) = Some(idle);
    }
}

/// Counts until it is dropped, on the CPUs on which the agent may run: at first these.
pub(crate) async fn keep_counting(agent: Arc<Agent>, mut cpus: CpuList) {
    let mut host = counted_from_here_on(&cpus);
    let mut vms_before = VmCpu::read(&agent.vms);
    let mut time = FIRST_COUNT_FOR;
    loop {
        let has_migrated = migrates_within(&agent, time).await;
        let (mut idle, vms) = (host.idle_cores(), VmCpu::read(&agent.vms));
        if let Some(others) = own_cpus().ok().filter(|own| *own != cpus) {
            (host, idle) = (counted_from_here_on(&others), None);
            cpus = others;
        }
        // Where VMs come and go all the time, as in a drain that an agent goes on with that was started anew, so many
        // are idle at the least.
        let is_better_than_nothing = agent.idle_cores.known().is_none();
        if let Some(idle) = idle.filter(|_| !has_migrated || is_better_than_nothing) {
            agent.idle_cores.count(idle);
        }
        if !has_migrated {
            agent.vms.count_cores(&vms.cores_since(&vms_before));
        }
        vms_before = vms;
        time = COUNT_FOR;
    }
}

fn counted_from_here_on(cpus: &CpuList) -> HostCpu {
    let mut host = HostCpu::new(cpus.cpus().to_vec());
    host.idle_cores();
    host
}

/// Whether a VM is on its way at any time before this one is over.
async fn migrates_within(agent: &Agent, time: Duration) -> bool {
    let end = Instant::now() + time;
    let mut migrates = agent.is_migrating();
    while Instant::now() < end {
        sleep(LOOK_EVERY).await;
        migrates |= agent.is_migrating();
    }
    migrates
}
