//! A sender's figures so far.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use drainpipe_engine::transfer::codec::Codec;

/// What a sender has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Figures {
    /// Bytes taken from the program and sent.
    pub raw_bytes: u64,
    /// Bytes given to the network for them, with the relay's own headers, without TCP's.
    pub wire_bytes: u64,
    /// The part of `raw_bytes` that was sent packed, by codec, without the random-looking chunks in between.
    pub packed: CodecBytes,
    /// The part of `raw_bytes` in pages for which only the changes were sent, without further compression.
    pub delta_bytes: u64,
    /// The part of `raw_bytes` that was sent before a core had the time to see whether it shrinks.
    pub overtaken_bytes: u64,
    /// CPU that packing took, in seconds.
    pub packing_cpu_seconds: f64,
}

/// Bytes before packing, by codec.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CodecBytes {
    /// By LZ4.
    pub lz4: u64,
    /// By zstd, at any level.
    pub zstd: u64,
}

/// The parts of a compressed block that bypassed the codec, in bytes as they came from the program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PastCodec {
    /// As they were.
    pub(crate) plain_bytes: usize,
    /// Bytes of pages for which only the changes are sent.
    pub(crate) changed_bytes: usize,
}

/// What packing took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PackingTime {
    /// On a core.
    pub(crate) cpu: Duration,
    /// With waits for one.
    pub(crate) wall: Duration,
}

/// [`Figures`] as they are counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    raw_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    lz4_bytes: AtomicU64,
    zstd_bytes: AtomicU64,
    delta_bytes: AtomicU64,
    overtaken_bytes: AtomicU64,
    packing_cpu_ns: AtomicU64,
    cipher_suite: OnceLock<String>,
}

impl Counters {
    /// A connection is encrypted; all of them are alike.
    pub(crate) fn encrypted(&self, cipher_suite: String) {
        self.cipher_suite.get_or_init(|| cipher_suite);
    }

    pub(crate) fn cipher_suite(&self) -> Option<String> {
        self.cipher_suite.get().cloned()
    }

    pub(crate) fn sent(&self, raw_bytes: usize, wire_bytes: usize) {
        self.raw_bytes.fetch_add(raw_bytes as u64, Ordering::Relaxed);
        self.wire_bytes.fetch_add(wire_bytes as u64, Ordering::Relaxed);
    }

    /// Counts sent bytes that were packed by this codec.
    pub(crate) fn packed_by(&self, codec: Codec, raw_bytes: usize) {
        match codec {
            Codec::Lz4 => &self.lz4_bytes,
            Codec::ZstdLiterals | Codec::Zstd1 | Codec::Zstd3 => &self.zstd_bytes,
        }
        .fetch_add(raw_bytes as u64, Ordering::Relaxed);
    }

    /// Counts bytes for which only the changes were sent.
    pub(crate) fn packed_by_changes(&self, raw_bytes: usize) {
        self.delta_bytes.fetch_add(raw_bytes as u64, Ordering::Relaxed);
    }

    /// Counts sent bytes that should have been packed, and for which no core had the time.
    pub(crate) fn overtaken(&self, raw_bytes: usize) {
        self.overtaken_bytes.fetch_add(raw_bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn packed(&self, cpu: Duration) {
        let nanoseconds = u64::try_from(cpu.as_nanos()).unwrap_or(u64::MAX);
        self.packing_cpu_ns.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Figures {
        Figures {
            raw_bytes: self.raw_bytes.load(Ordering::Relaxed),
            wire_bytes: self.wire_bytes.load(Ordering::Relaxed),
            packed: CodecBytes {
                lz4: self.lz4_bytes.load(Ordering::Relaxed),
                zstd: self.zstd_bytes.load(Ordering::Relaxed),
            },
            delta_bytes: self.delta_bytes.load(Ordering::Relaxed),
            overtaken_bytes: self.overtaken_bytes.load(Ordering::Relaxed),
            packing_cpu_seconds: self.packing_cpu_ns.load(Ordering::Relaxed) as f64 / 1e9,
        }
    }
}
