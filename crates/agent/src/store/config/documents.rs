//! Whether the example and docs/reference/config.md say about each key what the code does.

use std::collections::BTreeSet;

use toml::{Table, Value};

use super::*;

/// A configuration with an entry of all that may come more than once.
const BASE: &str = r#"
name = "a"
listen = "10.0.0.1:7420"

[[link]]
name = "e0"

[[peer]]
name = "b"
address = "10.0.0.2:7420"

[[bandwidth.window]]
mbps = 1
from = "08:00"
until = "20:00"
"#;

fn parse(text: &str) -> Result<Config, String> {
    Config::parse(text, Path::new("agent.toml")).map_err(|error| error.to_string())
}

/// The keys of a table, such as `[limits]` or `[[link]]`; of the top level where it is empty.
fn known_keys(table: &str) -> Vec<String> {
    // serde names all that it knows where it meets what it does not.
    let text = format!("name = \"a\"\nlisten = \"10.0.0.1:7420\"\n{table}\nno_such_key = 1");
    let error = parse(&text).unwrap_err();
    let known = error.split_once("expected").unwrap().1.lines().next().unwrap();
    let (known, _) = known.split_once(';').unwrap_or((known, ""));
    known.split('`').skip(1).step_by(2).map(ToOwned::to_owned).collect()
}

const EXAMPLE: &str = include_str!("../../../../../packaging/agent.toml");

/// A line that shows how a key is set, as it reads without its `#`.
fn setting_of(line: &str) -> Option<&str> {
    let setting = line.strip_prefix("# ")?;
    let (key, _) = setting.split_once(" = ")?;
    key.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_').then_some(setting)
}

#[test]
fn each_line_of_the_example_may_be_uncommented_and_shows_the_default() {
    let lines: Vec<&str> = EXAMPLE.lines().collect();
    let as_it_is = format!("{:?}", parse(EXAMPLE).unwrap());
    for (at, setting) in lines.iter().enumerate().filter_map(|(at, line)| Some((at, setting_of(line)?))) {
        let text = [&lines[..at], &[setting], &lines[at + 1..]].concat().join("\n");
        let read = parse(&text).unwrap_or_else(|error| panic!("`{setting}` cannot be uncommented: {error}"));
        let is_example = setting.contains("# example; ");
        assert_eq!(format!("{read:?}") == as_it_is, !is_example, "{setting}");
    }
    let all: Vec<&str> = lines.iter().map(|line| setting_of(line).unwrap_or(line)).collect();
    parse(&all.join("\n")).unwrap();
}

#[test]
fn the_example_has_every_key() {
    let example: Vec<&str> = EXAMPLE.lines().map(|line| setting_of(line).unwrap_or(line)).collect();
    let tables = [
        "[vms]",
        "[disks]",
        "[hooks]",
        "[limits]",
        "[drain]",
        "[bandwidth]",
        "[compression]",
        "[tls]",
        "[qemu]",
        "[libvirt]",
        "[[link]]",
        "[[peer]]",
    ];
    for table in [""].into_iter().chain(tables) {
        let section: Vec<&str> = example
            .iter()
            .skip_while(|line| !table.is_empty() && **line != table)
            .skip(usize::from(!table.is_empty()))
            .take_while(|line| !line.starts_with('['))
            .copied()
            .collect();
        for key in known_keys(table) {
            let is_set = section.iter().any(|line| line.starts_with(&format!("{key} = ")));
            let is_table = tables.contains(&format!("[{key}]").as_str())
                || tables.contains(&format!("[[{key}]]").as_str());
            assert!(is_set || is_table && table.is_empty(), "{table} {key} is missing in the example");
        }
    }
}

const PAGE: &str = include_str!("../../../../../docs/reference/config.md");

/// What the page says of a key.
struct Row<'a> {
    /// The heading that it is below: `[limits]`, `[[link]]`; empty for the top level.
    table: &'a str,
    key: &'a str,
    kind: &'a str,
    default: &'a str,
    range: &'a str,
}

fn rows() -> Vec<Row<'static>> {
    let mut rows = vec![];
    for section in PAGE.split("\n## ").skip(1) {
        let heading = section.lines().next().unwrap();
        let table = if heading.starts_with('[') { heading } else { "" };
        let lines = section.lines().filter(|line| line.starts_with("| "));
        let cells = |line: &'static str| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>();
        let mut lines = lines.map(cells);
        let head = lines.next().unwrap();
        for line in lines {
            let cell = |name| head.iter().position(|cell| *cell == name).map_or("", |index| line[index]);
            let (kind, default, range) = (cell("type"), cell("default"), cell("range"));
            let keys = cell("key").split('`').skip(1).step_by(2);
            rows.extend(keys.map(|key| Row { table, key, kind, default, range }));
        }
    }
    rows
}

