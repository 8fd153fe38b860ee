//! Which kind of content each page of the filled memory starts with.

use std::fmt;
use std::str::FromStr;

/// Pages of one kind lie together in runs of this many pages (64 KiB): real memory is not mixed
/// page by page, and chunks that a codec looks at are larger than a page.
pub const RUN_PAGES: usize = 16;

/// The layout repeats after this many runs, one run for each percent of the mix.
const RUNS_PER_BLOCK: usize = 100;

/// What a page holds before its first rewrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// All zero, but written once, so that the host has a page behind it.
    Zero,
    /// Words of text; `zstd -1` makes it about three times smaller.
    Text,
    /// Incompressible.
    Random,
    /// Incompressible, and the same in every guest, whatever its seed.
    Shared,
}

impl Kind {
    /// Every kind, in the order in which counts by kind are given.
    pub const ALL: [Self; 4] = [Self::Zero, Self::Text, Self::Random, Self::Shared];

    /// The kind's name on the kernel command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Text => "text",
            Self::Random => "random",
            Self::Shared => "shared",
        }
    }

    const fn position(self) -> usize {
        match self {
            Self::Zero => 0,
            Self::Text => 1,
            Self::Random => 2,
            Self::Shared => 3,
        }
    }
}

/// Shares of the kinds in percent; they add up to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    percent: [u8; 4],
}

/// Why a text is not a mix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MixError {
    /// A part is not `kind:percent`.
    #[error("`{0}` is not of the form kind:percent; write for example zero:20,random:80")]
    Form(String),
    /// A kind that does not exist.
    #[error("`{0}` is not a kind of page; the kinds are zero, text, random and shared")]
    Kind(String),
    /// The same kind was given twice.
    #[error("`{0}` is given twice; give each kind once")]
    Twice(&'static str),
    /// The shares do not add up.
    #[error("the shares add up to {0} percent; make them add up to 100")]
    Sum(u32),
}

impl Mix {
    /// A mix of one kind only.
    pub const fn only(kind: Kind) -> Self {
        let mut percent = [0; 4];
        percent[kind.position()] = 100;
        Self { percent }
    }

    /// The share of a kind, in percent.
    pub const fn percent(self, kind: Kind) -> u8 {
        self.percent[kind.position()]
    }
}

impl FromStr for Mix {
    type Err = MixError;

    fn from_str(text: &str) -> Result<Self, MixError> {
        let mut shares: [Option<u8>; 4] = [None; 4];
        for part in text.split(',') {
            let (kind, share) = parse_share(part)?;
            if shares[kind.position()].replace(share).is_some() {
                return Err(MixError::Twice(kind.name()));
            }
        }
        let percent = shares.map(Option::unwrap_or_default);
        match percent.iter().map(|&share| u32::from(share)).sum() {
            100 => Ok(Self { percent }),
            sum => Err(MixError::Sum(sum)),
        }
    }
}

fn parse_share(part: &str) -> Result<(Kind, u8), MixError> {
    let form = || MixError::Form(part.to_owned());
    let (name, share) = part.split_once(':').ok_or_else(form)?;
    let kind = Kind::ALL
        .into_iter()
        .find(|kind| kind.name() == name)
        .ok_or_else(|| MixError::Kind(name.to_owned()))?;
    Ok((kind, share.parse().map_err(|_| form())?))
}

impl fmt::Display for Mix {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for kind in Kind::ALL.into_iter().filter(|&kind| self.percent(kind) > 0) {
            write!(formatter, "{separator}{}:{}", kind.name(), self.percent(kind))?;
            separator = ",";
        }
        Ok(())
    }
}

/// The mix spread evenly over runs of pages.
#[derive(Clone, Debug)]
pub struct Layout {
    mix: Mix,
    kinds: [Kind; RUNS_PER_BLOCK],
    /// For each run of a block, how many of the same kind come before it in the block. Kept,
    /// because every page that is checked asks for it.
    ranks: [usize; RUNS_PER_BLOCK],
}

