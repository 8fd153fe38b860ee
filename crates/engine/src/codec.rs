//! Which codec pays now, from what was measured of each.
//!
//! A relay sends each block as it is when the wire would stand idle otherwise, and packed when a core was
//! free to pack it in time. So what the wire carries and what the cores save add up:
//!
//! ```text
//! throughput = min(wire × ratio, wire + cores × rate × (1 − 1 / ratio))
//! ```
//!
//! with the wire's rate in bytes per second, and of the codec the bytes that one core packs in a second and
//! how many bytes become one. The left side holds when the cores keep up, the right one when they do not.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a block is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Codec {
    /// LZ4, block format.
    Lz4,
    /// zstd, which only looks for long repetitions, and packs bytes by how often each is there.
    ZstdLiterals,
    /// zstd, level 1.
    Zstd1,
    /// zstd, level 3.
    Zstd3,
}

impl Codec {
    /// All, by what they cost.
    pub const ALL: [Self; 4] = [Self::Lz4, Self::ZstdLiterals, Self::Zstd1, Self::Zstd3];
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lz4 => "lz4",
            Self::ZstdLiterals => "zstd literals",
            Self::Zstd1 => "zstd 1",
            Self::Zstd3 => "zstd 3",
        })
    }
}

/// What a codec does with the blocks of late.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Performance {
    /// Bytes that one core packs in a second.
    pub bytes_per_core_second: f64,
    /// Bytes before packing for each one after it, 1 or more.
    pub ratio: f64,
}

/// What the relay carries per second, in bytes before packing, with this codec.
pub fn throughput(wire_bytes_per_second: f64, cores: f64, codec: Performance) -> f64 {
    let Performance { bytes_per_core_second, ratio } = codec;
    let saved = cores * bytes_per_core_second * (1.0 - 1.0 / ratio);
    (wire_bytes_per_second * ratio).min(wire_bytes_per_second + saved)
}

/// What limits the relay now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// Bytes per second that the wire took while it was the limit.
    pub wire_bytes_per_second: f64,
    /// Cores that the packing got, or would have got.
    pub cores: f64,
}

/// Trials before the first choice.
const FIRST_TRIALS: u32 = 3;

/// A trial changes the figures by this part.
const SMOOTHING: f64 = 0.1;

/// A codec that promises so many times the throughput is taken,
const BETTER: f64 = 1.1;
/// and one that costs less CPU, if it keeps this part of what is gained over the bare wire. Of the gain, not of
/// the whole: while no core is idle all codecs carry the same, and the best is to be at hand when one is again.
const AS_GOOD: f64 = 0.95;

/// Choices in a row that must name another codec before it is taken.
const PATIENCE: u32 = 3;

/// What one codec did with the block of a trial.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Trial {
    /// On a core.
    pub seconds_per_byte: f64,
    /// Length after packing, by that before; 0 to 1.
    pub packed_share: f64,
}

/// Chooses the codec.
#[derive(Debug, Clone)]
pub struct Controller {
    current: Codec,
    // Smoothed, in the order of `Codec::ALL`.
    known: [Trial; Codec::ALL.len()],
    trials: u32,
    trials_begun: u32,
    is_trial_due: bool,
    challenger: Option<(Codec, u32)>,
}

impl Default for Controller {
    fn default() -> Self {
        Self {
            current: Codec::Zstd1,
            known: Default::default(),
            trials: 0,
            trials_begun: 0,
            is_trial_due: false,
            challenger: None,
        }
    }
}

impl Controller {
    /// The codec of choice.
    pub fn current(&self) -> Codec {
        self.current
    }

    /// Whether the next block is one for a trial: to be packed with every codec, so that they are compared by
    /// the same content at the same moment. A block tells apart what two codecs do with it far better than two
    /// blocks would. There is one trial for each choice, so that trials cost little CPU on a fast wire.
    pub fn wants_trial(&mut self) -> bool {
        let is_wanted = self.is_trial_due || self.trials_begun < FIRST_TRIALS;
        self.is_trial_due = false;
        self.trials_begun = self.trials_begun.saturating_add(u32::from(is_wanted));
        is_wanted
    }

    /// A block was packed with every codec, in the order of [`Codec::ALL`].
    pub fn record(&mut self, trials: [Trial; Codec::ALL.len()]) {
        self.trials = self.trials.saturating_add(1);
        let part = SMOOTHING.max(1.0 / f64::from(self.trials));
        let smooth = |known: &mut f64, new: f64| *known += part * (new - *known);
        for (known, trial) in self.known.iter_mut().zip(trials) {
            smooth(&mut known.seconds_per_byte, trial.seconds_per_byte);
            smooth(&mut known.packed_share, trial.packed_share);
        }
    }

