//! `drainpipe history`.

use drainpipe_agent::api::types::MigrationView;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::result::Outcome;

use crate::arguments::HistoryArguments;
use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::output;

pub(crate) async fn run(
    connection: &ConnectionArguments,
    arguments: &HistoryArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let fleet = connection.fleet()?;
    let host = match &arguments.host {
        Some(name) => fleet.host(name).await?,
        None => fleet.entry(),
    };
    if let Some(id) = &arguments.id {
        let view: MigrationView = host.client().get(&host.path(&format!("/v1/migrations/{id}"))).await?;
        if json {
            output::json(&view)?;
        } else {
            tell(&view)?;
        }
        return Ok(Exit::Done);
    }
    let path = host.path(&format!("/v1/migrations?limit={}", arguments.limit));
    let views: Vec<MigrationView> = host.client().get(&path).await?;
    if json {
        output::json(&views)?;
    } else {
        let head = ["migration", "vm", "from", "to", "began", "option", "took", "rate", "outcome"];
        output::table(&head, views.iter().map(row).collect())?;
    }
    Ok(Exit::Done)
}

fn row(view: &MigrationView) -> Vec<String> {
    let mut row = vec![view.id.clone(), view.vm.clone(), view.source.clone(), view.target.clone()];
    if let Some(result) = &view.result {
        row.extend([
            output::time(&result.started_at),
            result.option.to_string(),
            output::duration(result.total_ms),
            format!("{:.2} Gb/s", result.throughput_gbps),
            outcome_word(result.outcome).into(),
        ]);
    } else {
        let step = view.progress.as_ref().map_or("waits", |progress| progress.step.title());
        row.extend([
            String::new(),
            String::new(),
            String::new(),
            String::new(),
            format!("under way: {step}"),
        ]);
    }
    row
}

fn outcome_word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Completed => "completed",
        Outcome::Failed => "failed",
        Outcome::Cancelled => "cancelled",
        Outcome::Undecided => "undecided",
        Outcome::Lost => "lost",
    }
}

fn tell(view: &MigrationView) -> Result<(), Problem> {
    let Some(result) = &view.result else {
        let waits = view.waits_for.as_ref().map_or(String::new(), |why| format!("; it waits: {why}"));
        return output::print(&format!("under way{waits}\n"));
    };
    let mut text =
        format!("{} {} → {}: {}\n", result.vm, result.source, result.target, outcome_word(result.outcome));
    if let Some(error) = &result.error {
        text.push_str(error);
        text.push('\n');
    }
    output::print(&text)?;
    let rows = result
        .events
        .iter()
        .map(|event| vec![output::duration(event.ms), event.step.number().to_string(), event.what.clone()]);
    output::table(&["after", "step", "what"], rows.collect())
}
