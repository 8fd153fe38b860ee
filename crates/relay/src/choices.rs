//! Decisions, taken from a fuzzer's bytes.

/// Decisions, taken from a fuzzer's bytes. Once these are used up, all are zero.
#[derive(Debug)]
pub(crate) struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn are_used_up(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// Below `bound`, which is 65 536 at most.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let number = u16::from_le_bytes([self.byte(), if bound > 256 { self.byte() } else { 0 }]);
        usize::from(number) % bound
    }

    /// `count` bytes, or all that are left if they are fewer.
    pub(crate) fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// Something of a length that is its own, up to `bytes_max`: zeros, noise, or a few bytes again and again. A
    /// few bytes make megabytes of it.
    pub(crate) fn content(&mut self, bytes_max: usize) -> Vec<u8> {
        let kind = self.byte();
        let length = match kind >> 6 {
            0 => self.below(256),
            1 => 4096 * self.below(7),
            2 => self.below(1 << 13),
            _ => 4 * self.below(1 << 16),
        };
        let length = length.min(bytes_max);
        match kind & 3 {
            0 => vec![0; length],
            1 => noise(self.byte()).take(length).collect(),
            _ => {
                let few = self.below(64);
                let few = self.bytes(few);
                let mut content: Vec<u8> = few.iter().copied().cycle().take(length).collect();
                content.resize(length, kind);
                content
            }
        }
    }
}

fn noise(seed: u8) -> impl Iterator<Item = u8> {
    let mut state = 88_172_645_463_325_252 + u64::from(seed);
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    })
    .flatten()
}
