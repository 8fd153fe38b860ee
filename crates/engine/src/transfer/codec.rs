//! Which codecs pay at present, by measurements of each.
//!
//! A relay sends each block as it is when the wire would stand idle otherwise, and packed when a core was
//! free to pack it in time. So what the wire carries and what the cores save add up:
//!
//! ```text
//! throughput = min(wire ÷ left, wire + cores × (1 − left) ÷ cost)
//! ```
//!
//! with the wire's rate in bytes per second, and of the codec what it leaves of a byte and the core-seconds that a byte
//! costs. The left side holds when the cores keep up, the right one when they do not.
//!
//! So one codec alone leaves some of the cores idle, or some blocks as they are. Two of them fill cores and wire: the
//! stronger one while the cores keep up, the cheaper one while they do not. The best two are neighbours on the lower
//! hull of cost and what is left, where a byte that goes as it is stands too, with nothing and all.

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
    /// All, by what they leave of most blocks.
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

/// Two codecs for blocks of the same moment; twice the same where none comes before it on the hull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mix {
    /// For those that are to be packed fast, while the cores are behind.
    pub cheaper: Codec,
    /// For those that are to be packed small, while the cores keep up.
    pub stronger: Codec,
}

impl Mix {
    /// Good for most memory on most links, until there were trials.
    const FIRST: Self = Self { cheaper: Codec::ZstdLiterals, stronger: Codec::Zstd1 };
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

/// The cheapest codec must keep this part of the gain over the bare wire. This counts the gain and not the whole:
/// while no core is idle all codecs carry the same, and the best one must be at hand when a core is idle again.
const AS_GOOD: f64 = 0.95;

/// Another choice is taken if it promises to gain so many times as much,
const BETTER: f64 = 1.05;
/// also if each of its codecs left this more of a byte than is known of it,
const DOUBT: f64 = 0.01;
/// or if it costs so many times less CPU.
const CHEAPER: f64 = 1.1;

/// The part of the cores that is counted on, so that it matters which codec is at hand where they nearly keep up.
const SURE: f64 = 0.9;

/// Choices in a row that must be for something else before it is taken.
const PATIENCE: u32 = 3;

/// What one codec did with the block of a trial.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CodecTrial {
    /// On a core.
    pub seconds_per_byte: f64,
    /// Length after packing, by that before; 0 to 1.
    pub packed_share: f64,
}

impl CodecTrial {
    /// For data that is sent as it is.
    pub const AS_IT_IS: Self = Self { seconds_per_byte: 0.0, packed_share: 1.0 };

    /// How far the cores are ahead of the wire if all is packed so; below 0 they do not keep up.
    fn lead(self, reading: Reading) -> f64 {
        self.packed_share * reading.cores - self.seconds_per_byte * reading.wire_bytes_per_second
    }

    /// Some blocks so and some, with which the cores do not keep up, as `other`: as many as fill them.
    fn filled_with(self, other: Self, reading: Reading) -> Self {
        let part = self.lead(reading) / (self.lead(reading) - other.lead(reading));
        Self {
            seconds_per_byte: self.seconds_per_byte + part * (other.seconds_per_byte - self.seconds_per_byte),
            packed_share: self.packed_share + part * (other.packed_share - self.packed_share),
        }
    }

    /// What is gained by it if the wire is full, by what the wire carries.
    fn gain(self) -> f64 {
        1.0 / self.packed_share.max(f64::MIN_POSITIVE) - 1.0
    }

    /// Bytes saved by each core-second more than this one takes.
    fn saves_beyond(self, other: Self) -> f64 {
        (other.packed_share - self.packed_share)
            / (self.seconds_per_byte - other.seconds_per_byte).max(f64::MIN_POSITIVE)
    }
}

/// The cost and the rest of all that is carried, by a mix of codecs and blocks that are sent as they are for lack of
/// cores.
fn carried(known: &[CodecTrial; Codec::ALL.len()], mix: Mix, reading: Reading) -> CodecTrial {
    let [cheaper, stronger] = [mix.cheaper, mix.stronger].map(|codec| known[codec as usize]);
    match () {
        () if stronger.lead(reading) >= 0.0 => stronger,
        () if cheaper.lead(reading) >= 0.0 => cheaper.filled_with(stronger, reading),
        () => CodecTrial::AS_IT_IS.filled_with(cheaper, reading),
    }
}