    fn performance(&self, codec: Codec) -> Performance {
        let Trial { seconds_per_byte, packed_share } = self.known[codec as usize];
        Performance {
            bytes_per_core_second: 1.0 / seconds_per_byte.max(f64::MIN_POSITIVE),
            ratio: (1.0 / packed_share.max(f64::MIN_POSITIVE)).max(1.0),
        }
    }

    /// Looks at the choice again. To be called at a steady pace, while the wire is the limit.
    pub fn choose(&mut self, reading: Reading) -> Codec {
        self.is_trial_due = true;
        let wanted = self.wanted(reading);
        if wanted == self.current {
            self.challenger = None;
            return self.current;
        }
        let seen = match self.challenger {
            Some((codec, seen)) if codec == wanted => seen + 1,
            _ => 1,
        };
        self.challenger = Some((wanted, seen));
        if seen >= PATIENCE {
            self.current = wanted;
            self.challenger = None;
        }
        self.current
    }

    fn wanted(&self, reading: Reading) -> Codec {
        if self.trials < FIRST_TRIALS {
            return self.current;
        }
        let carried =
            |codec| throughput(reading.wire_bytes_per_second, reading.cores, self.performance(codec));
        let now = carried(self.current);
        let most = Codec::ALL.into_iter().map(carried).fold(0.0, f64::max);
        let gain = |codec| carried(codec) - reading.wire_bytes_per_second;
        let most_gained = most - reading.wire_bytes_per_second;
        if most_gained <= 0.0 {
            return self.current;
        }
        if most > now * BETTER {
            return self.cheapest_of(|codec| gain(codec) >= most_gained * AS_GOOD);
        }
        let least_gain = gain(self.current).max(most_gained * AS_GOOD) * AS_GOOD;
        let cheapest = self.cheapest_of(|codec| gain(codec) >= least_gain);
        // By a clear margin, so that two codecs of one price do not take turns.
        if self.cost(cheapest) * BETTER < self.cost(self.current) { cheapest } else { self.current }
    }

    fn cheapest_of(&self, is_good: impl Fn(Codec) -> bool) -> Codec {
        let good = Codec::ALL.into_iter().filter(|codec| is_good(*codec));
        let cheaper = |one, other| if self.cost(other) < self.cost(one) { other } else { one };
        good.reduce(cheaper).unwrap_or(self.current)
    }

