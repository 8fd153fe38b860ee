//! Throughput of one migration over time, in layers: its links, or the ways in which its bytes went.
//!
//! Stacked, because links of the same speed carry the same and their lines would hide each other.

use drainpipe_engine::format::{duration, percent};
use drainpipe_engine::migration::result::{CompressionUse, MigrationResult, PathUse, Sample};
use maud::{Markup, html};

use super::bars::{Unit, anchor};
use super::scale::Scale;

/// Most points of a line: more than a screen shows.
const POINTS_MAX: usize = 240;
/// Least share of the bytes that is drawn.
const SHARE_SHOWN_MIN: f64 = 0.001;
/// How many colours there are for layers.
const COLOURS: usize = 6;
/// Heights in pixels.
const PLOT_HEIGHT: usize = 132;
const TOP: usize = 8;
const AXIS_HEIGHT: usize = 22;
/// Size of the plot's own coordinates.
const PLOT_WIDTH_UNITS: f64 = 1_000.0;
const PLOT_HEIGHT_UNITS: f64 = 100.0;

/// What is stacked.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    /// What it is called.
    pub(super) name: String,
    /// Its part of all bytes, 0 to 1.
    pub(super) share: f64,
    /// Bytes by a reading, since the start.
    bytes: fn(&Sample, usize) -> Option<u64>,
}

/// A layer for each link.
pub(super) fn links(run: &MigrationResult) -> Vec<Layer> {
    let bytes = |sample: &Sample, link: usize| sample.path_bytes.get(link).copied();
    let layer = |path: &PathUse| Layer { name: path.link.clone(), share: path.share, bytes };
    run.traffic.paths.iter().map(layer).collect()
}

/// A layer for each way in which a compressed migration sent QEMU's stream; none of others.
pub(super) fn codecs(run: &MigrationResult) -> Vec<Layer> {
    let Some(compression) = run.connection_use.compression else { return Vec::new() };
    let names = ["as it was", "LZ4", "zstd", "changes"];
    let bytes = |sample: &Sample, codec: usize| Some(by_codec(&sample.compression?)[codec]);
    let share = |sent: u64| if sent == 0 { 0.0 } else { sent as f64 / compression.stream_bytes as f64 };
    names
        .into_iter()
        .zip(by_codec(&compression))
        .map(|(name, sent)| Layer { name: name.to_owned(), share: share(sent), bytes })
        .collect()
}

fn by_codec(compression: &CompressionUse) -> [u64; 4] {
    let CompressionUse { raw_bytes, lz4_bytes, zstd_bytes, delta_bytes, .. } = *compression;
    [raw_bytes, lz4_bytes, zstd_bytes, delta_bytes]
}

/// The time between two readings.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Interval {
    /// Its beginning, since the start of the migration.
    pub(super) from_ms: f64,
    /// Its end.
    pub(super) to_ms: f64,
    /// What each layer carried.
    pub(super) gbps: Vec<f64>,
}

