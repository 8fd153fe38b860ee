//! Cores that are left to migrations, and those that the VMs take, as they were before migrations took some of them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use drainpipe_engine::free_cores::{CoresLook, FreeCores, LOOK_EVERY};
use drainpipe_relay::HostCpu;
use tokio::time::{Instant, sleep};

use crate::agent::Agent;
use crate::cpu_list::CpuList;
use crate::host::own_cpu;
use crate::lock::lock;
use crate::relay::own_cpus;
use crate::vm_cores::VmCpu;

/// Over such times it is counted what VMs take: what a VM did for longer than that is likely to go on.
const COUNT_VMS_FOR: Duration = Duration::from_secs(5);

/// What the last looks have shown.
#[derive(Debug, Default)]
pub(crate) struct IdleCores(Mutex<FreeCores>);

impl IdleCores {
    /// Of those on which the agent may run, whether they may pack or only pass on; with those that migrations take. None
    /// until they were counted.
    pub(crate) fn known(&self) -> Option<f64> {
        lock(&self.0).free()
    }
}

/// Counts until it is dropped, on the CPUs on which the agent may run: at first these.
pub(crate) async fn keep_counting(agent: Arc<Agent>, mut cpus: CpuList) {
    let mut host = counted_from_here_on(&cpus);
    let (mut before, mut vms) = (Taken::read(&agent), VmsCount::begin(&agent));
    loop {
        sleep(LOOK_EVERY).await;
        vms.follow(&agent);
        let (idle, taken) = (host.idle_cores(), Taken::read(&agent));
        if let Some(others) = own_cpus().ok().filter(|own| *own != cpus) {
            host = counted_from_here_on(&others);
            cpus = others;
            *lock(&agent.idle_cores.0) = FreeCores::default();
        } else if let Some(idle) = idle {
            let migrating =
                if agent.is_migrating() { taken.by_migrations_since(&before, &agent) } else { 0.0 };
            let cores = cpus.cpus().len() as f64;
            lock(&agent.idle_cores.0).look(CoresLook { cores, idle, migrating });
        }
        before = taken;
    }
}

fn counted_from_here_on(cpus: &CpuList) -> HostCpu {
    let mut host = HostCpu::new(cpus.cpus().to_vec());
    host.idle_cores();
    host
}

/// CPU that this agent and its QEMUs have used, those that wait for their VMs too.
struct Taken {
    at: Instant,
    agent: Duration,
    qemus: VmCpu,
}

impl Taken {
    fn read(agent: &Agent) -> Self {
        let mut qemus = agent.vms.all_running();
        qemus.extend(agent.incoming.qemus());
        Self { at: Instant::now(), agent: own_cpu(), qemus: VmCpu::of(&qemus) }
    }

    /// Cores that migrations took: those of the agent, and of each QEMU what is more than its VM takes otherwise.
    fn by_migrations_since(&self, before: &Self, agent: &Agent) -> f64 {
        let passed_s = self.at.duration_since(before.at).as_secs_f64();
        let of_agent =
            self.agent.saturating_sub(before.agent).as_secs_f64() / passed_s.max(f64::MIN_POSITIVE);
        let usual = agent.vms.cores_taken_by_process();
        let more = |(pid, cores): (&u32, &f64)| match usual.get(pid) {
            Some(Some(usual)) => (cores - usual).max(0.0),
            // Nobody knows yet what its VM takes.
            Some(None) => 0.0,
            // It waits for its VM.
            None => *cores,
        };
        of_agent + self.qemus.cores_since(&before.qemus).iter().map(more).sum::<f64>()
    }
}

/// What VMs take while nothing migrates.
struct VmsCount {
    since: Instant,
    before: VmCpu,
    has_migrated: bool,
}

impl VmsCount {
    fn begin(agent: &Agent) -> Self {
        let before = VmCpu::of(&agent.vms.all_running());
        Self { since: Instant::now(), before, has_migrated: agent.is_migrating() }
    }

    fn follow(&mut self, agent: &Agent) {
        self.has_migrated |= agent.is_migrating();
        if self.since.elapsed() < COUNT_VMS_FOR {
            return;
        }
        let next = Self::begin(agent);
        if !self.has_migrated {
            agent.vms.count_cores(&next.before.cores_since(&self.before));
        }
        *self = next;
    }
}