impl Layout {
    /// Spreads a mix so that every block of 100 runs has exactly its shares, and every part of a
    /// block nearly so.
    pub fn new(mix: Mix) -> Self {
        let mut owed = [0_i32; 4];
        let kinds = std::array::from_fn(|_| {
            for kind in Kind::ALL {
                owed[kind.position()] += i32::from(mix.percent(kind));
            }
            let most_owed =
                Kind::ALL.into_iter().max_by_key(|kind| owed[kind.position()]).expect("there are four kinds");
            owed[most_owed.position()] -= 100;
            most_owed
        });
        let mut seen = [0; 4];
        let ranks = kinds.map(|kind: Kind| {
            seen[kind.position()] += 1;
            seen[kind.position()] - 1
        });
        Self { mix, kinds, ranks }
    }

    /// The kind of the run with this number.
    pub fn kind(&self, run: usize) -> Kind {
        self.kinds[run % RUNS_PER_BLOCK]
    }

    /// How many runs of the same kind come before this one.
    pub fn rank(&self, run: usize) -> usize {
        let in_blocks_before = run / RUNS_PER_BLOCK * usize::from(self.mix.percent(self.kind(run)));
        in_blocks_before + self.ranks[run % RUNS_PER_BLOCK]
    }

    /// How many of the first `pages` pages start as each kind, in the order of [`Kind::ALL`].
    pub fn count(&self, pages: usize) -> [u64; 4] {
        let mut counts = [0; 4];
        for first in (0..pages).step_by(RUN_PAGES) {
            let kind = self.kind(first / RUN_PAGES);
            counts[kind.position()] += RUN_PAGES.min(pages - first) as u64;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mixes() -> impl Strategy<Value = Mix> {
        (0..=100_u8, 0..=100_u8, 0..=100_u8).prop_map(|(a, b, c)| {
            let mut cuts = [a, b, c];
            cuts.sort_unstable();
            let percent = [cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1], 100 - cuts[2]];
            Mix { percent }
        })
    }

    #[test]
    fn bad_mixes_say_what_is_wrong() {
        let parse = |text: &str| text.parse::<Mix>().unwrap_err();
        assert_eq!(parse("zero:20,random:70"), MixError::Sum(90));
        assert_eq!(parse("zero:50,zero:50"), MixError::Twice("zero"));
        assert_eq!(parse("noise:100"), MixError::Kind("noise".into()));
        assert_eq!(parse(""), MixError::Form(String::new()));
        assert_eq!(parse("random:-1"), MixError::Form("random:-1".into()));
        assert_eq!(parse("random:300"), MixError::Form("random:300".into()));
    }

    #[test]
    fn a_kind_left_out_has_no_pages() {
        let layout = Layout::new("random:100".parse().unwrap());
        assert_eq!(layout.count(1000), [0, 0, 1000, 0]);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(mix in mixes()) {
            prop_assert_eq!(mix.to_string().parse::<Mix>(), Ok(mix));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in ".{0,60}") {
            let _ = text.parse::<Mix>();
        }

        #[test]
        fn shares_are_exact_in_a_block_and_close_in_any_part(mix in mixes(), runs in 1..300_usize) {
            let layout = Layout::new(mix);
            for (kind, pages) in Kind::ALL.into_iter().zip(layout.count(runs * RUN_PAGES)) {
                let share = f64::from(mix.percent(kind)) / 100.0;
                let off = (pages as f64 / RUN_PAGES as f64 - runs as f64 * share).abs();
                prop_assert!(off <= 4.0, "{} is off by {off} runs", kind.name());
                if runs % 100 == 0 {
                    prop_assert!(off < 1e-6);
                }
            }
        }

        #[test]
        fn ranks_of_a_kind_count_up(mix in mixes(), runs in 1..300_usize) {
            let layout = Layout::new(mix);
            let mut seen = [0_usize; 4];
            for run in 0..runs {
                let kind = layout.kind(run);
                prop_assert_eq!(layout.rank(run), seen[kind.position()]);
                seen[kind.position()] += 1;
            }
        }
    }
}
