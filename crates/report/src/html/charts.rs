//! The charts of the page, each with what it shows in a sentence.

use drainpipe_engine::format::{NONE, cpu_seconds, duration, link_speed, percent, rate, ratio};
use drainpipe_engine::migration::result::{CpuSeconds, MigrationResult, Times};
use maud::{Markup, html};

use super::bars::{Bar, BarChart, Marker, Row, Segment, Unit};
use super::scale::Scale;
use super::timeline::{Layer, Timeline, codecs, intervals, layer_class, links};
use crate::bench::{BenchReport, Conditions};
use crate::findings::{capacity_gbps, median_run};
use crate::summary::{OptionSummary, Spread, cpu_total, gib};

/// Room to the right of the longest bar.
const MARGIN: f64 = 1.03;

/// All charts.
pub(super) fn sections(report: &BenchReport, summaries: &[OptionSummary]) -> Markup {
    html! {
        section aria-labelledby="speed" {
            h2 #speed { "Speed" }
            div.pair {
                (figure("Total time", "From the request to the end of clean-up; shorter is better.", &[], &total_time(summaries)))
                (figure("Throughput", "Bytes on the wire over the time of the transfer.", &[], &throughput(report, summaries)))
            }
        }
        (over_time(report, summaries))
        section aria-labelledby="cost" {
            h2 #cost { "What it cost" }
            div.trio {
                (figure(
                    "Guest silence",
                    "The VM's pause as the hosts saw it, and as a client did.",
                    &[("downtime", "downtime, hosts"), ("guest-gap", "longest gap, client")],
                    &guest_silence(summaries),
                ))
                (figure(
                    "CPU per GiB of memory",
                    "User and system time of the median run, the guest's own included.",
                    &[
                        ("source-vmm", "source QEMU"),
                        ("source-agent", "source agent"),
                        ("target-vmm", "target QEMU"),
                        ("target-agent", "target agent"),
                    ],
                    &cpu(report, summaries),
                ))
                (figure(
                    "Where the time went",
                    "Share of the ten steps in the total time of the median run.",
                    &[
                        ("setup", "setup, steps 1–5"),
                        ("transfer", "transfer, 6–8"),
                        ("completion", "completion, 9–10"),
                    ],
                    &steps(report, summaries),
                ))
            }
        }
    }
}

fn figure(title: &str, remark: &str, legend: &[(&str, &str)], chart: &Markup) -> Markup {
    html! {
        figure {
            figcaption {
                h3 { (title) }
                p { (remark) }
                @if !legend.is_empty() {
                    ul.legend {
                        @for (class, name) in legend {
                            li { (swatch(class)) (name) }
                        }
                    }
                }
            }
            (chart)
        }
    }
}

fn swatch(class: &str) -> Markup {
    html! {
        svg.swatch width="12" height="12" aria-hidden="true" {
            rect class=(class) width="12" height="12" rx="2" {}
        }
    }
}

/// The description of a chart, for those who do not see it: "tcp 13.8 s; multichannel 6.95 s".
fn in_words(rows: &[Row]) -> String {
    let rows: Vec<String> = rows.iter().map(|row| format!("{} {}", row.label, row.value)).collect();
    rows.join("; ")
}

fn bar_class(summary: &OptionSummary) -> &'static str {
    if summary.label() == "tcp" { "base" } else { "accent" }
}

fn largest(spreads: impl IntoIterator<Item = Option<Spread>>) -> f64 {
    spreads.into_iter().flatten().map(|spread| spread.max).fold(0.0, f64::max)
}

fn total_time(summaries: &[OptionSummary]) -> Markup {
    let row = |summary: &OptionSummary| Row {
        label: summary.label(),
        value: with_ratio(summary.total_ms, duration, summary.speed_against_tcp, "as fast"),
        bars: vec![Bar::Spread(bar_class(summary), summary.total_ms)],
    };
    let rows: Vec<Row> = summaries.iter().map(row).collect();
    BarChart {
        id: "total-time",
        title: "Total time of each option",
        description: &in_words(&rows),
        rows,
        scale: Scale::up_to([largest(summaries.iter().map(|summary| summary.total_ms)) * MARGIN]),
        unit: Unit::Time,
        markers: Vec::new(),
    }
    .render()
}

