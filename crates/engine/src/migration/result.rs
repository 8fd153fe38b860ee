//! What one migration did: the same value in the CLI, the API, `bench` and the history.
//!
//! The field names are a stable contract. Fields are added, never renamed.
//! Times are milliseconds on the source agent's monotonic clock, kept to a tenth.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::finding::Finding;
use crate::format::{bytes, one_line};
use crate::known::if_known;
use crate::migration::step::Step;
use crate::option::{MigrationOption, RequestedOption};
use crate::paths::path::write_name;
use crate::problem::ProblemKind;
use crate::storage::DiskUse;

/// The outcome and the measurements of one migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationResult {
    /// Identifier of the migration, unique on the source.
    pub id: String,
    /// Name of the VM.
    pub vm: String,
    /// Host the VM ran on when the migration began.
    pub source: String,
    /// Host the VM was to run on.
    pub target: String,
    /// Number of the protocol that the two hosts spoke; absent where they had not agreed on one, or an older Drainpipe
    /// led the migration.
    #[serde(default)]
    pub protocol: Option<u32>,
    /// When the migration began, RFC 3339, by the source's clock.
    pub started_at: String,
    /// How it was to go, and went.
    #[serde(flatten)]
    #[schema(inline)]
    pub choice: OptionChoice,
    /// What became of the VM, truthfully.
    pub outcome: Outcome,
    /// What went wrong.
    #[serde(flatten)]
    #[schema(inline)]
    pub failure: MigrationFailure,
    /// How long its parts took.
    #[serde(flatten)]
    #[schema(inline)]
    pub times: Times,
    /// For how long the VM did nothing.
    #[serde(flatten)]
    #[schema(inline)]
    pub silence: Silence,
    /// What it took to send its memory.
    #[serde(flatten)]
    #[schema(inline)]
    pub memory: MemoryUse,
    /// What it met on its hosts, and took of them.
    #[serde(flatten)]
    #[schema(inline)]
    pub host_use: HostUse,
    /// What was done to its connections, and to those of the VM.
    #[serde(flatten)]
    #[schema(inline)]
    pub connection_use: MigrationConnections,
    /// The disks that were copied.
    #[serde(flatten)]
    #[schema(inline)]
    pub copied: CopiedDisks,
    /// What went over which links.
    #[serde(flatten)]
    #[schema(inline)]
    pub traffic: MigrationTraffic,
    /// What was seen of it, in the order of time.
    #[serde(flatten)]
    #[schema(inline)]
    pub record: MigrationRecord,
}

/// The option that was asked for, and the one that was used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OptionChoice {
    /// What was asked for.
    pub requested_option: RequestedOption,
    /// What was used.
    pub option: MigrationOption,
    /// Why `option` is not what was asked for, or why `auto` chose it.
    pub fallback_reason: Option<String>,
    /// Whether the VM might have run on the target before all its memory was there: then it went over one connection.
    #[serde(default)]
    pub post_copy_allowed: bool,
}

/// What went wrong, and where that has left the VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationFailure {
    /// What it is doing on the source, where it did not move; absent where nobody has looked.
    #[serde(default, deserialize_with = "if_known")]
    pub source_vm: Option<SourceVm>,
    /// What went wrong, where, and what to do; absent when nothing did.
    pub error: Option<String>,
    /// Which kind of failure `error` is.
    pub error_kind: Option<ProblemKind>,
}

/// How long a migration and its parts took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Times {
    /// From the request to the end of clean-up.
    pub total_ms: f64,
    /// Steps 1 to 5.
    pub setup_ms: f64,
    /// The wait for its place at the target, between steps 1 and 2, and for its turn, between steps 5 and 6, when
    /// several VMs share the target or the links.
    #[serde(default)]
    pub held_ms: f64,
    /// Steps 6 to 8: from the first page sent until the target has all state.
    pub transfer_ms: f64,
    /// Steps 9 and 10, without `post_copy_ms`.
    pub completion_ms: f64,
    /// How long the VM ran on the target before all its memory was there; absent if all of it was (no post-copy).
    #[serde(default)]
    pub post_copy_ms: Option<f64>,
    /// What was predicted before the start, from the request to the end, of a VM that rests and waits for no turn; absent
    /// where it is not known what its memory holds, or what the paths carry.
    pub predicted_total_ms: Option<f64>,
}

