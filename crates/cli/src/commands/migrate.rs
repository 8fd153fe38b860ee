//! `drainpipe migrate` and `drainpipe cancel`.

use std::collections::BTreeMap;
use std::path::Path;

use drainpipe_api_types::{MigrateRequest, PlanView};
use drainpipe_engine::finding::Finding;
use drainpipe_engine::format;
use drainpipe_engine::migration::result::{
    CompressionUse, EncryptionUse, MigrationResult, Outcome, PathState, PathUse, SourceVm,
};
use drainpipe_engine::plan::Spread;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::transfer::encryption::Encryption;

use drainpipe_engine::storage::{DiskCopy, DiskName, DiskUse};

use crate::arguments::{DiskPlace, MigrateArguments};
use crate::connection::{ConnectionArguments, Fleet};
use crate::exit::Exit;
use crate::follow::{self, Followed};
use crate::migrations;
use crate::output;

pub(crate) async fn run(
    connection: &ConnectionArguments,
    arguments: &MigrateArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let fleet = connection.fleet()?;
    let request = MigrateRequest {
        vm: arguments.vm.clone(),
        target: arguments.host.clone(),
        option: arguments.option,
        encrypt: arguments.encrypt,
        post_copy: arguments.post_copy,
        copy_storage: arguments.copy_storage,
        disks: disk_places(&arguments.disks)?,
        deadline_s: arguments.deadline,
        throttle_max_percent: arguments.throttle,
    };
    if arguments.dry_run {
        return dry_run(&fleet, &request, json).await;
    }
    let result = match follow::migrate(&fleet, &request, true).await? {
        Followed::Over(result) => result,
        Followed::LostSight(problem) => {
            output::complain(&problem);
            return Ok(Exit::InDoubt);
        }
    };
    if json {
        output::json(&result)?;
    } else {
        tell(&result)?;
    }
    Ok(Exit::of_result(&result))
}

/// Each disk once.
fn disk_places(given: &[DiskPlace]) -> Result<BTreeMap<DiskName, String>, Problem> {
    let mut places = BTreeMap::new();
    for DiskPlace { disk, path } in given {
        if places.insert(*disk, path.clone()).is_some() {
            return Err(Problem::bad_input(format!("--disk names more than one path for {disk}")));
        }
    }
    Ok(places)
}

async fn dry_run(fleet: &Fleet, request: &MigrateRequest, json: bool) -> Result<Exit, Problem> {
    let host = fleet.host(&fleet.find_running_vm(&request.vm).await?.host).await?;
    let view: PlanView = host.client().post(&host.path("/v1/migrations/plan"), request).await?;
    if json {
        output::json(&view)?;
    } else {
        output::print(&describe_plan(&view))?;
        if !view.findings.is_empty() {
            output::remark("");
        }
        view.findings.iter().for_each(tell_finding);
    }
    let refused = view.findings.iter().any(|finding| finding.refuses_migration);
    Ok(if refused { Exit::Refused } else { Exit::Done })
}

const HELD_WRITES: &str = "writes   to them are held back near the end: the VM's QEMU cannot have them wait for the target (8.2 and newer do)";

fn describe_plan(view: &PlanView) -> String {
    use std::fmt::Write;
    let plan = &view.plan;
    let mut text =
        format!("{} would move from {} to {} by {}\n", view.vm, view.source, view.target, plan.option());
    let spread = match plan.spread() {
        Spread::InTurn => "the first of these paths that answers",
        Spread::Routed => "all of these paths that answer, by their speed",
    };
    let lines = plan
        .reason()
        .into_iter()
        .map(|reason| format!("because  {reason}"))
        .chain([format!("over     {spread}")])
        .chain(plan.paths.iter().map(|path| {
            let speed = path.speed_mbps.map_or("speed unknown".into(), format::mbps);
            let found =
                if path.is_link_local() { "answered over link-local addresses" } else { "in one subnet" };
            let standby = if path.is_standby { ", standby" } else { "" };
            format!("         {path}  {} to {}, {found}, {speed}{standby}", path.address, path.peer_address)
        }))
        .chain(
            plan.transfer.parallel().map(|parallel| format!("with     {} connections", parallel.channels())),
        )
        .chain(plan.post_copy().then(|| {
            "post-copy if its memory gets dirty as fast as it is sent: until the rest has followed, the VM \
            needs both hosts"
                .into()
        }))
        .chain(plan.is_compressed().then(|| "memory   compressed as far as that is faster".into()))
        .chain(plan.disks.iter().map(copied))
        .chain(view.holds_writes.then(|| HELD_WRITES.into()))
        .chain([encrypted(&plan.encryption())])
        .chain(limited(view))
        .chain(
            view.predicted_total_ms
                .map(|ms| format!("takes    some {}", format::estimate_up_to(ms, view.predicted_most_ms))),
        )
        .chain(view.warnings.iter().map(|warning| format!("warning: {warning}")));
    for line in lines {
        writeln!(text, "  {line}").expect("a String takes all");
    }
    text
}

