//! Follows a drain or a failback.

use drainpipe_api_types::{DrainKind, DrainRequest, DrainView, PLAN_DEADLINE, ResumeRequest};
use drainpipe_engine::problem::{Problem, ProblemKind};
use serde::Serialize;

use super::drain_display::Display;
use super::{Cancelling, Followed, interrupts, until_left, until_over};
use crate::connection::Host;

/// Begins to empty a host and follows it to its end. Ctrl-C cancels, which is followed too; a second
/// Ctrl-C stops the following. What it has begun is shown to `begun` first.
pub(crate) async fn drain(
    host: &Host,
    request: &DrainRequest,
    begun: impl FnOnce(&DrainView),
) -> Result<Followed<DrainView>, Problem> {
    begin_and_follow(host, "/v1/drain", request, begun).await
}

/// Lets VMs come to a host again, begins to bring back what left it, and follows that as [`drain`] does.
pub(crate) async fn failback(host: &Host, request: &ResumeRequest) -> Result<Followed<DrainView>, Problem> {
    begin_and_follow(host, "/v1/resume", request, |_| {}).await
}

async fn begin_and_follow(
    host: &Host,
    path: &str,
    request: &impl Serialize,
    show: impl FnOnce(&DrainView),
) -> Result<Followed<DrainView>, Problem> {
    let mut interrupts = interrupts()?;
    // A host that cannot be reached now has not begun anything.
    host.client().get::<DrainView>(&host.path("/v1/drain")).await?;
    let begun: DrainView = match host.client().post_within(&host.path(path), request, PLAN_DEADLINE).await {
        Err(problem) if problem.kind == ProblemKind::Unreachable => {
            let may_go_on = "if it has begun nevertheless, `drainpipe drain status HOST` shows it";
            return Ok(Followed::LostSight(problem.context(may_go_on)));
        }
        begun => begun?,
    };
    show(&begun);
    let name = begun.host.clone();
    if is_over(&begun) {
        return Ok(Followed::Over(begun));
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
        cancelling = until_left(host, "/v1/drain/cancel", &display, &mut interrupts) => {
            Err(not_watched(&name, &cancelling))
        }
    };
    display.end();
    Ok(ended.into())
}

fn not_watched(host: &str, cancelling: &Cancelling) -> Problem {
    let how_far = format!("`drainpipe drain status {host}` shows how far it has got");
    let cancels = format!("`drainpipe drain cancel {host}` cancels it");
    Problem::failed(match cancelling {
        Cancelling::Heard => format!("no longer watching; {host} is still cancelling, and {how_far}"),
        Cancelling::Unknown => format!(
            "no longer watching; {host} has not confirmed the cancellation, so the drain may go on: \
            {how_far}, and {cancels}"
        ),
        Cancelling::Refused(problem) => {
            format!(
                "no longer watching; it was not cancelled ({problem}) and goes on: {how_far}, and {cancels}"
            )
        }
    })
}

fn is_over(view: &DrainView) -> bool {
    view.ended_at.is_some() || view.status.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_it_goes_on_cancelling_is_said_only_if_it_was_heard() {
        let message = |cancelling| not_watched("a", &cancelling).message;
        let heard = message(Cancelling::Heard);
        assert!(heard.contains("a is still cancelling") && !heard.contains("drain cancel"), "{heard}");
        let refused = Cancelling::Refused(Problem::failed("you may not"));
        for (cancelling, words) in
            [(Cancelling::Unknown, "may go on"), (refused, "(you may not) and goes on")]
        {
            let message = message(cancelling);
            assert!(message.contains(words) && message.contains("`drainpipe drain cancel a`"), "{message}");
        }
    }
}