impl Times {
    /// For how long its memory was on the links.
    pub fn sending_ms(self) -> f64 {
        self.transfer_ms + self.post_copy_ms.unwrap_or(0.0)
    }
}

/// For how long the VM did nothing, or its clients heard nothing of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Silence {
    /// From the source's pause to the target's acknowledged resume, seen from the source. An upper
    /// bound of the VM's own pause that needs no agreement of clocks. Where the VM was paused and did not move: until
    /// it ran again on the source. Absent where it was not paused, or nobody saw when it ran again.
    // Its name in 0.1.0.
    #[serde(rename = "blackout_ms")]
    pub downtime_ms: Option<f64>,
    /// The longest time in which the VM may have done nothing: `blackout_ms`, or a longer time in flight, to within a
    /// tenth of a second, in which its QEMU on the source answered nothing and its vCPUs used next to no CPU. A VM that had
    /// nothing to do just then counts too. Absent where nobody looked.
    #[serde(default)]
    pub standstill_ms: Option<f64>,
    /// Longest silence that a client of the guest saw; absent when no client was watching.
    pub guest_gap_ms: Option<f64>,
}

/// What it took to send the VM's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemoryUse {
    /// Memory of the VM.
    pub memory_bytes: u64,
    /// Bytes of the migration that the source's kernel sent on the paths, without headers.
    pub wire_bytes: u64,
    /// `wire_bytes` over `transfer_ms` and `post_copy_ms`.
    pub throughput_gbps: f64,
    /// How many times dirty memory was gone through.
    pub rounds: u64,
    /// How fast the guest rewrote its memory meanwhile, by its own count; absent when nobody asked it.
    #[serde(default)]
    pub guest_rewritten_mib_per_s: Option<f64>,
    /// Share of their time, in percent, for which the VM's CPUs were held back at most, since its memory got
    /// dirty too fast; absent if they were not.
    #[serde(default)]
    pub throttle_percent: Option<u8>,
}

/// What a migration met on its hosts, and took of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostUse {
    /// Most other migrations from this host that were sending at the same time; 0 if it had the links for itself.
    #[serde(default)]
    pub others_at_once: u32,
    /// Cores of the source that were free when it was planned; absent where that was not known.
    #[serde(default)]
    pub free_cores: Option<f64>,
    /// CPU that the migration's processes used while it ran.
    pub cpu_seconds: CpuSeconds,
}

/// What was done to the connections of a migration, and to those of its VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationConnections {
    /// What compression did; absent without it.
    #[serde(default)]
    pub compression: Option<CompressionUse>,
    /// What has become of the connections that firewalls track of the VM; absent where the source's kernel tracks none, where
    /// the VM has no NIC, and where it did not leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracked_connections: Option<TrackedUse>,
    /// Whether it was encrypted, why, and how; absent when it ended before that was decided.
    #[serde(default)]
    pub encryption: Option<EncryptionUse>,
}

/// The disks that were copied with the VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CopiedDisks {
    /// Bytes of disks that were copied, with what the VM wrote meanwhile.
    #[serde(default)]
    pub disk_bytes: u64,
    /// From the begin of the copies of the disks until all of each was there, before step 6; absent where none was copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_ms: Option<f64>,
    /// The disks that were copied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskUse>,
}

impl CopiedDisks {
    /// What their copies carried, in Mb/s; absent where none was copied.
    pub fn mbps(&self) -> Option<f64> {
        let ms = self.disk_ms.filter(|ms| *ms > 0.0)?;
        (self.disk_bytes > 0).then(|| self.disk_bytes as f64 * 8.0 / 1_000.0 / ms)
    }
}

/// What went over which links.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationTraffic {
    /// What each path carried, by the kernel's counters of the migration's connections.
    pub paths: Vec<PathUse>,
    /// What went over links that are on none of the paths.
    #[serde(default)]
    pub elsewhere: Vec<LinkUse>,
}

