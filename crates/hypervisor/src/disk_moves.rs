//! A disk of a VM that moves to another place on its host while the VM runs.
//!
//! ```text
//! begin        all there is goes to the new disk; the guest writes on
//! state        ready
//! synchronise  each write goes to both disks, and the guest waits for both
//! hold         both are the same and durable; the guest's writes wait
//! (it is recorded that the VM has the new disk)
//! switch       the VM has the new disk, and the guest's writes go on
//! note, tidy   so does its specification; the old disk is let go of
//! ```
//!
//! Before the record, [`DiskMoves::abandon`] leaves the guest with the old disk. While writes are held, neither disk
//! has data that the other lacks: that is why one record can decide, whichever process ends then.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::VmError;
use crate::spec::Disk;

/// How far a move is, as the VM's process tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MoveState {
    /// The VM has the old disk, and nothing is copied.
    None,
    /// The VM has the old disk, which is being copied.
    Copying {
        /// What was gone through.
        copied_bytes: u64,
        /// What there is to go through.
        total_bytes: u64,
        /// Whether all is there, but for what the guest writes just now.
        is_ready: bool,
        /// Whether all is there, and no write of the guest is done before it is there too.
        is_synchronised: bool,
    },
    /// Both are the same, and the guest's writes wait.
    Held,
    /// The VM has the new disk.
    Switched,
    /// The copy has failed, for this reason, and the VM has the old disk.
    Failed(String),
}

/// Which of a VM's disks, and which of its moves. A process knows them apart by that, also for an agent that comes later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoveName<'a> {
    /// The disk, from 0.
    pub disk: usize,
    /// The move.
    pub id: &'a str,
}

/// The disks of a running VM, to be moved on its host, one at a time.
#[async_trait]
pub trait DiskMoves: Send + Sync {
    /// Refuses where the VM's process cannot do it: it is too old, say.
    fn check(&self) -> Result<(), VmError>;

    /// Begins to copy to this disk, which is there and empty, and returns at once. No write of the guest is lost.
    async fn begin(&self, name: MoveName<'_>, to: &Disk, deadline: Duration) -> Result<(), VmError>;

    /// What [`Self::begin`] does last, once more: whoever began may have ended before. May be repeated while it copies.
    async fn go_on(&self, name: MoveName<'_>, to: &Disk, deadline: Duration) -> Result<(), VmError>;

    /// How far it is.
    async fn state(&self, name: MoveName<'_>, deadline: Duration) -> Result<MoveState, VmError>;

    /// From now on a write is on both disks before the guest hears that it is done, and what is left to copy only becomes less.
    /// Returns at once; [`Self::state`] tells when nothing is left.
    async fn synchronise(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError>;

    /// Waits until both disks are the same and durable, and holds the guest's writes from then on.
    async fn hold(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError>;

    /// Gives the VM the new disk, and lets the guest's writes go on, to that alone.
    async fn switch(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError>;

    /// Ends the copy, if there is one, and lets go of the new disk: the VM goes on with the old one. Not of one that was
    /// switched. May be repeated.
    async fn abandon(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError>;

    /// Lets go of the old disk. May be repeated.
    async fn tidy(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError>;

    /// The VM's specification names this place of a disk from now on, for agents that come later too. May be repeated.
    fn note(&self, disk: usize, path: &Path) -> Result<(), VmError>;
}
