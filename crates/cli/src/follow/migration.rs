//! Follows a migration.

use std::cell::Cell;

use drainpipe_api_types::{MigrateRequest, MigrationView};
use drainpipe_engine::estimate::convergence::Outpaced;
use drainpipe_engine::format;
use drainpipe_engine::migration::progress::{CompressionProgress, Progress};
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::storage::DiskProgress;

use super::display::{Display, set_bar};
use super::{Followed, Say, interrupts, until_left, until_over};
use crate::connection::Fleet;
use crate::output;

/// Begins a migration and follows it. Ctrl-C cancels it, which is followed to the end too; a second
/// Ctrl-C stops the following.
pub(crate) async fn migrate(
    fleet: &Fleet,
    request: &MigrateRequest,
    watched: bool,
) -> Result<Followed<MigrationResult>, Problem> {
    let mut interrupts = interrupts()?;
    let source = fleet.find_running_vm(&request.vm).await?.host;
    let host = fleet.host(&source).await?;
    let begun: MigrationView = match host.client().post(&host.path("/v1/migrations"), request).await {
        Err(problem) if problem.kind == ProblemKind::Unreachable => {
            let may_go_on = "if it has begun nevertheless, `drainpipe history` shows it";
            return Ok(Followed::LostSight(problem.context(may_go_on)));
        }
        begun => begun?,
    };
    let whither = format!("{} {} → {}", begun.vm, begun.source, begun.target);
    let display = Display::<Lines>::new(watched, whither);
    let id = &begun.id;
    let (path, what) = (format!("/v1/migrations/{id}"), format!("migration {id}"));
    let cancel_path = format!("{path}/cancel");
    let over = until_over(&host, &path, &what, &display, |view: MigrationView| {
        if let (None, Some(progress)) = (&view.result, &view.progress) {
            display.show(progress);
        }
        if let Some(why) = &view.waits_for {
            display.waits(why);
        }
        view.result
    });
    let result = tokio::select! {
        result = over => result,
        _ = until_left(&host, &cancel_path, &display, &mut interrupts) => {
            Err(Problem::failed(format!(
                "no longer watching migration {id}; `drainpipe history` shows how it ends, \
                 `drainpipe cancel {id}` cancels it"
            )))
        }
    };
    display.end();
    Ok(result.into())
}

/// The last lines printed, one for each step.
#[derive(Default)]
struct Lines {
    step: Cell<Option<Step>>,
    stalled: Cell<bool>,
    outpaced: Cell<bool>,
    waits: Cell<bool>,
}

impl Lines {
    fn show(&self, progress: &Progress) {
        let step = progress.step;
        if self.step.replace(Some(step)) != Some(step) {
            output::remark(&format!("step {}: {}", step.number(), step.title()));
        }
        let is_stalled = progress.stalled_ms.is_some();
        if self.stalled.replace(is_stalled) != is_stalled {
            let line = if is_stalled { describe(progress) } else { "bytes arrive again".into() };
            output::remark(&line);
        }
        // Once: near the limit it may come and go.
        if let Some(outpaced) = progress.outpaced.filter(|_| !self.outpaced.replace(true)) {
            let (done, helps) = (outpaced.what_is_done(), outpaced.what_helps());
            output::remark(&format!("it does not converge: {outpaced}; {done}; {helps}"));
        }
    }
}

impl Display<Lines> {
    fn show(&self, progress: &Progress) {
        match self {
            Self::Bar(bar) => {
                let done = progress.total_bytes.saturating_sub(progress.remaining_bytes);
                set_bar(bar, done, progress.total_bytes, describe(progress));
            }
            Self::Lines(lines) => lines.show(progress),
            Self::Nothing => {}
        }
    }

    /// Nothing goes on, for this reason.
    fn waits(&self, why: &str) {
        match self {
            Self::Lines(lines) if lines.waits.replace(true) => {}
            _ => self.say(&format!("it waits: {why}")),
        }
    }
}

