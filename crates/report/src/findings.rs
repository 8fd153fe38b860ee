//! What the numbers say, in words.

use drainpipe_engine::format::{MIB, bytes, count, duration, link_speed, percent, plural, rate, ratio};
use drainpipe_engine::migration::result::{MigrationResult, Outcome, SourceVm};

use crate::bench::{BenchReport, Conditions, GuestConditions};
use crate::summary::OptionSummary;

/// Least share of the bytes that makes a link one that was used.
const SHARE_USED_MIN: f64 = 0.05;
/// Least ratio of total times that is called a difference.
const SPEED_DIFFERENT_MIN: f64 = 1.05;
/// Least part of the bytes saved that is worth a word.
const SAVED_MIN: f64 = 0.2;
/// A page of a guest's memory.
const PAGE_BYTES: u64 = 4096;

/// The main finding, as a sentence without a full stop.
pub(crate) fn headline(report: &BenchReport, summaries: &[OptionSummary]) -> String {
    let Some(best) = fastest(summaries) else {
        return match report.results.len() {
            0 => "No migration was measured".to_owned(),
            1 => "The migration did not complete".to_owned(),
            runs => format!("None of the {runs} migrations completed"),
        };
    };
    let took = best.total_ms.map_or(0.0, |total| total.median);
    let compared = summaries.iter().filter(|summary| summary.completed > 0).count() > 1;
    match best.speed_against_tcp {
        Some(speed) if speed >= SPEED_DIFFERENT_MIN => format!(
            "{} moved the VM {} as fast as tcp{}",
            best.option,
            ratio(speed),
            how(best, report, summaries)
        ),
        Some(_) if compared => {
            format!("No option was faster than tcp, which moved the VM in {}", duration(took))
        }
        _ if compared => {
            format!("{} was the fastest: it moved the VM in {}", best.option, duration(took))
        }
        _ => format!("{} moved the VM in {}", best.option, duration(took)),
    }
}

/// The option with the shortest median; one that was asked for as such before a fallback to it.
pub(crate) fn fastest(summaries: &[OptionSummary]) -> Option<&OptionSummary> {
    let total = |summary: &OptionSummary| summary.total_ms.map_or(f64::INFINITY, |total| total.median);
    let completed = || summaries.iter().filter(|summary| summary.completed > 0);
    let as_asked = |summary: &&OptionSummary| summary.requested.to_string() == summary.option.to_string();
    let by_total = |left: &&OptionSummary, right: &&OptionSummary| total(left).total_cmp(&total(right));
    completed().filter(as_asked).min_by(by_total).or_else(|| completed().min_by(by_total))
}

fn how(best: &OptionSummary, report: &BenchReport, summaries: &[OptionSummary]) -> String {
    let links = median_run(best, report).map_or(0, links_used);
    match links {
        2 => ", over both links at once".to_owned(),
        3.. => format!(", over {links} links at once"),
        _ => saved(best, summaries).unwrap_or_default(),
    }
}

fn saved(best: &OptionSummary, summaries: &[OptionSummary]) -> Option<String> {
    let tcp = summaries.iter().find(|summary| summary.label() == "tcp")?;
    let part = best.wire_bytes?.median / tcp.wire_bytes?.median;
    (part < 1.0 - SAVED_MIN).then(|| format!(", sending {} of the bytes", percent(part)))
}

/// How many links carried a part of the VM that counts.
pub(crate) fn links_used(run: &MigrationResult) -> usize {
    run.traffic.paths.iter().filter(|path| path.share >= SHARE_USED_MIN).count()
}

/// The run that stands for an option.
pub(crate) fn median_run<'a>(
    summary: &OptionSummary,
    report: &'a BenchReport,
) -> Option<&'a MigrationResult> {
    report.results.get(summary.median_run?)
}

/// A sentence about which VM moved, between which hosts and how often.
pub(crate) fn subject(report: &BenchReport) -> String {
    let Some(first) = report.results.first() else {
        return "There are no results.".to_owned();
    };
    let runs = plural(report.results.len(), "migration", "migrations");
    let links = links(&report.conditions).map(|links| format!(", over {links}")).unwrap_or_default();
    let guest = &report.conditions.guest;
    let writes = writes(guest).filter(|_| guest.dirty_mib_per_s > Some(0.0));
    let writes = writes.map(|writes| format!("; its guest rewrites {writes}")).unwrap_or_default();
    format!(
        "{runs} of VM {} with {} of memory, between {} and {}{links}{writes}.",
        first.vm,
        bytes(first.memory.memory_bytes as f64),
        first.source,
        first.target
    )
}

