//! Made-up results for tests.

use drainpipe_engine::migration::result::{
    CompressionUse, CopiedDisks, CpuSeconds, HostUse, LogLine, MemoryUse, MigrationConnections,
    MigrationFailure, MigrationRecord, MigrationResult, MigrationTraffic, OptionChoice, Outcome, PathUse,
    Sample, Silence, SourceVm, Times, Verified,
};
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::option::{MigrationOption, RequestedOption};
use drainpipe_engine::problem::ProblemKind;

use crate::bench::{BenchReport, Conditions, GuestConditions, HostConditions, LinkConditions};

const MEMORY_BYTES: u64 = 2 << 30;
const WIRE_BYTES: u64 = 1_650_000_000;

/// A migration over two links that took `total_ms`.
pub(crate) fn completed(requested: RequestedOption, total_ms: f64) -> MigrationResult {
    let option = requested.named().unwrap_or(MigrationOption::Multichannel);
    let left_share = if option == MigrationOption::Tcp { 1.0 } else { 0.5 };
    let path = |link: &str, share: f64| PathUse {
        link: link.to_owned(),
        peer_link: link.to_owned(),
        bytes: part(WIRE_BYTES, share),
        includes_other_traffic: false,
        share,
        speed_mbps: Some(1_000),
        is_standby: false,
        connections: Some(8),
        retransmitted_segments: Some(0),
        turns: vec![],
    };
    MigrationResult {
        id: "0".to_owned(),
        vm: "demo".to_owned(),
        source: "a".to_owned(),
        target: "b".to_owned(),
        protocol: Some(2),
        started_at: "2026-01-01T00:00:00Z".to_owned(),
        choice: OptionChoice {
            requested_option: requested,
            option,
            fallback_reason: None,
            post_copy_allowed: false,
        },
        outcome: Outcome::Completed,
        failure: MigrationFailure::default(),
        times: Times {
            total_ms,
            setup_ms: total_ms * 0.05,
            transfer_ms: total_ms * 0.9,
            completion_ms: total_ms * 0.05,
            ..Times::default()
        },
        silence: Silence { downtime_ms: Some(12.0), standstill_ms: Some(180.0), guest_gap_ms: Some(24.0) },
        memory: MemoryUse {
            memory_bytes: MEMORY_BYTES,
            wire_bytes: WIRE_BYTES,
            throughput_gbps: WIRE_BYTES as f64 * 8e-6 / (total_ms * 0.9),
            rounds: 2,
            guest_rewritten_mib_per_s: Some(0.0),
            throttle_percent: None,
        },
        copied: CopiedDisks::default(),
        host_use: HostUse {
            cpu_seconds: CpuSeconds {
                source_vmm: 1.1,
                source_agent: 0.02,
                target_vmm: 1.3,
                target_agent: 0.01,
            },
            ..HostUse::default()
        },
        connection_use: MigrationConnections {
            compression: compression(option, 1.0),
            ..MigrationConnections::default()
        },
        traffic: MigrationTraffic {
            paths: vec![path("left", left_share), path("right", 1.0 - left_share)],
            elsewhere: vec![],
        },
        record: MigrationRecord {
            findings: vec![],
            events: vec![LogLine {
                ms: 1.0,
                step: Step::EstablishHosts,
                what: "hosts established".to_owned(),
            }],
            samples: samples(option, total_ms, left_share),
            verified: Some(Verified { pages: 524_288, bad: 0 }),
        },
    }
}

fn samples(option: MigrationOption, total_ms: f64, left_share: f64) -> Vec<Sample> {
    (0..=20_u32)
        .map(|step| {
            let done = f64::from(step) / 20.0;
            Sample {
                ms: total_ms * done,
                path_bytes: vec![
                    part(WIRE_BYTES, left_share * done),
                    part(WIRE_BYTES, (1.0 - left_share) * done),
                ],
                compression: compression(option, done),
            }
        })
        .collect()
}

