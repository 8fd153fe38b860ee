//! What a host's links send, by the kernel's counters.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_report::summary::Spread;

use crate::support::TestLab;

const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// The bytes that the links of a host had sent, at times that are about [`SAMPLE_EVERY`] apart.
pub(crate) struct LinkRate {
    counters: String,
    samples: Vec<(Instant, u64)>,
}

impl LinkRate {
    /// Begins with what they have sent by now.
    #[track_caller]
    pub(crate) fn watch(lab: &TestLab, host: &str) -> Self {
        let agent = lab.agent_pid(host).expect("its agent runs");
        let mut rate = Self { counters: format!("/proc/{agent}/net/dev"), samples: vec![] };
        rate.sample();
        rate
    }

    /// Looks on until it is over, for so long at most.
    pub(crate) fn until(mut self, at_most: Duration, mut is_over: impl FnMut() -> bool) -> Self {
        let end = Instant::now() + at_most;
        while !is_over() && Instant::now() < end {
            thread::sleep(SAMPLE_EVERY);
            self.sample();
        }
        self
    }

    fn sample(&mut self) {
        let counters = fs::read_to_string(&self.counters).unwrap();
        let sent = counters.lines().filter_map(|line| {
            let (link, figures) = line.trim().split_once(':')?;
            // Those of the lab for migrations are e0, e1 and so on; bytes sent are the ninth figure.
            link.strip_prefix('e')?.parse::<u8>().ok()?;
            figures.split_whitespace().nth(8)?.parse::<u64>().ok()
        });
        self.samples.push((Instant::now(), sent.sum()));
    }

    /// The most that went out in any second, a moment's delay of the reader being no excuse for a sender.
    pub(crate) fn most_in_a_second_mbps(&self) -> f64 {
        windows_mbps(&self.samples).fold(0.0, f64::max)
    }

    /// What went out in each second between two moments, in Mb/s; none where they are less than a second apart.
    pub(crate) fn seconds_between_mbps(&self, from: Instant, until: Instant) -> Option<Spread> {
        let first = self.samples.partition_point(|(at, _)| *at < from);
        let end = self.samples.partition_point(|(at, _)| *at <= until);
        Spread::of(windows_mbps(self.samples.get(first..end)?))
    }
}

/// What went out between two samples that are a second apart or a little more.
fn windows_mbps(samples: &[(Instant, u64)]) -> impl Iterator<Item = f64> {
    samples.iter().enumerate().filter_map(|(index, from)| {
        let until = samples[index..].iter().find(|until| until.0 - from.0 >= Duration::from_secs(1));
        until.map(|until| mbps(from, until))
    })
}

fn mbps(from: &(Instant, u64), until: &(Instant, u64)) -> f64 {
    (until.1 - from.1) as f64 * 8.0 / 1e6 / (until.0 - from.0).as_secs_f64()
}
