//! Each command and its arguments, as the command line's own definition has them.

use clap::{Arg, Command, CommandFactory};

use crate::arguments::Arguments;

/// The section of docs/reference/cli.md that lists them.
pub(super) fn section() -> String {
    let mut program = Arguments::command();
    // Only then a command knows what it is called, with all that goes before its own name.
    program.build();
    let of_all = arguments_in_words(program.get_arguments().filter(|argument| argument.is_global_set()));
    format!("## Options of every command\n\n{of_all}\n## Each command\n{}", in_words(&program))
}

/// What can be run below a command.
fn in_words(group: &Command) -> String {
    let is_listed = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
    group
        .get_subcommands()
        .filter(is_listed)
        .map(|command| one_in_words(command) + &in_words(command))
        .collect()
}

fn one_in_words(command: &Command) -> String {
    if command.is_subcommand_required_set() {
        // It does nothing by itself.
        return String::new();
    }
    let name = command.get_bin_name().expect("it was built");
    let purpose = command.get_about().expect("it says what it is for");
    let own = command.get_arguments().filter(|argument| !argument.is_global_set());
    let heading = format!("### {name}");
    let parts = [heading, purpose.to_string(), usage(command), arguments_in_words(own)];
    let there = parts.iter().filter(|part| !part.is_empty());
    there.flat_map(|part| ["\n", part.trim_end(), "\n"]).collect()
}

fn usage(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    let ways = usage.trim_start_matches("Usage:").lines().map(|way| format!("`{}`", way.trim()));
    ways.collect::<Vec<_>>().join(" or ")
}

fn arguments_in_words<'a>(arguments: impl Iterator<Item = &'a Arg>) -> String {
    let is_own = |argument: &&Arg| {
        !argument.is_hide_set() && !matches!(argument.get_id().as_str(), "help" | "version")
    };
    arguments.filter(is_own).map(argument_in_words).collect()
}

fn argument_in_words(argument: &Arg) -> String {
    let meaning = argument.get_help().expect("it says what it is for");
    let facts = [choices(argument), variable(argument), default(argument)];
    let facts: Vec<String> = facts.into_iter().flatten().collect();
    let facts = if facts.is_empty() { String::new() } else { format!(" ({})", facts.join("; ")) };
    format!("- `{argument}`: {meaning}{facts}\n")
}

fn choices(argument: &Arg) -> Option<String> {
    let values = argument.get_possible_values();
    let takes_one_of_them = argument.get_action().takes_values() && !values.is_empty();
    takes_one_of_them.then(|| quoted(values.iter().map(|value| value.get_name().to_owned())))
}

fn variable(argument: &Arg) -> Option<String> {
    Some(format!("variable `{}`", argument.get_env()?.display()))
}

fn default(argument: &Arg) -> Option<String> {
    let values = argument.get_default_values();
    let is_said = argument.get_action().takes_values() && !values.is_empty();
    let values = values.iter().map(|value| value.to_string_lossy().into_owned());
    is_said.then(|| format!("default {}", quoted(values)))
}

fn quoted(values: impl Iterator<Item = String>) -> String {
    values.map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ")
}
