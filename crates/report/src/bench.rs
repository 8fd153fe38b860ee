//! What a benchmark measured, and under which conditions: the content of `results.json`.

use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_engine::option::RequestedOption;
use serde::{Deserialize, Serialize};

/// All migrations of one benchmark.
///
/// Its JSON is a stable contract, as that of [`MigrationResult`] is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// What was the same for all migrations.
    pub conditions: Conditions,
    /// The migrations, in the order in which they ran.
    pub results: Vec<MigrationResult>,
}

/// What was the same for all migrations of a benchmark.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Version of Drainpipe.
    pub drainpipe_version: String,
    /// When the benchmark began, RFC 3339.
    pub date: String,
    /// The hosts between which the VM moved.
    pub hosts: Vec<HostConditions>,
    /// The links between the hosts.
    pub links: Vec<LinkConditions>,
    /// The VM.
    pub guest: GuestConditions,
    /// Memory for copies of pages on each host, if it was set for this benchmark.
    #[serde(default)]
    pub page_cache_mib: Option<u32>,
    /// How many times each option was to be measured.
    pub repeats: u32,
    /// The options that were to be measured.
    pub options: Vec<RequestedOption>,
    /// Whatever else a reader should know.
    pub notes: Vec<String>,
}

/// One host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostConditions {
    /// Its name.
    pub name: String,
    /// Release of its kernel.
    pub kernel: String,
    /// Model of its processors, as the kernel calls it.
    pub cpu_model: String,
    /// Processors that run at once.
    pub cores: u32,
    /// Memory of the host.
    pub memory_bytes: u64,
    /// Version of QEMU.
    pub hypervisor_version: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
}

/// A pair of NICs between the hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkConditions {
    /// Link of the first host.
    pub name: String,
    /// Link of the second host.
    pub peer_link: String,
    /// Slower of the two; absent if neither configuration nor driver says it.
    pub speed_mbps: Option<u64>,
    /// Smaller of the two, in bytes.
    pub mtu: u32,
}

/// The VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GuestConditions {
    /// Its memory.
    pub memory_mib: u64,
    /// Its virtual processors.
    pub vcpus: u32,
    /// What its memory holds, such as "75 % random, 25 % zero"; absent if unknown.
    pub content: Option<String>,
    /// How fast it was to rewrite its memory; absent if unknown.
    pub dirty_mib_per_s: Option<f64>,
    /// Share of the filled memory that it rewrites, in percent; absent if unknown.
    #[serde(default)]
    pub dirty_percent: Option<u8>,
    /// Bytes of a page that it changes each time; absent if unknown.
    #[serde(default)]
    pub rewrite_bytes: Option<u64>,
}

/// More than any memory takes, in MiB/s.
const UNREACHABLE_MIB_PER_S: f64 = 100_000.0;

impl GuestConditions {
    /// Whether it was to rewrite as fast as it can, and so needs all CPU that it is given.
    pub fn needs_all_cpu(&self) -> bool {
        self.dirty_mib_per_s > Some(UNREACHABLE_MIB_PER_S)
    }
}

#[cfg(test)]
mod tests {
    use super::BenchReport;
    use crate::sample::report;

    #[test]
    fn json_is_conditions_and_results_and_can_be_read_back() {
        let json = serde_json::to_value(report()).unwrap();
        let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["conditions", "results"]);
        assert_eq!(json["conditions"]["options"][0], "tcp");
        assert_eq!(json["conditions"]["guest"]["memory_mib"], 2_048);
        assert_eq!(serde_json::from_value::<BenchReport>(json).unwrap(), report());
    }
}
