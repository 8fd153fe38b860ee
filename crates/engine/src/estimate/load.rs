//! How much a VM has to send.

use super::sending::{END, START};
use crate::transfer::memory_sample::MemorySample;

/// Rounds after which a prediction stops to add more. A VM that converges needs fewer.
pub(crate) const ROUNDS_MAX: u64 = 20;

/// What a VM has to send, and what it takes besides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Load {
    /// What the copies of its disks carry before that.
    pub(crate) disk_bytes: f64,
    /// In the first round: what is not zero.
    pub(crate) first_bytes: f64,
    /// How fast clean memory gets dirty.
    pub(crate) dirty_bytes_per_ms: f64,
    /// How much of it does.
    pub(crate) dirty_set_bytes: f64,
    /// From its turn to the first byte.
    pub(crate) start_ms: f64,
    /// From the last byte until the target has taken it.
    pub(crate) end_ms: f64,
}

impl Load {
    /// The load of a transfer that puts this share on the wire when it is compressed. Without disks.
    pub(crate) fn of(
        memory_bytes: u64,
        sample: Option<MemorySample>,
        wire_share: f64,
        free_cores: Option<f64>,
    ) -> Self {
        let sample = sample.filter(|memory| memory.zero_share.is_finite()).unwrap_or(MemorySample {
            zero_share: 0.0,
            dirty_bytes_per_s: 0,
            dirty_set_bytes: 0,
            compressible: None,
        });
        Self {
            disk_bytes: 0.0,
            first_bytes: memory_bytes as f64 * (1.0 - sample.zero_share.clamp(0.0, 1.0)) * wire_share,
            dirty_bytes_per_ms: sample.dirty_bytes_per_s as f64 / 1_000.0 * wire_share,
            dirty_set_bytes: sample.dirty_set_bytes.min(memory_bytes) as f64 * wire_share,
            start_ms: START.with_ms(free_cores),
            end_ms: END.with_ms(free_cores),
        }
    }

    /// Memory that never gets dirty.
    #[cfg(test)]
    pub(crate) fn resting(bytes: f64) -> Self {
        let (start_ms, end_ms) = (START.ms, END.ms);
        let (disk_bytes, dirty_bytes_per_ms, dirty_set_bytes) = (0.0, 0.0, 0.0);
        Self { disk_bytes, first_bytes: bytes, dirty_bytes_per_ms, dirty_set_bytes, start_ms, end_ms }
    }

    /// How much gets dirty in so long, of memory that was clean.
    pub(crate) fn dirtied_bytes(&self, ms: f64) -> f64 {
        if self.dirty_set_bytes <= 0.0 {
            return 0.0;
        }
        let changes = self.dirty_bytes_per_ms * ms / self.dirty_set_bytes;
        -(-changes).exp_m1() * self.dirty_set_bytes
    }
}

/// Such an amount as a number of bytes.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of sizes, never negative")]
pub(crate) fn whole_bytes(bytes: f64) -> u64 {
    bytes.round() as u64
}