fn limited(view: &PlanView) -> Option<String> {
    let rate = |mbps: u64| format::rate(mbps as f64 / 1e3);
    let all = view.bandwidth_limit_mbps.map(rate);
    let disks = view.storage_limit_mbps.filter(|_| !view.plan.disks.is_empty());
    let disks = disks.map(|mbps| format!("{} for disks", rate(mbps)));
    let limits: Vec<String> = all.into_iter().chain(disks).collect();
    (!limits.is_empty()).then(|| format!("limit    {} now", limits.join(", ")))
}

fn copied(disk: &DiskCopy) -> String {
    let DiskCopy { disk: name, from, to, size_bytes, allocated_bytes, why, is_flattened, .. } = disk;
    let place = if from == to { from.clone() } else { format!("{from} to {to}") };
    let flattened = if *is_flattened { ", with its backing images" } else { "" };
    let lost = if is_device_path(to) { "; everything on that device is overwritten" } else { "" };
    format!(
        "disk     {name} {place}, {} of {}{flattened}: {why}{lost}",
        format::bytes(*allocated_bytes as f64),
        format::bytes(*size_bytes as f64)
    )
}

/// Files are not kept there, and the target alone knows what is.
fn is_device_path(path: &str) -> bool {
    Path::new(path).starts_with("/dev")
}

/// What a disk that went with its VM has taken.
fn disk_line(disk: &DiskUse, source: &str) -> String {
    let DiskUse { copy, copied_bytes, same_bytes, wire_bytes, ready_ms } = disk;
    let took = ready_ms.map(|ms| format!(" in {}", format::duration(ms))).unwrap_or_default();
    let same = match same_bytes {
        0 => String::new(),
        same_bytes => format!(", {} of it were there already", format::bytes(*same_bytes as f64)),
    };
    let wire = wire_bytes.map(|bytes| format!(", {} over the network", format::bytes(bytes as f64)));
    let left = match copy.from_device {
        None => "is kept until `drainpipe disk left --remove`",
        Some(_) => "stays as it is",
    };
    format!(
        "disk {} copied to {}: {}{took}{same}{}; the one on {source} {left}",
        copy.disk,
        copy.to,
        format::bytes(*copied_bytes as f64),
        wire.unwrap_or_default()
    )
}

fn encrypted(encryption: &Encryption) -> String {
    let whether = if encryption.is_encrypted() { "encrypted" } else { "in the clear" };
    format!("{whether}: {}", encryption.why())
}

/// Tells what a check has found.
pub(super) fn tell_finding(finding: &Finding) {
    output::remark(&describe_finding(finding));
}

fn describe_finding(finding: &Finding) -> String {
    let Finding { severity, what, effect, remedy, .. } = finding;
    format!("{severity}: {what}\n  effect: {effect}\n  remedy: {remedy}")
}

/// What a check has found, and a blank line, so that nobody takes what follows for a part of it.
fn before_the_result(findings: &[Finding]) -> Vec<String> {
    let mut lines: Vec<String> = findings.iter().map(describe_finding).collect();
    if !lines.is_empty() {
        lines.push(String::new());
    }
    lines
}

fn encrypted_by(encryption: &EncryptionUse) -> String {
    let EncryptionUse { is_encrypted, why, protocol, cipher_suite } = encryption;
    match (is_encrypted, protocol, cipher_suite) {
        (true, Some(protocol), Some(cipher_suite)) => {
            format!("encrypted by {protocol}, {cipher_suite}: {why}")
        }
        (true, Some(protocol), None) => format!("encrypted by QEMU's {protocol}: {why}"),
        (true, ..) => format!("was to be encrypted; no connection was made: {why}"),
        (false, ..) => format!("sent in the clear: {why}"),
    }
}

