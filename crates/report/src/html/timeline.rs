//! Throughput over time: the links of one migration stacked on one another.
//!
//! Stacked, because links of the same speed carry the same and their lines would hide each other.

use drainpipe_engine::result::MigrationResult;
use maud::{Markup, html};

use super::bars::{Unit, anchor};
use super::scale::Scale;

/// Most points of a line: more than a screen shows.
const POINTS_MAX: usize = 240;
/// Least share of the bytes that is drawn.
const SHARE_SHOWN_MIN: f64 = 0.001;
/// How many colours there are for links.
const LINK_COLOURS: usize = 6;
/// Heights in pixels.
const PLOT_HEIGHT: usize = 132;
const TOP: usize = 8;
const AXIS_HEIGHT: usize = 22;
/// Size of the plot's own coordinates.
const PLOT_WIDTH_UNITS: f64 = 1_000.0;
const PLOT_HEIGHT_UNITS: f64 = 100.0;

/// The time between two readings of the links' counters.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Interval {
    /// Its beginning, since the start of the migration.
    pub(super) from_ms: f64,
    /// Its end.
    pub(super) to_ms: f64,
    /// What each link carried.
    pub(super) gbps: Vec<f64>,
}

/// The throughput between each two readings, in at most [`POINTS_MAX`] intervals.
pub(super) fn intervals(run: &MigrationResult) -> Vec<Interval> {
    let stride = run.samples.len().div_ceil(POINTS_MAX).max(1);
    let mut read = run.samples.iter().step_by(stride).collect::<Vec<_>>();
    if let Some(last) = run.samples.last()
        && !(run.samples.len() - 1).is_multiple_of(stride)
    {
        read.push(last);
    }
    read.windows(2)
        .filter(|pair| pair[1].ms > pair[0].ms)
        .map(|pair| Interval {
            from_ms: pair[0].ms,
            to_ms: pair[1].ms,
            gbps: (0..run.paths.len())
                .map(|link| {
                    let at = |index: usize| pair[index].path_bytes.get(link).copied().unwrap_or(0);
                    at(1).saturating_sub(at(0)) as f64 * 8e-6 / (pair[1].ms - pair[0].ms)
                })
                .collect(),
        })
        .collect()
}

/// One chart, with the scales that it shares with those beside it.
pub(super) struct Timeline<'a> {
    /// Unique on the page.
    pub(super) id: &'a str,
    /// Name of the option.
    pub(super) label: &'a str,
    /// The migration.
    pub(super) run: &'a MigrationResult,
    /// Milliseconds since the start.
    pub(super) time: Scale,
    /// Gb/s of all links together.
    pub(super) rate: Scale,
    /// Gb/s that all links together can carry.
    pub(super) capacity_gbps: Option<f64>,
}