/// [`BASE`], with a change in the table of a key.
fn changed(row: &Row<'_>, change: impl FnOnce(&mut Table)) -> Result<Config, String> {
    let mut whole: Table = BASE.parse().unwrap();
    let mut table = &mut whole;
    for name in row.table.trim_matches(['[', ']']).split('.').filter(|name| !name.is_empty()) {
        let inner = table.entry(name).or_insert_with(|| Table::new().into());
        table = match inner {
            Value::Array(entries) => entries[0].as_table_mut().unwrap(),
            inner => inner.as_table_mut().unwrap(),
        };
    }
    change(table);
    parse(&whole.to_string())
}

/// With a key set to what is given as TOML.
fn set(row: &Row<'_>, value: &str) -> Result<Config, String> {
    let value = format!("value = {value}").parse::<Table>().unwrap().remove("value").unwrap();
    changed(row, |table| {
        table.insert(row.key.into(), value);
    })
}

/// A cell that is nothing but a value.
fn value_in(cell: &str) -> Option<&str> {
    let quoted =
        cell.strip_prefix('`').and_then(|rest| rest.strip_suffix('`')).filter(|value| !value.contains('`'));
    quoted
        .or_else(|| cell.parse::<u64>().is_ok().then_some(cell))
        .or_else(|| (cell == "none").then_some("[]"))
}

#[test]
fn the_page_has_every_key_and_no_other() {
    let rows = rows();
    let tables: BTreeSet<&str> = rows.iter().map(|row| row.table).collect();
    for table in &tables {
        let known = known_keys(table);
        let has = |key: &str| rows.iter().filter(|row| row.table == *table && row.key == key).count();
        let is_table = |key: &str| {
            let inner = format!("{}.{key}", table.trim_matches(['[', ']']));
            let inner = inner.trim_start_matches('.');
            tables.contains(format!("[{inner}]").as_str()) || tables.contains(format!("[[{inner}]]").as_str())
        };
        for key in &known {
            assert!(has(key) == 1 || is_table(key), "config.md needs one row of {table} `{key}`");
        }
        for row in rows.iter().filter(|row| row.table == *table) {
            assert!(
                known.iter().any(|key| key == row.key),
                "config.md has {table} `{}`, which nothing reads",
                row.key
            );
        }
    }
}

#[test]
fn the_page_has_the_defaults() {
    let base = format!("{:?}", parse(BASE).unwrap());
    for row in rows() {
        let Row { table, key, default, .. } = row;
        let is_right = if default == "required" {
            changed(&row, |table| drop(table.remove(key))).is_err()
        } else if let Some(value) = value_in(default) {
            set(&row, value).is_ok_and(|config| format!("{config:?}") == base)
        } else {
            // No value, so that the agent chooses.
            base.contains(&format!(" {key}: None"))
        };
        assert!(is_right, "config.md has another default of {table} `{key}` than the code: {default}");
    }
}

#[test]
fn the_page_has_the_ranges() {
    for row in rows() {
        let Row { table, key, kind, range, .. } = row;
        let said = format!("config.md says of {table} `{key}`: {range}");
        let number = |word: &str| word.parse::<i64>().ok();
        let try_out = |number: i64, is_allowed: bool| {
            let value =
                if kind.contains("FIRST-LAST") { format!("\"{number}-65535\"") } else { number.to_string() };
            let read = set(&row, &value);
            assert_eq!(read.is_ok(), is_allowed, "{said}; with {value}: {read:?}");
        };
        let words: Vec<&str> = range.split([' ', ';']).collect();
        let (least, most) = match words[..] {
            ["from", least, ..] => (number(least), None),
            [least, "to", most, ..] => (number(least), number(most)),
            _ => (None, None),
        };
        if let Some(least) = least {
            try_out(least, true);
            try_out(least - 1, false);
        }
        if let Some(most) = most {
            try_out(most, true);
            try_out(most + 1, false);
        }
        for value in range.split('`').skip(1).step_by(2).filter(|value| value.starts_with('"')) {
            assert!(set(&row, value).is_ok(), "{said}");
            assert!(set(&row, &value.replacen('"', "\"no-", 1)).is_err(), "{said}");
        }
    }
}

#[test]
fn the_unit_has_vms_write_where_they_may_by_default() {
    let unit = include_str!("../../../../../packaging/drainpipe.service");
    let writable = unit.lines().find_map(|line| line.strip_prefix("ReadWritePaths=")).unwrap();
    let directories = VmResources::default().directories;
    let expected: Vec<String> =
        directories.iter().map(|directory| format!("-{}", directory.display())).collect();
    assert_eq!(writable.split(' ').collect::<Vec<_>>(), expected);
}
