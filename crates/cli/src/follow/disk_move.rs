//! Follows a disk that moves on its host while its VM runs.

use std::cell::Cell;
use std::time::{Duration, Instant};

use drainpipe_api_types::{DiskMoveResult, DiskMoveView, MoveDiskRequest};
use drainpipe_engine::format;
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::storage::DiskProgress;

use super::display::{Display, set_bar};
use super::{Followed, interrupts, until_left, until_over};
use crate::connection::Fleet;
use crate::output;

/// Where nobody sees a bar.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Begins to move a disk and follows it. Ctrl-C cancels it, which is followed to the end too; a second Ctrl-C stops the
/// following.
pub(crate) async fn disk_move(
    fleet: &Fleet,
    vm: &str,
    request: &MoveDiskRequest,
    is_watched: bool,
) -> Result<Followed<(DiskMoveView, DiskMoveResult)>, Problem> {
    let mut interrupts = interrupts()?;
    let host = fleet.host(&fleet.find_vm(vm).await?.host).await?;
    let path = format!("/v1/vms/{vm}/disk-move");
    let begun: DiskMoveView = match host.client().post(&host.path(&path), request).await {
        Err(problem) if problem.kind == ProblemKind::Unreachable => {
            return Ok(Followed::LostSight(problem.context(where_to_look(vm))));
        }
        begun => begun?,
    };
    let display = Display::<LastLine>::new(is_watched, String::new());
    let what = format!("the move of {} of VM {vm}", request.disk);
    let cancel_path = format!("{path}/cancel");
    let over = until_over(&host, &path, &what, &display, |view: DiskMoveView| {
        if let (None, Some(progress)) = (&view.result, &view.progress) {
            display.show(progress);
        }
        (view.id == begun.id).then(|| view.result.clone().map(|result| (view, result))).flatten()
    });
    let result = tokio::select! {
        result = over => result.map_err(|problem| problem.context(where_to_look(vm))),
        _ = until_left(&host, &cancel_path, &display, &mut interrupts) => {
            Err(Problem::failed(format!("no longer watching {what}; {}", where_to_look(vm))))
        }
    };
    display.end();
    Ok(result.into())
}

fn where_to_look(vm: &str) -> String {
    format!(
        "`drainpipe vm show {vm}` says which disk the VM has, `drainpipe vm move-disk {vm} --cancel` cancels a move"
    )
}

/// When the last line was.
struct LastLine(Cell<Instant>);

impl Default for LastLine {
    fn default() -> Self {
        Self(Cell::new(Instant::now()))
    }
}

impl Display<LastLine> {
    fn show(&self, progress: &DiskProgress) {
        match self {
            Self::Bar(bar) => set_bar(bar, progress.copied_bytes, progress.total_bytes, describe(progress)),
            Self::Lines(LastLine(last)) if last.get().elapsed() >= LINE_EVERY => {
                last.set(Instant::now());
                output::remark(&describe(progress));
            }
            Self::Lines(_) | Self::Nothing => {}
        }
    }
}

fn describe(progress: &DiskProgress) -> String {
    let DiskProgress { disk, copied_bytes, total_bytes, is_ready, rate_gbps, eta_ms, .. } = progress;
    let bytes = |bytes: u64| format::bytes(bytes as f64);
    if *is_ready {
        return format!("{disk}: all is there, the VM is switching to the new disk");
    }
    let left = eta_ms.map_or(String::new(), |ms| format!(", {} left", format::estimate(ms)));
    let rate = format::bytes(rate_gbps * 1e9 / 8.0);
    format!("{disk}{left}: {} of {}, {rate}/s", bytes(*copied_bytes), bytes(*total_bytes))
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::storage::DiskName;

    use super::*;

    #[test]
    fn no_time_left_is_told_before_it_is_known() {
        let progress = DiskProgress {
            disk: DiskName::at(0).unwrap(),
            copied_bytes: 1 << 30,
            total_bytes: 4 << 30,
            is_ready: false,
            writes_wait: false,
            writes_held: false,
            rate_gbps: 0.0,
            eta_ms: None,
        };
        assert!(!describe(&progress).contains("left"));
        let known = DiskProgress { rate_gbps: 4.294_967_296, eta_ms: Some(6_000.0), ..progress };
        assert_eq!(describe(&known), "vda, 6.0 s left: 1.00 GiB of 4.00 GiB, 512 MiB/s");
    }
}
