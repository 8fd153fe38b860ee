//! What a running guest's memory looks like to a migration: how much of it is zero, and how fast it
//! changes. A sample costs the guest nothing that it could notice.

mod pages;

use std::io;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::open_enum::open_enum;
use crate::qmp::QmpError;
use crate::vmm::Vmm;
use pages::zero_share;

/// How long QEMU watches which pages change: the least that QEMU 7.2 takes.
const WATCHED_S: u64 = 1;

/// Between two looks whether QEMU has done so.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Pages that QEMU compares in all; each costs it some µs.
const COMPARED_PAGES_MAX: u64 = 1 << 16;

/// Pages that QEMU compares of each GiB. It takes 128 to 16384, and 512 by itself, which are too few
/// for a small guest.
const COMPARED_PAGES_PER_GIB: std::ops::RangeInclusive<u64> = 128..=4096;

/// What a sample of a running guest's memory has shown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemorySample {
    /// Share of pages that hold nothing but zeros, or were never touched: 0 to 1. From 2048 pages of
    /// those that were touched, so within about 0.02.
    pub zero_share: f64,
    /// How fast pages get dirty, in whole MiB: each counts once in a second, however often it changes.
    pub dirty_bytes_per_s: u64,
}

/// Why a guest's memory could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// QEMU has ended, or the kernel refuses.
    #[error("cannot read {file} of QEMU (process {pid}): {source}")]
    Process {
        /// The process.
        pid: u32,
        /// File in `/proc/PID`.
        file: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The process has no mapping that could be the guest's memory.
    #[error("QEMU (process {pid}) has no {bytes} bytes of memory in one piece, as its guest's would be")]
    NoMemory {
        /// The process.
        pid: u32,
        /// Size of the guest's memory.
        bytes: u64,
    },
    /// The host is too busy.
    #[error(
        "only {pages} pages of the guest could be looked at within {} ms: the host is too busy",
        limit.as_millis()
    )]
    TooSlow {
        /// Pages that were looked at.
        pages: usize,
        /// For how long.
        limit: Duration,
    },
    /// QEMU does not measure how fast memory changes.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU did not finish.
    #[error("QEMU has not measured within {} ms how fast memory changes", .0.as_millis())]
    Deadline(Duration),
}

impl Vmm {
    /// Looks at the guest's memory while it runs. Takes a second, in which QEMU watches what changes;
    /// give it some more.
    pub async fn sample_memory(&self, deadline: Duration) -> Result<MemorySample, SampleError> {
        let (zero_share, dirty_bytes_per_s) =
            tokio::try_join!(self.zero_share(), self.dirty_bytes_per_s(deadline))?;
        Ok(MemorySample { zero_share, dirty_bytes_per_s })
    }

    async fn zero_share(&self) -> Result<f64, SampleError> {
        let pid = self.pid();
        let failed = move |file| move |source| SampleError::Process { pid, file, source };
        let open = |file| self.process().open(file).map_err(failed(file));
        let [maps, pagemap, memory] = [open("maps")?, open("pagemap")?, open("mem")?];
        // QEMU rounds it up.
        let bytes = (self.spec().memory_kib() * 1024).next_multiple_of(8192);
        let looking = tokio::task::spawn_blocking(move || {
            let maps = io::read_to_string(maps).map_err(failed("maps"))?;
            let region = pages::region(&maps, bytes).ok_or(SampleError::NoMemory { pid, bytes })?;
            zero_share(region, &pagemap, &memory).map_err(|error| error.of_process(pid))
        });
        looking.await.unwrap_or_else(|error| Err(failed("mem")(io::Error::other(error))))
    }

    async fn dirty_bytes_per_s(&self, deadline: Duration) -> Result<u64, SampleError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Measured {
            status: MeasuringStatus,
            dirty_rate: Option<u64>,
        }
        let end = Instant::now() + deadline;
        let gib = self.spec().memory_kib().div_ceil(1 << 20);
        let (least, most) = (*COMPARED_PAGES_PER_GIB.start(), *COMPARED_PAGES_PER_GIB.end());
        let arguments = json!({
            "calc-time": WATCHED_S,
            "mode": "page-sampling",
            "sample-pages": (COMPARED_PAGES_MAX / gib).clamp(least, most),
        });
        self.qmp().execute::<Value>("calc-dirty-rate", arguments, deadline).await?;
        sleep(Duration::from_secs(WATCHED_S)).await;
        while Instant::now() < end {
            let measured: Measured = self.qmp().execute("query-dirty-rate", Value::Null, deadline).await?;
            if measured.status == MeasuringStatus::Measured {
                // QEMU says MB/s and means MiB/s (`do_calculate_dirtyrate`, 7.2 and 10.0).
                return Ok(measured.dirty_rate.unwrap_or(0) << 20);
            }
            sleep(LOOK_EVERY).await;
        }
        Err(SampleError::Deadline(deadline))
    }
}

open_enum! {
    /// How far QEMU is (`DirtyRateStatus` in QEMU's QMP reference).
    pub enum MeasuringStatus {
        /// Never begun.
        Unstarted = "unstarted",
        /// Under way.
        Measuring = "measuring",
        /// There is a result.
        Measured = "measured",
    }
}
