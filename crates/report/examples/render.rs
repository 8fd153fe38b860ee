//! Shows the results of an earlier benchmark again: `render results.json report.html` writes the
//! page and prints the table.

use std::error::Error;
use std::fs;

use drainpipe_report::{BenchReport, html, table};

const TERMINAL_WIDTH: usize = 120;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [results, page] = arguments.as_slice() else {
        return Err("usage: render RESULTS.json REPORT.html".into());
    };
    let report: BenchReport = serde_json::from_str(&fs::read_to_string(results)?)?;
    fs::write(page, html::page(&report))?;
    print!("{}", table::text(&report, TERMINAL_WIDTH, false));
    Ok(())
}
