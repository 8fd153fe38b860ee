//! The content of one page, and the check that a page holds exactly that.
//!
//! Both are written for a guest under TCG, where an instruction of the guest costs several of the
//! host: two multiplications or additions and a shift for eight bytes, no vectors, no tables beyond
//! the first-level cache.

use crate::mix::Kind;

/// Size of a page in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Size of a page in 64-bit words.
pub const PAGE_WORDS: usize = PAGE_BYTES / 8;

/// One page of the guest's memory.
pub type Page = [u64; PAGE_WORDS];

/// Three-letter words; pairs of them have 12 bits of entropy in 8 bytes, which `zstd -1` makes 3.3
/// times smaller in a long stream and 2.3 times in single pages.
const WORDS: &[u8; 256] = b"the and for was one our out day \
get has him his how man new now old see two way who boy did its let put say she too use far ago \
air all any arm art ask bad bag bar bed big bit box bus but buy can car cat cup cut dog dry due \
ear eat egg end eye fit fly fun ";

static TEXT: [u32; 64] = text_table();

const fn text_table() -> [u32; 64] {
    let mut table = [0; 64];
    let mut word = 0;
    while word < table.len() {
        let at = word * 4;
        table[word] = u32::from_le_bytes([WORDS[at], WORDS[at + 1], WORDS[at + 2], WORDS[at + 3]]);
        word += 1;
    }
    table
}

/// A page of a guest: all that its first content depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Kind of the page's first content.
    pub kind: Kind,
    /// Number of the page in the filled memory.
    pub index: u64,
    /// How many pages of the same kind come before it. Shared pages are equal between guests at
    /// the same rank, wherever the mix put them.
    pub rank: u64,
}

/// What a page must hold. Two contents with different keys differ in every word if random, and
/// with near certainty if text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// All zero.
    Zero,
    /// Words of text.
    Text {
        /// Selects the text.
        key: u64,
    },
    /// Incompressible words.
    Random {
        /// Selects the words.
        key: u64,
    },
}

/// Shared pages take their keys from this in place of a guest's seed.
const SHARED_SEED: u64 = 0x5348_4152_4544_5047;

impl Content {
    /// The content of a page after `generation` rewrites.
    ///
    /// A zero page that is rewritten gets text and a shared page gets random content of its own,
    /// as with fresh and with copy-on-write memory: staying as it was would hide a lost write.
    pub fn new(seed: u64, page: Identity, generation: u32) -> Self {
        match (page.kind, generation) {
            (Kind::Zero, 0) => Self::Zero,
            (Kind::Shared, 0) => Self::Random { key: key(SHARED_SEED, page.rank, 0) },
            (Kind::Zero | Kind::Text, _) => Self::Text { key: key(seed, page.index, generation) },
            (Kind::Random | Kind::Shared, _) => Self::Random { key: key(seed, page.index, generation) },
        }
    }

    /// Writes the content over a page, or over so many words of its beginning.
    pub fn write(self, page: &mut [u64]) {
        match self {
            Self::Zero => page.fill(0),
            Self::Text { key } => page.iter_mut().zip(Words(key)).for_each(|(word, random)| {
                *word = text(random);
            }),
            Self::Random { key } => page.iter_mut().zip(Words(key)).for_each(|(word, random)| {
                *word = random;
            }),
        }
    }

    /// Whether these words of a page, from number `first` on, hold exactly this content.
    pub fn matches(self, page: &[u64], first: usize) -> bool {
        match self {
            Self::Zero => page.iter().all(|&word| word == 0),
            Self::Text { key } => {
                page.iter().zip(Words(key).skip(first)).all(|(&word, random)| word == text(random))
            }
            Self::Random { key } => {
                page.iter().zip(Words(key).skip(first)).all(|(&word, random)| word == random)
            }
        }
    }
}

fn text(random: u64) -> u64 {
    // The upper bits of a linear congruential generator are the good ones.
    let first = TEXT[(random >> 58) as usize];
    let second = TEXT[(random >> 52 & 63) as usize];
    u64::from(first) | u64::from(second) << 32
}

fn key(seed: u64, index: u64, generation: u32) -> u64 {
    scramble(scramble(scramble(seed) ^ index) ^ u64::from(generation))
}