/// The throughput between each two readings, in at most [`POINTS_MAX`] intervals.
pub(super) fn intervals(run: &MigrationResult, layers: &[Layer]) -> Vec<Interval> {
    let stride = run.record.samples.len().div_ceil(POINTS_MAX).max(1);
    let mut read = run.record.samples.iter().step_by(stride).collect::<Vec<_>>();
    if let Some(last) = run.record.samples.last()
        && !(run.record.samples.len() - 1).is_multiple_of(stride)
    {
        read.push(last);
    }
    read.windows(2)
        .filter(|pair| pair[1].ms > pair[0].ms)
        .map(|pair| Interval {
            from_ms: pair[0].ms,
            to_ms: pair[1].ms,
            gbps: (0..)
                .zip(layers)
                .map(|(index, layer)| {
                    let at = |reading: usize| (layer.bytes)(pair[reading], index).unwrap_or(0);
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
    /// What is shown of it.
    pub(super) title: &'a str,
    /// The migration.
    pub(super) run: &'a MigrationResult,
    /// In the order in which they are stacked, the upmost last.
    pub(super) layers: &'a [Layer],
    /// Milliseconds since the start.
    pub(super) time: Scale,
    /// Gb/s of all layers together.
    pub(super) rate: Scale,
    /// Gb/s that all links together can carry.
    pub(super) capacity_gbps: Option<f64>,
}

impl Timeline<'_> {
    /// The chart as an SVG image.
    pub(super) fn render(&self) -> Markup {
        let intervals = intervals(self.run, self.layers);
        html! {
            svg.timeline role="img" aria-labelledby=(format!("{0}-title {0}-description", self.id))
                height=(TOP + PLOT_HEIGHT + AXIS_HEIGHT) {
                title id=(format!("{}-title", self.id)) { (self.title) ", " (self.label) }
                desc id=(format!("{}-description", self.id)) { (self.description()) }
                (self.grid())
                svg x="0" y=(TOP) width="100%" height=(PLOT_HEIGHT) preserveAspectRatio="none"
                    viewBox=(format!("0 0 {PLOT_WIDTH_UNITS} {PLOT_HEIGHT_UNITS}")) {
                    @for layer in self.shown() {
                        path class=(format!("area {}", layer_class(layer))) d=(self.area(&intervals, layer)) {}
                    }
                    @for layer in self.shown() {
                        path class=(format!("edge {}", layer_class(layer))) d=(self.edge(&intervals, layer)) {}
                    }
                }
                @if let Some(capacity) = self.capacity_gbps {
                    @let y = self.height_of(capacity);
                    line.marker x1="0" x2="100%" y1=(y) y2=(y) {}
                }
            }
        }
    }

    /// The edge of a layer that carried nothing would hide that of the one below.
    fn shown(&self) -> impl Iterator<Item = usize> {
        let layers = self.layers.iter().enumerate();
        layers.filter(|(_, layer)| layer.share >= SHARE_SHOWN_MIN).map(|(index, _)| index)
    }

    fn description(&self) -> String {
        let share = |layer: &Layer| format!("{} {}", layer.name, percent(layer.share));
        let layers: Vec<String> = self.layers.iter().map(share).collect();
        format!("{} took {}; {}.", self.label, duration(self.run.times.total_ms), layers.join(", "))
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

    /// The steps along the top of so many layers.
    fn steps(&self, intervals: &[Interval], layers: usize) -> Vec<String> {
        intervals
            .iter()
            .flat_map(|interval| {
                let sum: f64 = interval.gbps[..layers].iter().sum();
                [self.point(interval.from_ms, sum), self.point(interval.to_ms, sum)]
            })
            .collect()
    }

    fn edge(&self, intervals: &[Interval], layer: usize) -> String {
        path_of(&self.steps(intervals, layer + 1))
    }

    fn area(&self, intervals: &[Interval], layer: usize) -> String {
        let mut outline = self.steps(intervals, layer + 1);
        outline.extend(self.steps(intervals, layer).into_iter().rev());
        let path = path_of(&outline);
        if path.is_empty() { path } else { format!("{path}Z") }
    }
}

fn path_of(points: &[String]) -> String {
    if points.is_empty() { String::new() } else { format!("M{}", points.join("L")) }
}

/// The class that gives a layer its colour and its kind of line.
pub(super) fn layer_class(layer: usize) -> String {
    format!("layer-{}", layer % COLOURS)
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::migration::result::MigrationRecord;
    use drainpipe_engine::option::RequestedOption;
    use proptest::prelude::*;

    use super::*;
    use crate::sample::completed;

    fn run(samples: Vec<(f64, Vec<u64>)>) -> MigrationResult {
        let samples =
            samples.into_iter().map(|(ms, path_bytes)| Sample { ms, path_bytes, compression: None });
        let completed = completed(RequestedOption::Multichannel, 1_000.0);
        let record = MigrationRecord { samples: samples.collect(), ..completed.record };
        MigrationResult { record, ..completed }
    }

    #[test]
    fn counters_become_rates() {
        let run = run(vec![(0.0, vec![0, 0]), (8.0, vec![1_000_000, 500_000])]);
        let interval = Interval { from_ms: 0.0, to_ms: 8.0, gbps: vec![1.0, 0.5] };
        assert_eq!(intervals(&run, &links(&run)), [interval]);
    }

    #[test]
    fn readings_that_make_no_sense_do_no_harm() {
        let backwards = run(vec![(0.0, vec![5, 5]), (1.0, vec![4]), (1.0, vec![9, 9, 9]), (0.5, vec![])]);
        let intervals = intervals(&backwards, &links(&backwards));
        assert_eq!(intervals, [Interval { from_ms: 0.0, to_ms: 1.0, gbps: vec![0.0, 0.0] }]);
    }

    #[test]
    fn what_compression_sent_is_parted_by_how_it_went() {
        let sent = |raw_bytes, lz4_bytes, zstd_bytes, delta_bytes| {
            let stream_bytes = raw_bytes + lz4_bytes + zstd_bytes + delta_bytes;
            let sent = CompressionUse {
                stream_bytes,
                raw_bytes,
                lz4_bytes,
                zstd_bytes,
                ..CompressionUse::default()
            };
            CompressionUse { delta_bytes, ..sent }
        };
        let mut run = run(vec![(0.0, vec![]), (8.0, vec![]), (16.0, vec![])]);
        assert!(codecs(&run).is_empty());
        run.record.samples[1].compression = Some(sent(1_000_000, 0, 500_000, 0));
        run.record.samples[2].compression = Some(sent(1_000_000, 0, 2_500_000, 500_000));
        run.connection_use.compression = run.record.samples[2].compression;
        let layers = codecs(&run);
        let gbps: Vec<_> = intervals(&run, &layers).into_iter().map(|interval| interval.gbps).collect();
        assert_eq!(gbps, [[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 2.0, 0.5]]);
        assert_eq!(layers.iter().map(|layer| layer.share).collect::<Vec<_>>(), [0.25, 0.0, 0.625, 0.125]);
    }

    proptest! {
        #[test]
        fn long_migrations_keep_all_bytes(count in 2_u32..2_000) {
            let samples = (0..count).map(|index| (f64::from(index), vec![u64::from(index) * 1_000, 0]));
            let run = run(samples.collect());
            let intervals = intervals(&run, &links(&run));
            prop_assert!(intervals.len() <= POINTS_MAX + 1);
            let bytes: f64 =
                intervals.iter().map(|each| each.gbps[0] * (each.to_ms - each.from_ms) / 8e-6).sum();
            prop_assert!((bytes - f64::from(count - 1) * 1_000.0).abs() < 1.0);
        }
    }
}
