//! Follows an agent's work to its end: progress for the person, Ctrl-C for the agent.

mod disk;
mod disk_move;
mod display;
mod drain;
mod drain_display;
mod line;
mod migration;

use std::time::{Duration, Instant};

use drainpipe_engine::problem::{Problem, ProblemKind};
use serde::de::{DeserializeOwned, IgnoredAny};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

pub(crate) use self::disk::disk;
pub(crate) use self::disk_move::disk_move;
pub(crate) use self::drain::{drain, failback};
pub(crate) use self::drain_display::{describe_pace, own_moves, state_word};
pub(crate) use self::migration::{describe_packing, migrate};
use crate::connection::Host;

/// How often the agent is asked; each time costs it about 0.2 ms. It is told too, so that it answers at once when what is
/// followed is over.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// How long an agent may be unreachable, as it is during a restart, before the program gives up.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// What has become of what is followed.
#[derive(Debug)]
pub(crate) enum Followed<End> {
    /// It is over.
    Over(End),
    /// It may go on, and it is not known how it ends: why.
    LostSight(Problem),
}

impl<End> From<Result<End, Problem>> for Followed<End> {
    fn from(followed: Result<End, Problem>) -> Self {
        followed.map_or_else(Self::LostSight, Self::Over)
    }
}

/// Where messages go while progress is shown.
trait Say {
    fn say(&self, text: &str);
}

/// Ctrl-C, from now on. Made before anything begins, and one for all of it: none is lost between two
/// requests.
fn interrupts() -> Result<Signal, Problem> {
    signal(SignalKind::interrupt())
        .map_err(|error| Problem::failed(format!("cannot watch for Ctrl-C: {error}")))
}

/// Asks the agent until `look` finds that it is over. An error says nothing of how it ends.
async fn until_over<View: DeserializeOwned, End>(
    host: &Host,
    path: &str,
    what: &str,
    display: &impl Say,
    mut look: impl FnMut(View) -> Option<End>,
) -> Result<End, Problem> {
    let path = host.path(&format!("{path}?wait_ms={}", ASK_EVERY.as_millis()));
    let mut silent_since = None;
    loop {
        let asked_at = Instant::now();
        match host.client().get::<View>(&path).await {
            Ok(view) => {
                silent_since = None;
                if let Some(end) = look(view) {
                    return Ok(end);
                }
            }
            Err(problem) if problem.kind == ProblemKind::Unreachable => {
                if silent_since.is_none() {
                    display.say("the agent does not answer; trying again");
                }
                let since = *silent_since.get_or_insert_with(Instant::now);
                if since.elapsed() > SILENCE_MAX {
                    return Err(problem.context(format!("lost sight of {what}, which may go on")));
                }
            }
            Err(problem) => return Err(problem),
        }
        // Older agents, and those that are asked for other things, answer at once.
        sleep(ASK_EVERY.saturating_sub(asked_at.elapsed())).await;
    }
}

/// Whether the agent has heard that it is to cancel.
#[derive(Debug)]
enum Cancelling {
    /// It has, or it was over by then.
    Heard,
    /// It has not answered.
    Unknown,
    /// It does not cancel.
    Refused(Problem),
}

/// At the first interrupt asks the agent to cancel; ends at the second, and says what has come of that.
async fn until_left(
    host: &Host,
    cancel_path: &str,
    display: &impl Say,
    interrupts: &mut Signal,
) -> Cancelling {
    interrupts.recv().await;
    display.say("cancelling, unless it is too late; Ctrl-C again stops watching");
    let mut cancelling = Cancelling::Unknown;
    let cancel = async {
        match host.client().post::<IgnoredAny>(&host.path(cancel_path), &()).await {
            // It is over, and the result says how.
            Ok(_) | Err(Problem { kind: ProblemKind::NotFound | ProblemKind::Conflict, .. }) => {
                cancelling = Cancelling::Heard;
            }
            // It may have heard, and the answer was lost.
            Err(problem) if problem.kind == ProblemKind::Unreachable => {
                display.say(&format!("it is not known whether it cancels: {problem}"));
            }
            Err(problem) => {
                display.say(&format!("not cancelled: {problem}"));
                cancelling = Cancelling::Refused(problem);
            }
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = cancel => {}
        _ = interrupts.recv() => {}
    }
    cancelling
}
