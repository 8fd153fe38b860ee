//! The comparison of the options for a terminal.

use drainpipe_engine::format::{NONE, bytes, cpu_seconds, duration, one_line, range, rate, ratio};
use owo_colors::{OwoColorize, Style};

use crate::bench::BenchReport;
use crate::findings::{failures, fastest, headline, subject, verification};
use crate::summary::{OptionSummary, Spread, summarise};

/// Between two columns.
const GAP: usize = 2;
/// Columns from this rank on make room for the bars.
const RANK_BELOW_BARS: u8 = 5;
/// Narrowest and widest bar, in characters.
const BAR_WIDTH: std::ops::RangeInclusive<usize> = 8..=24;

/// The comparison of the options, in lines of at most `width` characters except where the option's
/// name with its total time, a reason or an error are longer. Columns that do not fit are left out,
/// the less important first.
pub fn text(report: &BenchReport, width: usize, colour: bool) -> String {
    let summaries = summarise(&report.results);
    let paint = Paint { colour };
    let mut text = String::new();
    line(&mut text, &paint.strong(&one_line(&headline(report, &summaries))));
    line(&mut text, &paint.faint(&one_line(&subject(report))));
    if !summaries.is_empty() {
        text.push('\n');
        write_table(&mut text, &summaries, width, &paint);
        text.push('\n');
    }
    write_remarks(&mut text, report, &summaries, &paint);
    text
}

fn line(text: &mut String, content: &str) {
    text.push_str(content);
    text.push('\n');
}

fn write_remarks(text: &mut String, report: &BenchReport, summaries: &[OptionSummary], paint: &Paint) {
    for summary in summaries {
        for reason in &summary.fallback_reasons {
            line(text, &format!("{}: {}", summary.label(), one_line(reason)));
        }
    }
    for failure in failures(report) {
        let what = format!(
            "✗ migration {} ({}, {} → {}) {}: {}",
            failure.number,
            failure.run.choice.requested_option,
            failure.run.source,
            failure.run.target,
            failure.outcome,
            failure.reason
        );
        line(text, &paint.bad(&one_line(&what)));
    }
    if !report.results.is_empty() {
        let verification = verification(summaries);
        let mark = if verification.good { paint.good("✓") } else { paint.bad("✗") };
        line(text, &format!("{mark} {}", verification.sentence));
    }
}

/// One column; the lower its rank, the longer it stays when there is little room.
struct Column {
    heading: &'static str,
    rank: u8,
    left: bool,
    cells: Vec<String>,
}

impl Column {
    fn width(&self) -> usize {
        let cells = self.cells.iter().map(|cell| cell.chars().count());
        cells.chain([self.heading.chars().count()]).max().unwrap_or(0)
    }

    fn align(&self, cell: &str) -> String {
        let width = self.width();
        if self.left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
    }
}

fn write_table(text: &mut String, summaries: &[OptionSummary], width: usize, paint: &Paint) {
    let mut columns = columns(summaries);
    drop_columns(&mut columns, width.saturating_sub(GAP + BAR_WIDTH.start()), RANK_BELOW_BARS);
    drop_columns(&mut columns, width, 1);
    let room = width.saturating_sub(total_width(&columns) + GAP).min(*BAR_WIDTH.end());
    let bars = if BAR_WIDTH.contains(&room) { bars(summaries, room) } else { Vec::new() };
    let headings: Vec<String> = columns.iter().map(|column| column.align(column.heading)).collect();
    line(text, &paint.faint(headings.join(&" ".repeat(GAP)).trim_end()));
    let best = fastest(summaries).map(OptionSummary::label);
    for (row, summary) in summaries.iter().enumerate() {
        let cells: Vec<String> = columns.iter().map(|column| column.align(&column.cells[row])).collect();
        let cells = cells.join(&" ".repeat(GAP));
        let cells = if best.as_ref() == Some(&summary.label()) { paint.strong(&cells) } else { cells };
        let bar = bars.get(row).map(|bar| paint.bar(bar)).unwrap_or_default();
        line(text, format!("{cells}{:GAP$}{bar}", "").trim_end());
    }
}

/// Leaves out columns, the highest rank first and none below `rank_min`, until the rest fit.
fn drop_columns(columns: &mut Vec<Column>, width: usize, rank_min: u8) {
    while total_width(columns) > width {
        let droppable = columns.iter().enumerate().filter(|(_, column)| column.rank >= rank_min);
        let Some((index, _)) = droppable.max_by_key(|(_, column)| column.rank) else { break };
        columns.remove(index);
    }
}

fn total_width(columns: &[Column]) -> usize {
    columns.iter().map(|column| column.width() + GAP).sum::<usize>().saturating_sub(GAP)
}