fn packed_by(compression: &CompressionUse) -> String {
    let share = |bytes: u64| bytes as f64 * 100.0 / compression.stream_bytes.max(1) as f64;
    format!(
        "compressed {:.1} : 1 in {} of CPU; {:.0} % by zstd, {:.0} % by lz4, {:.0} % as changes only, {:.0} \
        % uncompressed ({:.0} % because no core had the time)",
        compression.stream_bytes as f64 / compression.compressed_bytes.max(1) as f64,
        format::cpu_seconds(compression.cpu_seconds),
        share(compression.zstd_bytes),
        share(compression.lz4_bytes),
        share(compression.delta_bytes),
        share(compression.raw_bytes),
        share(compression.overtaken_bytes)
    )
}

/// Tells how a migration has ended.
pub(super) fn tell(result: &MigrationResult) -> Result<(), Problem> {
    for line in before_the_result(&result.record.findings) {
        output::remark(&line);
    }
    let why = result.choice.fallback_reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    if result.outcome != Outcome::Completed {
        let error = result.failure.error.as_deref().unwrap_or("cancelled");
        let state = match result.outcome {
            Outcome::InDoubt => {
                format!("it is paused on {} until {} answers", result.source, result.target)
            }
            Outcome::Lost => format!(
                "it has ended on {}, and what it was doing is lost; `drainpipe vm start {}` boots it again",
                result.ended_on(),
                result.vm
            ),
            _ => match result.failure.source_vm {
                Some(SourceVm::Runs) => format!("it runs on {}", result.source),
                Some(SourceVm::Paused) => format!("it stands still on {}", result.source),
                Some(SourceVm::Ended) => format!(
                    "it is stopped on {}; `drainpipe vm start {}` boots it again",
                    result.source, result.vm
                ),
                Some(SourceVm::Unknown) | None => {
                    format!(
                        "it is not known whether it runs on {}; `drainpipe vms` asks again",
                        result.source
                    )
                }
            },
        };
        output::remark(&format!("{} was not moved to {}: {error}; {state}", result.vm, result.target));
        if let Some(line) = standstill(result) {
            output::remark(&line);
        }
        return Ok(());
    }
    let paths: Vec<String> =
        result.traffic.paths.iter().map(|path| format!("{path} {:.0} %", path.share * 100.0)).collect();
    let downtime = result.silence.downtime_ms.map_or("unknown".into(), format::duration);
    output::print(&format!(
        "{} runs on {}\n  {} by {}{why}\n  {} over {}; {} sent in {} rounds\n  downtime {downtime}; \
         setup {}, completion {}\n",
        result.vm,
        result.target,
        format::duration(result.times.total_ms),
        result.choice.option,
        format::rate(result.memory.throughput_gbps),
        paths.join(", "),
        format::bytes(result.memory.wire_bytes as f64),
        result.memory.rounds,
        format::duration(result.times.setup_ms),
        format::duration(result.times.completion_ms),
    ))?;
    if let Some(line) = standstill(result) {
        output::remark(&line);
    }
    for link in &result.traffic.elsewhere {
        output::remark(&link.to_string());
    }
    result.connection_use.tracked_connections.iter().filter(|used| used.along + used.left > 0).for_each(
        |used| {
            output::remark(&used.to_string());
        },
    );
    if let Some(percent) = result.memory.throttle_percent {
        output::remark(&format!(
            "its memory got dirty too fast: its CPUs were throttled by up to {percent} %"
        ));
    }
    if let Some(post_copy_ms) = result.times.post_copy_ms {
        output::remark(&format!(
            "its memory got dirty as fast as it was sent: it ran on {} for {} before all of it was there (post-copy)",
            result.target,
            format::duration(post_copy_ms)
        ));
    }
    for disk in &result.copied.disks {
        output::remark(&disk_line(disk, &result.source));
    }
    result.connection_use.compression.iter().map(packed_by).for_each(|line| output::remark(&line));
    result.connection_use.encryption.iter().map(encrypted_by).for_each(|line| output::remark(&line));
    for line in result.traffic.paths.iter().flat_map(|path| lines_of(path, result.traffic.paths.len())) {
        output::remark(&line);
    }
    match &result.failure.error {
        Some(error) => {
            output::remark(error);
            Ok(())
        }
        None => Ok(()),
    }
}

/// Less than this beside the pause is not worth a line.
const STANDSTILL_TOLD_MS: f64 = 250.0;

