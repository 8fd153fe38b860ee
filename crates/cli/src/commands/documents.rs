//! Completion scripts for shells, and man pages for people.

use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;
use drainpipe_engine::problem::Problem;

use crate::arguments::{Arguments, completion};
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

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    /// The names of the pages of a command and of all visible commands below it.
    fn pages(command: &Command) -> Vec<String> {
        let name = command.get_display_name().unwrap_or(command.get_name());
        let shown =
            command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help");
        std::iter::once(format!("{name}.1")).chain(shown.flat_map(pages)).collect()
    }

    #[test]
    fn every_command_has_a_man_page() {
        let directory = tempfile::tempdir().unwrap();
        man(directory.path()).unwrap();
        let mut command = Arguments::command();
        command.build();
        let pages = pages(&command);
        assert!(pages.contains(&"drainpipe-vm-create.1".into()), "{pages:?}");
        for page in pages {
            let written = std::fs::read_to_string(directory.path().join(&page)).unwrap_or_default();
            assert!(written.contains(".SH DESCRIPTION"), "{page}: {written}");
        }
    }

    #[test]
    fn every_packaged_shell_completes() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = completion::script(shell).unwrap();
            assert!(script.contains("drainpipe"), "{shell}");
            // The place where it was built is not the place where it runs.
            assert!(!script.contains(env!("CARGO_MANIFEST_DIR")), "{shell}");
        }
    }
}
