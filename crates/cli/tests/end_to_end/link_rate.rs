//! What a host's links send, according to the kernel.
//!
//! The counters are those of the lab's queues (tc-tbf(8)): like those of a network card, they count each packet with
//! its headers. A veth counts a packet of 64 KiB, which a card would split, with its headers only once, and so lacks up
//! to 5 %. A link without a rate has no such queue.

use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_report::summary::Spread;
use serde::Deserialize;

use crate::support::TestLab;

const SAMPLE_EVERY: Duration = Duration::from_millis(100);

/// The bytes that the links of a host had sent, at times that are about [`SAMPLE_EVERY`] apart.
pub(crate) struct LinkRate {
    namespace: PathBuf,
    samples: Vec<Sample>,
}

/// The bytes sent at some moment of a reading, which takes long if no core is free.
struct Sample {
    begun: Instant,
    done: Instant,
    bytes: u64,
}

impl LinkRate {
    /// Begins with the bytes that the links have sent so far.
    pub(crate) fn watch(lab: &TestLab, host: &str) -> Self {
        let mut rate = Self { namespace: lab.namespace(host), samples: vec![] };
        rate.sample();
        rate
    }

    /// Watches until it is over, at most for this long.
    pub(crate) fn until(mut self, at_most: Duration, mut is_over: impl FnMut() -> bool) -> Self {
        let end = Instant::now() + at_most;
        while !is_over() && Instant::now() < end {
            thread::sleep(SAMPLE_EVERY);
            self.sample();
        }
        self
    }

    fn sample(&mut self) {
        let mut tc = Command::new("nsenter");
        tc.arg(format!("--net={}", self.namespace.display()));
        tc.args(["tc", "-statistics", "-json", "qdisc", "show"]);
        let begun = Instant::now();
        let queues = tc.output().expect("nsenter and tc, which labs need too").stdout;
        let queues: Vec<Queue> = serde_json::from_slice(&queues).expect("its queues");
        // The lab has shaped only the links for migrations.
        let of_links: Vec<&Queue> = queues.iter().filter(|queue| queue.kind == "tbf").collect();
        assert!(!of_links.is_empty(), "links with a rate");
        let bytes = of_links.iter().map(|queue| queue.bytes).sum();
        self.samples.push(Sample { begun, done: Instant::now(), bytes });
    }

    /// All bytes that were sent.
    pub(crate) fn sent_bytes(&self) -> u64 {
        let [first, last] = [self.samples.first(), self.samples.last()];
        last.zip(first).map_or(0, |(last, first)| last.bytes - first.bytes)
    }

    /// The most that was certainly sent in any second: a late reading does not count as haste of the sender.
    pub(crate) fn most_in_a_second_mbps(&self) -> f64 {
        windows_mbps(&self.samples).fold(0.0, f64::max)
    }

    /// The rate in each second between two moments, in Mb/s; `None` if they are less than a second apart.
    pub(crate) fn seconds_between_mbps(&self, from: Instant, until: Instant) -> Option<Spread> {
        let first = self.samples.partition_point(|sample| sample.begun < from);
        let end = self.samples.partition_point(|sample| sample.done <= until);
        Spread::of(windows_mbps(self.samples.get(first..end)?))
    }
}

/// One queue of `tc -json qdisc show`.
#[derive(Deserialize)]
struct Queue {
    kind: String,
    bytes: u64,
}

/// The rates between two samples that are a second apart, or a little more.
fn windows_mbps(samples: &[Sample]) -> impl Iterator<Item = f64> {
    samples.iter().enumerate().filter_map(|(index, from)| {
        let until =
            samples[index + 1..].iter().find(|until| until.begun - from.done >= Duration::from_secs(1));
        until.map(|until| mbps(from, until))
    })
}

/// Assumes the longest time that sending may have taken.
fn mbps(from: &Sample, until: &Sample) -> f64 {
    (until.bytes - from.bytes) as f64 * 8.0 / 1e6 / (until.done - from.begun).as_secs_f64()
}