fn columns(summaries: &[OptionSummary]) -> Vec<Column> {
    let column = |heading, rank, cell: &dyn Fn(&OptionSummary) -> String| Column {
        heading,
        rank,
        left: rank == 0 && heading == "option",
        cells: summaries.iter().map(cell).collect(),
    };
    let median = |spread: Option<Spread>, show: fn(f64) -> String| {
        spread.map_or(NONE.to_owned(), |spread| show(spread.median))
    };
    let optional = |value: Option<f64>| value.map_or(NONE.to_owned(), ratio);
    vec![
        column("option", 0, &OptionSummary::label),
        column("done", 6, &|row| format!("{}/{}", row.completed, row.completed + row.failed)),
        column("total", 0, &|row| median(row.total_ms, duration)),
        column("min – max", 7, &total_range),
        column("vs tcp", 2, &|row| optional(row.speed_against_tcp)),
        column("setup", 8, &|row| median(row.setup_ms, duration)),
        column("finish", 9, &|row| median(row.completion_ms, duration)),
        column("downtime", 3, &|row| median(row.downtime_ms, duration)),
        column("guest gap", 4, &|row| median(row.guest_gap_ms, duration)),
        column("CPU/GiB", 5, &|row| median(row.cpu_seconds_per_gib, cpu_seconds)),
        column("wire", 7, &|row| median(row.wire_bytes, bytes)),
        column("throughput", 1, &|row| median(row.throughput_gbps, rate)),
    ]
}

fn total_range(summary: &OptionSummary) -> String {
    summary.total_ms.map_or(NONE.to_owned(), |total| range(total.min, total.max, duration))
}

/// Bars of the throughput, in eighths of a character.
fn bars(summaries: &[OptionSummary], width: usize) -> Vec<String> {
    let throughput = |row: &OptionSummary| row.throughput_gbps.map_or(0.0, |spread| spread.median);
    let longest = summaries.iter().map(throughput).fold(0.0, f64::max);
    summaries.iter().map(|row| bar(throughput(row) / longest, width)).collect()
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 8 × a bar's width")]
fn bar(part: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    // 0 out of 0 is no number, which as an integer is 0.
    let eighths = (part.clamp(0.0, 1.0) * (width * 8) as f64).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

/// Text with or without colour.
struct Paint {
    colour: bool,
}

impl Paint {
    fn style(&self, text: &str, style: Style) -> String {
        if self.colour { text.style(style).to_string() } else { text.to_owned() }
    }

    fn strong(&self, text: &str) -> String {
        self.style(text, Style::new().bold())
    }

    fn faint(&self, text: &str) -> String {
        self.style(text, Style::new().dimmed())
    }

    fn good(&self, text: &str) -> String {
        self.style(text, Style::new().green())
    }

    fn bad(&self, text: &str) -> String {
        self.style(text, Style::new().red())
    }

    fn bar(&self, text: &str) -> String {
        self.style(text, Style::new().blue())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::{conditions, report};

    fn table_lines(text: &str) -> Vec<&str> {
        text.lines().skip(3).take(5).collect()
    }

    #[test]
    fn every_option_has_a_line() {
        let text = text(&report(), 140, false);
        for option in ["tcp", "compression", "multichannel", "direct → multichannel"] {
            assert!(text.lines().any(|line| line.starts_with(option)), "{option} in\n{text}");
        }
        assert!(text.contains("13.8 s") && text.contains("1.99 ×") && text.contains("1/2"), "{text}");
        assert!(text.contains("host b has no RDMA device"), "{text}");
        assert!(text.contains("port 4444 on b is taken"), "{text}");
        assert!(text.contains("none bad"), "{text}");
    }

    #[test]
    fn lines_fit_and_narrow_terminals_keep_what_matters() {
        for width in [40, 60, 80, 100, 140, 200] {
            let text = text(&report(), width, false);
            for line in table_lines(&text) {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
            assert!(text.contains("13.8 s"), "{text}");
        }
        assert!(text(&report(), 1, false).contains("13.8 s"));
    }

    #[test]
    fn values_stand_below_their_headings() {
        let text = text(&report(), 80, false);
        let lines = table_lines(&text);
        let column = |line: &str, part: &str| {
            let end = line.find(part).expect("in the line") + part.len();
            line[..end].chars().count()
        };
        assert_eq!(column(lines[0], "total"), column(lines[1], "13.8 s"), "{text}");
    }

    #[test]
    fn without_colour_there_is_no_escape() {
        assert!(!text(&report(), 100, false).contains('\x1b'));
        assert!(text(&report(), 100, true).contains('\x1b'));
    }

    #[test]
    fn names_cannot_act_on_the_terminal() {
        let mut report = report();
        for run in &mut report.results {
            run.vm = "\x1b[2J\r\n".to_owned();
            run.failure.error = Some("\x1b]0;x\x07".to_owned());
            run.choice.fallback_reason = Some("\u{9b}2J".to_owned());
        }
        let text = text(&report, 100, false);
        assert!(!text.contains(|character: char| character.is_control() && character != '\n'), "{text:?}");
    }

    #[test]
    fn no_results_are_said() {
        let empty = BenchReport { conditions: conditions(), results: vec![] };
        let text = text(&empty, 80, false);
        assert!(text.starts_with("No migration was measured\n"), "{text}");
    }

    #[test]
    fn bars_are_in_proportion() {
        assert_eq!(bar(1.0, 8), "████████");
        assert_eq!(bar(0.5, 8), "████");
        assert_eq!(bar(0.0, 8), "");
        assert_eq!(bar(0.01, 8), "▏");
        assert_eq!(bar(f64::NAN, 8), "");
    }
}
