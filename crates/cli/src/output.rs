//! What people and scripts read.

use std::io::{self, IsTerminal, Write};

use comfy_table::{ContentArrangement, Table, presets};
use drainpipe_engine::format::plain;
use drainpipe_engine::problem::Problem;
use owo_colors::OwoColorize;
use serde::Serialize;

/// Prints a value for scripts.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Problem> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Problem::failed(format!("cannot write JSON: {error}")))?;
    print(&format!("{text}\n"))
}

/// Prints to standard output. A reader that has gone, as `head` goes, is no failure.
pub(crate) fn print(text: &str) -> Result<(), Problem> {
    let mut output = io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Problem::failed(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints a table with a head.
pub(crate) fn table(head: &[&str], rows: Vec<Vec<String>>) -> Result<(), Problem> {
    print(&table_text(head, rows))
}

/// A table with a head. What another host says is in its cells: nothing in them commands the terminal.
pub(crate) fn table_text(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(head.iter().map(|word| word.to_uppercase()));
    table.add_rows(rows.into_iter().map(|row| row.into_iter().map(|cell| plain(&cell))));
    format!("{}\n", table.trim_fmt())
}

/// A line for the person, beside the output proper.
pub(crate) fn remark(text: &str) {
    // With standard error closed there is nobody to tell.
    let _nobody_listens = writeln!(io::stderr(), "{text}");
}

/// Tells what went wrong.
pub(crate) fn complain(problem: &Problem) {
    if is_coloured(&io::stderr()) {
        remark(&format!("{} {problem}", "error:".red()));
    } else {
        remark(&format!("error: {problem}"));
    }
}

/// Whether a person watches.
pub(crate) fn is_watched() -> bool {
    io::stderr().is_terminal()
}

/// Whether standard output may have colours, and how wide it is.
pub(crate) fn page() -> (usize, bool) {
    let width = rustix::termios::tcgetwinsize(io::stdout()).map_or(100, |size| usize::from(size.ws_col));
    (if width == 0 { 100 } else { width }, is_coloured(&io::stdout()))
}

/// See <https://no-color.org>.
fn is_coloured(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// A moment, in UTC, from its form in RFC 3339: to the second.
pub(crate) fn time(rfc3339: &str) -> String {
    rfc3339.split(['.', 'Z']).next().unwrap_or_default().replace('T', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_cannot_command_a_terminal() {
        let text = table_text(&["host", "version"], vec![vec!["b".into(), "\u{1b}[2J9.9\u{9b}\r".into()]]);
        assert_eq!(text, " HOST  VERSION\n b     [2J9.9\n");
    }

    #[test]
    fn moments_are_told_to_the_second() {
        assert_eq!(time("2026-11-21T12:03:04.567Z"), "2026-11-21 12:03:04");
        assert_eq!(time("2026-11-21T12:03:04Z"), "2026-11-21 12:03:04");
    }
}
