use drainpipe_engine::migration::result::Verified;
use drainpipe_engine::option::RequestedOption;

use super::*;
use crate::bench::Conditions;
use crate::sample::{completed, conditions, failed, report};

/// Elements without an end.
const VOID: [&str; 2] = ["meta", "!DOCTYPE"];

/// Checks that every element that is opened is closed, in order; the text of all of them.
fn well_formed(page: &str) -> String {
    let mut open: Vec<String> = Vec::new();
    let mut text = String::new();
    let mut rest = page;
    while let Some(start) = rest.find('<') {
        text.push_str(&rest[..start]);
        let end = start + rest[start..].find('>').expect("the tag ends");
        let tag = &rest[start + 1..end];
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        let name = tag.split_whitespace().next().expect("a name").trim_start_matches('/');
        if tag.starts_with('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "</{name}> after {text}");
        } else if !VOID.contains(&name) {
            open.push(name.to_owned());
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty(), "left open: {open:?}");
    text
}

fn all_pages() -> Vec<String> {
    let with = |results| page(&BenchReport { conditions: conditions(), results });
    vec![
        page(&report()),
        with(vec![]),
        with(vec![failed(RequestedOption::Tcp)]),
        with(vec![completed(RequestedOption::Auto, 1_000.0)]),
        page(&BenchReport { conditions: Conditions::default(), results: report().results }),
    ]
}

#[test]
fn the_page_is_well_formed() {
    for page in all_pages() {
        well_formed(&page);
    }
}

#[test]
fn identifiers_are_unique_and_references_lead_somewhere() {
    for page in all_pages() {
        let values = |attribute: &str| -> Vec<String> {
            page.split(&format!(" {attribute}=\""))
                .skip(1)
                .flat_map(|rest| rest[..rest.find('"').unwrap()].split(' ').map(str::to_owned))
                .collect()
        };
        let mut identifiers = values("id");
        for reference in values("aria-labelledby") {
            assert!(identifiers.contains(&reference), "{reference}");
        }
        let number = identifiers.len();
        identifiers.sort();
        identifiers.dedup();
        assert_eq!(identifiers.len(), number);
    }
}

#[test]
fn nothing_is_fetched() {
    for page in all_pages() {
        for reference in ["http:", "https:", "//", "url(", "@import", "src=", "href=", "<script", "<link"] {
            assert!(!page.contains(reference), "{reference}");
        }
    }
}

#[test]
fn every_option_and_every_finding_is_there() {
    let text = well_formed(&page(&report()));
    for part in [
        "multichannel moved the VM 1.99 × as fast as tcp, over both links at once",
        "compression",
        "direct → multichannel",
        "host b has no RDMA device",
        "1 of 8 migrations did not complete",
        "port 4444 on b is taken",
        "none bad",
        "75 % random, 25 % zero",
        "links shaped with tbf",
        "both links, 2 Gb/s",
        "What compression sent over time",
        "zstd 67 %",
    ] {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn pages_that_changed_are_said_first() {
    let mut report = report();
    report.results[0].record.verified = Some(Verified { pages: 100, bad: 7 });
    let text = well_formed(&page(&report));
    let found = text.find("7 of").expect("said");
    assert!(found < text.find("did not complete").expect("said"), "{text}");
    assert!(text.contains("7 bad"));
}

#[test]
fn images_say_what_they_show() {
    let page = page(&report());
    let images = page.matches("role=\"img\"").count();
    assert!(images >= 5 + 4, "{images} charts");
    assert_eq!(page.matches("<desc").count(), images);
}

#[test]
fn names_of_others_are_only_text() {
    let evil = "<script>alert(1)</script>\"'&";
    let mut report = report();
    for run in &mut report.results {
        for text in [&mut run.vm, &mut run.source, &mut run.target, &mut run.id] {
            evil.clone_into(text);
        }
        run.failure.error = Some(evil.to_owned());
        run.choice.fallback_reason = Some(evil.to_owned());
        for path in &mut run.traffic.paths {
            evil.clone_into(&mut path.link);
        }
    }
    let conditions = &mut report.conditions;
    for text in [
        &mut conditions.drainpipe_version,
        &mut conditions.date,
        &mut conditions.hosts[0].name,
        &mut conditions.links[0].name,
        &mut conditions.notes[0],
    ] {
        evil.clone_into(text);
    }
    evil.clone_into(&mut conditions.hosts[1].cpu_model);
    conditions.guest.content = Some(evil.to_owned());
    let page = page(&report);
    well_formed(&page);
    assert!(!page.contains("<script"));
    assert!(page.contains("&lt;script&gt;"));
}

#[test]
fn odd_numbers_do_not_break_the_charts() {
    let mut report = report();
    for run in &mut report.results {
        run.times.total_ms = f64::NAN;
        run.times.setup_ms = f64::INFINITY;
        run.memory.throughput_gbps = f64::NAN;
        run.memory.memory_bytes = 0;
        run.host_use.cpu_seconds.source_vmm = -1.0;
        for sample in &mut run.record.samples {
            sample.ms = -sample.ms;
        }
    }
    let page = page(&report);
    well_formed(&page);
    for value in ["=\"NaN", "=\"inf", "=\"-inf", "MNaN", "LNaN", "width=\"-"] {
        assert!(!page.contains(value), "{value}");
    }
}
