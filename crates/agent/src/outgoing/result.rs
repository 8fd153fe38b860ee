//! Puts a migration's result together from the engine's timings and the agent's readings.

use drainpipe_engine::migration::result::{
    CopiedDisks, EncryptionUse, HostUse, LinkUse, LogLine, MemoryUse, MigrationConnections, MigrationFailure,
    MigrationRecord, MigrationResult, MigrationTraffic, OptionChoice, Outcome, PathUse, Silence, Times,
};
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::migration::{Migration, Timings};
use drainpipe_engine::option::{MigrationOption, RequestedOption};
use drainpipe_engine::plan::Plan;
use jiff::Timestamp;

use crate::outgoing::measure::Measured;

/// What a migration is about.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// Its identifier.
    pub(crate) id: String,
    /// The VM.
    pub(crate) vm: String,
    /// From where.
    pub(crate) source: String,
    /// To where.
    pub(crate) target: String,
    /// Memory of the VM.
    pub(crate) memory_bytes: u64,
    /// What was asked for.
    pub(crate) requested_option: RequestedOption,
    /// When it began.
    pub(crate) started_at: Timestamp,
}

/// When it was paused, and for how long it stood still.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pauses {
    /// The engine's, as far as nobody knows better.
    pub(crate) timings: Timings,
    /// The longest time in flight; absent where nobody looked.
    pub(crate) standstill_ms: Option<f64>,
}

impl Pauses {
    fn longest_ms(self) -> Option<f64> {
        // None is less than any.
        let downtime_ms = self.timings.downtime_ms();
        if downtime_ms > self.standstill_ms { downtime_ms } else { self.standstill_ms }
    }
}

/// What `auto` is said to have used where no plan was made.
const UNPLANNED: MigrationOption = MigrationOption::Tcp;

/// The result of a migration that is over.
pub(crate) fn assemble(
    identity: Identity,
    migration: &Migration,
    pauses: Pauses,
    outcome: Outcome,
    plan: Option<&Plan>,
    measured: Measured,
) -> MigrationResult {
    let times = times(pauses.timings);
    let total_ms = tenth(times.total_ms);
    let paths = measured.paths.into_iter().map(|path| {
        let turns = migration.turns_of(&path.to_string());
        PathUse { turns, ..path }
    });
    let paths: Vec<PathUse> = paths.collect();
    let mut events = migration.log().to_vec();
    events.extend(said_of_counts(&paths, &measured.elsewhere, total_ms));
    if outcome == Outcome::Completed {
        events.extend(of_no_use(&paths, total_ms));
    }
    MigrationResult {
        id: identity.id,
        vm: identity.vm,
        source: identity.source,
        target: identity.target,
        protocol: None,
        started_at: identity.started_at.to_string(),
        choice: OptionChoice {
            requested_option: identity.requested_option,
            option: plan.map_or_else(|| identity.requested_option.named().unwrap_or(UNPLANNED), Plan::option),
            fallback_reason: plan.and_then(Plan::reason),
            post_copy_allowed: plan.is_some_and(Plan::post_copy),
        },
        outcome,
        failure: MigrationFailure {
            source_vm: migration.source_vm(),
            error: migration.error().map(ToString::to_string),
            error_kind: migration.error().map(|problem| problem.kind),
        },
        times: rounded(times),
        silence: Silence {
            downtime_ms: pauses.timings.downtime_ms().map(tenth),
            standstill_ms: pauses.longest_ms().map(tenth),
            guest_gap_ms: None,
        },
        memory: MemoryUse {
            memory_bytes: identity.memory_bytes,
            wire_bytes: measured.wire_bytes,
            throughput_gbps: gigabits_per_second(measured.wire_bytes, times.sending_ms()),
            rounds: measured.rounds,
            guest_rewritten_mib_per_s: None,
            throttle_percent: migration.most_throttled_percent(),
        },
        host_use: HostUse {
            others_at_once: measured.others_at_once,
            free_cores: None,
            cpu_seconds: measured.cpu_seconds,
        },
        copied: CopiedDisks {
            disk_bytes: migration.disks().iter().map(|disk| disk.copied_bytes).sum(),
            disk_ms: disk_ms(pauses.timings).map(tenth),
            disks: migration.disks(),
        },
        traffic: MigrationTraffic { paths, elsewhere: measured.elsewhere },
        connection_use: MigrationConnections {
            compression: measured.compression,
            tracked_connections: None,
            encryption: plan.map(|plan| encryption_use(plan, measured.rounds, measured.cipher_suite)),
        },
        record: MigrationRecord {
            findings: migration.findings().to_vec(),
            events,
            samples: measured.samples,
            verified: None,
        },
    }
}

