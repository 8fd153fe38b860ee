//! A progress line on a terminal, which never gets wider than the terminal: a wrapped line would be left behind at
//! each step.

use indicatif::ProgressStyle;

/// With so much room before it.
pub(super) fn style(indent: &str) -> ProgressStyle {
    ProgressStyle::with_template(&format!("{indent}{{prefix}} {{bar:12}} {{wide_msg}}"))
        .expect("the template is well-formed")
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use indicatif::{ProgressBar, ProgressDrawTarget, TermLike};

    use super::*;

    const COLUMNS: u16 = 100;

    /// A terminal that keeps what is written to it.
    #[derive(Debug, Clone, Default)]
    struct Terminal(Arc<Mutex<Vec<String>>>);

    impl Terminal {
        fn keep(&self, text: &str) {
            self.0.lock().unwrap().push(text.into());
        }
    }

    impl TermLike for Terminal {
        fn width(&self) -> u16 {
            COLUMNS
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.keep(text);
            Ok(())
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.keep(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.keep("\n");
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_long_message_ends_where_the_terminal_does() {
        let terminal = Terminal::default();
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let bar = ProgressBar::with_draw_target(Some(10), target).with_style(style("  "));
        bar.set_prefix("database a → b");
        bar.set_message("7/10 copy dirty memory, ".repeat(20));
        bar.tick();
        let written = terminal.0.lock().unwrap().join("");
        let widest = written.lines().map(|line| line.trim_end().chars().count()).max();
        assert!(
            written.contains("7/10 copy dirty memory") && widest <= Some(COLUMNS.into()),
            "{widest:?}: {written}"
        );
    }
}