    fn cost(&self, codec: Codec) -> f64 {
        self.known[codec as usize].seconds_per_byte
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: f64 = 1e6;

    /// What the four codecs do with some content, as measured with blocks of 128 KiB.
    fn contents() -> [[Performance; 4]; 3] {
        let of = |figures: [(f64, f64); 4]| {
            figures.map(|(rate, ratio)| Performance { bytes_per_core_second: rate * MB, ratio })
        };
        [
            of([(600.0, 1.9), (1000.0, 2.0), (470.0, 3.0), (410.0, 3.1)]),
            of([(880.0, 1.3), (800.0, 1.3), (610.0, 1.4), (510.0, 1.5)]),
            of([(2000.0, 1.02), (1500.0, 1.02), (1400.0, 1.05), (1200.0, 1.06)]),
        ]
    }

    /// What makes readings differ: of all that goes on at a moment, and of each codec by itself.
    #[derive(Debug, Clone, Copy)]
    struct Noise {
        all: f64,
        // Of CPU, and of what is left of a block.
        each: [(f64, f64); 4],
    }

    impl Noise {
        const NONE: Self = Self { all: 1.0, each: [(1.0, 1.0); 4] };
    }

    fn some_noise() -> impl Strategy<Value = Noise> {
        let each = (0.9..1.1_f64, 0.97..1.03_f64);
        (0.9..1.1_f64, prop::array::uniform4(each)).prop_map(|(all, each)| Noise { all, each })
    }

    fn pack(controller: &mut Controller, content: &[Performance; 4], noise: &Noise) {
        if controller.wants_trial() {
            let mut trials = [Trial::default(); 4];
            for ((trial, Performance { bytes_per_core_second, ratio }), (cpu, left)) in
                trials.iter_mut().zip(content).zip(noise.each)
            {
                trial.seconds_per_byte = noise.all * cpu / bytes_per_core_second;
                trial.packed_share = (left / ratio).min(1.0);
            }
            controller.record(trials);
        }
    }

    /// Lets the controller run; gives the codecs chosen, one each 100 ms.
    fn run(
        controller: &mut Controller,
        content: &[Performance; 4],
        reading: Reading,
        noises: &[Noise],
    ) -> Vec<Codec> {
        let choice = |noise: &Noise| {
            for _ in 0..32 {
                pack(controller, content, noise);
            }
            controller.choose(Reading { cores: reading.cores / noise.all, ..reading })
        };
        noises.iter().map(choice).collect()
    }

    #[test]
    fn what_the_wire_carries_and_what_the_cores_save_add_up() {
        let codec = Performance { bytes_per_core_second: 400.0 * MB, ratio: 3.0 };
        let carried = |wire: f64, cores| throughput(wire * MB, cores, codec) / MB;
        assert!((carried(125.0, 2.0) - 375.0).abs() < 1e-6, "the cores keep up");
        assert!((carried(125.0, 0.0) - 125.0).abs() < 1e-6, "no core, no gain");
        assert!((carried(1250.0, 1.5) - 1650.0).abs() < 1e-6, "the cores are the limit");
    }

    #[test]
    fn on_a_slow_link_the_best_ratio_wins_and_on_a_fast_one_what_saves_most() {
        let text = &contents()[0];
        let settle = |wire: f64, cores| {
            let reading = Reading { wire_bytes_per_second: wire * MB, cores };
            *run(&mut Controller::default(), text, reading, &[Noise::NONE; 20]).last().unwrap()
        };
        assert_eq!(settle(12.0, 8.0), Codec::Zstd1, "level 3 packs 3 % better, which is not worth its CPU");
        assert_eq!(settle(1250.0, 2.0), Codec::ZstdLiterals);
    }

    #[test]
    fn while_hardly_a_core_is_idle_what_saves_most_in_its_time_is_at_hand() {
        for (cores, codec) in [(0.0, Codec::Zstd1), (0.001, Codec::ZstdLiterals), (0.05, Codec::ZstdLiterals)]
        {
            let reading = Reading { wire_bytes_per_second: 62.5 * MB, cores };
            let chosen = run(&mut Controller::default(), &contents()[0], reading, &[Noise::NONE; 20]);
            assert_eq!(chosen[PATIENCE as usize..], [codec; 17], "{cores}");
        }
    }

    proptest! {
        #[test]
        fn settles_soon_on_a_codec_that_carries_nearly_the_most_and_stays(
            wire in 5.0..3000.0_f64,
            cores in 0.05..16.0_f64,
            content in 0..3_usize,
            noises in prop::collection::vec(some_noise(), 60),
        ) {
            let content = &contents()[content];
            let reading = Reading { wire_bytes_per_second: wire * MB, cores };
            let chosen = run(&mut Controller::default(), content, reading, &noises);
            let carried = |codec: Codec| throughput(wire * MB, cores, content[codec as usize]);
            let most = Codec::ALL.into_iter().map(carried).fold(0.0, f64::max);
            for codec in &chosen[10..] {
                // Another one has to promise 1.1 times as much, and what is known of each is off by a percent or two.
                prop_assert!(carried(*codec) >= most * 0.87, "{codec} of {chosen:?}");
            }
            let turns = chosen.windows(2).filter(|pair| pair[0] != pair[1]).count();
            prop_assert!(turns <= 3, "{chosen:?}");
        }

        #[test]
        fn follows_when_the_content_changes(wire in 5.0..300.0_f64, cores in 0.5..8.0_f64) {
            let reading = Reading { wire_bytes_per_second: wire * MB, cores };
            let mut controller = Controller::default();
            run(&mut controller, &contents()[1], reading, &[Noise::NONE; 20]);
            let chosen = run(&mut controller, &contents()[0], reading, &[Noise::NONE; 60]);
            let carried = |codec: Codec| throughput(wire * MB, cores, contents()[0][codec as usize]);
            let most = Codec::ALL.into_iter().map(carried).fold(0.0, f64::max);
            prop_assert!(carried(*chosen.last().unwrap()) >= most * 0.93, "{chosen:?}");
        }
    }

    #[test]
    fn nothing_is_chosen_before_there_were_trials() {
        let mut controller = Controller::default();
        let reading = Reading { wire_bytes_per_second: MB, cores: 1.0 };
        controller.record([Trial { seconds_per_byte: 0.0, packed_share: 0.0 }; 4]);
        for _ in 0..10 {
            assert_eq!(controller.choose(reading), Codec::Zstd1);
        }
    }
}