/// From what costs least to what carries most: along the lower hull, as far as the cores come. The one before is at
/// hand also where the cores are said to keep up: that is not known to the percent, and what they do not get done in
/// time would go as it is.
fn mixes(known: &[CodecTrial; Codec::ALL.len()], reading: Reading) -> Vec<Mix> {
    let (mut mixes, mut last, mut reached) = (vec![], None, CodecTrial::AS_IT_IS);
    let next_after = |reached: CodecTrial| {
        let smaller =
            Codec::ALL.into_iter().filter(|codec| known[*codec as usize].packed_share < reached.packed_share);
        let saves = |codec: &Codec| known[*codec as usize].saves_beyond(reached);
        smaller.max_by(|one, other| saves(one).total_cmp(&saves(other)))
    };
    while let Some(next) = next_after(reached) {
        let cheaper = last.replace(next).unwrap_or(next);
        mixes.push(Mix { cheaper, stronger: next });
        reached = known[next as usize];
        if reached.lead(reading) < 0.0 {
            break;
        }
    }
    mixes
}

/// Chooses the codecs.
#[derive(Debug, Clone)]
pub struct Controller {
    current: Mix,
    // Smoothed, in the order of `Codec::ALL`.
    known: [CodecTrial; Codec::ALL.len()],
    trials: u32,
    trials_begun: u32,
    is_trial_due: bool,
    // In a row.
    challenges: u32,
}

impl Default for Controller {
    fn default() -> Self {
        Self {
            current: Mix::FIRST,
            known: Default::default(),
            trials: 0,
            trials_begun: 0,
            is_trial_due: false,
            challenges: 0,
        }
    }
}

