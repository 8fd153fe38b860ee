//! The generated parts of docs/reference: whether they match this program.

mod commands;

use std::fs;
use std::path::Path;

use crate::exit::Exit;

/// Set to have the pages written again.
const UPDATE: &str = "DRAINPIPE_UPDATE";
const HOW: &str = "DRAINPIPE_UPDATE=1 cargo test -p drainpipe-cli --bins reference";
const BEGIN: &str = "<!-- generated";
const END: &str = "<!-- end of what is generated -->";

/// A page with `made` in place of what stands between its marks.
fn made_anew(page: &str, made: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}: {HOW} -->\n\n{}\n\n{END}{after}", made.trim()))
}

fn assert_holds(page: &str, made: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(page);
    let checked_in = fs::read_to_string(&path).expect("it can be read");
    let anew = made_anew(&checked_in, made).expect("it has marks of what is generated");
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&path, anew).expect("it can be written");
    } else {
        assert!(checked_in == anew, "docs/reference/{page} is out of date: run `{HOW}`");
    }
}

#[test]
fn the_page_of_commands_is_that_of_this_program() {
    assert_holds("cli.md", &commands::section());
}

#[test]
fn the_page_of_exit_codes_is_that_of_this_program() {
    let rows = Exit::ALL.map(|exit| format!("| {} | {} |\n", exit.code(), exit.meaning()));
    assert_holds("exit-codes.md", &format!("| code | meaning |\n|---|---|\n{}", rows.concat()));
}

#[test]
fn only_what_is_between_the_marks_is_made_anew() {
    let page = format!("above\n{BEGIN} -->\nold\n{END}\nbelow\n");
    let anew = made_anew(&page, "new\n").unwrap();
    assert_eq!(anew, format!("above\n{BEGIN}: {HOW} -->\n\nnew\n\n{END}\nbelow\n"));
    assert_eq!(made_anew(&anew, "new").unwrap(), anew);
    assert_eq!(made_anew("above\nbelow\n", "new"), None);
}
