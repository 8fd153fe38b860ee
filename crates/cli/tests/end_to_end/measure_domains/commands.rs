//! The ways to move a domain, and what they take.

use std::fs;
use std::time::Instant;

use drainpipe_engine::migration::result::{MigrationResult, Outcome};

use crate::support::TestLab;
use crate::tls_certificates::TARGET_NAME;

/// One way to move a domain.
pub(super) struct MoveCommand {
    pub(super) name: &'static str,
    by: By,
}

enum By {
    /// `virsh` with these options besides `--live`.
    Virsh(&'static [&'static str]),
    /// `drainpipe migrate` with these options.
    Drainpipe(&'static [&'static str]),
}

pub(super) const VIRSH: MoveCommand = MoveCommand { name: "`virsh migrate --live`", by: By::Virsh(&[]) };
pub(super) const VIRSH_PARALLEL: MoveCommand = MoveCommand {
    name: "`virsh migrate --live --parallel`, 16 connections",
    by: By::Virsh(&["--parallel", "--parallel-connections", "16"]),
};
pub(super) const VIRSH_TLS: MoveCommand = MoveCommand {
    name: "`virsh migrate --live --parallel --tls`, 16 connections",
    by: By::Virsh(&["--parallel", "--parallel-connections", "16", "--tls", "--tls-destination", TARGET_NAME]),
};
pub(super) const TCP: MoveCommand =
    MoveCommand { name: "Drainpipe, `tcp`", by: By::Drainpipe(&["--option", "tcp"]) };
pub(super) const MULTICHANNEL: MoveCommand =
    MoveCommand { name: "Drainpipe, `multichannel`", by: By::Drainpipe(&["--option", "multichannel"]) };
pub(super) const ENCRYPTED: MoveCommand = MoveCommand {
    name: "Drainpipe, `multichannel`, encrypted",
    by: By::Drainpipe(&["--option", "multichannel", "--encrypt"]),
};

impl MoveCommand {
    pub(super) fn is_encrypted(&self) -> bool {
        matches!(self.by, By::Virsh(options) if options.contains(&"--tls"))
    }
}

/// What a move took.
pub(super) struct Move {
    /// The time of the whole command.
    pub(super) total_s: f64,
    /// The rate at which the hypervisor sent memory while it did.
    pub(super) gbps: f64,
    /// The CPU time of the whole machine meanwhile, which is both hosts.
    pub(super) cpu_s: f64,
    /// The pause that the hypervisor reports.
    pub(super) pause_ms: f64,
}

pub(super) fn move_it(lab: &TestLab, command: &MoveCommand, source: &str, target: &str) -> Move {
    let (cpu_before_s, began) = (cpu_used_s(), Instant::now());
    let result = match command.by {
        By::Virsh(more) => {
            lab.migrate_domain_with("web", source, target, "e0", more);
            None
        }
        By::Drainpipe(options) => {
            Some(lab.json::<MigrationResult>(&[&["migrate", "web", target], options].concat()))
        }
    };
    let (total_s, cpu_s) = (began.elapsed().as_secs_f64(), cpu_used_s() - cpu_before_s);
    let (gbps, pause_ms) = if let Some(result) = &result {
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
        (result.memory.throughput_gbps, result.silence.downtime_ms.unwrap_or(f64::NAN))
    } else {
        let job = lab.virsh(target, &["domjobinfo", "web", "--completed"]).done();
        (gbps_of(&job), number(&job, "Total downtime:").unwrap_or(f64::NAN))
    };
    Move { total_s, gbps, cpu_s, pause_ms }
}

fn gbps_of(job: &str) -> f64 {
    let elapsed_ms = number(job, "Time elapsed:").unwrap_or(f64::NAN);
    let sent_bytes = bytes(job, "Memory processed:").unwrap_or(f64::NAN);
    sent_bytes * 8.0 / elapsed_ms / 1e6
}

/// A number as in `Total downtime:   325          ms`.
fn number(job: &str, key: &str) -> Option<f64> {
    let line = job.lines().find(|line| line.starts_with(key))?;
    line.strip_prefix(key)?.split_whitespace().next()?.parse().ok()
}

/// An amount as in `Memory processed: 130.525 MiB`.
fn bytes(job: &str, key: &str) -> Option<f64> {
    let line = job.lines().find(|line| line.starts_with(key))?;
    let unit = match line.split_whitespace().last()? {
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => 1,
    };
    Some(number(job, key)? * f64::from(unit))
}

/// The CPU time of all cores since the machine was booted.
fn cpu_used_s() -> f64 {
    const TICKS_PER_S: f64 = 100.0;
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let ticks: Vec<f64> =
        stat.lines().next().unwrap().split_whitespace().skip(1).map(|ticks| ticks.parse().unwrap()).collect();
    let [user, nice, system, _idle, _awaits_io, irq, softirq, ..] = ticks[..] else { panic!("{stat}") };
    (user + nice + system + irq + softirq) / TICKS_PER_S
}
