//! Follows a migration to its end: progress for the person, Ctrl-C for the agent.

use std::cell::Cell;
use std::time::Duration;

use drainpipe_agent::api::types::{MigrateRequest, MigrationView};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::progress::Progress;
use drainpipe_engine::result::MigrationResult;
use drainpipe_engine::step::Step;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::connection::{Fleet, Host};
use crate::output;

/// How often the agent is asked; each time costs it about 0.2 ms.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// How long an agent may be out of reach, as it is while it is restarted, before it is given up.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Begins a migration and follows it. Ctrl-C cancels it, which is followed to the end too; a second
/// Ctrl-C stops the following.
pub(crate) async fn migrate(
    fleet: &Fleet,
    request: &MigrateRequest,
    watched: bool,
) -> Result<MigrationResult, Problem> {
    // Before it begins, and one for all of it: no Ctrl-C is lost between two requests.
    let mut interrupts = signal(SignalKind::interrupt())
        .map_err(|error| Problem::failed(format!("cannot watch for Ctrl-C: {error}")))?;
    let source = fleet.find_vm(&request.vm).await?.host;
    let host = fleet.host(&source).await?;
    let begun: MigrationView = host.client().post(&host.path("/v1/migrations"), request).await?;
    let display = Display::new(&begun, watched);
    let result = tokio::select! {
        result = follow(&host, &begun.id, &display) => result,
        stopped = cancel_when_interrupted(&host, &begun.id, &display, &mut interrupts) => Err(stopped),
    };
    display.end();
    result
}

/// Ends at the second interrupt, with what to tell the person.
async fn cancel_when_interrupted(
    host: &Host,
    id: &str,
    display: &Display,
    interrupts: &mut Signal,
) -> Problem {
    interrupts.recv().await;
    display.say("cancelling, unless it is too late; Ctrl-C again stops watching");
    let path = host.path(&format!("/v1/migrations/{id}/cancel"));
    let cancel = async {
        match host.client().post::<()>(&path, &()).await {
            // It is over, and the result says how.
            Ok(()) | Err(Problem { kind: ProblemKind::NotFound, .. }) => {}
            Err(problem) => display.say(&format!("not cancelled: {problem}")),
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = cancel => {}
        _ = interrupts.recv() => {}
    }
    Problem::failed(format!(
        "migration {id} is not watched any more; `drainpipe history` shows how it ends, `drainpipe cancel {id}` \
         cancels it"
    ))
}

async fn follow(host: &Host, id: &str, display: &Display) -> Result<MigrationResult, Problem> {
    let path = host.path(&format!("/v1/migrations/{id}"));
    let mut silent_since = None;
    loop {
        tokio::time::sleep(ASK_EVERY).await;
        match host.client().get::<MigrationView>(&path).await {
            Ok(MigrationView { result: Some(result), .. }) => return Ok(result),
            Ok(view) => {
                silent_since = None;
                if let Some(progress) = &view.progress {
                    display.show(progress);
                }
            }
            Err(problem) if problem.kind == ProblemKind::Unreachable => {
                if silent_since.is_none() {
                    display.say("the agent does not answer; trying again");
                }
                let since = *silent_since.get_or_insert_with(std::time::Instant::now);
                if since.elapsed() > SILENCE_MAX {
                    return Err(problem.context(format!("lost sight of migration {id}, which may go on")));
                }
            }
            Err(problem) => return Err(problem),
        }
    }
}

/// A bar for a person at a terminal, a line a step for a log, nothing for a script.
enum Display {
    Bar(ProgressBar),
    Lines { last: Cell<Option<Step>> },
    Nothing,
}

impl Display {
    fn new(begun: &MigrationView, watched: bool) -> Self {
        if !watched {
            return Self::Nothing;
        }
        if !output::is_watched() {
            return Self::Lines { last: Cell::new(None) };
        }
        let style =
            ProgressStyle::with_template("{prefix} {bar:24} {msg}").expect("the template is well-formed");
        let bar = ProgressBar::new(1).with_style(style);
        bar.set_prefix(format!("{} {} → {}", begun.vm, begun.source, begun.target));
        Self::Bar(bar)
    }

    fn show(&self, progress: &Progress) {
        match self {
            Self::Bar(bar) => {
                bar.set_length(progress.total_bytes.max(1));
                bar.set_position(progress.total_bytes.saturating_sub(progress.remaining_bytes));
                bar.set_message(describe(progress));
            }
            Self::Lines { last } if last.replace(Some(progress.step)) != Some(progress.step) => {
                output::remark(&format!("step {}: {}", progress.step.number(), progress.step.title()));
            }
            Self::Lines { .. } | Self::Nothing => {}
        }
    }

    fn say(&self, text: &str) {
        match self {
            Self::Bar(bar) => bar.set_message(text.to_owned()),
            Self::Lines { .. } => output::remark(text),
            Self::Nothing => {}
        }
    }

    fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
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
        return format!("stalled for {}{on}{out}", output::duration(stalled_ms));
    }
    let out = if stalled.is_empty() { out } else { format!("; nothing arrives by {stalled}{out}") };
    let step = format!("{}/10 {}", progress.step.number(), progress.step.title());
    if progress.total_bytes == 0 {
        return step;
    }
    let sent = output::bytes(progress.sent_bytes);
    let left = progress.eta_ms.map_or(String::new(), |eta| format!(", {} left", output::duration(eta)));
    let limit = progress.limit_mbps.map_or(String::new(), |mbps| format!(" of {mbps} Mb/s allowed"));
    format!("{step}: {sent} sent, {:.2} Gb/s{limit}{left}{out}", progress.rate_gbps)
}