/// What was seen of a migration, in the order of time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationRecord {
    /// What a check before it found to be wrong; the migration was tried all the same.
    #[serde(default)]
    pub findings: Vec<Finding>,
    /// What happened when.
    pub events: Vec<LogLine>,
    /// Bytes on each path over time.
    pub samples: Vec<Sample>,
    /// The guest's own check of its memory after the migration; absent when not asked for.
    pub verified: Option<Verified>,
}

/// What became of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The VM runs on the target, and only there.
    Completed,
    /// The VM is where it was, on the source; `source_vm` says whether it runs there.
    Failed,
    /// Somebody cancelled; the VM is where it was, on the source.
    Cancelled,
    /// The hand-over was recorded and the target has not answered since. The VM is paused on the
    /// source until the target's journal can be asked.
    // Its name in 0.1.0.
    #[serde(rename = "undecided")]
    InDoubt,
    /// The VM has ended, and what it was doing is lost: on the source, and it did not run on the target, where
    /// `source_vm` says so; else on the target, since it was told to run there.
    Lost,
}

/// In a word.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::InDoubt => "in doubt",
            Self::Lost => "lost",
        })
    }
}

/// The state of a VM that did not move, on its source, by the hypervisor that was asked when all was undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SourceVm {
    /// It runs.
    Runs,
    /// It stands still: somebody has paused it, or it could not be made to run on.
    Paused,
    /// It has ended.
    Ended,
    /// The hypervisor did not answer.
    Unknown,
}

/// CPU seconds, user and system, used between start and end of the migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CpuSeconds {
    /// QEMU on the source, its vCPUs included.
    pub source_vmm: f64,
    /// The agent on the source.
    pub source_agent: f64,
    /// QEMU on the target, its vCPUs included.
    pub target_vmm: f64,
    /// The agent on the target.
    pub target_agent: f64,
}

/// What compression did on the source. The bytes are those of QEMU's stream: pages and what goes with them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CompressionUse {
    /// Bytes of the stream.
    pub stream_bytes: u64,
    /// Bytes that went to the network for them, without TCP's headers.
    pub compressed_bytes: u64,
    /// The part of `stream_bytes` that was sent uncompressed.
    pub raw_bytes: u64,
    /// The part of `raw_bytes` that was sent before a core had the time to see whether it shrinks.
    #[serde(default)]
    pub overtaken_bytes: u64,
    /// The part of `stream_bytes` that was compressed with LZ4.
    pub lz4_bytes: u64,
    /// The part of `stream_bytes` that was compressed with zstd.
    pub zstd_bytes: u64,
    /// The part of `stream_bytes` in pages for which only the changes were sent, without further compression.
    #[serde(default)]
    pub delta_bytes: u64,
    /// CPU that packing took on the source; part of the source's agent's.
    pub cpu_seconds: f64,
}

/// Whether a migration's memory was encrypted on its way, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EncryptionUse {
    /// Whether it was, or was to be.
    pub is_encrypted: bool,
    /// Why, in words.
    pub why: String,
    /// Such as `TLS 1.3`; absent where no connection was encrypted.
    pub protocol: Option<String>,
    /// IANA's name of the cipher suite; absent where no connection was encrypted, and with post-copy, which QEMU encrypts
    /// without saying so.
    pub cipher_suite: Option<String>,
}

/// What has become of a VM's connections that the source's kernel tracked (`nf_conntrack`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TrackedUse {
    /// Those that the target's kernel tracked before the VM ran there.
    pub along: u64,
    /// Those that it did not.
    pub left: u64,
    /// Why; absent where nothing was left.
    pub why: Option<String>,
    /// From the pause's begin until the target's kernel had them, while the rest of the VM's state went; absent where it
    /// was not waited for that.
    pub took_ms: Option<f64>,
    /// By how much the pause was longer for it.
    pub waited_ms: f64,
}

