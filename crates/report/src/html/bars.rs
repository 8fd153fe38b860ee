//! Horizontal bars: one row for each option, its name and its value above its bars.
//!
//! Places are percentages of the width and pixels of the height, so a chart is as sharp and its
//! text as large on a telephone as on a desk.

use maud::{Markup, html};

use super::scale::{Scale, percent};
use crate::summary::Spread;

/// Heights in pixels.
const LABEL_HEIGHT: usize = 21;
const BAR_HEIGHT: usize = 14;
const BAR_GAP: usize = 3;
const ROW_GAP: usize = 13;
const MARKER_HEIGHT: usize = 18;
const AXIS_HEIGHT: usize = 20;
/// Least part of the width that has room for a label inside.
const INSIDE_LABEL_MIN: f64 = 0.14;

/// A chart of horizontal bars.
pub(super) struct BarChart<'a> {
    /// Unique on the page.
    pub(super) id: &'a str,
    /// What is shown.
    pub(super) title: &'a str,
    /// Its description, for those who do not see it.
    pub(super) description: &'a str,
    /// The rows.
    pub(super) rows: Vec<Row>,
    /// The horizontal axis.
    pub(super) scale: Scale,
    /// How its ticks are labelled.
    pub(super) unit: Unit,
    /// Values to compare the bars with.
    pub(super) markers: Vec<Marker>,
}

/// What the numbers of an axis are.
#[derive(Clone, Copy)]
pub(super) enum Unit {
    /// Gb/s.
    Rate,
    /// Milliseconds.
    Time,
    /// CPU seconds.
    CpuSeconds,
    /// Parts of 1.
    Share,
}

impl Unit {
    /// What to divide by, and what to write behind the last tick.
    pub(super) fn of(self, scale: Scale) -> (f64, &'static str) {
        match self {
            Self::Rate if scale.end() < 0.2 => (1e-3, " Mb/s"),
            Self::Rate => (1.0, " Gb/s"),
            Self::Time if scale.end() < 2_000.0 => (1.0, " ms"),
            Self::Time => (1e3, " s"),
            Self::CpuSeconds => (1.0, " s"),
            Self::Share => (0.01, " %"),
        }
    }
}

/// What belongs to one option.
pub(super) struct Row {
    /// Name of the option.
    pub(super) label: String,
    /// The value in words.
    pub(super) value: String,
    /// The bars below.
    pub(super) bars: Vec<Bar>,
}

/// One bar; classes give the colour.
pub(super) enum Bar {
    /// The median, with whiskers from the smallest to the largest.
    Spread(&'static str, Option<Spread>),
    /// Parts of a whole, one behind the other.
    Stack(Vec<Segment>),
}

/// A part of a stacked bar.
pub(super) struct Segment {
    /// Its colour.
    pub(super) class: &'static str,
    /// Its length.
    pub(super) value: f64,
    /// Shown inside, where there is room.
    pub(super) label: String,
}

/// A vertical line at a value that matters.
pub(super) struct Marker {
    /// Where.
    pub(super) value: f64,
    /// What it is.
    pub(super) label: String,
}

impl BarChart<'_> {
    /// The chart as an SVG image.
    pub(super) fn render(&self) -> Markup {
        let top = self.markers.len() * MARKER_HEIGHT;
        let rows: usize = self.rows.iter().map(Row::height).sum();
        let bottom = top + rows;
        html! {
            svg.bars role="img" aria-labelledby=(format!("{0}-title {0}-description", self.id))
                width="100%" height=(bottom + AXIS_HEIGHT) {
                title id=(format!("{}-title", self.id)) { (self.title) }
                desc id=(format!("{}-description", self.id)) { (self.description) }
                (self.axis(top, bottom))
                @for (index, marker) in self.markers.iter().enumerate() {
                    (self.marker(marker, index * MARKER_HEIGHT, bottom))
                }
                @for (row, y) in self.rows.iter().zip(self.row_tops(top)) {
                    (self.row(row, y))
                }
            }
        }
    }