/// What compression has done when it has done so much.
fn compression(option: MigrationOption, done: f64) -> Option<CompressionUse> {
    let (raw_bytes, zstd_bytes) = (part(WIRE_BYTES, 0.5 * done), part(2 * WIRE_BYTES, 0.5 * done));
    (option == MigrationOption::Compression).then(|| CompressionUse {
        stream_bytes: raw_bytes + zstd_bytes,
        compressed_bytes: part(WIRE_BYTES, done),
        raw_bytes,
        lz4_bytes: 0,
        zstd_bytes,
        delta_bytes: 0,
        overtaken_bytes: 0,
        cpu_seconds: done,
    })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "parts are 0 to 1")]
fn part(bytes: u64, part: f64) -> u64 {
    (bytes as f64 * part) as u64
}

/// A migration that failed in setup.
pub(crate) fn failed(requested: RequestedOption) -> MigrationResult {
    let begun = completed(requested, 120.0);
    MigrationResult {
        outcome: Outcome::Failed,
        failure: MigrationFailure {
            source_vm: Some(SourceVm::Runs),
            error: Some("port 4444 on b is taken: free it, or choose another".to_owned()),
            error_kind: Some(ProblemKind::Refused),
        },
        times: Times { transfer_ms: 0.0, completion_ms: 0.0, ..begun.times },
        silence: Silence::default(),
        memory: MemoryUse { memory_bytes: begun.memory.memory_bytes, ..MemoryUse::default() },
        host_use: HostUse::default(),
        record: MigrationRecord { samples: Vec::new(), verified: None, ..begun.record },
        ..begun
    }
}

/// A migration that fell back from `direct`.
pub(crate) fn fallen_back(total_ms: f64) -> MigrationResult {
    let moved = completed(RequestedOption::Direct, total_ms);
    MigrationResult {
        choice: OptionChoice {
            option: MigrationOption::Multichannel,
            fallback_reason: Some("host b has no RDMA device".to_owned()),
            ..moved.choice
        },
        ..moved
    }
}

pub(crate) fn conditions() -> Conditions {
    let host = |name: &str| HostConditions {
        name: name.to_owned(),
        kernel: "6.1.0-20-amd64".to_owned(),
        cpu_model: "Example CPU".to_owned(),
        cores: 2,
        memory_bytes: 24 << 30,
        hypervisor_version: "10.0.2".to_owned(),
        accelerator: "tcg".to_owned(),
    };
    let link = |name: &str| LinkConditions {
        name: name.to_owned(),
        peer_link: name.to_owned(),
        speed_mbps: Some(1_000),
        mtu: 1_500,
    };
    Conditions {
        drainpipe_version: "0.1.0".to_owned(),
        date: "2026-01-01T00:00:00Z".to_owned(),
        hosts: vec![host("a"), host("b")],
        links: vec![link("left"), link("right")],
        guest: GuestConditions {
            memory_mib: 2_048,
            vcpus: 1,
            content: Some("75 % random, 25 % zero".to_owned()),
            dirty_mib_per_s: Some(0.0),
            dirty_percent: Some(100),
            rewrite_bytes: Some(4096),
        },
        page_cache_mib: None,
        repeats: 2,
        options: vec![
            RequestedOption::Tcp,
            RequestedOption::Compression,
            RequestedOption::Multichannel,
            RequestedOption::Direct,
        ],
        notes: vec!["links shaped with tbf".to_owned()],
    }
}

/// Every option, one of them fallen back and one failed.
pub(crate) fn report() -> BenchReport {
    BenchReport {
        conditions: conditions(),
        results: vec![
            completed(RequestedOption::Tcp, 13_700.0),
            completed(RequestedOption::Tcp, 13_900.0),
            completed(RequestedOption::Compression, 10_000.0),
            failed(RequestedOption::Compression),
            completed(RequestedOption::Multichannel, 6_900.0),
            completed(RequestedOption::Multichannel, 7_000.0),
            fallen_back(6_800.0),
            fallen_back(6_900.0),
        ],
    }
}