/// "nothing, idle", "150 MiB/s in 33 % of what it filled, 64 B of each page", "as fast as it can"; none if it is not
/// known.
pub(crate) fn writes(guest: &GuestConditions) -> Option<String> {
    let rate = guest.dirty_mib_per_s?;
    if rate <= 0.0 {
        return Some("nothing, idle".to_owned());
    }
    let part = guest.dirty_percent.filter(|percent| *percent < 100);
    let part = part.map(|percent| format!(" in {percent} % of what it filled")).unwrap_or_default();
    let changed = guest.rewrite_bytes.filter(|bytes| *bytes < PAGE_BYTES);
    let changed = changed.map(|changed| format!(", {} of each page", bytes(changed as f64)));
    let rate = if guest.needs_all_cpu() {
        "as fast as it can".to_owned()
    } else {
        format!("{}/s", bytes(rate * MIB))
    };
    Some(format!("{rate}{part}{}", changed.unwrap_or_default()))
}

/// "2 links of 1 Gb/s", "2 links, 6 Gb/s together".
fn links(conditions: &Conditions) -> Option<String> {
    let links = &conditions.links;
    let number = plural(links.len(), "link", "links");
    let speed = links.first()?.speed_mbps;
    match (speed, capacity_gbps(conditions)) {
        (Some(speed), Some(_)) if links.iter().all(|link| link.speed_mbps == Some(speed)) => {
            Some(format!("{number} of {}", link_speed(speed)))
        }
        (_, Some(capacity)) => Some(format!("{number}, {} together", rate(capacity))),
        _ => Some(number),
    }
}

/// What all links carry together, if the speed of each is known.
pub(crate) fn capacity_gbps(conditions: &Conditions) -> Option<f64> {
    let speeds: Option<Vec<u64>> = conditions.links.iter().map(|link| link.speed_mbps).collect();
    let total = speeds?.into_iter().fold(0, u64::saturating_add);
    (total > 0).then_some(total as f64 / 1e3)
}

/// Whether the guest's memory was the same after its moves.
pub(crate) struct Verification {
    /// Whether every completed migration was checked, and nothing was wrong.
    pub(crate) good: bool,
    /// Pages that were wrong.
    pub(crate) bad_pages: u64,
    /// The sentence.
    pub(crate) sentence: String,
}

/// What the guest's checks of its memory found.
pub(crate) fn verification(summaries: &[OptionSummary]) -> Verification {
    let completed: usize = summaries.iter().map(|summary| summary.completed).sum();
    let runs: usize = summaries.iter().map(|summary| summary.verified_runs).sum();
    let sum = |part: fn(&OptionSummary) -> u64| summaries.iter().map(part).fold(0, u64::saturating_add);
    let (pages, bad) = (sum(|summary| summary.verified.pages), sum(|summary| summary.verified.bad));
    let sentence = if bad > 0 {
        format!(
            "{} of {} pages were not what the guest had written, in {}.",
            count(bad),
            count(pages),
            plural(runs, "checked migration", "checked migrations")
        )
    } else if runs == 0 {
        "The guest did not check its memory after any migration.".to_owned()
    } else {
        let of = if runs == completed { format!("all {runs}") } else { format!("{runs} of {completed}") };
        format!(
            "After {of} completed migrations the guest checked its memory: {} pages, none bad.",
            count(pages)
        )
    };
    Verification { good: bad == 0 && runs > 0 && runs == completed, bad_pages: bad, sentence }
}

/// A migration that did not complete.
pub(crate) struct Failure<'a> {
    /// Which one it was, from 1.
    pub(crate) number: usize,
    /// The migration.
    pub(crate) run: &'a MigrationResult,
    /// What became of the VM.
    pub(crate) outcome: &'static str,
    /// Why.
    pub(crate) reason: &'a str,
}

/// All migrations that did not complete.
pub(crate) fn failures(report: &BenchReport) -> Vec<Failure<'_>> {
    report
        .results
        .iter()
        .enumerate()
        .filter(|(_, run)| run.outcome != Outcome::Completed)
        .map(|(index, run)| Failure {
            number: index + 1,
            run,
            outcome: outcome(run),
            reason: run.failure.error.as_deref().unwrap_or("no reason is recorded"),
        })
        .collect()
}

