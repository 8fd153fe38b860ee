//! Follows a drain, or the way back of what it moved.

use drainpipe_agent::api::types::{DrainKind, DrainRequest, DrainView, PLAN_DEADLINE, ResumeRequest};
use drainpipe_engine::problem::{Problem, ProblemKind};
use serde::Serialize;

use super::drain_display::Display;
use super::{interrupts, until_left, until_over};
use crate::connection::Host;

/// Begins to empty a host and follows it to its end. Ctrl-C cancels, which is followed too; a second
/// Ctrl-C stops the following.
pub(crate) async fn drain(host: &Host, request: &DrainRequest) -> Result<DrainView, Problem> {
    begin_and_follow(host, "/v1/drain", request).await
}

/// Lets VMs come to a host again, begins to bring back what left it, and follows that as [`drain`] does.
pub(crate) async fn failback(host: &Host) -> Result<DrainView, Problem> {
    begin_and_follow(host, "/v1/resume", &ResumeRequest { failback: true }).await
}

async fn begin_and_follow(host: &Host, path: &str, request: &impl Serialize) -> Result<DrainView, Problem> {
    let mut interrupts = interrupts()?;
    let begun = host.client().post_within(&host.path(path), request, PLAN_DEADLINE).await;
    let begun: DrainView = begun.map_err(|problem| match problem.kind {
        ProblemKind::Unreachable => {
            problem.context("if it has begun all the same, `drainpipe drain status HOST` shows it")
        }
        _ => problem,
    })?;
    let name = begun.host.clone();
    if is_over(&begun) {
        return Ok(begun);
    }
    let display = Display::new(&begun);
    let what = match begun.kind {
        Some(DrainKind::Failback) => format!("the way back to {name}"),
        _ => format!("the drain of {name}"),
    };
    let over = until_over(host, "/v1/drain", &what, &display, |view: DrainView| {
        if view.id != begun.id {
            return Some(Err(Problem::failed(format!(
                "what was followed has ended, and {name} has begun something else since: `drainpipe drain status {name}`"
            ))));
        }
        display.show(&view);
        is_over(&view).then_some(Ok(view))
    });
    let ended = tokio::select! {
        ended = over => ended.flatten(),
        () = until_left(host, "/v1/drain/cancel", &display, &mut interrupts) => Err(Problem::failed(format!(
            "not watched any more; {name} goes on cancelling, and `drainpipe drain status {name}` shows how far it is"
        ))),
    };
    display.end();
    ended
}

fn is_over(view: &DrainView) -> bool {
    view.ended_at.is_some() || view.status.is_none()
}
