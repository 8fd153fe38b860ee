//! The results as one HTML page that needs nothing else: no network, no script, no other file.

mod bars;
mod charts;
mod scale;
mod tables;
mod timeline;

use drainpipe_engine::format::{NONE, count, date, duration, percent, rate};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::bench::BenchReport;
use crate::findings::{Verification, capacity_gbps, failures, fastest, headline, subject, verification};
use crate::summary::{OptionSummary, Spread, summarise};

const STYLE: &str = include_str!("html/style.css");

/// The whole page.
pub fn page(report: &BenchReport) -> String {
    let summaries = summarise(&report.results);
    let headline = headline(report, &summaries);
    let verification = verification(&summaries);
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (headline) " · Drainpipe" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    (header(report, &headline))
                    @if verification.bad_pages > 0 { (verification_notice(&verification)) }
                    (failure_notice(report))
                    @if !report.results.is_empty() {
                        (tiles(report, &summaries, &verification))
                        (charts::sections(report, &summaries))
                        (tables::comparison(&summaries))
                        @if verification.bad_pages == 0 { (verification_notice(&verification)) }
                        (fallbacks(&summaries))
                        (tables::migrations(report))
                    }
                    (tables::conditions(&report.conditions))
                }
            }
        }
    }
    .into_string()
}

fn header(report: &BenchReport, headline: &str) -> Markup {
    html! {
        header {
            p.eyebrow { "Drainpipe " (report.conditions.drainpipe_version) " · live migration, measured · " time { (date(&report.conditions.date)) } }
            h1 { (headline) "." }
            p.lede { (subject(report)) " Figures are medians; whiskers reach from the smallest to the largest." }
        }
    }
}

fn failure_notice(report: &BenchReport) -> Markup {
    let failures = failures(report);
    html! {
        @if !failures.is_empty() {
            section.notice.bad aria-labelledby="failures" {
                h2 #failures { (failures.len()) " of " (report.results.len()) " migrations did not complete" }
                ul {
                    @for failure in &failures {
                        li {
                            strong { "Migration " (failure.number) ", " (failure.run.choice.requested_option) }
                            ", " (failure.run.source) " → " (failure.run.target) ": " (failure.outcome) ". "
                            (failure.reason)
                        }
                    }
                }
            }
        }
    }
}

fn tiles(report: &BenchReport, summaries: &[OptionSummary], verification: &Verification) -> Markup {
    let best = fastest(summaries);
    let total = best.and_then(|best| best.total_ms);
    let throughput = best.and_then(|best| best.throughput_gbps);
    let of_capacity = throughput.zip(capacity_gbps(&report.conditions)).map(|(throughput, capacity)| {
        format!("{} of all links together", percent(throughput.median / capacity))
    });
    let silence = best
        .and_then(|best| best.guest_gap_ms.map(|gap| (gap, "longest silence a client saw")))
        .or(best.and_then(|best| best.downtime_ms.map(|pause| (pause, "pause as the hosts saw it"))));
    let pages: u64 = summaries.iter().map(|summary| summary.verified.pages).fold(0, u64::saturating_add);
    let found = match verification.bad_pages {
        0 if verification.good => "none bad".to_owned(),
        0 => "not after every migration".to_owned(),
        bad => format!("{} bad", count(bad)),
    };
    let name = best.map_or(NONE.to_owned(), |best| best.option.to_string());
    let median = |spread: Option<Spread>, show: fn(f64) -> String| {
        spread.map_or(NONE.to_owned(), |spread| show(spread.median))
    };
    html! {
        dl.tiles {
            (tile("Fastest", &median(total, duration), &name))
            (tile("Throughput", &median(throughput, rate), of_capacity.as_ref().unwrap_or(&name)))
            (tile(
                "Guest silent for",
                &median(silence.map(|(spread, _)| spread), duration),
                silence.map_or("not measured", |(_, what)| what),
            ))
            (tile("Pages checked", &count(pages), &found))
        }
    }
}

fn tile(name: &str, value: &str, remark: &str) -> Markup {
    html! {
        div {
            dt { (name) }
            dd.figure { (value) }
            dd.remark { (remark) }
        }
    }
}

fn verification_notice(verification: &Verification) -> Markup {
    let (class, mark) = if verification.good { ("notice good", "✓") } else { ("notice bad", "✗") };
    html! {
        section class=(class) aria-labelledby="memory" {
            h2 #memory { span aria-hidden="true" { (mark) " " } "Memory after the move" }
            p { (verification.sentence) }
        }
    }
}

fn fallbacks(summaries: &[OptionSummary]) -> Markup {
    let explained: Vec<_> = summaries.iter().filter(|summary| !summary.fallback_reasons.is_empty()).collect();
    html! {
        @if !explained.is_empty() {
            section aria-labelledby="fallbacks" {
                h2 #fallbacks { "Why another option was used" }
                dl.reasons {
                    @for summary in explained {
                        dt { (summary.label()) }
                        @for reason in &summary.fallback_reasons { dd { (reason) } }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
