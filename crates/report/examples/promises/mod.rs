//! What was promised, what was measured, and whether it holds.

use drainpipe_report::BenchReport;

/// One promise and what was measured.
pub(crate) struct Figure {
    pub(crate) what: &'static str,
    pub(crate) promise: String,
    pub(crate) measured: String,
    pub(crate) holds: bool,
}

/// The results in a file, or what is wrong with it.
pub(crate) fn read(path: &str) -> Result<BenchReport, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{path}: {error}"))
}

/// As a Markdown table.
pub(crate) fn markdown(figures: &[Figure]) -> String {
    let rows = figures.iter().map(|figure| {
        let verdict = if figure.holds { "yes" } else { "**no**" };
        format!("| {} | {} | {} | {verdict} |\n", figure.what, figure.promise, figure.measured)
    });
    format!("| figure | promise | measured | holds |\n|---|---|---|---|\n{}", rows.collect::<String>())
}