fn throughput(report: &BenchReport, summaries: &[OptionSummary]) -> Markup {
    let row = |summary: &OptionSummary| Row {
        label: summary.label(),
        value: with_ratio(summary.throughput_gbps, rate, summary.throughput_against_tcp, "tcp"),
        bars: vec![Bar::Spread(bar_class(summary), summary.throughput_gbps)],
    };
    let rows: Vec<Row> = summaries.iter().map(row).collect();
    let markers = capacity_markers(&report.conditions);
    let longest = largest(summaries.iter().map(|summary| summary.throughput_gbps));
    let end = markers.iter().map(|marker| marker.value).fold(longest * MARGIN, f64::max);
    BarChart {
        id: "throughput",
        title: "Throughput of each option",
        description: &in_words(&rows),
        rows,
        scale: Scale::up_to([end]),
        unit: Unit::Rate,
        markers,
    }
    .render()
}

/// "6.95 s · 1.99 × as fast"; the ratio only where it is not that of `tcp` to itself.
fn with_ratio(
    spread: Option<Spread>,
    show: fn(f64) -> String,
    against_tcp: Option<f64>,
    what: &str,
) -> String {
    let value = spread.map_or("did not complete".to_owned(), |spread| show(spread.median));
    match against_tcp {
        Some(factor) if (factor - 1.0).abs() > 1e-9 => format!("{value} · {} {what}", ratio(factor)),
        _ => value,
    }
}

