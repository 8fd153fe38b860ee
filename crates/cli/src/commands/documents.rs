//! The scripts and pages that tell shells and people of the command line.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;
use drainpipe_engine::problem::Problem;

use crate::arguments::Arguments;
use crate::completion;
use crate::exit::Exit;
use crate::output;

pub(crate) fn completions(shell: Shell) -> Result<Exit, Problem> {
    output::print(&completion::script(shell)?)?;
    Ok(Exit::Done)
}

pub(crate) fn man(directory: &Path) -> Result<Exit, Problem> {
    let failed =
        |error| Problem::failed(format!("cannot write man pages to {}: {error}", directory.display()));
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(Arguments::command(), directory).map_err(failed)?;
    output::remark(&format!("wrote drainpipe.1 and a page for each command to {}", directory.display()));
    Ok(Exit::Done)
}
