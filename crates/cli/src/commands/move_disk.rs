//! `drainpipe vm move-disk`.

use drainpipe_api_types::{DiskMoveOutcome, DiskMoveResult, DiskMoveView, MoveDiskRequest};
use drainpipe_engine::format;
use drainpipe_engine::problem::Problem;

use crate::connection::Fleet;
use crate::exit::Exit;
use crate::follow::{self, Followed};
use crate::output;

pub(crate) async fn run(
    fleet: &Fleet,
    vm: &str,
    request: &MoveDiskRequest,
    json: bool,
) -> Result<Exit, Problem> {
    match follow::disk_move(fleet, vm, request, !json).await? {
        Followed::LostSight(problem) => Err(problem),
        Followed::Over((view, result)) => {
            if json {
                output::json(&view)?;
            } else {
                output::remark(&describe(&view, &result));
            }
            Ok(exit_of(&result))
        }
    }
}

pub(crate) async fn cancel(fleet: &Fleet, vm: &str, json: bool) -> Result<Exit, Problem> {
    let host = fleet.host(&fleet.find_vm(vm).await?.host).await?;
    let path = host.path(&format!("/v1/vms/{vm}/disk-move/cancel"));
    let view: DiskMoveView = host.client().post(&path, &()).await?;
    if json {
        output::json(&view)?;
    } else {
        output::remark(&format!("the move of {} of VM {vm} is cancelled, unless it is too late", view.disk));
    }
    Ok(Exit::Done)
}

fn exit_of(result: &DiskMoveResult) -> Exit {
    match result.outcome {
        DiskMoveOutcome::Completed => Exit::Done,
        DiskMoveOutcome::Failed => result.error.as_ref().map_or(Exit::Failed, Exit::of),
        DiskMoveOutcome::Cancelled => Exit::Cancelled,
    }
}

fn describe(view: &DiskMoveView, result: &DiskMoveResult) -> String {
    let DiskMoveView { vm, disk, from, to, .. } = view;
    match result.outcome {
        DiskMoveOutcome::Completed => {
            let (took, copied) =
                (format::duration(result.total_ms), format::bytes(result.copied_bytes as f64));
            let left = result
                .left
                .as_ref()
                .map_or(String::new(), |left| format!("; the old disk is kept as {left}"));
            format!("{disk} of VM {vm} is {to} now: {copied} in {took}{left}")
        }
        DiskMoveOutcome::Failed => {
            let why = result.error.as_ref().map_or(String::new(), |error| format!(": {error}"));
            format!("not moved, {disk} of VM {vm} is still {from}{why}")
        }
        DiskMoveOutcome::Cancelled => format!("cancelled; {disk} of VM {vm} is still {from}"),
    }
}
