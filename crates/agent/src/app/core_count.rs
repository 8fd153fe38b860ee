//! Counts the cores that are left to migrations and those that the VMs use, as they were before migrations took some
//! of them.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::host::free_cores::{CoresLook, LOOK_EVERY};
use drainpipe_relay::{Busyness, HostCpu};
use tokio::time::{Instant, sleep};

use crate::host::hardware::own_cpu;
use crate::host::own_waits::OwnWaits;
use crate::outgoing::Outgoing;
use crate::store::cpu_list::CpuList;
use crate::transfer::relay::own_cpus;
use crate::vms::Vms;
use crate::vms::vm_cores::VmCpu;

/// Over such times it is counted what VMs take: what a VM did for longer than that is likely to go on.
const COUNT_VMS_FOR: Duration = Duration::from_secs(5);

/// Counts until it is dropped, on the CPUs on which the agent may run: at first these.
pub(crate) async fn keep_counting(outgoing: Arc<Outgoing>, mut cpus: CpuList) {
    let mut host = counted_from_here_on(&cpus);
    let (mut before, mut vms) = (Taken::read(&outgoing), VmsCount::begin(&outgoing));
    loop {
        sleep(LOOK_EVERY).await;
        vms.follow(&outgoing);
        let (busyness, taken) = (host.busyness(), Taken::read(&outgoing));
        if let Some(others) = own_cpus().ok().filter(|own| *own != cpus) {
            host = counted_from_here_on(&others);
            cpus = others;
            outgoing.host.idle_cores.forget();
        } else if let Some(Busyness { idle, threads_per_core }) = busyness {
            let migrating =
                if outgoing.is_migrating() { taken.by_migrations_since(&before, &outgoing.vms) } else { 0.0 };
            let cores = cpus.cpus().len() as f64;
            let wait = taken.waits.since(&before.waits);
            outgoing.host.idle_cores.look(CoresLook { cores, idle, migrating, threads_per_core, wait });
        }
        before = taken;
    }
}

fn counted_from_here_on(cpus: &CpuList) -> HostCpu {
    let mut host = HostCpu::new(cpus.cpus().to_vec());
    host.busyness();
    host
}

/// CPU that this agent and its QEMUs have used, those that wait for their VMs too.
struct Taken {
    at: Instant,
    agent: Duration,
    waits: OwnWaits,
    machines: VmCpu,
}

impl Taken {
    fn read(outgoing: &Outgoing) -> Self {
        let mut machines = outgoing.vms.all_running();
        machines.extend(outgoing.incoming.entries.machines());
        Self { at: Instant::now(), agent: own_cpu(), waits: OwnWaits::read(), machines: VmCpu::of(&machines) }
    }

    /// Cores that migrations took: those of the agent, and of each QEMU what is more than its VM takes otherwise.
    fn by_migrations_since(&self, before: &Self, vms: &Vms) -> f64 {
        let passed_s = self.at.duration_since(before.at).as_secs_f64();
        let of_agent =
            self.agent.saturating_sub(before.agent).as_secs_f64() / passed_s.max(f64::MIN_POSITIVE);
        let usual = vms.cores_taken_by_process();
        let more = |(pid, cores): (&u32, &f64)| match usual.get(pid) {
            Some(Some(usual)) => (cores - usual).max(0.0),
            // Nobody knows yet what its VM takes.
            Some(None) => 0.0,
            // It waits for its VM.
            None => *cores,
        };
        of_agent + self.machines.cores_since(&before.machines).iter().map(more).sum::<f64>()
    }
}

/// What VMs take while nothing migrates.
struct VmsCount {
    since: Instant,
    before: VmCpu,
    has_migrated: bool,
}

impl VmsCount {
    fn begin(outgoing: &Outgoing) -> Self {
        let before = VmCpu::of(&outgoing.vms.all_running());
        Self { since: Instant::now(), before, has_migrated: outgoing.is_migrating() }
    }

    fn follow(&mut self, outgoing: &Outgoing) {
        self.has_migrated |= outgoing.is_migrating();
        if self.since.elapsed() < COUNT_VMS_FOR {
            return;
        }
        let next = Self::begin(outgoing);
        if !self.has_migrated {
            outgoing.vms.count_cores(&next.before.cores_since(&self.before));
        }
        *self = next;
    }
}