impl Timeline<'_> {
    /// The chart as an SVG image.
    pub(super) fn render(&self) -> Markup {
        let intervals = intervals(self.run);
        html! {
            svg.timeline role="img" aria-labelledby=(format!("{0}-title {0}-description", self.id))
                height=(TOP + PLOT_HEIGHT + AXIS_HEIGHT) {
                title id=(format!("{}-title", self.id)) { "Throughput per link over time, " (self.label) }
                desc id=(format!("{}-description", self.id)) { (self.description()) }
                (self.grid())
                svg x="0" y=(TOP) width="100%" height=(PLOT_HEIGHT) preserveAspectRatio="none"
                    viewBox=(format!("0 0 {PLOT_WIDTH_UNITS} {PLOT_HEIGHT_UNITS}")) {
                    @for link in self.used_links() {
                        path class=(format!("area {}", link_class(link))) d=(self.area(&intervals, link)) {}
                    }
                    @for link in self.used_links() {
                        path class=(format!("edge {}", link_class(link))) d=(self.edge(&intervals, link)) {}
                    }
                }
                @if let Some(capacity) = self.capacity_gbps {
                    @let y = self.height_of(capacity);
                    line.marker x1="0" x2="100%" y1=(y) y2=(y) {}
                }
            }
        }
    }

    /// The edge of a link that carried nothing would hide that of the link below.
    fn used_links(&self) -> impl Iterator<Item = usize> {
        let paths = self.run.paths.iter().enumerate();
        paths.filter(|(_, path)| path.share >= SHARE_SHOWN_MIN).map(|(link, _)| link)
    }

    fn description(&self) -> String {
        let links: Vec<String> = self
            .run
            .paths
            .iter()
            .map(|path| format!("{} carried {}", path.link, crate::format::percent(path.share)))
            .collect();
        format!("{} took {}; {}.", self.label, crate::format::duration(self.run.total_ms), links.join(", "))
    }

    fn grid(&self) -> Markup {
        let (rate_divisor, rate_unit) = Unit::Rate.of(self.rate);
        let (time_divisor, time_unit) = Unit::Time.of(self.time);
        let rates: Vec<f64> = self.rate.ticks().collect();
        let times: Vec<f64> = self.time.ticks().collect();
        html! {
            @for (index, tick) in rates.iter().enumerate() {
                @let y = self.height_of(*tick);
                line.grid x1="0" x2="100%" y1=(y) y2=(y) {}
                text.tick x="-6" y=(y) dy="4" text-anchor="end" {
                    (self.rate.tick_label(*tick, rate_divisor))
                    @if index + 1 == rates.len() { (rate_unit) }
                }
            }
            @for (index, tick) in times.iter().enumerate() {
                text.tick x=(self.time.percent(*tick)) y=(TOP + PLOT_HEIGHT + AXIS_HEIGHT - 6)
                    text-anchor=(anchor(self.time.part(*tick))) {
                    (self.time.tick_label(*tick, time_divisor))
                    @if index + 1 == times.len() { (time_unit) }
                }
            }
        }
    }

    /// Pixels from the top.
    fn height_of(&self, gbps: f64) -> String {
        format!("{:.1}", TOP as f64 + PLOT_HEIGHT as f64 * (1.0 - self.rate.part(gbps)))
    }

    fn point(&self, ms: f64, gbps: f64) -> String {
        let x = self.time.part(ms) * PLOT_WIDTH_UNITS;
        let y = (1.0 - self.rate.part(gbps)) * PLOT_HEIGHT_UNITS;
        format!("{x:.1} {y:.1}")
    }

    /// The steps along the top of `links` stacked links.
    fn steps(&self, intervals: &[Interval], links: usize) -> Vec<String> {
        intervals
            .iter()
            .flat_map(|interval| {
                let sum: f64 = interval.gbps[..links].iter().sum();
                [self.point(interval.from_ms, sum), self.point(interval.to_ms, sum)]
            })
            .collect()
    }

    fn edge(&self, intervals: &[Interval], link: usize) -> String {
        path_of(&self.steps(intervals, link + 1))
    }

    fn area(&self, intervals: &[Interval], link: usize) -> String {
        let mut outline = self.steps(intervals, link + 1);
        outline.extend(self.steps(intervals, link).into_iter().rev());
        let path = path_of(&outline);
        if path.is_empty() { path } else { format!("{path}Z") }
    }
}

fn path_of(points: &[String]) -> String {
    if points.is_empty() { String::new() } else { format!("M{}", points.join("L")) }
}

/// The class that gives a link its colour and its kind of line.
pub(super) fn link_class(link: usize) -> String {
    format!("link-{}", link % LINK_COLOURS)
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::option::RequestedOption;
    use drainpipe_engine::result::Sample;
    use proptest::prelude::*;

    use super::*;
    use crate::sample::completed;

    fn run(samples: Vec<(f64, Vec<u64>)>) -> MigrationResult {
        let samples = samples.into_iter().map(|(ms, path_bytes)| Sample { ms, path_bytes }).collect();
        MigrationResult { samples, ..completed(RequestedOption::Multichannel, 1_000.0) }
    }

    #[test]
    fn counters_become_rates() {
        let run = run(vec![(0.0, vec![0, 0]), (8.0, vec![1_000_000, 500_000])]);
        let interval = Interval { from_ms: 0.0, to_ms: 8.0, gbps: vec![1.0, 0.5] };
        assert_eq!(intervals(&run), [interval]);
    }

    #[test]
    fn readings_that_make_no_sense_do_no_harm() {
        let backwards = run(vec![(0.0, vec![5, 5]), (1.0, vec![4]), (1.0, vec![9, 9, 9]), (0.5, vec![])]);
        let intervals = intervals(&backwards);
        assert_eq!(intervals, [Interval { from_ms: 0.0, to_ms: 1.0, gbps: vec![0.0, 0.0] }]);
    }

    proptest! {
        #[test]
        fn long_migrations_keep_all_bytes(count in 2_u32..2_000) {
            let samples = (0..count).map(|index| (f64::from(index), vec![u64::from(index) * 1_000, 0]));
            let intervals = intervals(&run(samples.collect()));
            prop_assert!(intervals.len() <= POINTS_MAX + 1);
            let bytes: f64 =
                intervals.iter().map(|each| each.gbps[0] * (each.to_ms - each.from_ms) / 8e-6).sum();
            prop_assert!((bytes - f64::from(count - 1) * 1_000.0).abs() < 1.0);
        }
    }
}
