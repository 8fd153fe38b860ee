//! `drainpipe journal`.

use std::time::Duration;

use drainpipe_api_types::{JournalView, LiveVm};
use drainpipe_engine::problem::Problem;

use crate::arguments::JournalCommand;
use crate::connection::{ConnectionArguments, Host};
use crate::exit::Exit;
use crate::{ask, output};

/// The agent asks its QEMUs and the other hosts, all at once.
const LOOK_DEADLINE: Duration = Duration::from_secs(15);

pub(crate) async fn run(
    connection: &ConnectionArguments,
    command: &JournalCommand,
    json: bool,
) -> Result<Exit, Problem> {
    let host = connection.fleet()?.entry();
    match command {
        JournalCommand::Show => show(&host, json).await,
        JournalCommand::Adopt { yes } => adopt(&host, *yes, json).await,
    }
}

async fn show(host: &Host, json: bool) -> Result<Exit, Problem> {
    let view = look(host).await?;
    if json {
        output::json(&view)?;
    } else {
        tell(&view)?;
    }
    Ok(if view.doubts.is_empty() { Exit::Done } else { Exit::Refused })
}

async fn adopt(host: &Host, is_agreed: bool, json: bool) -> Result<Exit, Problem> {
    if !is_agreed {
        ask::is_possible("`journal adopt`")?;
        let view = look(host).await?;
        tell(&view)?;
        let question = format!(
            "{} will continue with what is there. VMs that it does not find may run on other hosts. Continue?",
            view.host
        );
        if !view.doubts.is_empty() && !ask::confirmed(&question)? {
            output::remark("nothing is changed");
            return Ok(Exit::Cancelled);
        }
    }
    let path = host.path("/v1/journal/adoption");
    let view: JournalView = host.client().post_within(&path, &(), LOOK_DEADLINE).await?;
    if json {
        output::json(&view)?;
    } else {
        output::table(&["vm", "guest", "is from now on"], view.live.iter().map(row).collect())?;
        output::remark(&format!("{} continues with what is there", view.host));
    }
    Ok(Exit::Done)
}

async fn look(host: &Host) -> Result<JournalView, Problem> {
    host.client().get_within(&host.path("/v1/journal"), LOOK_DEADLINE).await
}

fn tell(view: &JournalView) -> Result<(), Problem> {
    let JournalView { host, file, mark, .. } = view;
    if view.doubts.is_empty() {
        let generation = mark.as_ref().map_or(0, |mark| mark.generation);
        return output::print(&format!("the journal of {host}, {file}, is believed (record {generation})\n"));
    }
    output::print(&format!("the journal of {host}, {file}, is not believed:\n"))?;
    for doubt in &view.doubts {
        output::print(&format!("  {doubt}\n"))?;
    }
    output::table(&["lives here", "guest", "would be"], view.live.iter().map(row).collect())?;
    for migration in &view.coming {
        output::print(&format!(
            "{} says that {} is on its way here (migration {})\n",
            migration.source, migration.vm, migration.id
        ))?;
    }
    for silent in &view.silent {
        output::remark(silent);
    }
    Ok(())
}

fn row(live: &LiveVm) -> Vec<String> {
    let guest = match live.runs {
        Some(true) => "runs",
        Some(false) => "stands still",
        None => "not known",
    };
    vec![live.vm.clone(), guest.into(), live.will_be.clone()]
}