/// What one link can carry, and all together.
fn capacity_markers(conditions: &Conditions) -> Vec<Marker> {
    let Some(all) = capacity_gbps(conditions) else { return Vec::new() };
    let marker = |value, what: &str| Marker { value, label: format!("{what}, {}", rate_of_link(value)) };
    let fastest = conditions.links.iter().filter_map(|link| link.speed_mbps).max().unwrap_or(0);
    match conditions.links.len() {
        1 => vec![marker(all, "the link")],
        2 => vec![marker(all, "both links"), marker(fastest as f64 / 1e3, "one link")],
        _ => vec![marker(all, "all links"), marker(fastest as f64 / 1e3, "one link")],
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of u64 speeds")]
fn rate_of_link(gbps: f64) -> String {
    link_speed((gbps * 1e3).round() as u64)
}

fn guest_silence(summaries: &[OptionSummary]) -> Markup {
    let median = |spread: Option<Spread>| spread.map_or(NONE.to_owned(), |spread| duration(spread.median));
    let row = |summary: &OptionSummary| Row {
        label: summary.label(),
        value: format!("{} / {}", median(summary.downtime_ms), median(summary.guest_gap_ms)),
        bars: vec![
            Bar::Spread("downtime", summary.downtime_ms),
            Bar::Spread("guest-gap", summary.guest_gap_ms),
        ],
    };
    let rows: Vec<Row> = summaries.iter().map(row).collect();
    let spreads = summaries.iter().flat_map(|summary| [summary.downtime_ms, summary.guest_gap_ms]);
    BarChart {
        id: "guest-silence",
        title: "Downtime and longest gap of each option",
        description: &in_words(&rows),
        rows,
        scale: Scale::up_to([largest(spreads) * MARGIN]),
        unit: Unit::Time,
        markers: Vec::new(),
    }
    .render()
}

fn cpu(report: &BenchReport, summaries: &[OptionSummary]) -> Markup {
    let per_gib = |run: &MigrationResult| cpu_total(&run.host_use.cpu_seconds) / gib(run);
    let row = |summary: &OptionSummary| match median_run(summary, report) {
        Some(run) => Row {
            label: summary.label(),
            value: format!(
                "{} · agents {}",
                cpu_seconds(per_gib(run)),
                agents_share(&run.host_use.cpu_seconds)
            ),
            bars: vec![Bar::Stack(cpu_segments(run))],
        },
        None => without_run(summary),
    };
    let rows: Vec<Row> = summaries.iter().map(row).collect();
    let totals = summaries.iter().filter_map(|summary| median_run(summary, report)).map(per_gib);
    BarChart {
        id: "cpu",
        title: "CPU seconds per GiB of memory, by program",
        description: &in_words(&rows),
        rows,
        scale: Scale::up_to([totals.fold(0.0, f64::max) * MARGIN]),
        unit: Unit::CpuSeconds,
        markers: Vec::new(),
    }
    .render()
}

fn agents_share(cpu: &CpuSeconds) -> String {
    percent((cpu.source_agent + cpu.target_agent) / cpu_total(cpu))
}

fn cpu_segments(run: &MigrationResult) -> Vec<Segment> {
    let cpu = run.host_use.cpu_seconds;
    [
        ("source-vmm", cpu.source_vmm),
        ("source-agent", cpu.source_agent),
        ("target-vmm", cpu.target_vmm),
        ("target-agent", cpu.target_agent),
    ]
    .map(|(class, seconds)| Segment {
        class,
        value: seconds / gib(run),
        label: cpu_seconds(seconds / gib(run)),
    })
    .into()
}

fn steps(report: &BenchReport, summaries: &[OptionSummary]) -> Markup {
    let row = |summary: &OptionSummary| match median_run(summary, report) {
        Some(run) => Row {
            label: summary.label(),
            value: format!(
                "{} + {} + {}",
                duration(run.times.setup_ms),
                duration(run.times.transfer_ms),
                duration(run.times.completion_ms)
            ),
            bars: vec![Bar::Stack(step_segments(run.times))],
        },
        None => without_run(summary),
    };
    let rows: Vec<Row> = summaries.iter().map(row).collect();
    BarChart {
        id: "steps",
        title: "Share of setup, transfer and completion in the total time",
        description: &in_words(&rows),
        rows,
        scale: Scale::up_to([1.0]),
        unit: Unit::Share,
        markers: Vec::new(),
    }
    .render()
}

fn step_segments(times: Times) -> Vec<Segment> {
    [("setup", times.setup_ms), ("transfer", times.transfer_ms), ("completion", times.completion_ms)]
        .map(|(class, ms)| {
            let share = ms / times.total_ms;
            Segment { class, value: share, label: percent(share) }
        })
        .into()
}

fn without_run(summary: &OptionSummary) -> Row {
    Row { label: summary.label(), value: "did not complete".to_owned(), bars: vec![Bar::Stack(Vec::new())] }
}

fn over_time(report: &BenchReport, summaries: &[OptionSummary]) -> Markup {
    let runs: Vec<(&OptionSummary, &MigrationResult)> = summaries
        .iter()
        .filter_map(|summary| Some((summary, median_run(summary, report)?)))
        .filter(|(_, run)| run.record.samples.len() > 1)
        .collect();
    let compressed: Vec<_> =
        runs.iter().copied().filter(|(_, run)| run.connection_use.compression.is_some()).collect();
    html! {
        @if !runs.is_empty() {
            (Timelines {
                id: "over-time",
                title: "Throughput per link over time",
                remark: "The median run of each option, its links stacked, all to the same scale.",
                layers: links,
                capacity_gbps: capacity_gbps(&report.conditions),
            }.render(&runs))
        }
        @if !compressed.is_empty() {
            (Timelines {
                id: "codecs",
                title: "What compression sent over time",
                remark: "QEMU's stream of the median run, before packing, stacked by how it went.",
                layers: codecs,
                capacity_gbps: None,
            }.render(&compressed))
        }
    }
}

/// A section with a chart for each of some migrations, to the same scale.
struct Timelines {
    id: &'static str,
    title: &'static str,
    remark: &'static str,
    layers: fn(&MigrationResult) -> Vec<Layer>,
    capacity_gbps: Option<f64>,
}

impl Timelines {
    fn render(&self, runs: &[(&OptionSummary, &MigrationResult)]) -> Markup {
        let rates = |run| intervals(run, &(self.layers)(run)).into_iter().map(|each| each.gbps.iter().sum());
        let rates = runs.iter().flat_map(|(_, run)| rates(run).collect::<Vec<f64>>());
        let rate = Scale::up_to(rates.chain(self.capacity_gbps));
        let time = Scale::up_to(runs.iter().map(|(_, run)| run.times.total_ms));
        html! {
            section aria-labelledby=(self.id) {
                h2 id=(self.id) { (self.title) }
                p.section-remark {
                    (self.remark)
                    @if self.capacity_gbps.is_some() {
                        " The dashed line is what the links can carry together."
                    }
                }
                div.pair {
                    @for (index, (summary, run)) in runs.iter().enumerate() {
                        @let (id, label) = (format!("{}-{index}", self.id), summary.label());
                        @let layers = (self.layers)(run);
                        @let (title, capacity_gbps) = (self.title, self.capacity_gbps);
                        figure {
                            figcaption {
                                h3 { (label) " " span.aside { (duration(run.times.total_ms)) } }
                                ul.legend { (legend(&layers)) }
                            }
                            (Timeline { id: &id, label: &label, title, run, layers: &layers, time, rate, capacity_gbps }.render())
                        }
                    }
                }
            }
        }
    }
}

fn legend(layers: &[Layer]) -> Markup {
    html! {
        @for (index, layer) in layers.iter().enumerate() {
            li {
                (swatch(&format!("area {}", layer_class(index))))
                (layer.name) " " span.aside { (percent(layer.share)) }
            }
        }
    }
}
