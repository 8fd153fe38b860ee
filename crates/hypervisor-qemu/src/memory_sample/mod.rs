//! What a running guest's memory looks like to a migration: how much of it is zero, what else it holds, and how
//! fast it changes. A sample costs the guest nothing that it could notice.

mod dirty;
mod pages;

use std::fs::File;
use std::io;
use std::time::Duration;

use drainpipe_engine::format::bound;
use drainpipe_hypervisor::{Contents, MemorySample};

use self::pages::{PagesError, Region};
use crate::reach::ProcessFile;
use crate::vmm::Vmm;

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
        "only {pages} pages of the guest could be looked at within {}: the host is too busy",
        bound(*limit)
    )]
    TooSlow {
        /// Pages that were looked at.
        pages: usize,
        /// For how long.
        limit: Duration,
    },
}

impl Vmm {
    /// Looks at the guest's memory while it runs. Takes some 0.2 s.
    pub async fn sample_memory(&self) -> Result<MemorySample, SampleError> {
        let seen = self.look(pages::look).await?;
        let dirty = dirty::estimate(seen.changed, seen.bytes_per_read);
        Ok(MemorySample {
            zero_share: seen.zero_share,
            dirty_bytes_per_s: dirty.bytes_per_s,
            dirty_set_bytes: dirty.set_bytes.min(self.guest_bytes()),
            dirty_share_of_pages: seen.changed_share,
            contents: Contents::new(seen.contents),
        })
    }

    /// Looks at which share of its memory is zero and at what the rest holds, and not for whether that changes. Takes
    /// some 20 ms.
    pub async fn sample_contents(&self) -> Result<(f64, Contents), SampleError> {
        let (zero_share, contents) = self.look(pages::contents).await?;
        Ok((zero_share, Contents::new(contents)))
    }

    async fn look<T: Send + 'static>(
        &self,
        look: fn(Region, &File, &File) -> Result<T, PagesError>,
    ) -> Result<T, SampleError> {
        let pid = self.pid();
        let failed = move |file| move |source| SampleError::Process { pid, file, source };
        let open = |file: ProcessFile| self.process().open_hidden(file).map_err(failed(file.name()));
        let (maps, pagemap) = (open(ProcessFile::Maps)?, open(ProcessFile::Pagemap)?);
        let memory = open(ProcessFile::Memory)?;
        let bytes = self.guest_bytes();
        let looking = tokio::task::spawn_blocking(move || {
            let maps = io::read_to_string(maps).map_err(failed("maps"))?;
            let region = pages::region(&maps, bytes).ok_or(SampleError::NoMemory { pid, bytes })?;
            look(region, &pagemap, &memory).map_err(|error| error.of_process(pid))
        });
        looking.await.unwrap_or_else(|error| Err(failed("mem")(io::Error::other(error))))
    }

    fn guest_bytes(&self) -> u64 {
        // QEMU rounds it up.
        (self.spec().memory_kib() * 1024).next_multiple_of(8192)
    }
}