/// All that is encrypted with, by a relay or by QEMU.
const ENCRYPTION_PROTOCOL: &str = "TLS 1.3";

/// A QEMU that encrypts has begun a round once it has connected, and does not say which suite it uses.
fn encryption_use(plan: &Plan, rounds: u64, cipher_suite: Option<String>) -> EncryptionUse {
    let encryption = plan.encryption();
    let connected = cipher_suite.is_some() || (plan.is_encrypted_by_hypervisor() && rounds > 0);
    let protocol = connected.then(|| ENCRYPTION_PROTOCOL.into());
    EncryptionUse { is_encrypted: encryption.is_encrypted(), why: encryption.why(), protocol, cipher_suite }
}

/// Says of each path that was to carry and did not, that it did not.
fn of_no_use(paths: &[PathUse], ms: f64) -> impl Iterator<Item = LogLine> {
    let unused = paths.iter().filter(|path| path.carried_nothing(paths.len()));
    unused.map(move |path| LogLine { ms, step: Step::CleanUp, what: format!("{path} carried nothing") })
}

/// Says what the counts of the paths contain that they should not, and what they do not contain.
fn said_of_counts(paths: &[PathUse], elsewhere: &[LinkUse], ms: f64) -> impl Iterator<Item = LogLine> {
    let counts_others = paths.iter().any(|path| path.includes_other_traffic);
    let others = counts_others.then(|| {
        "the bytes of each path include other traffic on its link: the kernel did not report what QEMU's \
        connections sent"
            .to_owned()
    });
    let said: Vec<String> = others.into_iter().chain(elsewhere.iter().map(ToString::to_string)).collect();
    said.into_iter().map(move |what| LogLine { ms, step: Step::CleanUp, what })
}

/// From the begin of the copies of its disks until all of each was there.
fn disk_ms(timings: Timings) -> Option<f64> {
    let over_ms = timings.disks_ready_ms.or(timings.state_transferred_ms).or(timings.ended_ms);
    timings.disks_began_ms.map(|began_ms| over_ms.unwrap_or(0.0) - began_ms)
}

fn times(timings: Timings) -> Times {
    let total_ms = timings.ended_ms.unwrap_or(0.0);
    let connected_ms = timings.connected_ms.unwrap_or(total_ms);
    let released_ms = timings.released_ms.unwrap_or(total_ms);
    let transferred_ms = timings.state_transferred_ms.unwrap_or(total_ms);
    let post_copy = timings.resumed_ms.zip(timings.rest_sent_ms);
    let post_copy_ms = post_copy.map(|(resumed, rest_sent)| rest_sent - resumed);
    Times {
        total_ms,
        setup_ms: connected_ms - timings.awaited_place_ms,
        held_ms: released_ms - connected_ms + timings.awaited_place_ms,
        transfer_ms: transferred_ms - released_ms - disk_ms(timings).unwrap_or(0.0),
        completion_ms: total_ms - transferred_ms - post_copy_ms.unwrap_or(0.0),
        post_copy_ms,
        predicted_total_ms: None,
    }
}

/// The same, rounded as results report them.
fn rounded(times: Times) -> Times {
    Times {
        total_ms: tenth(times.total_ms),
        setup_ms: tenth(times.setup_ms),
        held_ms: tenth(times.held_ms),
        transfer_ms: tenth(times.transfer_ms),
        completion_ms: tenth(times.completion_ms),
        post_copy_ms: times.post_copy_ms.map(tenth),
        predicted_total_ms: times.predicted_total_ms.map(tenth),
    }
}

