//! What a migration used and carried, read while it runs.

use std::net::SocketAddr;

use drainpipe_engine::migration::progress::PathCounter;
use drainpipe_engine::migration::result::{CompressionUse, CpuSeconds, LinkUse, PathUse, Sample};
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::plan::Plan;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::{Machine, TransferStatus};

use crate::host::hardware;
use crate::host::network::HostNetwork;
use crate::paths::path_counters::PathCounters;
use crate::transfer::relay::OutgoingRelay;
use crate::transfer::transport::connections;
use drainpipe_api_types::TargetUse;

/// Samples of one migration: an hour at ten a second. Past that, every second one is dropped.
const SAMPLES_MAX: usize = 36_000;

/// Readings of one migration.
#[derive(Debug)]
pub(crate) struct Measurements {
    vmm_cpu_at_start: f64,
    vmm_cpu_at_end: Option<f64>,
    agent_cpu_at_start: f64,
    paths: Vec<Path>,
    counters: Option<PathCounters>,
    readings: Vec<Reading>,
    rounds: u64,
    others_at_once: u32,
    compression: Option<CompressionUse>,
    cipher_suite: Option<String>,
}

/// The counters at one moment, for each path.
#[derive(Debug, Clone)]
struct Reading {
    ms: f64,
    /// Sent on its link, by anybody, since the link exists.
    link_bytes: Vec<u64>,
    /// Sent by this migration; empty as long as it is not known.
    migration_bytes: Vec<u64>,
    compression: Option<CompressionUse>,
}

/// The readings, added up.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Measured {
    /// CPU of all four processes.
    pub(crate) cpu_seconds: CpuSeconds,
    /// What each path carried.
    pub(crate) paths: Vec<PathUse>,
    /// Bytes that went over links that are on none of them.
    pub(crate) elsewhere: Vec<LinkUse>,
    /// Bytes on each path over time.
    pub(crate) samples: Vec<Sample>,
    /// Bytes sent on all paths. Not QEMU's own count: that of 7.2 takes multifd's pages as they were
    /// before compression.
    pub(crate) wire_bytes: u64,
    /// Rounds over memory.
    pub(crate) rounds: u64,
    /// Most other migrations from this host that were sending too.
    pub(crate) others_at_once: u32,
    /// What compression did, if there was any.
    pub(crate) compression: Option<CompressionUse>,
    /// What its connections were encrypted with, if any were.
    pub(crate) cipher_suite: Option<String>,
}

