//! What moved the bytes, by what was measured. Pure.

use serde::Serialize;

/// Bytes that went through this host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Traffic {
    /// From the storage.
    pub read_bytes: u64,
    /// To the storage.
    pub written_bytes: u64,
}

/// What the figures of [`Traffic`] are taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MeasuredBy {
    /// This program moved each byte and counted it.
    OwnCount,
    /// `/proc/self/io`: what the kernel read and wrote for this process.
    ProcessIo,
    /// `/proc/self/mountstats`: what the NFS mount read and wrote, for others too.
    NfsMount,
    /// `/sys/dev/block/*/stat` of both devices, with what others read and wrote.
    Devices,
    /// `/proc/vmstat`: what the whole host wrote to block devices, for others too.
    WholeHost,
    /// Nothing counts here: the kernel's memory itself was copied, all of it.
    Nothing,
}

impl MeasuredBy {
    /// Where a person finds it.
    pub fn words(self) -> &'static str {
        match self {
            Self::OwnCount => "counted here",
            Self::ProcessIo => "by /proc/self/io",
            Self::NfsMount => "at most, by /proc/self/mountstats",
            Self::Devices => "at most, by the devices' counters",
            Self::WholeHost => "at most, by /proc/vmstat",
            Self::Nothing => "files in memory, which nothing counts",
        }
    }
}

/// What moved the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MovedBy {
    /// The storage: next to nothing went through this host.
    Storage,
    /// This host.
    Host,
}

/// One part in this many of what a copy took through the host may be metadata and other programs' traffic.
const STRAY_PART: u64 = 16;

/// So little is metadata, whatever the disk's size.
const STRAY_BYTES: u64 = 4 << 20;

impl MovedBy {
    /// By what went through the host of so many bytes of data.
    pub fn of(traffic: Traffic, data_bytes: u64) -> Self {
        let most = traffic.read_bytes.max(traffic.written_bytes);
        let is_stray = most <= data_bytes / STRAY_PART || (most <= STRAY_BYTES && most < data_bytes);
        if is_stray { Self::Storage } else { Self::Host }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(read_bytes: u64, written_bytes: u64, data_bytes: u64) -> MovedBy {
        MovedBy::of(Traffic { read_bytes, written_bytes }, data_bytes)
    }

    #[test]
    fn an_offload_that_moves_the_bytes_through_the_host_is_called_so() {
        const GIB: u64 = 1 << 30;
        assert_eq!(moved(0, 0, GIB), MovedBy::Storage);
        assert_eq!(moved(40 << 10, 90 << 10, GIB), MovedBy::Storage);
        assert_eq!(moved(GIB, GIB, GIB), MovedBy::Host);
        assert_eq!(moved(0, GIB, GIB), MovedBy::Host, "read from the page cache");
        assert_eq!(moved(GIB / 2, 0, GIB), MovedBy::Host);
        assert_eq!(moved(1 << 20, 1 << 20, 1 << 20), MovedBy::Host);
        assert_eq!(moved(0, 4096, 1 << 20), MovedBy::Storage);
        assert_eq!(moved(0, 0, 0), MovedBy::Storage);
    }
}
