//! The disks of a VM that are copied while it runs, by the hypervisors of both hosts.
//!
//! ```text
//!   source                                   target
//!                                            open: its disks may be written to
//!   start ───────── all there is ──────────►
//!   states: ready, or the guest writes as fast
//!   synchronise ─── each write ────────────► (and the guest waits for both)
//!   states: synchronised
//!   (the guest is paused)
//!   end ─────────── the last of it ────────► (durable)
//!                                            close: nobody writes any more
//! ```
//!
//! A hypervisor may have a single operation for disks and memory ([`DiskCopies::go_along`]). Then `start` only says
//! where they go, the transfer copies them before it sends memory, and no write of the guest waits for the target:
//!
//! ```text
//!   start
//!   start_transfer ─ all there is, then memory, and each write a moment later
//!   states: ready
//!   (the guest is paused)
//!   end ─────────── the last of it, and of memory
//!                                            close
//! ```
//!
//! Or it cannot make the guest's writes wait ([`DiskCopies::holds_writes`]). Then they are held back as far as
//! necessary for the copies to keep up:
//!
//! ```text
//!   start
//!   states: ready, or the guest writes as fast
//!   hold_writes ─── from time to time
//!   states: little is left at any moment
//!   (the guest is paused)
//!   end ─────────── the last of it
//!                                            close
//! ```
//!
//! Until the end, `abandon` on the source leaves the guest with its own disks, whatever has become of the others.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_engine::storage::{DiskCopy, DiskImage, WriteLimit};

use crate::error::VmError;
use crate::transport::Address;

/// The unit of blocks in `stat(2)`.
const BLOCK_BYTES: u64 = 512;

/// What a VM's process has open as a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenDisk {
    /// What its file holds.
    pub image: DiskImage,
    /// What the guest sees of it.
    pub size_bytes: u64,
    /// What its file takes.
    pub allocated_bytes: u64,
    /// Whether it stands on other images.
    pub has_backing: bool,
    /// Whether its data is in another file than the image.
    pub has_data_file: bool,
    /// Why the hypervisor does not copy it, and what to do; none if it does.
    pub obstacle: Option<String>,
}

impl OpenDisk {
    /// A file without a format of its own.
    pub fn raw_file(metadata: &Metadata) -> Self {
        Self {
            image: DiskImage::Raw,
            size_bytes: metadata.len(),
            allocated_bytes: metadata.blocks() * BLOCK_BYTES,
            has_backing: false,
            has_data_file: false,
            obstacle: None,
        }
    }
}

/// How far the copy of one disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyState {
    /// Which disk, from 0.
    pub disk: usize,
    /// What was gone through.
    pub copied_bytes: u64,
    /// What there is to go through.
    pub total_bytes: u64,
    /// Whether all is there, but for what the guest writes just now.
    pub is_ready: bool,
    /// Whether all is there, and no write of the guest is done before it is there too.
    pub is_synchronised: bool,
}

/// Where the copy of one disk goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyTo {
    /// Which disk, from 0.
    pub disk: usize,
    /// The NBD server that takes it.
    pub address: Address,
    /// Under which name; where [`DiskCopies::names`] says some, under that.
    pub name: String,
}

/// The disks of a VM that leaves.
#[async_trait]
pub trait DiskCopies: Send + Sync {
    /// All of them, in their order.
    async fn disks(&self, deadline: Duration) -> Result<Vec<OpenDisk>, VmError>;

    /// Refuses what the VM's process cannot do: it is too old, say.
    fn check(&self, copies: &[DiskCopy]) -> Result<(), VmError>;

    /// Whether the transfer copies them, before memory.
    fn go_along(&self) -> bool {
        false
    }

    /// By which names the VM's process asks for these disks, all at one address; `None` where it takes any, and an address
    /// for each.
    async fn names(&self, disks: &[usize], deadline: Duration) -> Result<Option<Vec<String>>, VmError> {
        let _takes_any = (disks, deadline);
        Ok(None)
    }

    /// Begins to copy these, and returns at once. No write of the guest is lost, from the first on.
    async fn start(&self, copies: &[CopyTo], deadline: Duration) -> Result<(), VmError>;

    /// How far each is. Fails where one has failed.
    async fn states(&self, deadline: Duration) -> Result<Vec<CopyState>, VmError>;

    /// From now on a write is on both disks before the guest hears that it is done, and what is left to copy only becomes
    /// less. Returns at once; [`Self::states`] tell when nothing is left. May be repeated. Not where [`Self::holds_writes`].
    async fn synchronise(&self, deadline: Duration) -> Result<(), VmError>;

    /// Whether no write of the guest can wait for the target, and [`Self::hold_writes`] is there instead.
    fn holds_writes(&self) -> bool {
        false
    }

    /// From now on the guest writes no more than this to these disks, and reads without a limit; an earlier limit ends.
    /// Fails where one of them has limits that somebody else has set.
    async fn hold_writes(
        &self,
        disks: &[usize],
        limit: WriteLimit,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let _without_limits = (disks, limit, deadline);
        Err(VmError::failed("the VM's process cannot hold back what its guest writes"))
    }

    /// Lets the guest write as it likes, if it was held back, and waits for no copy. May be repeated.
    async fn let_writes_go(&self, deadline: Duration) -> Result<(), VmError> {
        let _nothing_is_held = deadline;
        Ok(())
    }

    /// The guest is paused: waits until all that it wrote is there and durable, and ends the copies of these disks. Fails
    /// where one of them is not copied, or has failed.
    async fn end(&self, disks: &[usize], deadline: Duration) -> Result<(), VmError>;

    /// Ends the copies as they are, if there are any, and lets the guest write as it likes. May be repeated. Their receiver
    /// has closed the connections before, or the process would wait for what is on its way.
    async fn abandon(&self, deadline: Duration) -> Result<(), VmError>;
}

/// The disks of a VM that comes.
#[async_trait]
pub trait DiskExports: Send + Sync {
    /// Lets whoever connects to [`crate::TargetVm::incoming_disks`] write to these disks, by the names that are returned.
    async fn open(&self, disks: &[usize], deadline: Duration) -> Result<Vec<String>, VmError>;

    /// Nobody writes to them any more: all connections are cut. May be repeated.
    async fn close(&self, deadline: Duration) -> Result<(), VmError>;
}

/// By which name a hypervisor that has none of its own offers a disk.
pub fn export_name(disk: usize) -> String {
    format!("disk{disk}")
}