/// The output function of `SplitMix64` (Steele, Lea, Flood 2014): a bijection, so that different
/// inputs never collide.
pub(crate) fn scramble(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Knuth's MMIX linear congruential generator. Folding the upper half onto the lower hides the
/// short periods of the low bits and stays a bijection: streams of different keys differ in every
/// word.
#[derive(Clone)]
pub(crate) struct Words(pub(crate) u64);

impl Iterator for Words {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some(self.0 ^ self.0 >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn identities() -> impl Strategy<Value = Identity> {
        (0..4_usize, 0..1_u64 << 40, 0..1_u64 << 40).prop_map(|(kind, index, rank)| Identity {
            kind: Kind::ALL[kind],
            index,
            rank,
        })
    }

    fn written(content: Content) -> Box<Page> {
        let mut page = Box::new([0xaaaa_aaaa_aaaa_aaaa; PAGE_WORDS]);
        content.write(&mut page[..]);
        page
    }

    fn random_page(seed: u64, index: u64) -> Box<Page> {
        let page = Identity { kind: Kind::Random, index, rank: index };
        written(Content::new(seed, page, 0))
    }

    #[test]
    fn shared_pages_are_equal_in_guests_of_different_seeds_until_rewritten() {
        let page = |index| Identity { kind: Kind::Shared, index, rank: 7 };
        assert_eq!(Content::new(1, page(10), 0), Content::new(2, page(99), 0));
        assert_ne!(Content::new(1, page(10), 1), Content::new(2, page(10), 1));
        let next = Identity { rank: 8, ..page(10) };
        assert_ne!(Content::new(1, page(10), 0), Content::new(1, next, 0));
    }

    #[test]
    fn text_is_words_and_blanks() {
        let page = Identity { kind: Kind::Text, index: 3, rank: 0 };
        let bytes: Vec<u8> =
            written(Content::new(5, page, 0)).iter().flat_map(|word| word.to_le_bytes()).collect();
        for word in bytes.chunks(4) {
            assert!(WORDS.chunks(4).any(|known| known == word));
        }
    }

    #[test]
    fn random_pages_have_no_frequent_bytes() {
        let mut counts = [0_u32; 256];
        for index in 0..64 {
            for byte in random_page(1, index).iter().flat_map(|word| word.to_le_bytes()) {
                counts[usize::from(byte)] += 1;
            }
        }
        // 1024 are expected of each; six standard deviations are 192.
        assert!(counts.iter().all(|count| (832..1216).contains(count)));
    }

    proptest! {
        #[test]
        fn what_was_written_matches(seed: u64, page in identities(), generation: u32) {
            let content = Content::new(seed, page, generation);
            prop_assert!(content.matches(&written(content)[..], 0));
        }

        #[test]
        fn a_flipped_bit_is_caught(
            seed: u64, page in identities(), generation: u32,
            word in 0..PAGE_WORDS, bit in 0..64_u32,
        ) {
            let content = Content::new(seed, page, generation);
            let mut memory = written(content);
            memory[word] ^= 1 << bit;
            prop_assert!(!content.matches(&memory[..], 0));
        }

        #[test]
        fn a_stale_page_is_caught(seed: u64, page in identities(), generation in 1..u32::MAX) {
            let stale = written(Content::new(seed, page, generation - 1));
            prop_assert!(!Content::new(seed, page, generation).matches(&stale[..], 0));
        }

        #[test]
        fn a_page_of_another_place_is_caught(
            seed: u64, page in identities(), generation in 1..u32::MAX, distance in 1..1_u64 << 40,
        ) {
            let other = Identity { index: page.index + distance, ..page };
            let moved = written(Content::new(seed, other, generation));
            prop_assert!(!Content::new(seed, page, generation).matches(&moved[..], 0));
        }

        #[test]
        fn shifted_content_is_caught(seed: u64, index: u64, words in 1..PAGE_WORDS) {
            let page = Identity { kind: Kind::Random, index, rank: 0 };
            let content = Content::new(seed, page, 0);
            let mut memory = written(content);
            memory.rotate_left(words);
            prop_assert!(!content.matches(&memory[..], 0));
        }
    }
}
