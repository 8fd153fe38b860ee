//! Tests that docs/reference/kept.md has the files that an agent keeps, and no others.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::store::config::{DEFAULT_PATH, DEFAULT_SOCKET};
use crate::store::fleet_files;
use crate::test_host::{TestHost, definition};

const PAGE: &str = include_str!("../../../../docs/reference/kept.md");
const STATE: &str = "/var/lib/drainpipe";
const RUNTIME: &str = "/run/drainpipe";

/// The paths in the page's table of files, such as `/run/drainpipe/vms`.
fn named() -> BTreeSet<String> {
    let table = PAGE.split("## Files").nth(1).and_then(|rest| rest.split("\n\n").nth(1)).unwrap();
    let cells = table.lines().skip(2).filter_map(|line| line.split('`').nth(1));
    cells.map(|path| path.trim_end_matches("NAME/").trim_end_matches('/').to_owned()).collect()
}

/// The files in a directory, without the database's own files beside the journal.
fn kept_in(directory: &Path, shown: &str) -> BTreeSet<String> {
    let names =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names = names.filter(|name| !name.ends_with("-wal") && !name.ends_with("-shm"));
    names.map(|name| format!("{shown}/{name}")).collect()
}

#[test]
fn the_page_has_the_files_that_an_agent_keeps_and_no_others() {
    let host = TestHost::new();
    let config = host.config();
    host.runs_by_others(&definition("web"));
    let life = host.start();
    let standing = life.parts.journal.standing().unwrap();
    life.block_on(async { life.parts.heard.note("other", Some(&standing)) });
    let state = Path::new(STATE);
    let joined = fleet_files::files(state);
    let fleet = joined.host.parent().unwrap();
    let mut kept = kept_in(&config.state_directory, STATE);
    kept.extend(kept_in(&config.runtime_directory, RUNTIME));
    // These need a network, or come with a fleet.
    kept.insert(DEFAULT_SOCKET.into());
    let directories =
        [Path::new(DEFAULT_PATH).parent().unwrap(), fleet, &fleet_files::authority_directory(state)];
    kept.extend(directories.map(|path| path.display().to_string()));
    assert_eq!(named(), kept);
    let row = PAGE.lines().find(|line| line.contains(&format!("`{}/`", fleet.display()))).unwrap();
    for file in [joined.host, joined.authority, joined.list] {
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(row.contains(&format!("`{name}`")), "{name}");
    }
}