/// How long the VM stood still, if its downtime does not say so.
pub(super) fn standstill(result: &MigrationResult) -> Option<String> {
    let vm = &result.vm;
    let paused = result.silence.downtime_ms.filter(|_| result.outcome != Outcome::Completed);
    let paused = paused.map(|ms| format!("{vm} was paused for {}", format::duration(ms)));
    let still_ms = result.silence.standstill_ms.unwrap_or_default();
    if still_ms < result.silence.downtime_ms.unwrap_or_default() + STANDSTILL_TOLD_MS {
        return paused;
    }
    let still_for = format::duration(still_ms);
    let of_what = "in flight, while its QEMU did not answer";
    Some(match paused {
        Some(paused) => format!("{paused}; it stood still for up to {still_for} {of_what}"),
        None => format!("{vm} stood still for up to {still_for} {of_what}"),
    })
}

/// What a person should know of a path: that it failed, or was of no use.
fn lines_of(path: &PathUse, paths: usize) -> Vec<String> {
    let name = format!("path {path}");
    let mut lines: Vec<String> = path
        .turns
        .iter()
        .map(|turn| {
            let at = format::duration(turn.ms);
            match turn.state {
                PathState::Out => format!("{name} out at {at}: {}", turn.why.as_deref().unwrap_or("not fit")),
                PathState::Back => format!("{name} back at {at}"),
                PathState::Weighted => {
                    format!("{name} {} from {at} on", turn.why.as_deref().unwrap_or("weighted"))
                }
                PathState::Unwatched => {
                    format!("{name} not watched from {at} on: {}", turn.why.as_deref().unwrap_or("no hello"))
                }
                PathState::Watched => format!("{name} watched from {at} on"),
            }
        })
        .collect();
    if let Some(segments) = path.retransmitted_segments.filter(|segments| *segments > 0) {
        lines.push(format!("{name} lost packets: {segments} TCP segments were sent again"));
    }
    if path.includes_other_traffic {
        lines.push(format!("{name}: its bytes include other traffic on {}", path.link));
    }
    if path.carried_nothing(paths) {
        lines.push(format!("{name} carried nothing"));
    }
    lines
}

pub(crate) async fn cancel(connection: &ConnectionArguments, id: &str) -> Result<Exit, Problem> {
    let fleet = connection.fleet()?;
    let (name, view) = migrations::find(&fleet, id).await?;
    let host = fleet.host(&name).await?;
    host.client().post::<()>(&host.path(&format!("/v1/migrations/{}/cancel", view.id)), &()).await?;
    output::remark("cancelling, unless it is too late; `drainpipe history` shows how it ends");
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::finding::Severity;

    use super::*;

    #[test]
    fn a_blank_line_parts_warnings_from_the_result() {
        assert_eq!(before_the_result(&[]), [""; 0], "and nothing stands above a result alone");
        let finding = Finding {
            severity: Severity::Warning,
            code: "of-a-test".into(),
            places: vec![],
            what: "e1 is slow".into(),
            effect: "it takes longer".into(),
            remedy: "another cable".into(),
            refuses_migration: false,
            fix: None,
        };
        let lines = before_the_result(&[finding.clone(), finding]);
        let [one, other, blank] = &lines[..] else { panic!("{lines:?}") };
        assert!(one == other && one.starts_with("warning: e1 is slow\n  effect:"), "{one}");
        assert_eq!(blank, "");
    }

    #[test]
    fn in_the_clear_is_said_only_of_what_was_not_to_be_encrypted() {
        let described = |is_encrypted, used: Option<(&str, Option<&str>)>| {
            let (protocol, cipher_suite): (Option<String>, Option<Option<String>>) =
                used.map(|(one, other)| (one.into(), other.map(str::to_owned))).unzip();
            let (why, cipher_suite) = ("asked for".into(), cipher_suite.flatten());
            encrypted_by(&EncryptionUse { is_encrypted, why, protocol, cipher_suite })
        };
        assert_eq!(
            described(true, Some(("TLS 1.3", Some("TLS_X")))),
            "encrypted by TLS 1.3, TLS_X: asked for"
        );
        assert_eq!(described(true, Some(("TLS 1.3", None))), "encrypted by QEMU's TLS 1.3: asked for");
        assert_eq!(described(true, None), "was to be encrypted; no connection was made: asked for");
        assert_eq!(described(false, None), "sent in the clear: asked for");
    }
}
