//! The `drainpipe` program: every mode of it is in [`dispatch`].

mod arguments;
mod ask;
mod bench;
mod commands;
mod connection;
mod exit;
mod follow;
mod migrations;
mod output;
#[cfg(test)]
mod reference;

use std::process::ExitCode;

use clap::Parser;
use drainpipe_engine::problem::Problem;

use arguments::{Arguments, Command, completion};
use exit::Exit;

fn main() -> ExitCode {
    completion::answer_shell();
    let arguments = Arguments::parse();
    match &arguments.command {
        // Before there are other threads.
        Command::Launch(order) => return ExitCode::from(commands::agent::launch(order)),
        Command::Keeper(keeper) => return exit_code(commands::agent::keep(keeper)),
        _ => {}
    }
    exit_code(runtime().and_then(|runtime| runtime.block_on(dispatch(arguments))))
}

fn exit_code(outcome: Result<Exit, Problem>) -> ExitCode {
    match outcome {
        Ok(exit) => exit.into(),
        Err(problem) => {
            output::complain(&problem);
            Exit::of(&problem).into()
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, Problem> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Problem::failed(format!("cannot start: {error}")))
}

async fn dispatch(arguments: Arguments) -> Result<Exit, Problem> {
    let Arguments { connection, json, command } = arguments;
    match command {
        Command::Demo(demo) => commands::demo::run(&demo, json).await,
        Command::Agent(agent) => commands::agent::run(&agent).await,
        Command::Launch(_) | Command::Keeper(_) => unreachable!("it needs no runtime"),
        Command::Guard(guard) => commands::agent::guard(guard).await,
        Command::Init(init) => commands::fleet::init(&init, json).await,
        Command::Join(join) => commands::fleet::join(&join).await,
        Command::Leave(leave) => commands::fleet::leave(&leave).await,
        Command::Revoke(revoke) => commands::fleet::revoke(&connection, &revoke, json).await,
        Command::Hosts => commands::hosts::run(&connection, json).await,
        Command::Vms => commands::vm::list(&connection, json).await,
        Command::Vm { command } => commands::vm::run(&connection, command, json).await,
        Command::Disk { command } => commands::disk::run(&connection, command, json).await,
        Command::Check(check) => commands::check::run(&connection, &check, json).await,
        Command::Migrate(migrate) => commands::migrate::run(&connection, &migrate, json).await,
        Command::Cancel { id } => commands::migrate::cancel(&connection, &id).await,
        Command::Drain(drain) => commands::drain::run(&connection, &drain, json).await,
        Command::Resume(resume) => commands::drain::resume(&connection, &resume, json).await,
        Command::Limit(limit) => commands::limit::run(&connection, &limit, json).await,
        Command::History(history) => commands::history::run(&connection, &history, json).await,
        Command::Bench(bench) => commands::bench::run(&connection, &bench, json).await,
        Command::Journal { command } => commands::journal::run(&connection, &command, json).await,
        Command::Lab { command } => commands::lab::run(command, json).await,
        Command::Pki { command } => commands::pki::run(&command),
        Command::Completions { shell } => commands::documents::completions(shell),
        Command::Man { directory } => commands::documents::man(&directory),
    }
}
