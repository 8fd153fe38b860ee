//! Streams between packing cores and a wire, where cores and wire are only numbers: whether packing fast or small, by
//! how many blocks wait, fills both.

#![expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "all is small and positive")]

use std::ops::RangeInclusive;

use drainpipe_engine::transfer::codec::CodecTrial;
use proptest::prelude::*;

use super::tests::packed;
use super::*;

/// What may wait in the streams, by the time that the wire needs for it, and how many blocks in each stream; as a sender's.
const STREAMS_S: f64 = 0.04;
const DEPTHS: RangeInclusive<f64> = 2.0..=8.0;

/// How long the wire waits for a block that is being packed. A sender goes by the wire's rate, from 1 to 8 ms.
const PATIENCE_S: f64 = 0.004;

/// What goes over the wire is a block's number of bytes, and nothing else of it.
const BLOCK_BYTES: f64 = BLOCK_BYTES_MAX as f64;

#[derive(Debug, Clone, Copy)]
struct Means {
    streams: usize,
    threads: usize,
    cores: f64,
    wire_bytes_per_second: f64,
    cheaper: CodecTrial,
    stronger: CodecTrial,
}

impl Means {
    /// Bytes before packing that could be carried in a second, by the best parts of blocks as they are, and packed by
    /// either codec.
    fn most(self) -> f64 {
        let carried = |one: CodecTrial, other: CodecTrial, part: f64| {
            let mixed = |of: fn(CodecTrial) -> f64| of(one) + part * (of(other) - of(one));
            let by_wire = self.wire_bytes_per_second / mixed(|trial| trial.packed_share);
            by_wire.min(self.cores / mixed(|trial| trial.seconds_per_byte))
        };
        let parts = (0..=1000).map(|part| f64::from(part) / 1000.0);
        let best = |part| {
            carried(CodecTrial::AS_IT_IS, self.cheaper, part).max(carried(self.cheaper, self.stronger, part))
        };
        parts.map(best).fold(0.0, f64::max)
    }

    fn depth(self) -> usize {
        let depth = self.most() * STREAMS_S / BLOCK_BYTES / self.streams as f64;
        depth.clamp(*DEPTHS.start(), *DEPTHS.end()) as usize
    }

    fn codec_of(self, work: &Work) -> CodecTrial {
        if work.is_urgent { self.cheaper } else { self.stronger }
    }
}

struct Simulation {
    means: Means,
    depth: usize,
    streams: Streams,
    now_s: f64,
    // When each is done, and with what.
    packing: Vec<Option<(f64, Work)>>,
    // Until when it sends, and since when it waits for the front of each stream.
    wire_busy_until_s: f64,
    wanted_since_s: Vec<Option<f64>>,
    next_stream: usize,
    sent_blocks: usize,
}

impl Simulation {
    fn new(means: Means) -> Self {
        Self {
            means,
            depth: means.depth(),
            streams: Streams::new(means.streams),
            now_s: 0.0,
            packing: std::iter::repeat_with(|| None).take(means.threads).collect(),
            wire_busy_until_s: 0.0,
            wanted_since_s: vec![None; means.streams],
            next_stream: 0,
            sent_blocks: 0,
        }
    }

    /// Bytes before packing that it carries in a second.
    fn run(mut self, until_s: f64) -> f64 {
        while self.now_s < until_s {
            self.finish();
            self.fill();
            self.send();
            self.begin();
            let done = self.packing.iter().flatten().map(|(at_s, _)| *at_s);
            let given_up = self.wanted_since_s.iter().flatten().map(|since_s| since_s + PATIENCE_S);
            let next_of_wire_s = if self.now_s < self.wire_busy_until_s {
                self.wire_busy_until_s
            } else {
                given_up.fold(f64::INFINITY, f64::min)
            };
            self.now_s = done.fold(next_of_wire_s, f64::min);
        }
        self.sent_blocks as f64 * BLOCK_BYTES / self.now_s
    }

    fn fill(&mut self) {
        for stream in 0..self.means.streams {
            while self.streams.depth(stream) < self.depth {
                self.streams.push(stream, Block::from(&[0][..]));
            }
        }
    }

    /// The wire takes what is ready from the next stream, or waits a little for what is not.
    fn send(&mut self) {
        let is_busy = self.now_s < self.wire_busy_until_s;
        for stream in 0..self.means.streams {
            self.streams.set_waits_for_wire(stream, is_busy || self.wanted_since_s[stream].is_none());
        }
        if is_busy {
            return;
        }
        for step in 0..self.means.streams {
            let stream = (self.next_stream + step) % self.means.streams;
            let since_s = *self.wanted_since_s[stream].get_or_insert(self.now_s);
            if self.streams.front(stream) != Front::Ready && self.now_s < since_s + PATIENCE_S {
                self.streams.set_wanted(stream, self.streams.front(stream) == Front::Waiting);
                continue;
            }
            self.wanted_since_s[stream] = None;
            self.streams.set_wanted(stream, false);
            let block = self.streams.pop(stream).expect("streams are full");
            let share = match block.content {
                Content::Raw(_) => 1.0,
                Content::Packed(Packed { unpacked_bytes, bytes, .. }) => {
                    bytes.len() as f64 / unpacked_bytes as f64
                }
            };
            self.wire_busy_until_s = self.now_s + BLOCK_BYTES * share / self.means.wire_bytes_per_second;
            self.next_stream = stream + 1;
            self.sent_blocks += 1;
            return;
        }
    }

    fn finish(&mut self) {
        for packing in &mut self.packing {
            if let Some((_, work)) = packing.take_if(|(at_s, _)| *at_s <= self.now_s) {
                let bytes = vec![0; (1000.0 * self.means.codec_of(&work).packed_share) as usize];
                drop(self.streams.finish(&work, Some(packed(bytes, 1000))));
            }
        }
    }

    fn begin(&mut self) {
        let cores_each = self.means.cores / self.means.threads as f64;
        for packing in self.packing.iter_mut().filter(|packing| packing.is_none()) {
            *packing = self.streams.take_work().map(|work| {
                let takes_s = BLOCK_BYTES * self.means.codec_of(&work).seconds_per_byte / cores_each;
                (self.now_s + takes_s, work)
            });
        }
    }
}

/// The cores keep up with the cheaper codec, and perhaps with the stronger one.
fn some_means() -> impl Strategy<Value = Means> {
    let stronger = (1.5..3.0_f64, 0.2..0.45_f64);
    (3..18_usize, 1.05..4.0_f64, 20.0..600.0_f64, stronger).prop_map(
        |(streams, keeps_up, wire_mb_per_second, (times, packed_share))| {
            let wire_bytes_per_second = wire_mb_per_second * 1e6;
            let cheaper = CodecTrial { seconds_per_byte: 1e-9, packed_share: 0.5 };
            let stronger = CodecTrial { seconds_per_byte: times * 1e-9, packed_share };
            let cores = keeps_up * wire_bytes_per_second / cheaper.packed_share * cheaper.seconds_per_byte;
            let threads = cores.ceil() as usize;
            Means { streams, threads, cores, wire_bytes_per_second, cheaper, stronger }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn blocks_packed_fast_or_small_by_how_many_wait_fill_cores_and_wire(means in some_means()) {
        let carried = Simulation::new(means).run(2.0);
        prop_assert!(carried >= 0.85 * means.most(), "{:.3}", carried / means.most());
    }
}