impl Controller {
    /// The codecs of choice.
    pub fn current(&self) -> Mix {
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
    pub fn record(&mut self, trials: [CodecTrial; Codec::ALL.len()]) {
        self.trials = self.trials.saturating_add(1);
        let part = SMOOTHING.max(1.0 / f64::from(self.trials));
        let smooth = |known: &mut f64, new: f64| *known += part * (new - *known);
        for (known, trial) in self.known.iter_mut().zip(trials) {
            smooth(&mut known.seconds_per_byte, trial.seconds_per_byte);
            smooth(&mut known.packed_share, trial.packed_share);
        }
    }

    /// Looks at the choice again. To be called at a steady pace, while the wire is the limit.
    pub fn choose(&mut self, reading: Reading) -> Mix {
        self.is_trial_due = true;
        let wanted = self.wanted(reading);
        self.challenges = if wanted == self.current { 0 } else { self.challenges + 1 };
        if self.challenges >= PATIENCE {
            self.current = wanted;
            self.challenges = 0;
        }
        self.current
    }

    fn wanted(&self, reading: Reading) -> Mix {
        if self.trials < FIRST_TRIALS {
            return self.current;
        }
        let reading = Reading { cores: reading.cores * SURE, ..reading };
        let carried = |mix| carried(&self.known, mix, reading);
        let mixes = mixes(&self.known, reading);
        let most_gained = mixes.iter().map(|mix| carried(*mix).gain()).fold(0.0, f64::max);
        let is_good = |mix: &Mix| most_gained > 0.0 && carried(*mix).gain() >= most_gained * AS_GOOD;
        let Some(wanted) = mixes.into_iter().find(is_good) else { return self.current };
        // By a clear margin, so that two that are worth the same do not take turns.
        let in_doubt =
            self.known.map(|known| CodecTrial { packed_share: known.packed_share + DOUBT, ..known });
        let (new, now) = (self::carried(&in_doubt, wanted, reading), carried(self.current));
        let is_better = new.gain() > now.gain() * BETTER;
        let is_cheaper = new.seconds_per_byte * CHEAPER < now.seconds_per_byte;
        if is_better || (is_cheaper && new.gain() >= now.gain() * AS_GOOD) { wanted } else { self.current }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MB: f64 = 1e6;

    /// The figures of the four codecs for some content, as measured with blocks of 128 KiB.
    fn contents() -> [[CodecTrial; 4]; 3] {
        let of = |figures: [(f64, f64); 4]| {
            figures.map(|(mb_per_core_second, ratio)| CodecTrial {
                seconds_per_byte: 1.0 / (mb_per_core_second * MB),
                packed_share: 1.0 / ratio,
            })
        };
        [
            of([(600.0, 1.9), (1000.0, 2.0), (470.0, 3.0), (410.0, 3.1)]),
            of([(880.0, 1.3), (800.0, 1.3), (610.0, 1.4), (510.0, 1.5)]),
            of([(2000.0, 1.02), (1500.0, 1.02), (1400.0, 1.05), (1200.0, 1.06)]),
        ]
    }

    fn of(codec: Codec) -> Mix {
        Mix { cheaper: codec, stronger: codec }
    }

    fn begun_with(current: Mix) -> Controller {
        Controller { current, ..Controller::default() }
    }

    fn some_mix() -> impl Strategy<Value = Mix> {
        let pair = prop::sample::subsequence(Codec::ALL.to_vec(), 2);
        pair.prop_map(|pair| Mix { cheaper: pair[0], stronger: pair[1] })
    }

    /// Bytes before packing that are carried in a second.
    fn throughput(content: &[CodecTrial; 4], mix: Mix, reading: Reading) -> f64 {
        reading.wire_bytes_per_second / carried(content, mix, reading).packed_share
    }

    /// The most that any two codecs carry.
    fn most(content: &[CodecTrial; 4], reading: Reading) -> f64 {
        let pairs =
            Codec::ALL.into_iter().flat_map(|cheaper| Codec::ALL.map(|stronger| Mix { cheaper, stronger }));
        pairs.map(|mix| throughput(content, mix, reading)).fold(0.0, f64::max)
    }

    /// Why readings differ: everything that goes on at a moment, and each codec by itself.
    #[derive(Debug, Clone, Copy)]
    struct Noise {
        all: f64,
        // CPU time, and what is left of a block.
        each: [(f64, f64); 4],
    }

    impl Noise {
        const NONE: Self = Self { all: 1.0, each: [(1.0, 1.0); 4] };
    }

    fn some_noise() -> impl Strategy<Value = Noise> {
        let each = (0.9..1.1_f64, 0.97..1.03_f64);
        (0.9..1.1_f64, prop::array::uniform4(each)).prop_map(|(all, each)| Noise { all, each })
    }

    fn pack(controller: &mut Controller, content: &[CodecTrial; 4], noise: &Noise) {
        if controller.wants_trial() {
            let mut trials = *content;
            for (trial, (cpu, left)) in trials.iter_mut().zip(noise.each) {
                trial.seconds_per_byte *= noise.all * cpu;
                trial.packed_share = (left * trial.packed_share).min(1.0);
            }
            controller.record(trials);
        }
    }

    /// Lets the controller run; gives what was chosen, once each 100 ms.
    fn run(
        controller: &mut Controller,
        content: &[CodecTrial; 4],
        reading: Reading,
        noises: &[Noise],
    ) -> Vec<Mix> {
        let choice = |noise: &Noise| {
            for _ in 0..32 {
                pack(controller, content, noise);
            }
            controller.choose(Reading { cores: reading.cores / noise.all, ..reading })
        };
        noises.iter().map(choice).collect()
    }

    fn settle(content: &[CodecTrial; 4], wire_mb_per_second: f64, cores: f64) -> Mix {
        let reading = Reading { wire_bytes_per_second: wire_mb_per_second * MB, cores };
        *run(&mut Controller::default(), content, reading, &[Noise::NONE; 20]).last().unwrap()
    }

    #[test]
    fn what_the_wire_carries_and_what_the_cores_save_add_up() {
        let codec = CodecTrial { seconds_per_byte: 1.0 / (400.0 * MB), packed_share: 1.0 / 3.0 };
        let carried = |wire: f64, cores| {
            throughput(&[codec; 4], of(Codec::Zstd1), Reading { wire_bytes_per_second: wire * MB, cores })
                / MB
        };
        assert!((carried(125.0, 2.0) - 375.0).abs() < 1e-6, "the cores keep up");
        assert!((carried(125.0, 0.0) - 125.0).abs() < 1e-6, "no core, no gain");
        assert!((carried(1250.0, 1.5) - 1650.0).abs() < 1e-6, "the cores are the limit");
    }

    #[test]
    fn on_a_slow_link_the_best_ratio_wins_and_on_a_fast_one_what_saves_most() {
        let text = &contents()[0];
        let slow = settle(text, 12.0, 8.0);
        assert_eq!(slow.stronger, Codec::Zstd1, "level 3 packs 3 % better, which is not worth its CPU");
        assert_eq!(settle(text, 1250.0, 2.0).cheaper, Codec::ZstdLiterals);
        let small = settle(&contents()[1], 12.0, 8.0);
        assert_eq!(small.stronger, Codec::Zstd3, "of what hardly shrinks a little more counts for much");
    }

    #[test]
    fn between_two_codecs_both_fill_cores_and_wire() {
        let text = &contents()[0];
        // One core packs 470 MB/s into 157 MB/s, or 1000 into 500.
        let reading = Reading { wire_bytes_per_second: 250.0 * MB, cores: 1.0 };
        let both = Mix { cheaper: Codec::ZstdLiterals, stronger: Codec::Zstd1 };
        assert_eq!(settle(text, 250.0, 1.0), both);
        let carried = |mix| throughput(text, mix, reading) / MB;
        // 250 = x / 2 + y / 3 and 1 = x / 1000 + y / 470.
        assert!((carried(both) - 614.1).abs() < 0.1, "{}", carried(both));
        assert!((carried(of(Codec::ZstdLiterals)) - 500.0).abs() < 0.1, "a part of the core idles");
        assert!((carried(of(Codec::Zstd1)) - 563.3).abs() < 0.1, "a part of the blocks goes as it is");
    }

    #[test]
    fn while_hardly_a_core_is_idle_what_saves_most_in_its_time_is_at_hand() {
        for cores in [0.001, 0.05] {
            let reading = Reading { wire_bytes_per_second: 62.5 * MB, cores };
            let mut controller = begun_with(of(Codec::Zstd1));
            let chosen = run(&mut controller, &contents()[0], reading, &[Noise::NONE; 20]);
            assert_eq!(chosen[PATIENCE as usize..], [of(Codec::ZstdLiterals); 17], "{cores}");
        }
    }

    proptest! {
        #[test]
        fn settles_soon_on_codecs_that_carry_nearly_the_most_and_stays(
            wire in 5.0..3000.0_f64,
            cores in 0.05..16.0_f64,
            content in 0..3_usize,
            noises in prop::collection::vec(some_noise(), 60),
            first in some_mix(),
        ) {
            let content = &contents()[content];
            let reading = Reading { wire_bytes_per_second: wire * MB, cores };
            let chosen = run(&mut begun_with(first), content, reading, &noises);
            let most = most(content, reading);
            for mix in &chosen[10..] {
                // Another one has to promise 1.05 times as much, and what is known of each is off by a percent or two.
                prop_assert!(throughput(content, *mix, reading) >= most * 0.9, "{mix:?} of {chosen:?}");
            }
            let turns = chosen.windows(2).filter(|pair| pair[0] != pair[1]).count();
            prop_assert!(turns <= 3, "{chosen:?}");
        }

        #[test]
        fn follows_when_the_content_changes(wire in 5.0..300.0_f64, cores in 0.5..8.0_f64, first in some_mix()) {
            let reading = Reading { wire_bytes_per_second: wire * MB, cores };
            let mut controller = begun_with(first);
            run(&mut controller, &contents()[1], reading, &[Noise::NONE; 20]);
            let chosen = run(&mut controller, &contents()[0], reading, &[Noise::NONE; 60]);
            let most = most(&contents()[0], reading);
            prop_assert!(throughput(&contents()[0], *chosen.last().unwrap(), reading) >= most * 0.93, "{chosen:?}");
        }

        #[test]
        fn the_last_and_best_of_the_mixes_carries_the_most_that_any_two_codecs_do(
            wire in 1.0..3000.0_f64,
            cores in 0.0..16.0_f64,
            costs in prop::array::uniform4((0.5..10.0_f64, 0.0..1.0_f64)),
        ) {
            let content = costs.map(|(ns, packed_share)| CodecTrial { seconds_per_byte: ns * 1e-9, packed_share });
            let reading = Reading { wire_bytes_per_second: wire * MB, cores };
            let last = mixes(&content, reading).pop().unwrap();
            prop_assert!(throughput(&content, last, reading) >= most(&content, reading) * (1.0 - 1e-9));
        }
    }

    #[test]
    fn nothing_is_chosen_before_there_were_trials() {
        let mut controller = Controller::default();
        let reading = Reading { wire_bytes_per_second: MB, cores: 1.0 };
        controller.record([CodecTrial { seconds_per_byte: 0.0, packed_share: 0.0 }; 4]);
        for _ in 0..10 {
            assert_eq!(controller.choose(reading), Mix::FIRST);
        }
    }
}