impl Measurements {
    /// Begins to measure.
    pub(crate) fn begin(vmm: Option<&dyn Machine>) -> Self {
        Self {
            vmm_cpu_at_start: cpu_seconds(vmm).unwrap_or(0.0),
            vmm_cpu_at_end: None,
            agent_cpu_at_start: hardware::own_cpu().as_secs_f64(),
            paths: vec![],
            counters: None,
            readings: vec![],
            rounds: 0,
            others_at_once: 0,
            compression: None,
            cipher_suite: None,
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
        self.paths = plan.paths.to_vec();
        self.counters = Some(PathCounters::expect(connections(plan), destination, &plan.paths));
        self.readings.clear();
        self.sample(network, now_ms).await
    }

    /// The connection is broken, and another one will be made to `destination`. If an earlier run of
    /// the agent began the transfer, only QEMU counts it.
    pub(crate) fn transfer_goes_on(&mut self, destination: SocketAddr) {
        if let Some(counters) = &mut self.counters {
            counters.expect_again(destination);
        }
    }

    /// The VM is paused and the rest is about to be sent.
    pub(crate) fn transfer_is_ending(&mut self) {
        if let Some(counters) = &mut self.counters {
            counters.expect_end();
        }
    }

    /// Notes how many other migrations from this host are sending now.
    pub(crate) fn beside(&mut self, others: usize) {
        self.others_at_once = self.others_at_once.max(u32::try_from(others).unwrap_or(u32::MAX));
    }

    /// Reads the links and the connections.
    pub(crate) async fn sample(&mut self, network: &HostNetwork, now_ms: f64) -> Result<(), Problem> {
        if let Some(counters) = &mut self.counters {
            counters.read(network, now_ms).await;
        }
        let link_bytes = network.sent_bytes(&self.links()).await?;
        let migration_bytes = self.counters.as_ref().and_then(PathCounters::sent_by_path).unwrap_or_default();
        let compression = self.compression;
        self.readings.push(Reading { ms: now_ms, link_bytes, migration_bytes, compression });
        if self.readings.len() > SAMPLES_MAX {
            let mut keep = false;
            self.readings.retain(|_| {
                keep = !keep;
                keep
            });
        }
        Ok(())
    }

    /// Bytes that have arrived by the last reading; none if that is not known.
    pub(crate) fn arrived_bytes(&self) -> Option<u64> {
        self.counters.as_ref()?.bytes()
    }

    /// The paths on which much had to be sent again by the last reading.
    pub(crate) fn losing(&self) -> Vec<Path> {
        self.counters.as_ref().map(PathCounters::losing).unwrap_or_default()
    }

    /// For each path what has arrived by the last reading.
    pub(crate) fn by_path(&self) -> Vec<PathCounter> {
        self.counters.as_ref().map(PathCounters::by_path).unwrap_or_default()
    }

    /// The last byte has been sent; QEMU is still there.
    pub(crate) fn transfer_ends(&mut self, vmm: &dyn Machine, status: &TransferStatus) {
        self.vmm_cpu_at_end = vmm.cpu_seconds().ok();
        self.rounds = status.ram.unwrap_or_default().rounds;
    }

    /// What a relay has done by now.
    pub(crate) fn relayed(&mut self, relay: &OutgoingRelay) {
        self.compression = relay.compression();
        self.cipher_suite = relay.cipher_suite();
    }

    /// Adds the readings up.
    pub(crate) fn finish(&self, vmm: Option<&dyn Machine>, target: TargetUse) -> Measured {
        let vmm_cpu = self.vmm_cpu_at_end.or_else(|| cpu_seconds(vmm)).unwrap_or(self.vmm_cpu_at_start);
        let (samples, is_own) = samples(&self.readings);
        let paths = self.path_uses(&samples, is_own);
        let elsewhere = self.counters.iter().flat_map(PathCounters::sent_elsewhere);
        Measured {
            elsewhere: elsewhere.map(|(link, bytes)| LinkUse { link: link.to_owned(), bytes }).collect(),
            wire_bytes: paths.iter().map(|path| path.bytes).sum(),
            cpu_seconds: CpuSeconds {
                source_vmm: vmm_cpu - self.vmm_cpu_at_start,
                source_agent: hardware::own_cpu().as_secs_f64() - self.agent_cpu_at_start,
                target_vmm: target.vmm_cpu_seconds,
                target_agent: target.agent_cpu_seconds,
            },
            paths,
            samples,
            rounds: self.rounds,
            others_at_once: self.others_at_once,
            compression: self.compression,
            cipher_suite: self.cipher_suite.clone(),
        }
    }

    fn path_uses(&self, samples: &[Sample], is_own: bool) -> Vec<PathUse> {
        let Some(last) = samples.last() else { return vec![] };
        let total: u64 = last.path_bytes.iter().sum();
        let counters = self.counters.as_ref();
        self.paths
            .iter()
            .zip(&last.path_bytes)
            .enumerate()
            .map(|(index, (path, bytes))| PathUse {
                link: path.link.clone(),
                peer_link: path.peer_link.clone(),
                bytes: *bytes,
                includes_other_traffic: !is_own,
                share: if total == 0 { 0.0 } else { *bytes as f64 / total as f64 },
                speed_mbps: path.speed_mbps,
                is_standby: path.is_standby,
                connections: counters.and_then(|counters| counters.connections_on(index)),
                retransmitted_segments: counters.and_then(|counters| counters.retransmitted_segments(index)),
                turns: vec![],
            })
            .collect()
    }

    fn links(&self) -> Vec<&str> {
        self.paths.iter().map(|path| path.link.as_str()).collect()
    }
}

/// What was sent since the first reading, and whether it is the migration's alone.
fn samples(readings: &[Reading]) -> (Vec<Sample>, bool) {
    let (Some(first), Some(last)) = (readings.first(), readings.last()) else { return (vec![], true) };
    let is_own = !last.migration_bytes.is_empty();
    let since_first = |reading: &Reading| -> Vec<u64> {
        if is_own {
            let mut bytes = reading.migration_bytes.clone();
            bytes.resize(last.migration_bytes.len(), 0);
            return bytes;
        }
        let each = reading.link_bytes.iter().zip(&first.link_bytes);
        each.map(|(now, start)| now.saturating_sub(*start)).collect()
    };
    let sample = |reading: &Reading| Sample {
        ms: reading.ms,
        path_bytes: since_first(reading),
        compression: reading.compression,
    };
    (readings.iter().map(sample).collect(), is_own)
}

fn cpu_seconds(vmm: Option<&dyn Machine>) -> Option<f64> {
    vmm.and_then(|vmm| vmm.cpu_seconds().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(ms: f64, link_bytes: [u64; 2], migration_bytes: &[u64]) -> Reading {
        let (link_bytes, migration_bytes) = (link_bytes.to_vec(), migration_bytes.to_vec());
        Reading { ms, link_bytes, migration_bytes, compression: None }
    }

    fn bytes(readings: &[Reading]) -> (Vec<Vec<u64>>, bool) {
        let (samples, is_own) = samples(readings);
        (samples.into_iter().map(|sample| sample.path_bytes).collect(), is_own)
    }

    #[test]
    fn what_others_send_over_the_links_does_not_count() {
        let readings = [
            reading(0.0, [1_000, 5_000], &[]),
            reading(1.0, [1_100, 9_000], &[100, 0]),
            reading(2.0, [1_300, 9_999], &[300, 10]),
        ];
        assert_eq!(bytes(&readings), (vec![vec![0, 0], vec![100, 0], vec![300, 10]], true));
    }

    #[test]
    fn without_the_connections_the_links_count_whole() {
        let readings = [reading(0.0, [1_000, 5_000], &[]), reading(1.0, [1_100, 9_000], &[])];
        assert_eq!(bytes(&readings), (vec![vec![0, 0], vec![100, 4_000]], false));
        assert_eq!(bytes(&[]), (vec![], true));
    }
}