/// What one path carried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PathUse {
    /// Link of the source.
    pub link: String,
    /// Link of the target.
    pub peer_link: String,
    /// Bytes of the migration that the source's kernel sent on the link: with what TCP sent again, without the
    /// headers of TCP, IP and Ethernet.
    pub bytes: u64,
    /// Whether `bytes` is instead all that anybody sent on the link, because the kernel does not tell what the
    /// migration's connections sent.
    #[serde(default)]
    pub includes_other_traffic: bool,
    /// Part of all bytes that went over this path, 0 to 1.
    pub share: f64,
    /// Slower of the two links, as configured or as the driver says.
    pub speed_mbps: Option<u64>,
    /// Whether it was to carry only when no other path does.
    #[serde(default)]
    // Its name in 0.1.0.
    #[serde(rename = "is_spare")]
    pub is_standby: bool,
    /// Connections that used it last; absent if that is not known.
    #[serde(default)]
    pub connections: Option<u64>,
    /// TCP segments that had to be sent again; absent if that is not known.
    #[serde(default)]
    pub retransmitted_segments: Option<u64>,
    /// When it went out of use and came back, in their order.
    #[serde(default)]
    pub turns: Vec<PathTurn>,
}

/// What went over a link that was not to carry it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LinkUse {
    /// Link of the source.
    pub link: String,
    /// As of a path.
    pub bytes: u64,
}

impl MigrationResult {
    /// Whether the VM is the target's: it runs there, or was told to and has ended.
    pub fn has_left(&self) -> bool {
        match self.outcome {
            Outcome::Completed => true,
            Outcome::Lost => self.failure.source_vm.is_none(),
            Outcome::Failed | Outcome::Cancelled | Outcome::InDoubt => false,
        }
    }

    /// Whether the VM has ended and what it was doing is lost: also where it failed to move, since its target is lost and may
    /// have run it, so that it is to be booted again on its source.
    pub fn has_vm_ended(&self) -> bool {
        self.outcome == Outcome::Lost || self.failure.source_vm == Some(SourceVm::Ended)
    }

    /// The host on which a VM that is [lost](Outcome::Lost) has ended.
    pub fn ended_on(&self) -> &str {
        if self.has_left() { &self.target } else { &self.source }
    }
}

impl fmt::Display for TrackedUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { along, left, why, .. } = self;
        write!(f, "{along} tracked connections went along")?;
        if *left > 0 {
            write!(f, ", {left} did not")?;
        }
        why.iter().try_for_each(|why| write!(f, ": {}", one_line(why)))
    }
}

impl fmt::Display for LinkUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let carried = bytes(self.bytes as f64);
        write!(f, "{carried} went over {}, which is on none of the paths", self.link)
    }
}

/// A path that was to carry and carried less than that did not do what was asked for.
const SHARE_OF_NOTHING: f64 = 0.01;

impl PathUse {
    /// Whether it was of no use, as one of so many paths.
    pub fn carried_nothing(&self, paths: usize) -> bool {
        paths > 1 && !self.is_standby && self.share < SHARE_OF_NOTHING
    }
}

impl fmt::Display for PathUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, &self.link, &self.peer_link)
    }
}

/// A path went out of use or came back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PathTurn {
    /// Since the start of the migration.
    pub ms: f64,
    /// What happened.
    pub state: PathState,
    /// Why it is out, or what it carries; absent where there is nothing to say.
    pub why: Option<String>,
}

/// What is known of a path in mid-flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PathState {
    /// It carries nothing more for now.
    Out,
    /// It carries again.
    Back,
    /// Its share of the traffic has changed with what it carries.
    Weighted,
    /// It is not known whether it is fit.
    Unwatched,
    /// It is known again whether it is fit.
    Watched,
}

/// One line of a migration's log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = Event)]
pub struct LogLine {
    /// Since the start of the migration.
    pub ms: f64,
    /// The step during which it happened.
    pub step: Step,
    /// What happened.
    pub what: String,
}

/// One reading of what was sent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Since the start of the migration.
    pub ms: f64,
    /// Bytes since the start on each path, in the order of `paths`.
    pub path_bytes: Vec<u64>,
    /// What compression had done by then; absent without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<CompressionUse>,
}

