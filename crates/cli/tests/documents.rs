//! What documents promise about themselves: links that lead somewhere, pages that people finish, and findings that
//! exist. `src/reference.rs` compares generated parts with the program; `tests/reference_fields.rs`, fields in JSON and
//! keys of a specification; `crates/agent/src/store/config/documents.rs`, the keys of agent.toml;
//! `crates/agent/src/app/tests.rs` and `crates/net/src/change.rs`, what an agent keeps and changes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use drainpipe_engine::finding::code::FindingCode;

/// The most words of a page that is read for a task or has measurements, of `architecture.md`, and of a decision. Pages
/// to look things up (`reference/`, what programs left in `bench/results/`, generated lists) may be longer.
const PAGE_WORDS_MAX: usize = 900;
const ARCHITECTURE_WORDS_MAX: usize = 1_800;
const DECISION_WORDS_MAX: usize = 200;

/// Marks the beginning of what a test generates.
const BEGIN: &str = "<!-- generated";
const END: &str = "<!-- end of what is generated -->";
/// The variable that has it generated again.
const UPDATE: &str = "DRAINPIPE_UPDATE";
const HOW: &str = "DRAINPIPE_UPDATE=1 cargo test -p drainpipe-cli --test documents decisions";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("it is in the repository")
}

fn files_below(directory: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = vec![];
    for entry in fs::read_dir(directory).expect("it is there").map(|entry| entry.expect("it can be read")) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(files_below(&path, ending));
        } else if path.to_str().is_some_and(|path| path.ends_with(ending)) {
            found.push(path);
        }
    }
    found
}

fn pages() -> Vec<PathBuf> {
    let root = root();
    let mut pages = files_below(&root.join("docs"), ".md");
    pages.extend(files_below(&root.join("bench"), ".md"));
    pages.extend(["README.md", "CHANGELOG.md"].map(|name| root.join(name)));
    pages
}

/// A page without the text between fences.
fn prose(page: &Path) -> String {
    let text = fs::read_to_string(page).expect("it can be read");
    text.split("```").step_by(2).collect()
}

/// Counts like `wc -w`, with tables and the text between fences. Generated parts do not count: people look them up.
fn words(page: &Path) -> usize {
    let text = fs::read_to_string(page).expect("it can be read");
    let written = text.split(BEGIN).map(|part| part.split_once(END).map_or(part, |(_, written)| written));
    written.map(|part| part.split_whitespace().count()).sum()
}

/// The anchors that GitHub makes of headings.
fn anchors(page: &Path) -> BTreeSet<String> {
    let kept = |letter: &char| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_');
    let anchor =
        |heading: &str| heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-");
    let text = prose(page);
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor(line.trim_start_matches('#').trim())).collect()
}

fn links(page: &Path) -> Vec<String> {
    let text = prose(page);
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets.map(|(target, _)| target.to_owned()).filter(|target| !target.contains("://")).collect()
}

#[test]
fn every_link_leads_somewhere() {
    for page in pages() {
        for link in links(&page) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let leads_to = if file.is_empty() {
                page.clone()
            } else {
                page.parent().expect("a file is in a directory").join(file)
            };
            assert!(leads_to.exists(), "{}: {link} is not there", page.display());
            let is_there = anchor.is_empty() || anchors(&leads_to).contains(anchor);
            assert!(is_there, "{}: {link} has no such heading", page.display());
        }
    }
}

/// The files and folders of crates that a page names, with or without `crates/` before them.
fn named_sources(page: &Path) -> Vec<String> {
    let crates = root().join("crates");
    let is_in_a_crate = |name: &str| {
        name.split_once('/').is_some_and(|(first, _)| !first.is_empty() && crates.join(first).exists())
    };
    let text = prose(page);
    let named = text.split('`').skip(1).step_by(2).filter(|name| !name.contains(char::is_whitespace));
    let is_source = |name: &str| Path::new(name).extension().is_some_and(|ending| ending == "rs");
    let sources = named.filter(|name| is_source(name) || name.ends_with('/') && is_in_a_crate(name));
    sources.map(|name| name.trim_start_matches("crates/").to_owned()).collect()
}