    fn row_tops(&self, top: usize) -> impl Iterator<Item = usize> {
        self.rows.iter().scan(top, |next, row| {
            let top = *next;
            *next += row.height();
            Some(top)
        })
    }

    fn axis(&self, top: usize, bottom: usize) -> Markup {
        let (divisor, unit) = self.unit.of(self.scale);
        let ticks: Vec<f64> = self.scale.ticks().collect();
        html! {
            @for (index, tick) in ticks.iter().enumerate() {
                @let x = self.scale.percent(*tick);
                line.grid x1=(x) x2=(x) y1=(top) y2=(bottom) {}
                text.tick x=(x) y=(bottom + AXIS_HEIGHT - 5) text-anchor=(anchor(self.scale.part(*tick))) {
                    (self.scale.tick_label(*tick, divisor))
                    @if index + 1 == ticks.len() { (unit) }
                }
            }
        }
    }

    fn marker(&self, marker: &Marker, y: usize, bottom: usize) -> Markup {
        let x = self.scale.percent(marker.value);
        html! {
            line.marker x1=(x) x2=(x) y1=(y + MARKER_HEIGHT - 3) y2=(bottom) {}
            text.marker-label x=(x) y=(y + MARKER_HEIGHT - 6) text-anchor=(anchor(self.scale.part(marker.value))) {
                (marker.label)
            }
        }
    }

    fn row(&self, row: &Row, y: usize) -> Markup {
        html! {
            text.label x="0" y=(y + LABEL_HEIGHT - 6) { (row.label) }
            text.value x="100%" y=(y + LABEL_HEIGHT - 6) text-anchor="end" { (row.value) }
            @for (index, bar) in row.bars.iter().enumerate() {
                @let y = y + LABEL_HEIGHT + index * (BAR_HEIGHT + BAR_GAP);
                @match bar {
                    Bar::Spread(class, Some(spread)) => { (self.spread(class, spread, y)) }
                    Bar::Spread(_, None) => { rect.none x="0" y=(y) width="2" height=(BAR_HEIGHT) {} }
                    Bar::Stack(segments) => { (self.stack(segments, y)) }
                }
            }
        }
    }

    fn spread(&self, class: &str, spread: &Spread, y: usize) -> Markup {
        let (min, max) = (self.scale.percent(spread.min), self.scale.percent(spread.max));
        let middle = y + BAR_HEIGHT / 2;
        html! {
            rect class=(class) x="0" y=(y) width=(self.scale.percent(spread.median)) height=(BAR_HEIGHT) rx="2" {}
            @if spread.max > spread.min {
                line.whisker x1=(min) x2=(max) y1=(middle) y2=(middle) {}
                line.whisker x1=(min) x2=(min) y1=(middle - 4) y2=(middle + 4) {}
                line.whisker x1=(max) x2=(max) y1=(middle - 4) y2=(middle + 4) {}
            }
        }
    }

    fn stack(&self, segments: &[Segment], y: usize) -> Markup {
        let placed = segments.iter().scan(0.0, |next, segment| {
            let start = *next;
            *next = f64::min(1.0, start + self.scale.part(segment.value));
            Some((segment, start, *next - start))
        });
        html! {
            @for (segment, start, width) in placed {
                rect class=(format!("segment {}", segment.class)) x=(percent(start)) y=(y)
                    width=(percent(width)) height=(BAR_HEIGHT) {}
                @if width >= INSIDE_LABEL_MIN {
                    text.inside x=(percent(start + width / 2.0)) y=(y + BAR_HEIGHT - 3) text-anchor="middle" {
                        (segment.label)
                    }
                }
            }
        }
    }
}

impl Row {
    fn height(&self) -> usize {
        LABEL_HEIGHT + self.bars.len() * (BAR_HEIGHT + BAR_GAP) + ROW_GAP
    }
}

/// Keeps a text at a place inside the chart.
pub(super) fn anchor(part: f64) -> &'static str {
    match part {
        ..0.12 => "start",
        0.88.. => "end",
        _ => "middle",
    }
}