/// The guest's check of its own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Verified {
    /// Pages looked at.
    pub pages: u64,
    /// Pages whose content was not what the guest had written.
    pub bad: u64,
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// All that a result may have, and each part of it once.
    const WHOLE: &str = r#"{
        "id": "1", "vm": "web", "source": "a", "target": "b", "protocol": 2, "started_at": "2026-01-01T00:00:00Z",
        "requested_option": "auto", "option": "tcp", "fallback_reason": "one path only", "post_copy_allowed": true,
        "outcome": "completed", "source_vm": "runs", "error": "none", "error_kind": "refused",
        "total_ms": 9.5, "setup_ms": 1.0, "held_ms": 0.5, "transfer_ms": 5.0, "completion_ms": 3.0,
        "post_copy_ms": 2.0, "predicted_total_ms": 8.0,
        "blackout_ms": 12.0, "standstill_ms": 180.0, "guest_gap_ms": 24.0,
        "memory_bytes": 4096, "wire_bytes": 7, "throughput_gbps": 1.5, "rounds": 2, "guest_rewritten_mib_per_s": 6.0,
        "throttle_percent": 20,
        "others_at_once": 1, "free_cores": 3.5,
        "cpu_seconds": { "source_vmm": 1.0, "source_agent": 2.0, "target_vmm": 3.0, "target_agent": 4.0 },
        "compression": {
            "stream_bytes": 1, "compressed_bytes": 2, "raw_bytes": 3, "overtaken_bytes": 4, "lz4_bytes": 5,
            "zstd_bytes": 6, "delta_bytes": 7, "cpu_seconds": 8.0
        },
        "tracked_connections": { "along": 1, "left": 2, "why": "no room", "took_ms": 3.0, "waited_ms": 4.0 },
        "encryption": {
            "is_encrypted": true, "why": "asked for", "protocol": "TLS 1.3",
            "cipher_suite": "TLS_AES_128_GCM_SHA256"
        },
        "disk_bytes": 9, "disk_ms": 10.0,
        "disks": [{
            "disk": "vda", "from": "/a", "to": "/b", "image": "raw", "size_bytes": 1, "allocated_bytes": 2,
            "why": "not_seen", "is_flattened": false, "copied_bytes": 3, "same_bytes": 4, "wire_bytes": 5,
            "ready_ms": 6.0
        }],
        "paths": [], "elsewhere": [{ "link": "mgmt", "bytes": 1 }], "findings": [],
        "events": [{ "ms": 1.0, "step": "establish_hosts", "what": "hosts established" }],
        "samples": [{ "ms": 1.0, "path_bytes": [1, 2] }],
        "verified": { "pages": 524288, "bad": 0 }
    }"#;

    fn whole() -> Value {
        serde_json::from_str(WHOLE).unwrap()
    }

    /// Scripts, and 0.1.0, read it by these names: its groups are Rust's alone.
    #[test]
    fn in_json_a_result_is_flat() {
        let result: MigrationResult = serde_json::from_value(whole()).unwrap();
        assert_eq!(serde_json::to_value(&result).unwrap(), whole());
        let text = serde_json::to_string(&result).unwrap();
        assert_eq!(serde_json::from_str::<MigrationResult>(&text).unwrap(), result);
    }

    /// 0.1.0 wrote results of migrations that did not begin like this.
    #[test]
    fn what_an_older_release_did_not_know_is_absent() {
        let mut old = whole();
        let unknown_then = [
            "protocol",
            "source_vm",
            "post_copy_allowed",
            "post_copy_ms",
            "standstill_ms",
            "guest_rewritten_mib_per_s",
            "held_ms",
            "others_at_once",
            "throttle_percent",
            "predicted_total_ms",
            "free_cores",
            "compression",
            "tracked_connections",
            "encryption",
            "disk_bytes",
            "disk_ms",
            "disks",
            "elsewhere",
            "findings",
        ];
        for name in unknown_then {
            old.as_object_mut().unwrap().remove(name).unwrap();
        }
        let result: MigrationResult = serde_json::from_value(old).unwrap();
        assert_eq!((result.times.held_ms, result.times.post_copy_ms), (0.0, None));
        assert_eq!((result.memory.throttle_percent, result.copied), (None, CopiedDisks::default()));
    }
}
