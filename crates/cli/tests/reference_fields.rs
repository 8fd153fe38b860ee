//! Compares what docs/reference says about fields in JSON and about keys with docs/openapi.json, which a test in the
//! agent compares with the program.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn read(page: &str) -> String {
    fs::read_to_string(docs().join(page)).expect("it can be read")
}

/// All schemas of the API, by name.
fn schemas() -> Map<String, Value> {
    let mut document: Value = serde_json::from_str(&read("openapi.json")).expect("it is JSON");
    match document["components"]["schemas"].take() {
        Value::Object(schemas) => schemas,
        other => panic!("no schemas: {other}"),
    }
}

/// The name of the schema that a field's value has, or each of its elements.
fn named_by(value: &Value) -> Option<&str> {
    let of_either = || value["oneOf"].as_array()?.iter().find_map(named_by);
    let name = value["$ref"].as_str().and_then(|path| path.rsplit('/').next());
    name.or_else(of_either).or_else(|| value.get("items").and_then(named_by))
}

/// The fields of a schema, each with the schema of its value.
fn fields<'a>(schemas: &'a Map<String, Value>, name: &str) -> BTreeMap<&'a str, Option<&'a str>> {
    let schema = &schemas[name];
    let parts = schema["allOf"].as_array().into_iter().flatten();
    let mut fields = BTreeMap::new();
    for part in parts.chain([schema]) {
        if let Some(other) = part["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
            fields.extend(self::fields(schemas, other));
        }
        let own = part["properties"].as_object().into_iter().flatten();
        fields.extend(own.map(|(field, value)| (field.as_str(), named_by(value))));
    }
    fields
}

/// The values that a schema names.
fn values<'a>(schemas: &'a Map<String, Value>, name: &str) -> Vec<&'a str> {
    schemas[name]["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// The words between backquotes.
fn quoted(text: &str) -> BTreeSet<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// The tables of a page in their order: for each row, the first cell, and the rest.
fn tables(page: &str) -> Vec<Vec<(&str, &str)>> {
    let blocks = page.split("\n\n").filter(|block| block.starts_with('|'));
    let row = |line: &'static str| line.trim_matches('|').split_once(" | ").expect("two cells");
    let rows = |block: &str| block.lines().skip(2).map(|line| row(line.to_owned().leak())).collect();
    blocks.map(rows).collect()
}

/// Panics unless the table has every field of the schema once, and no other, and the text beside it has every field and
/// value of what the field holds, unless another page has these.
#[track_caller]
fn assert_holds(table: &[(&str, &str)], schema: &str, elsewhere: &[&str]) {
    let schemas = schemas();
    let expected = fields(&schemas, schema);
    let named: Vec<&str> = table.iter().flat_map(|(first, _)| quoted(first)).collect();
    for name in &named {
        assert!(expected.contains_key(name), "the page has `{name}`, which {schema} has not");
    }
    for (field, held) in expected {
        let times = named.iter().filter(|name| **name == field).count();
        assert_eq!(times, 1, "the page needs `{field}` of {schema} in the first cell of one row");
        let Some(held) = held.filter(|_| !elsewhere.contains(&field)) else { continue };
        let (_, said) = table.iter().find(|(first, _)| quoted(first).contains(field)).expect("it is there");
        let inner = fields(&schemas, held).into_keys().chain(values(&schemas, held));
        let missing: Vec<&str> = inner.filter(|inner| !quoted(said).contains(inner)).collect();
        assert!(missing.is_empty(), "the row of `{field}` does not name {missing:?} of {held}");
    }
}

/// Panics unless the table has every value of the schema in its first column, and no other.
#[track_caller]
fn assert_has_values(table: &[(&str, &str)], schema: &str) {
    let schemas = schemas();
    let expected: BTreeSet<&str> = values(&schemas, schema).into_iter().collect();
    assert_eq!(table.iter().flat_map(|(first, _)| quoted(first)).collect::<BTreeSet<_>>(), expected);
}

/// Panics if a page names a field or value that is nowhere in the API.
#[track_caller]
fn assert_names_nothing_else(tables: &[&Vec<(&str, &str)>]) {
    let schemas = schemas();
    let known: BTreeSet<&str> = schemas
        .keys()
        .flat_map(|name| fields(&schemas, name).into_keys().chain(values(&schemas, name)))
        .collect();
    // A word without `_` may be a command.
    let is_name = |word: &&str| {
        word.contains('_') && word.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_')
    };
    for (_, said) in tables.iter().copied().flatten() {
        let words: Vec<&str> = quoted(said).into_iter().filter(is_name).collect();
        for word in words {
            assert!(known.contains(word), "the page names `{word}`, which nothing in the API is called");
        }
    }
}

#[test]
fn the_page_of_results_has_every_field_and_no_other() {
    let page = read("reference/results.md");
    let tables = tables(&page);
    let [in_list, result, outcomes, progress, drain, course, states] = &tables[..] else {
        panic!("the page has {} tables", tables.len())
    };
    assert_holds(in_list, "MigrationView", &["progress", "requested_option", "result"]);
    assert_holds(result, "MigrationResult", &["requested_option", "option", "outcome", "findings"]);
    assert_has_values(outcomes, "Outcome");
    assert_holds(progress, "Progress", &[]);
    assert_holds(drain, "DrainView", &["status"]);
    assert_holds(course, "DrainStatus", &[]);
    assert_has_values(states, "MoveState");
    assert_names_nothing_else(&[in_list, result, progress, drain, course]);
}

#[test]
fn the_page_of_findings_has_every_field_of_one() {
    let page = read("reference/findings.md");
    assert_holds(&tables(&page)[0], "Finding", &["fix"]);
}

#[test]
fn the_page_of_specifications_has_every_key_and_no_other() {
    let page = read("reference/vm.md");
    let tables = tables(&page);
    let [vm, disk, nic, placement, guest] = &tables[..] else {
        panic!("the page has {} tables", tables.len())
    };
    // These have tables of their own, or no owner writes them.
    let own = ["disk", "nic", "placement", "guest", "manager"];
    let schemas = schemas();
    for (table, schema) in
        [(vm, "VmSpec"), (disk, "Disk"), (nic, "Nic"), (placement, "Placement"), (guest, "GuestServices")]
    {
        let expected: BTreeSet<&str> =
            fields(&schemas, schema).into_keys().filter(|key| !own.contains(key)).collect();
        assert_eq!(table.iter().flat_map(|(first, _)| quoted(first)).collect::<BTreeSet<_>>(), expected);
        let required: BTreeSet<&str> =
            schemas[schema]["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let said = table.iter().filter(|(_, rest)| rest.starts_with("required |"));
        let said: BTreeSet<&str> = said.flat_map(|(first, _)| quoted(first)).collect();
        assert!(schema == "GuestServices" || said == required, "{schema} needs {required:?}");
    }
}