/// As results report times.
pub(crate) fn tenth(ms: f64) -> f64 {
    (ms * 10.0).round() / 10.0
}

fn gigabits_per_second(bytes: u64, ms: f64) -> f64 {
    if ms <= 0.0 {
        return 0.0;
    }
    (bytes as f64 * 8.0 / 1e6 / ms * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up() {
        let parts = times(Timings {
            awaited_place_ms: 50.0,
            connected_ms: Some(150.0),
            released_ms: Some(300.0),
            disks_began_ms: None,
            disks_ready_ms: None,
            paused_ms: Some(900.0),
            state_transferred_ms: Some(1000.0),
            resumed_ms: Some(1010.0),
            resumed_here_ms: None,
            rest_sent_ms: Some(1040.0),
            ended_ms: Some(1050.0),
        });
        let sum_ms = parts.setup_ms + parts.held_ms + parts.transfer_ms + parts.completion_ms + 30.0;
        assert_eq!(parts.post_copy_ms, Some(30.0));
        assert!((sum_ms - parts.total_ms).abs() < 1e-9);
        assert_eq!((parts.setup_ms, parts.held_ms, parts.transfer_ms), (100.0, 200.0, 700.0));
    }

    #[test]
    fn the_longest_standstill_is_the_pause_or_one_before_it() {
        let longest = |paused_ms, standstill_ms| {
            let timings = Timings { paused_ms, resumed_ms: Some(1010.0), ..Timings::default() };
            Pauses { timings, standstill_ms }.longest_ms()
        };
        assert_eq!(longest(Some(900.0), Some(40.0)), Some(110.0));
        assert_eq!(longest(Some(900.0), Some(1500.0)), Some(1500.0));
        assert_eq!(longest(Some(900.0), None), Some(110.0));
        assert_eq!(longest(None, Some(1500.0)), Some(1500.0));
        assert_eq!(longest(None, None), None);
    }

    fn path(link: &str, share: f64, is_standby: bool) -> PathUse {
        PathUse {
            link: link.into(),
            peer_link: link.into(),
            bytes: 0,
            includes_other_traffic: false,
            share,
            speed_mbps: None,
            is_standby,
            connections: None,
            retransmitted_segments: None,
            turns: vec![],
        }
    }

    #[test]
    fn a_path_that_was_to_carry_and_did_not_is_told() {
        let paths = [path("e0", 0.996, false), path("e1", 0.004, false), path("e2", 0.0, true)];
        let remarks: Vec<String> = of_no_use(&paths, 9.0).map(|event| event.what).collect();
        assert_eq!(remarks, ["e1–e1 carried nothing"]);
        assert_eq!(of_no_use(&paths[1..2], 9.0).count(), 0, "the only one");
    }

    #[test]
    fn bytes_that_are_not_the_migration_s_or_went_elsewhere_are_told() {
        let path = |includes_other_traffic| PathUse { includes_other_traffic, ..path("e0", 1.0, false) };
        let remarks = |path, elsewhere: &[LinkUse]| -> Vec<String> {
            said_of_counts(&[path], elsewhere, 9.0).map(|event| event.what).collect()
        };
        assert_eq!(remarks(path(false), &[]), [""; 0]);
        assert!(remarks(path(true), &[])[0].contains("include other traffic"));
        let elsewhere = [LinkUse { link: "mgmt".into(), bytes: 3 << 19 }];
        assert_eq!(
            remarks(path(false), &elsewhere),
            ["1.50 MiB went over mgmt, which is on none of the paths"]
        );
    }

    #[test]
    fn one_gigabit_in_a_second_is_one_gigabit_per_second() {
        assert!((gigabits_per_second(125_000_000, 1000.0) - 1.0).abs() < 1e-9);
        assert!(gigabits_per_second(1, 0.0).abs() < 1e-9);
    }
}
