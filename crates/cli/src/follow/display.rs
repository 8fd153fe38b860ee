//! How something that is followed is shown.

use indicatif::ProgressBar;

use super::Say;
use super::line::style;
use crate::output;

/// A bar for a person at a terminal, lines for a log, nothing for a script.
pub(super) enum Display<L> {
    Bar(ProgressBar),
    Lines(L),
    Nothing,
}

impl<L: Default> Display<L> {
    pub(super) fn new(is_watched: bool, prefix: String) -> Self {
        match (is_watched, output::is_watched()) {
            (false, _) => Self::Nothing,
            (true, true) => Self::Bar(ProgressBar::new(1).with_style(style("")).with_prefix(prefix)),
            (true, false) => Self::Lines(L::default()),
        }
    }
}

impl<L> Display<L> {
    pub(super) fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

impl<L> Say for Display<L> {
    fn say(&self, text: &str) {
        match self {
            Self::Bar(bar) => bar.set_message(text.to_owned()),
            Self::Lines(_) => output::remark(text),
            Self::Nothing => {}
        }
    }
}

/// How far it is, and what is said of it.
pub(super) fn set_bar(bar: &ProgressBar, done: u64, total: u64, text: String) {
    bar.set_length(total.max(1));
    bar.set_position(done);
    bar.set_message(text);
}
