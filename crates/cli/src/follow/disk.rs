//! Follows a disk that this program makes or copies.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drainpipe_engine::format;
use drainpipe_engine::problem::Problem;
use drainpipe_storage::pace::Pace;
use drainpipe_storage::task::Stage;
use drainpipe_storage::{DiskError, DiskResult, Task};
use indicatif::ProgressBar;

use super::display::set_bar;
use super::interrupts;
use super::line::style;
use crate::output;

const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What is over before is not worth a bar.
const SHOWN_AFTER: Duration = Duration::from_secs(2);

/// Where nobody sees a bar.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Does it, and shows how far it has got. Ctrl-C cancels it, which is followed to the end.
pub(crate) async fn disk(
    is_watched: bool,
    work: impl FnOnce(&Task) -> Result<DiskResult, DiskError> + Send + 'static,
) -> Result<Result<DiskResult, DiskError>, Problem> {
    let mut interrupts = interrupts()?;
    let task = Arc::new(Task::default());
    let own = Arc::clone(&task);
    let mut work = tokio::task::spawn_blocking(move || work(&own));
    let mut display = Display::new(is_watched);
    loop {
        tokio::select! {
            ended = &mut work => {
                display.end();
                return ended.map_err(|error| Problem::failed(format!("this program failed: {error}")));
            }
            _ = interrupts.recv() => {
                output::remark("cancelling");
                task.cancel();
            }
            () = tokio::time::sleep(LOOK_EVERY) => display.show(&task),
        }
    }
}

struct Display {
    begun: Instant,
    pace: Pace,
    shown: Shown,
}

/// A bar for a person at a terminal, a line now and then for a log, nothing for a script.
enum Shown {
    Bar(Option<ProgressBar>),
    Lines(Duration),
    Nothing,
}

impl Display {
    fn new(is_watched: bool) -> Self {
        let shown = match (is_watched, output::is_watched()) {
            (false, _) => Shown::Nothing,
            (true, true) => Shown::Bar(None),
            (true, false) => Shown::Lines(LINE_EVERY),
        };
        Self { begun: Instant::now(), pace: Pace::default(), shown }
    }

    fn show(&mut self, task: &Task) {
        let elapsed = self.begun.elapsed();
        let (done, total) = task.progress();
        self.pace.see(elapsed.as_secs_f64() * 1e3, done);
        if elapsed < SHOWN_AFTER {
            return;
        }
        let text = describe(task.stage(), &self.pace, (done, total));
        match &mut self.shown {
            Shown::Bar(bar) => {
                let bar = bar.get_or_insert_with(|| ProgressBar::new(1).with_style(style("")));
                set_bar(bar, done, total, text);
            }
            Shown::Lines(next) if elapsed >= *next => {
                *next = elapsed + LINE_EVERY;
                output::remark(&text);
            }
            Shown::Lines(_) | Shown::Nothing => {}
        }
    }

    fn end(&self) {
        if let Shown::Bar(Some(bar)) = &self.shown {
            bar.finish_and_clear();
        }
    }
}

fn describe(stage: Stage, pace: &Pace, (done, total): (u64, u64)) -> String {
    let method = match stage {
        Stage::Looking => return "looking at the disk".into(),
        Stage::Flushing => return "waiting until everything is safely on the storage".into(),
        Stage::Doing(method) => method.name(),
    };
    let bytes = |bytes: u64| format::bytes(bytes as f64);
    let left = pace.left_ms(total).map_or(String::new(), |ms| format!(", {} left", format::estimate(ms)));
    let rate = pace.bytes_per_s().map_or(String::new(), |rate| format!(", {}/s", format::bytes(rate)));
    format!("{method}{left}: {} of {}{rate}", bytes(done), bytes(total))
}

#[cfg(test)]
mod tests {
    use drainpipe_storage::method::Method;

    use super::*;

    #[test]
    fn no_time_left_is_told_before_it_is_known() {
        let mut pace = Pace::default();
        pace.see(0.0, 0);
        let shown = |pace: &Pace, done| describe(Stage::Doing(Method::Threads), pace, (done, 4 << 30));
        assert_eq!(shown(&pace, 0), "threads: 0 B of 4.00 GiB");
        pace.see(2_000.0, 1 << 30);
        assert_eq!(shown(&pace, 1 << 30), "threads, 6.0 s left: 1.00 GiB of 4.00 GiB, 512 MiB/s");
        assert!(!describe(Stage::Flushing, &pace, (4, 4)).contains("left"));
    }
}
