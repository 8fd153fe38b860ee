//! A part of a connection, as it came from the program.

use std::ops::Deref;

use crate::multifd::{PageAt, Walker};

/// The longest block. Long enough that zstd finds what repeats, short enough that one on its way does not
/// hold up the end of a stream: 1 ms at 1 Gb/s.
pub const BLOCK_BYTES_MAX: usize = 128 << 10;

/// A block that is filled, sent, and filled again.
#[derive(Debug)]
pub(crate) struct Block {
    room: Vec<u8>,
    filled: usize,
    pages: Vec<PageAt>,
    syncs: u64,
}

impl Block {
    /// An empty one, with room for [`BLOCK_BYTES_MAX`].
    pub(crate) fn new() -> Self {
        Self { room: vec![0; BLOCK_BYTES_MAX], filled: 0, pages: vec![], syncs: 0 }
    }

    /// Empties it, for what `walker` comes to next.
    pub(crate) fn begin(&mut self, walker: &Walker) {
        (self.filled, self.syncs) = (0, walker.syncs());
        self.pages.clear();
    }

    /// Where to put what comes next: as much as `walker` wants of it.
    pub(crate) fn rest(&mut self, walker: &Walker) -> &mut [u8] {
        let rest = &mut self.room[self.filled..];
        let wanted = walker.wants(rest.len());
        &mut rest[..wanted]
    }

    /// So much has come there.
    pub(crate) fn came(&mut self, bytes: usize, walker: &mut Walker) {
        let from = self.filled;
        self.filled += bytes;
        let pages = walker.feed(&self.room[from..self.filled]);
        self.pages.extend(pages.into_iter().map(|page| PageAt { at: from + page.at, ..page }));
    }

    /// The pages that are whole in it, in order.
    pub(crate) fn pages(&self) -> &[PageAt] {
        &self.pages
    }

    /// How often all connections have waited for each other before it.
    pub(crate) fn syncs(&self) -> u64 {
        self.syncs
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.room[..self.filled]
    }
}

#[cfg(test)]
impl From<&[u8]> for Block {
    fn from(bytes: &[u8]) -> Self {
        Self { room: bytes.to_vec(), filled: bytes.len(), pages: vec![], syncs: 0 }
    }
}
