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
use crate::transfer::encryption::EncryptionReason;

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
    /// What was asked for.
    pub requested_option: RequestedOption,
    /// What was used.
    pub option: MigrationOption,
    /// Why `option` is not what was asked for, or why `auto` chose it.
    pub fallback_reason: Option<String>,
    /// What became of the VM, truthfully.
    pub outcome: Outcome,
    /// What it is doing on the source, where it did not move; absent where nobody has looked.
    #[serde(default, deserialize_with = "if_known")]
    pub source_vm: Option<SourceVm>,
    /// What went wrong, where, and what to do; absent when nothing did.
    pub error: Option<String>,
    /// Which kind of failure `error` is.
    pub error_kind: Option<ProblemKind>,
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
    /// Whether the VM might have run on the target before all its memory was there: then it went over one connection.
    #[serde(default)]
    pub post_copy_allowed: bool,
    /// How long the VM ran on the target before all its memory was there; absent if all of it was (no post-copy).
    #[serde(default)]
    pub post_copy_ms: Option<f64>,
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
    /// How fast the guest rewrote its memory meanwhile, by its own count; absent when nobody asked it.
    #[serde(default)]
    pub guest_rewritten_mib_per_s: Option<f64>,
    /// Memory of the VM.
    pub memory_bytes: u64,
    /// Bytes of the migration that the source's kernel sent on the paths, without headers.
    pub wire_bytes: u64,
    /// `wire_bytes` over `transfer_ms` and `post_copy_ms`.
    pub throughput_gbps: f64,
    /// How many times dirty memory was gone through.
    pub rounds: u64,
    /// Most other migrations from this host that were sending at the same time; 0 if it had the links for itself.
    #[serde(default)]
    pub others_at_once: u32,
    /// Share of their time, in percent, for which the VM's CPUs were held back at most, since its memory got
    /// dirty too fast; absent if they were not.
    #[serde(default)]
    pub throttle_percent: Option<u8>,
    /// What was predicted before the start, from the request to the end, of a VM that rests and waits for no turn; absent
    /// where it is not known what its memory holds, or what the paths carry.
    pub predicted_total_ms: Option<f64>,
    /// Cores of the source that were free when it was planned; absent where that was not known.
    #[serde(default)]
    pub free_cores: Option<f64>,
    /// CPU that the migration's processes used while it ran.
    pub cpu_seconds: CpuSeconds,
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
    /// Bytes of disks that were copied, with what the VM wrote meanwhile.
    #[serde(default)]
    pub disk_bytes: u64,
    /// From the begin of the copies of the disks until all of each was there, before step 6; absent where none was copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_ms: Option<f64>,
    /// The disks that were copied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskUse>,
    /// What each path carried, by the kernel's counters of the migration's connections.
    pub paths: Vec<PathUse>,
    /// What went over links that are on none of the paths.
    #[serde(default)]
    pub elsewhere: Vec<LinkUse>,
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

/// What a VM that did not move is doing on its source, by the hypervisor that was asked when all was undone.
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
    /// Of `stream_bytes`, those that went as they were.
    pub raw_bytes: u64,
    /// Of `raw_bytes`, those that went before a core had the time to see whether they shrink.
    #[serde(default)]
    pub overtaken_bytes: u64,
    /// Of `stream_bytes`, those packed with LZ4.
    pub lz4_bytes: u64,
    /// Of `stream_bytes`, those packed with zstd.
    pub zstd_bytes: u64,
    /// Of `stream_bytes`, those of pages that went as what had changed of them, and packed no further.
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
    #[schema(value_type = String)]
    pub why: EncryptionReason,
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
    /// Connections that went over it last; absent where it could not be told.
    #[serde(default)]
    pub connections: Option<u64>,
    /// TCP segments that had to be sent again; absent where it could not be told.
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
            Outcome::Lost => self.source_vm.is_none(),
            Outcome::Failed | Outcome::Cancelled | Outcome::InDoubt => false,
        }
    }

    /// Whether the VM has ended and what it was doing is lost: also where it failed to move, since its target is lost and may
    /// have run it, so that it is to be booted anew on its source.
    pub fn has_vm_ended(&self) -> bool {
        self.outcome == Outcome::Lost || self.source_vm == Some(SourceVm::Ended)
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
    /// Whether it is fit cannot be told.
    Unwatched,
    /// Whether it is fit can be told again.
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
