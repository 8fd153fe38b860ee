//! Shell completion and man pages, made from the command line's own description.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;
use drainpipe_engine::problem::Problem;

use crate::arguments::Arguments;
use crate::exit::Exit;
use crate::output;

pub(crate) fn completions(shell: Shell) -> Result<Exit, Problem> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "drainpipe", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
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
