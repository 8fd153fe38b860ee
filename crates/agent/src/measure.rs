//! What a migration used and carried, read while it runs.

use std::net::SocketAddr;

use drainpipe_engine::path::Path;
use drainpipe_engine::plan::Plan;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::progress::PathArrival;
use drainpipe_engine::result::{CpuSeconds, PathUse, Sample};
use drainpipe_hypervisor::Vmm;
use drainpipe_hypervisor::migration::TransferStatus;

use crate::api::types::TargetUse;
use crate::arrivals::Arrivals;
use crate::host;
use crate::network::HostNetwork;

/// Samples of one migration: an hour at ten a second. Past that, every second one is dropped.
const SAMPLES_MAX: usize = 36_000;

/// Readings of one migration.
#[derive(Debug)]
pub(crate) struct Measurements {
    vmm_cpu_at_start: f64,
    vmm_cpu_at_end: Option<f64>,
    agent_cpu_at_start: f64,
    paths: Vec<Path>,
    bytes_at_start: Vec<u64>,
    arrivals: Option<Arrivals>,
    samples: Vec<Sample>,
    rounds: u64,
    others_at_once: u32,
}

/// The readings, added up.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    /// CPU of all four processes.
    pub(crate) cpu_seconds: CpuSeconds,
    /// What each path carried.
    pub(crate) paths: Vec<PathUse>,
    /// Bytes on each path over time.
    pub(crate) samples: Vec<Sample>,
    /// Bytes sent on all paths. Not QEMU's own count: that of 7.2 takes multifd's pages as they were
    /// before compression.
    pub(crate) wire_bytes: u64,
    /// Rounds over memory.
    pub(crate) rounds: u64,
    /// Most other migrations from this host that were sending too.
    pub(crate) others_at_once: u32,
}

impl Measurements {
    /// Begins to measure.
    pub(crate) fn begin(vmm: Option<&Vmm>) -> Self {
        Self {
            vmm_cpu_at_start: cpu_seconds(vmm).unwrap_or(0.0),
            vmm_cpu_at_end: None,
            agent_cpu_at_start: host::own_cpu().as_secs_f64(),
            paths: vec![],
            bytes_at_start: vec![],
            arrivals: None,
            samples: vec![],
            rounds: 0,
            others_at_once: 0,
        }
    }

    /// The first byte is about to be sent to `destination` by this plan.
    pub(crate) async fn transfer_begins(
        &mut self,
        network: &HostNetwork,
        plan: &Plan,
        destination: SocketAddr,
        now_ms: f64,
    ) -> Result<(), Problem> {
        let paths = &plan.paths;
        self.paths.clone_from(paths);
        // QEMU has one connection for all that is no memory, and without multifd for everything.
        let connections = usize::from(plan.multifd_channels.unwrap_or(0)) + 1;
        self.arrivals = Some(Arrivals::expect(connections, destination, paths));
        self.bytes_at_start = network.sent_bytes(&self.links()).await?;
        self.samples = vec![Sample { ms: now_ms, path_bytes: vec![0; paths.len()] }];
        Ok(())
    }

    /// So many other migrations from this host are sending now.
    pub(crate) fn beside(&mut self, others: usize) {
        self.others_at_once = self.others_at_once.max(u32::try_from(others).unwrap_or(u32::MAX));
    }

    /// Reads the links and the connections.
    pub(crate) async fn sample(&mut self, network: &HostNetwork, now_ms: f64) -> Result<(), Problem> {
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.read(network, now_ms).await;
        }
        let now = network.sent_bytes(&self.links()).await?;
        let path_bytes =
            now.iter().zip(&self.bytes_at_start).map(|(now, start)| now.saturating_sub(*start)).collect();
        self.samples.push(Sample { ms: now_ms, path_bytes });
        if self.samples.len() > SAMPLES_MAX {
            let mut keep = false;
            self.samples.retain(|_| {
                keep = !keep;
                keep
            });
        }
        Ok(())
    }

    /// Bytes that have arrived by the last reading; none if that is not known.
    pub(crate) fn arrived_bytes(&self) -> Option<u64> {
        self.arrivals.as_ref()?.bytes()
    }

    /// For each path what has arrived by the last reading.
    pub(crate) fn arrivals(&self) -> Vec<PathArrival> {
        self.arrivals.as_ref().map(Arrivals::by_path).unwrap_or_default()
    }

    /// The last byte has been sent; QEMU is still there.
    pub(crate) fn transfer_ends(&mut self, vmm: &Vmm, status: &TransferStatus) {
        self.vmm_cpu_at_end = vmm.cpu_seconds().ok();
        self.rounds = status.ram.unwrap_or_default().rounds;
    }

    /// Adds the readings up.
    pub(crate) fn finish(&self, vmm: Option<&Vmm>, target: TargetUse) -> Measured {
        let vmm_cpu = self.vmm_cpu_at_end.or_else(|| cpu_seconds(vmm)).unwrap_or(self.vmm_cpu_at_start);
        let paths = self.path_uses();
        Measured {
            wire_bytes: paths.iter().map(|path| path.bytes).sum(),
            cpu_seconds: CpuSeconds {
                source_vmm: vmm_cpu - self.vmm_cpu_at_start,
                source_agent: host::own_cpu().as_secs_f64() - self.agent_cpu_at_start,
                target_vmm: target.vmm_cpu_seconds,
                target_agent: target.agent_cpu_seconds,
            },
            paths,
            samples: self.samples.clone(),
            rounds: self.rounds,
            others_at_once: self.others_at_once,
        }
    }

    fn path_uses(&self) -> Vec<PathUse> {
        let Some(last) = self.samples.last() else { return vec![] };
        let total: u64 = last.path_bytes.iter().sum();
        let arrivals = self.arrivals.as_ref();
        self.paths
            .iter()
            .zip(&last.path_bytes)
            .enumerate()
            .map(|(index, (path, bytes))| PathUse {
                link: path.link.clone(),
                peer_link: path.peer_link.clone(),
                bytes: *bytes,
                share: if total == 0 { 0.0 } else { *bytes as f64 / total as f64 },
                speed_mbps: path.speed_mbps,
                is_spare: path.is_spare,
                connections: arrivals.and_then(|arrivals| arrivals.connections_on(index)),
                retransmitted_segments: arrivals.and_then(|arrivals| arrivals.retransmitted_segments(index)),
                turns: vec![],
            })
            .collect()
    }

    fn links(&self) -> Vec<&str> {
        self.paths.iter().map(|path| path.link.as_str()).collect()
    }
}

fn cpu_seconds(vmm: Option<&Vmm>) -> Option<f64> {
    vmm.and_then(|vmm| vmm.cpu_seconds().ok())
}