fn describe(progress: &Progress) -> String {
    let out = match progress.paths_out.as_slice() {
        [] => String::new(),
        paths => format!("; out: {}", paths.join(", ")),
    };
    let stalled = progress.paths_stalled.join(", ");
    if let Some(stalled_ms) = progress.stalled_ms {
        let on = if stalled.is_empty() { stalled } else { format!(" on {stalled}") };
        return format!("stalled for {}{on}{out}", format::duration(stalled_ms));
    }
    let out = if stalled.is_empty() { out } else { format!("; nothing arrives over {stalled}{out}") };
    let title = if progress.rest_follows {
        "runs there, and the rest of its memory follows"
    } else {
        progress.step.title()
    };
    let step = format!("{}/10 {title}", progress.step.number());
    if progress.total_bytes == 0 {
        return describe_disks(&progress.disks).unwrap_or(step);
    }
    let sent = format::bytes(progress.sent_bytes as f64);
    let left = match (progress.outpaced, progress.eta_ms) {
        (Some(Outpaced { dirty_gbps, .. }), _) => {
            format!(", does not converge, changes at {}", format::rate(dirty_gbps))
        }
        (None, Some(eta_ms)) => format!(", {} left", format::estimate(eta_ms)),
        (None, None) => String::new(),
    };
    let limit =
        progress.limit_mbps.map_or(String::new(), |mbps| format!(" of {} allowed", format::mbps(mbps)));
    let throttle =
        progress.throttle_percent.map_or(String::new(), |percent| format!(", VM throttled by {percent} %"));
    let packing = describe_packing(progress.compression);
    // What matters most comes first: a narrow terminal shows no more.
    let rate = format::rate(progress.rate_gbps);
    let held = writes_held(&progress.disks);
    format!("{step}{left}: {sent} sent, {rate}{limit}{packing}{throttle}{held}{out}")
}

/// Where disks go, before the memory.
fn describe_disks(disks: &[DiskProgress]) -> Option<String> {
    if disks.is_empty() {
        return None;
    }
    let each = disks.iter().map(|disk| {
        let share = 100.0 * disk.copied_bytes as f64 / disk.total_bytes.max(1) as f64;
        let left =
            disk.eta_ms.filter(|_| !disk.is_ready).map(|ms| format!(", {} left", format::estimate(ms)));
        format!("{} {share:.0} %{}", disk.disk, left.unwrap_or_default())
    });
    let rate_gbps = disks.iter().map(|disk| disk.rate_gbps).sum();
    let waits = if disks.iter().any(|disk| disk.writes_wait) {
        "; the VM's writes wait for the target"
    } else {
        writes_held(disks)
    };
    Some(format!("disks: {}; {}{waits}", each.collect::<Vec<_>>().join(", "), format::rate(rate_gbps)))
}

fn writes_held(disks: &[DiskProgress]) -> &'static str {
    if disks.iter().any(|disk| disk.writes_held) { "; the VM's writes are held back" } else { "" }
}

/// What compression does, if there is any, to be put behind something else.
pub(crate) fn describe_packing(compression: Option<CompressionProgress>) -> String {
    compression.map_or(String::new(), |CompressionProgress { ratio, cores }| {
        format!(", compressing {ratio:.1} : 1 on {cores:.1} cores")
    })
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::migration::progress::ProgressMeter;

    use super::*;

    #[test]
    fn a_line_tells_that_it_does_not_converge_and_claims_no_time() {
        let outpaced = Outpaced { dirty_gbps: 1.2, sent_gbps: 0.94, throttle_max_percent: 80 };
        let progress = Progress {
            total_bytes: 1 << 30,
            eta_ms: Some(407.0),
            outpaced: Some(outpaced),
            throttle_percent: Some(50),
            ..ProgressMeter::default().progress(Step::CopyDirtyMemory, 0.0)
        };
        let shown = describe(&progress);
        assert!(
            shown.contains("does not converge, changes at 1.20 Gb/s") && !shown.contains("left"),
            "{shown}"
        );
        assert!(shown.ends_with("VM throttled by 50 %"), "{shown}");
    }

    #[test]
    fn a_line_tells_what_compression_does() {
        let progress = Progress {
            total_bytes: 1 << 30,
            rate_gbps: 1.87,
            compression: Some(CompressionProgress { ratio: 2.93, cores: 1.38 }),
            ..ProgressMeter::default().progress(Step::CopyMemory, 0.0)
        };
        let shown = describe(&progress);
        assert!(shown.ends_with("1.87 Gb/s, compressing 2.9 : 1 on 1.4 cores"), "{shown}");
    }
}
