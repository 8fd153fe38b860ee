//! What a running guest's memory looks like to a migration.

use std::fmt;

/// What a sample of a running guest's memory has shown.
#[derive(Debug, Clone, PartialEq)]
pub struct MemorySample {
    /// Share of pages that hold nothing but zeros, or were never touched: 0 to 1. From 2048 pages or more of
    /// those that were touched, so within about 0.02.
    pub zero_share: f64,
    /// How fast pages get dirty that were not: each counts once, however often it changes.
    pub dirty_bytes_per_s: u64,
    /// How much gets dirty again and again, as far as that could be seen in so short a time; what has to be
    /// sent again is never more. At most the guest's memory.
    pub dirty_set_bytes: u64,
    /// The share of bytes that changed in pages that got dirty, in sixteenths of a page: 0 to 1; 1 if none was seen.
    pub dirty_share_of_pages: f64,
    /// Some of it.
    pub contents: Contents,
}

/// Some pages of a guest that are not zero, one after the other: at most 2 MiB, from all over its memory.
#[derive(Clone, PartialEq, Eq)]
pub struct Contents(Vec<u8>);

impl Contents {
    /// These pages, one after the other.
    pub fn new(pages: Vec<u8>) -> Self {
        Self(pages)
    }

    /// The pages' bytes. They are the guest's own: never keep them, and never show them to anybody.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}
