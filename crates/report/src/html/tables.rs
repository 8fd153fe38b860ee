//! The numbers behind the charts, and the conditions of the measurement.

use drainpipe_engine::format::{
    MIB, NONE, bytes, count, cpu_seconds, date, duration, link_speed, percent, range, rate, ratio,
};
use drainpipe_engine::migration::result::CompressionUse;
use maud::{Markup, html};

use crate::bench::{BenchReport, Conditions, HostConditions, LinkConditions};
use crate::findings::writes;
use crate::summary::{OptionSummary, Spread};

/// A table that scrolls by itself where the page is too narrow for it.
fn table(id: &str, caption: &str, headings: &[&str], rows: &[Vec<Markup>]) -> Markup {
    html! {
        div.scroll role="region" aria-labelledby=(id) tabindex="0" {
            table {
                caption id=(id) { (caption) }
                thead { tr { @for heading in headings { th scope="col" { (heading) } } } }
                tbody {
                    @for row in rows {
                        tr {
                            @for (index, cell) in row.iter().enumerate() {
                                @if index == 0 { th scope="row" { (cell) } } @else { td { (cell) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Median and spread of everything, for each option.
pub(super) fn comparison(summaries: &[OptionSummary]) -> Markup {
    let headings = [
        "option",
        "done",
        "total",
        "vs tcp",
        "setup",
        "transfer",
        "completion",
        "downtime",
        "guest gap",
        "throughput",
        "wire",
        "CPU/GiB",
    ];
    let rows: Vec<Vec<Markup>> = summaries.iter().map(comparison_row).collect();
    html! {
        section aria-labelledby="numbers" {
            h2 #numbers { "The numbers" }
            (table("comparison", "Medians, with the smallest and the largest below", &headings, &rows))
        }
    }
}

fn comparison_row(summary: &OptionSummary) -> Vec<Markup> {
    vec![
        html! { (summary.label()) },
        html! { (summary.completed) " of " (summary.completed + summary.failed) },
        spread(summary.total_ms, duration),
        html! { (summary.speed_against_tcp.map_or(NONE.to_owned(), ratio)) },
        spread(summary.setup_ms, duration),
        spread(summary.transfer_ms, duration),
        spread(summary.completion_ms, duration),
        spread(summary.downtime_ms, duration),
        spread(summary.guest_gap_ms, duration),
        spread(summary.throughput_gbps, rate),
        spread(summary.wire_bytes, bytes),
        spread(summary.cpu_seconds_per_gib, cpu_seconds),
    ]
}

fn spread(spread: Option<Spread>, show: fn(f64) -> String) -> Markup {
    html! {
        @if let Some(spread) = spread {
            (show(spread.median))
            @if spread.max > spread.min {
                span.range { (range(spread.min, spread.max, show)) }
            }
        } @else { (NONE) }
    }
}

/// Every migration.
pub(super) fn migrations(report: &BenchReport) -> Markup {
    let headings = [
        "no.",
        "asked for",
        "used",
        "from → to",
        "outcome",
        "total",
        "throughput",
        "packed",
        "downtime",
        "stood still",
        "guest gap",
        "rounds",
        "share of links",
        "pages checked",
    ];
    let rows: Vec<Vec<Markup>> = (1..).zip(&report.results).map(migration_row).collect();
    html! {
        section aria-labelledby="all" {
            h2 #all { "All migrations" }
            (table("migrations", "In the order in which they ran", &headings, &rows))
        }
    }
}

fn migration_row(
    (number, run): (usize, &drainpipe_engine::migration::result::MigrationResult),
) -> Vec<Markup> {
    let time = |ms: Option<f64>| html! { (ms.map_or(NONE.to_owned(), duration)) };
    let shares: Vec<String> =
        run.traffic.paths.iter().map(|path| format!("{} {}", path.link, percent(path.share))).collect();
    let checked = run.record.verified.map_or(NONE.to_owned(), |check| match check.bad {
        0 => format!("{}, none bad", count(check.pages)),
        bad => format!("{}, {} BAD", count(check.pages), count(bad)),
    });
    vec![
        html! { (number) },
        html! { (run.choice.requested_option) },
        html! { (run.choice.option) },
        html! { (run.source) " → " (run.target) },
        html! { (run.outcome) },
        html! { (duration(run.times.total_ms)) },
        html! { (rate(run.memory.throughput_gbps)) },
        html! { (run.connection_use.compression.map_or(NONE.to_owned(), packed)) },
        time(run.silence.downtime_ms),
        time(run.silence.standstill_ms),
        time(run.silence.guest_gap_ms),
        html! { (run.memory.rounds) },
        html! { (shares.join(", ")) },
        html! { (checked) },
    ]
}

/// What packing brought, and what CPU it took on the source.
fn packed(compression: CompressionUse) -> String {
    let left = compression.compressed_bytes.max(1) as f64 / compression.stream_bytes.max(1) as f64;
    format!("{:.1} : 1, {} of CPU", 1.0 / left, cpu_seconds(compression.cpu_seconds))
}

/// Under which conditions all this was measured.
pub(super) fn conditions(conditions: &Conditions) -> Markup {
    let hosts: Vec<Vec<Markup>> = conditions.hosts.iter().map(host_row).collect();
    let links: Vec<Vec<Markup>> = conditions.links.iter().map(link_row).collect();
    let options: Vec<String> = conditions.options.iter().map(ToString::to_string).collect();
    let guest = &conditions.guest;
    html! {
        section aria-labelledby="conditions" {
            h2 #conditions { "Conditions" }
            dl.facts {
                (fact("Date", &date(&conditions.date)))
                (fact("Drainpipe", &conditions.drainpipe_version))
                (fact("Options", &options.join(", ")))
                (fact("Repeats", &conditions.repeats.to_string()))
                (fact("Guest memory", &bytes(guest.memory_mib as f64 * MIB)))
                (fact("Guest vCPUs", &guest.vcpus.to_string()))
                (fact("Memory holds", guest.content.as_deref().unwrap_or("unknown")))
                (fact("Guest writes", &writes(guest).unwrap_or_else(|| "unknown".to_owned())))
                @if let Some(page_cache_mib) = conditions.page_cache_mib {
                    (fact("Copies of pages", &bytes(f64::from(page_cache_mib) * MIB)))
                }
            }
            (table(
                "hosts",
                "Hosts",
                &["host", "kernel", "processors", "memory", "QEMU", "accelerator"],
                &hosts,
            ))
            (table("links", "Links", &["link", "peer's link", "speed", "MTU"], &links))
            @if !conditions.notes.is_empty() {
                h3 { "Notes" }
                ul.notes { @for note in &conditions.notes { li { (note) } } }
            }
        }
    }
}

fn fact(name: &str, value: &str) -> Markup {
    html! { div { dt { (name) } dd { (value) } } }
}

fn host_row(host: &HostConditions) -> Vec<Markup> {
    vec![
        html! { (host.name) },
        html! { (host.kernel) },
        html! { (host.cores) " × " (host.cpu_model) },
        html! { (bytes(host.memory_bytes as f64)) },
        html! { (host.hypervisor_version) },
        html! { (host.accelerator) },
    ]
}

fn link_row(link: &LinkConditions) -> Vec<Markup> {
    vec![
        html! { (link.name) },
        html! { (link.peer_link) },
        html! { (link.speed_mbps.map_or("unknown".to_owned(), link_speed)) },
        html! { (link.mtu) },
    ]
}
