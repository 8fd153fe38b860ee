//! Questions to the person at the terminal.

use std::io::{self, IsTerminal, Write};

use drainpipe_engine::problem::Problem;

/// Refuses, before anything is begun, where nobody could be asked.
pub(crate) fn is_possible(what: &str) -> Result<(), Problem> {
    if io::stdin().is_terminal() {
        return Ok(());
    }
    Err(Problem::bad_input(format!(
        "{what} asks before it changes anything, and there is no terminal to ask on: add --yes"
    )))
}

/// Whether the person says yes.
pub(crate) fn confirmed(question: &str) -> Result<bool, Problem> {
    let failed = |error| Problem::failed(format!("cannot ask on the terminal: {error}"));
    let mut answer = String::new();
    write!(io::stderr(), "{question} [y/N] ").map_err(failed)?;
    io::stdin().read_line(&mut answer).map_err(failed)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
