//! What a host's links send, by the kernel's counters.
//!
//! Those of the lab's queues (tc-tbf(8)): they count each packet with its headers, as the counters of a network card do.
//! Those of a veth count a packet of 64 KiB, which a card cuts up, with its headers once, and lack up to 5 % so. A link
//! without a rate has no such queue.

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

/// What they had sent at some moment of a reading, which takes long where no core is free.
struct Sample {
    begun: Instant,
    done: Instant,
    bytes: u64,
}

impl LinkRate {
    /// Begins with what they have sent by now.
    pub(crate) fn watch(lab: &TestLab, host: &str) -> Self {
        let mut rate = Self { namespace: lab.namespace(host), samples: vec![] };
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
        let mut tc = Command::new("nsenter");
        tc.arg(format!("--net={}", self.namespace.display()));
        tc.args(["tc", "-statistics", "-json", "qdisc", "show"]);
        let begun = Instant::now();
        let queues = tc.output().expect("nsenter and tc, which labs need too").stdout;
        let queues: Vec<Queue> = serde_json::from_slice(&queues).expect("its queues");
        // The lab has shaped no links but those for migrations.
        let of_links: Vec<&Queue> = queues.iter().filter(|queue| queue.kind == "tbf").collect();
        assert!(!of_links.is_empty(), "links with a rate");
        let bytes = of_links.iter().map(|queue| queue.bytes).sum();
        self.samples.push(Sample { begun, done: Instant::now(), bytes });
    }

    /// All that went out.
    pub(crate) fn sent_bytes(&self) -> u64 {
        let [first, last] = [self.samples.first(), self.samples.last()];
        last.zip(first).map_or(0, |(last, first)| last.bytes - first.bytes)
    }

    /// The most that went out in any second for certain: the reader's delay is not taken for the sender's haste.
    pub(crate) fn most_in_a_second_mbps(&self) -> f64 {
        windows_mbps(&self.samples).fold(0.0, f64::max)
    }

    /// What went out in each second between two moments, in Mb/s; none where they are less than a second apart.
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

/// What went out between two samples that are a second apart or a little more.
fn windows_mbps(samples: &[Sample]) -> impl Iterator<Item = f64> {
    samples.iter().enumerate().filter_map(|(index, from)| {
        let until =
            samples[index + 1..].iter().find(|until| until.begun - from.done >= Duration::from_secs(1));
        until.map(|until| mbps(from, until))
    })
}

/// By the longest time in which it may have gone out.
fn mbps(from: &Sample, until: &Sample) -> f64 {
    (until.bytes - from.bytes) as f64 * 8.0 / 1e6 / (until.done - from.begun).as_secs_f64()
}