/// What became of the VM, in words.
fn outcome(run: &MigrationResult) -> &'static str {
    match run.outcome {
        Outcome::Completed => "completed",
        Outcome::Failed => match run.failure.source_vm {
            Some(SourceVm::Runs) => "failed; the VM runs on at the source",
            Some(SourceVm::Paused) => "failed; the VM is paused at the source",
            Some(SourceVm::Ended) => "failed; the VM is stopped at the source",
            Some(SourceVm::Unknown) | None => "failed; it is not known whether the VM runs at the source",
        },
        Outcome::Cancelled => "cancelled; the VM runs on at the source",
        Outcome::Lost if run.has_left() => "lost; the VM has ended on the target",
        Outcome::Lost => "lost; the VM has ended on the source",
        Outcome::InDoubt => "in doubt; the VM is paused until the target answers",
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::migration::result::Verified;
    use drainpipe_engine::option::RequestedOption;

    use super::*;
    use crate::sample::{completed, conditions, failed, fallen_back, report};
    use crate::summary::summarise;

    fn headline_of(results: Vec<MigrationResult>) -> String {
        let summaries = summarise(&results);
        headline(&BenchReport { conditions: conditions(), results }, &summaries)
    }

    #[test]
    fn the_fastest_option_is_compared_with_tcp() {
        let headline = headline_of(report().results);
        assert_eq!(headline, "multichannel moved the VM 1.99 × as fast as tcp, over both links at once");
    }

    #[test]
    fn a_guest_that_rewrites_its_memory_is_no_idle_one() {
        let mut report = report();
        assert!(!subject(&report).contains("rewrites"));
        let guest = &mut report.conditions.guest;
        (guest.dirty_mib_per_s, guest.dirty_percent, guest.rewrite_bytes) = (Some(150.0), Some(33), Some(64));
        let written = "; its guest rewrites 150 MiB/s in 33 % of what it filled, 64 B of each page.";
        assert!(subject(&report).ends_with(written), "{}", subject(&report));
        report.conditions.guest =
            GuestConditions { dirty_mib_per_s: Some(1_048_576.0), ..GuestConditions::default() };
        assert!(subject(&report).ends_with("; its guest rewrites as fast as it can."));
    }

    #[test]
    fn fewer_bytes_over_one_link_are_the_reason() {
        let mut compressed = completed(RequestedOption::Compression, 5_000.0);
        compressed.traffic.paths.truncate(1);
        compressed.memory.wire_bytes /= 4;
        let headline = headline_of(vec![completed(RequestedOption::Tcp, 10_000.0), compressed]);
        assert_eq!(headline, "compression moved the VM 2.00 × as fast as tcp, sending 25 % of the bytes");
    }

    #[test]
    fn other_cases_have_their_words() {
        let (tcp, multichannel) = (RequestedOption::Tcp, RequestedOption::Multichannel);
        for (results, words) in [
            (vec![], "No migration was measured"),
            (vec![failed(tcp)], "The migration did not complete"),
            (vec![failed(tcp), failed(tcp)], "None of the 2 migrations completed"),
            (vec![completed(tcp, 1e4)], "tcp moved the VM in 10.0 s"),
            (vec![fallen_back(1e4)], "multichannel moved the VM in 10.0 s"),
            (
                vec![completed(tcp, 1e4), completed(multichannel, 1.2e4)],
                "No option was faster than tcp, which moved the VM in 10.0 s",
            ),
            (
                vec![completed(RequestedOption::Compression, 2e4), completed(multichannel, 1e4)],
                "multichannel was the fastest: it moved the VM in 10.0 s",
            ),
        ] {
            assert_eq!(headline_of(results), words);
        }
    }

    #[test]
    fn verification_is_good_only_if_everything_was_checked() {
        let good = completed(RequestedOption::Tcp, 1.0);
        let mut bad = good.clone();
        bad.record.verified = Some(Verified { pages: 10, bad: 1 });
        let mut unchecked = good.clone();
        unchecked.record.verified = None;
        for (results, expected, part) in [
            (vec![good.clone(), good.clone()], true, "none bad"),
            (vec![good.clone(), unchecked.clone()], false, "1 of 2"),
            (vec![unchecked], false, "did not check"),
            (vec![good, bad], false, "not what the guest had written"),
            (vec![], false, "did not check"),
        ] {
            let verification = verification(&summarise(&results));
            assert_eq!(verification.good, expected, "{}", verification.sentence);
            assert!(verification.sentence.contains(part), "{}", verification.sentence);
        }
    }

    #[test]
    fn links_are_counted_and_added_up() {
        let mut conditions = conditions();
        assert_eq!(links(&conditions).as_deref(), Some("2 links of 1 Gb/s"));
        conditions.links[1].speed_mbps = Some(5_000);
        assert_eq!(links(&conditions).as_deref(), Some("2 links, 6.00 Gb/s together"));
        conditions.links[0].speed_mbps = None;
        assert_eq!(links(&conditions).as_deref(), Some("2 links"));
        assert_eq!(capacity_gbps(&conditions), None);
        conditions.links.clear();
        assert_eq!(links(&conditions), None);
    }
}