#[test]
fn every_named_source_is_there() {
    let crates = root().join("crates");
    for page in pages() {
        for name in named_sources(&page) {
            let is_there = crates.join(&name).exists();
            assert!(is_there, "{}: crates/{name} is not there: was it moved?", page.display());
        }
    }
}

#[test]
fn pages_are_short() {
    for page in pages() {
        let within = page.strip_prefix(root()).expect("it is below").to_str().expect("names are plain");
        let most = match within {
            "CHANGELOG.md" => continue,
            _ if within.starts_with("docs/reference/") || within.starts_with("bench/results/") => continue,
            "docs/architecture.md" => ARCHITECTURE_WORDS_MAX,
            _ if within.starts_with("docs/decisions/") => DECISION_WORDS_MAX,
            _ => PAGE_WORDS_MAX,
        };
        let words = words(&page);
        assert!(words <= most, "{within} has {words} words, of {most}");
    }
}

/// A line of the list: the number, and the title as a link.
fn listed(decision: &Path) -> String {
    let name = decision.file_name().and_then(|name| name.to_str()).expect("names are plain");
    let text = fs::read_to_string(decision).expect("it can be read");
    let title = text.lines().next().and_then(|line| line.strip_prefix("# ")?.split_once(". "));
    let (number, title) = title.unwrap_or_else(|| panic!("{name} has no title as `# 1. What was decided`"));
    assert!(name.starts_with(&format!("{number:0>4}-")), "{name} calls itself {number}");
    format!("{number}. [{title}]({name})\n")
}

#[test]
fn the_list_of_decisions_is_made_of_their_titles() {
    let page = root().join("docs/decisions/README.md");
    let mut decisions = files_below(&root().join("docs/decisions"), ".md");
    decisions.retain(|decision| *decision != page);
    decisions.sort();
    let list: String = decisions.iter().map(|decision| listed(decision)).collect();
    let checked_in = fs::read_to_string(&page).expect("it can be read");
    let (before, rest) = checked_in.split_once(BEGIN).expect("it has marks of what is generated");
    let (_, after) = rest.split_once(END).expect("it has marks of what is generated");
    let anew = format!("{before}{BEGIN}: {HOW} -->\n\n{list}\n{END}{after}");
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&page, anew).expect("it can be written");
    } else {
        assert!(checked_in == anew, "docs/decisions/README.md is out of date: run `{HOW}`");
    }
}

/// The code of each finding in a page, and its severity.
fn documented_findings(page: &str) -> Vec<(&str, &str)> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    let rows = rows.filter_map(|(codes, rest)| Some((codes, rest.split_once(" |")?.0)));
    let marks: BTreeSet<&str> = FindingCode::ALL.iter().map(|code| code.gravity().mark()).collect();
    let rows = rows.filter(|(_, mark)| marks.contains(mark));
    rows.flat_map(|(codes, mark)| codes.split('`').skip(1).step_by(2).map(move |code| (code, mark))).collect()
}

#[test]
fn findings_and_their_documents_are_the_same() {
    let page = prose(&root().join("docs/reference/findings.md"));
    let documented = documented_findings(&page);
    for code in FindingCode::ALL {
        let row = (code.name(), code.gravity().mark());
        let times = documented.iter().filter(|documented| **documented == row).count();
        assert_eq!(times, 1, "docs/reference/findings.md needs one row of `{}` with {}", row.0, row.1);
    }
    for (code, mark) in documented {
        let is_there = FindingCode::ALL.iter().any(|one| (one.name(), one.gravity().mark()) == (code, mark));
        assert!(is_there, "docs/reference/findings.md has `{code}` with {mark}, which nothing finds");
    }
}

#[test]
fn each_finding_is_found_by_something() {
    let sources = files_below(&root().join("crates/engine/src"), ".rs");
    let sources: String =
        sources.iter().map(|source| fs::read_to_string(source).expect("it can be read")).collect();
    let ends = |rest: &str| rest.find(|letter: char| !letter.is_alphanumeric()).unwrap_or(rest.len());
    let found: BTreeSet<&str> =
        sources.split("FindingCode::").skip(1).map(|rest| &rest[..ends(rest)]).collect();
    for code in FindingCode::ALL {
        assert!(found.contains(format!("{code:?}").as_str()), "nothing finds `{}`", code.name());
    }
}
